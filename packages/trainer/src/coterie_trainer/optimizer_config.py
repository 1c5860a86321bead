"""The ``[optimizer]`` table of a run."""

from dataclasses import dataclass, replace
from typing import Literal

from coterie_parallel import AdamWConfig, MuonConfig, OutlierConfig, ReductionConfig

from coterie_trainer.bounds import above_zero, at_least

__all__ = ["OptimizerConfig"]


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer and its learning rate: warm-up, then cosine, or constant with a decay at the end (``"wsd"``).

    Everything is updated by AdamW, or with ``muon`` the hidden weights by Muon. ``weight_decays`` and
    ``learning_rate_factors`` are lists of pairs: a shell-style pattern of parameter names, and what replaces the decay,
    or multiplies the rate, of those that match; the first that matches counts, and one that matches nothing is refused.
    ``gradient_dtype`` is what gradients travel in; ``gradient_sharding`` keeps no full fp32 gradient. ``skip_outliers``
    leaves out a step whose loss or gradient norm is far above those of the steps before. See
    `coterie_parallel.AdamWConfig`.
    """

    learning_rate: float
    warmup_steps: int = 0
    schedule: Literal["cosine", "wsd"] = "cosine"
    decay_steps: int = 0
    final_fraction: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    weight_decays: tuple[tuple[str, float], ...] = ()
    learning_rate_factors: tuple[tuple[str, float], ...] = ()
    gradient_clip: float | None = 1.0
    moments_dtype: Literal["float32", "bfloat16"] = "float32"
    muon: bool = False
    muon_scale: Literal["match_rms", "spectral"] = "match_rms"
    skip_outliers: bool = False
    gradient_dtype: Literal["float32", "bfloat16"] = "float32"
    gradient_sharding: bool = False
    gradient_overlap: bool = True

    def problems(self) -> list[str]:
        """Return every fault of these settings."""
        found = above_zero(self, "learning_rate", "eps")
        found += above_zero(self, "gradient_clip") if self.gradient_clip is not None else []
        found += at_least(self, 0, "warmup_steps", "decay_steps", "weight_decay")
        if not 0.0 <= self.final_fraction <= 1.0:
            found.append(f"final_fraction ({self.final_fraction}) must be between 0 and 1")
        if not all(0.0 <= beta < 1.0 for beta in self.betas):
            found.append(f"betas ({list(self.betas)}) must each be at least 0 and below 1; usual: [0.9, 0.95]")
        if self.schedule == "cosine" and self.decay_steps > 0:
            found.append(
                f'decay_steps ({self.decay_steps}) belongs to the schedule "wsd", and the schedule is "cosine"; '
                'leave it out or set schedule = "wsd"'
            )
        # What was judged above is replaced by sound values; coterie-parallel judges the rest.
        sound = replace(
            self,
            eps=1e-8,
            weight_decay=0.1,
            gradient_clip=None,
            betas=self.betas if all(0.0 <= beta < 1.0 for beta in self.betas) else (0.9, 0.95),
        )
        return found + sound.to_adamw().problems()

    def to_adamw(self) -> AdamWConfig:
        """Return these settings, but the schedule, in the form of coterie-parallel."""
        return AdamWConfig(
            betas=self.betas,
            eps=self.eps,
            weight_decay=self.weight_decay,
            gradient_clip=self.gradient_clip,
            weight_decays=self.weight_decays,
            learning_rate_factors=self.learning_rate_factors,
            moments_dtype=self.moments_dtype,
            muon=MuonConfig(scale=self.muon_scale) if self.muon else None,
            outliers=OutlierConfig() if self.skip_outliers else None,
            reduction=ReductionConfig(
                send_dtype=self.gradient_dtype, sharded=self.gradient_sharding, overlap=self.gradient_overlap
            ),
        )
