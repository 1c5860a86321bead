"""The settings of the optimizer, and what they say about one parameter."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

import torch

from coterie_parallel.gradients import ReductionConfig

__all__ = ["AdamWConfig", "MuonConfig", "OutlierConfig"]

Kind = Literal["adamw", "muon"]

_NOT_HIDDEN = (
    # Embeddings: embed.weight, model.embed_tokens.weight, tok_embeddings.weight, transformer.wte.weight
    "*embed*",
    "*emb.*",
    "wte*",
    "*.wte.*",
    "wpe*",
    "*.wpe.*",
    # Heads: lm_head.weight, module.lm_head.weight, output.weight, output_layer.weight
    "head*",
    "*.head.*",
    "lm_head*",
    "*_head.*",
    "output*",
    "model.output.*",
    "module.output.*",
    "_orig_mod.output.*",
    "*.output_layer.*",
    # Routers: moe.router.weight, mlp.gate.weight, moe.gate.wg.weight; but not gate_proj, gate_up
    "*router*",
    "*.gate.weight",
    "*.gate.wg.*",
    "*shared_expert_gate*",
)


@dataclass(frozen=True, kw_only=True)
class MuonConfig:
    """Settings of Muon (Keller Jordan, https://kellerjordan.github.io/posts/muon), for hidden weights.

    It takes parameters of two dimensions, and each matrix of those of three (experts), as they are stored; all others,
    and those whose name matches a shell-style pattern of ``exclude``, stay with AdamW. A pattern is for the whole name,
    and ``*`` also matches dots.

    Attributes:
        exclude: embeddings, the output head and routers are no hidden weights. The default has the usual names of
            these three; look at `AdamWConfig.kind_of` for others.
        learning_rate_factor: the learning rate of Muon over that of the step.
        momentum: of the moving average of gradients.
        nesterov: whether the update looks one step of momentum ahead.
        num_iterations: of the Newton-Schulz iteration.
        scale: of the update of a matrix of R rows and C columns. "match_rms": 0.2 sqrt(max(R, C)), with which rates and
            decay of AdamW fit (Liu and others, "Muon is Scalable for LLM Training", arXiv:2502.16982); "spectral":
            sqrt(max(1, R / C)), as in https://github.com/KellerJordan/Muon.
        dtype: of the iteration, and of what ranks exchange for it. "auto" takes bf16 for bf16 parameters and fp32
            for all others: in bf16 another last bit of a gradient gives an update that is off by a percent.
    """

    exclude: tuple[str, ...] = _NOT_HIDDEN
    learning_rate_factor: float = 1.0
    momentum: float = 0.95
    nesterov: bool = True
    num_iterations: int = 5
    scale: Literal["match_rms", "spectral"] = "match_rms"
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"

    def problems(self) -> list[str]:
        """Return every fault of these settings."""
        found = []
        if not 0 <= self.learning_rate_factor < math.inf:
            found.append(f"muon learning_rate_factor ({self.learning_rate_factor}) must be at least 0")
        if not 0 <= self.momentum < 1:
            found.append(f"muon momentum ({self.momentum}) must be in [0, 1), for example 0.95")
        if not 1 <= self.num_iterations < 100:
            found.append(f"muon num_iterations ({self.num_iterations}) must be from 1 to 99, for example 5")
        if self.scale not in ("match_rms", "spectral"):
            found.append(f"muon scale ({self.scale!r}) must be match_rms or spectral")
        if self.dtype not in ("auto", "bfloat16", "float32"):
            found.append(f"muon dtype ({self.dtype!r}) must be auto, bfloat16 or float32")
        return found

    def iteration_dtype(self, parameter_dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the iteration for parameters of a dtype."""
        if self.dtype == "auto":
            return torch.bfloat16 if parameter_dtype == torch.bfloat16 else torch.float32
        return torch.bfloat16 if self.dtype == "bfloat16" else torch.float32

    def scale_of(self, num_rows: int, num_columns: int) -> float:
        """Return the factor of the update of a matrix."""
        if self.scale == "match_rms":
            return 0.2 * math.sqrt(max(num_rows, num_columns))
        return math.sqrt(max(1.0, num_rows / num_columns))


@dataclass(frozen=True, kw_only=True)
class OutlierConfig:
    """When a step counts as an outlier and is skipped: its loss or gradient norm is far above those before.

    Attributes:
        window: number of steps that mean and standard deviation are taken over.
        num_deviations: how many standard deviations above the mean is too far.
        min_steps: no step is an outlier before so many were seen; None for half the window, at least 20.
    """

    window: int = 128
    num_deviations: float = 6.0
    min_steps: int | None = None

    def problems(self) -> list[str]:
        """Return every fault of these settings."""
        found = []
        if self.window < 2:
            found.append(f"outlier window ({self.window}) must be at least 2, for example 128")
        if not 0 < self.num_deviations < math.inf:
            found.append(f"outlier num_deviations ({self.num_deviations}) must be above 0, for example 6")
        if self.window >= 2 and not 2 <= self.first_judged <= self.window:
            found.append(f"outlier min_steps ({self.first_judged}) must be from 2 to the window ({self.window})")
        return found

    @property
    def first_judged(self) -> int:
        """Number of steps seen before the first one that is judged."""
        return max(20, self.window // 2) if self.min_steps is None else self.min_steps


@dataclass(frozen=True, kw_only=True)
class AdamWConfig:
    """Settings of AdamW (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", arXiv:1711.05101).

    Attributes:
        learning_rate: of a step that is given none.
        betas: decay of the two moments.
        eps: added to the root of the second moment.
        weight_decay: of parameters of two or more dimensions.
        gradient_clip: the largest global gradient norm; None for no limit.
        weight_decays: pairs of a shell-style pattern of names and a decay that replaces ``weight_decay``, for
            parameters of any dimension; of several that match, the first counts.
        learning_rate_factors: pairs of a pattern and a factor of the learning rate; the first that matches counts.
        moments_dtype: "bfloat16" rounds both moments to nearest after each update, which is computed in fp32.
        muon: which parameters Muon updates instead; None for none.
        outliers: which steps are skipped; None for those only whose gradient norm is not finite.
        reduction: how gradients are summed over ranks.
    """

    learning_rate: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    gradient_clip: float | None = 1.0
    weight_decays: tuple[tuple[str, float], ...] = ()
    learning_rate_factors: tuple[tuple[str, float], ...] = ()
    moments_dtype: Literal["float32", "bfloat16"] = "float32"
    muon: MuonConfig | None = None
    outliers: OutlierConfig | None = None
    reduction: ReductionConfig = field(default_factory=ReductionConfig)

    def problems(self) -> list[str]:
        """Return every fault of these settings."""
        found = []
        for name, value in (("learning_rate", self.learning_rate), ("weight_decay", self.weight_decay)):
            if not 0 <= value < math.inf:
                found.append(f"{name} ({value}) must be at least 0")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            found.append(f"betas ({self.betas}) must be two numbers in [0, 1), for example (0.9, 0.95)")
        if not 0 < self.eps < math.inf:
            found.append(f"eps ({self.eps}) must be above 0, for example 1e-8")
        if self.gradient_clip is not None and not 0 < self.gradient_clip < math.inf:
            found.append(f"gradient_clip ({self.gradient_clip}) must be above 0, or None for no limit")
        for name, pairs in (
            ("weight_decays", self.weight_decays),
            ("learning_rate_factors", self.learning_rate_factors),
        ):
            found += [
                f"{name}: value ({value}) of {pattern!r} must be at least 0"
                for pattern, value in pairs
                if not 0 <= value < math.inf
            ]
        if self.moments_dtype not in ("float32", "bfloat16"):
            found.append(f"moments_dtype ({self.moments_dtype!r}) must be float32 or bfloat16")
        # A change below half a step of bf16, 2^-9 of the value, is rounded away: with beta 0.999 a moment would stay
        # where it is until the square of the gradient is three times as large.
        elif self.moments_dtype == "bfloat16" and max(self.betas, default=0.0) > 0.99:
            found.append(
                f"betas ({self.betas}) must be at most 0.99 with moments_dtype bfloat16, whose rounding would hide "
                "smaller changes; or use float32"
            )
        found += self.muon.problems() if self.muon is not None else []
        found += self.outliers.problems() if self.outliers is not None else []
        return found + self.reduction.problems()

    def unused_patterns(self, names: Iterable[str]) -> list[str]:
        """Return a sentence for each pattern that matches none of ``names``; those Muon excludes by default may."""
        names = list(names)
        excluded = () if self.muon is None else [one for one in self.muon.exclude if one not in _NOT_HIDDEN]
        patterns = [("weight_decays", pattern) for pattern, _ in self.weight_decays]
        patterns += [("learning_rate_factors", pattern) for pattern, _ in self.learning_rate_factors]
        patterns += [("muon exclude", pattern) for pattern in excluded]
        return [
            f"{field}: {pattern!r} matches the whole name of no parameter"
            for field, pattern in patterns
            if not any(fnmatchcase(name, pattern) for name in names)
        ]

    def kind_of(self, name: str, num_dimensions: int) -> Kind:
        """Return which rule updates a parameter."""
        if self.muon is None or num_dimensions not in (2, 3) or _matches(name, self.muon.exclude):
            return "adamw"
        return "muon"

    def decay_of(self, name: str, num_dimensions: int) -> float:
        """Return the weight decay of a parameter."""
        return _first(self.weight_decays, name, self.weight_decay if num_dimensions >= 2 else 0.0)

    def factor_of(self, name: str, num_dimensions: int) -> float:
        """Return what the learning rate of a step is multiplied by for a parameter."""
        factor = _first(self.learning_rate_factors, name, 1.0)
        if self.muon is not None and self.kind_of(name, num_dimensions) == "muon":
            factor *= self.muon.learning_rate_factor
        return factor


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _first(pairs: Sequence[tuple[str, float]], name: str, otherwise: float) -> float:
    return next((value for pattern, value in pairs if fnmatchcase(name, pattern)), otherwise)
