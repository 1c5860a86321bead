"""AdamW with fp32 state over parameters that are replicated or sharded as their placements say."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from coterie_parallel.gradients import BUCKET_BYTES, GradientReducer, clip_gradients_, global_gradient_norm
from coterie_parallel.mesh import Mesh
from coterie_parallel.placement import Placement, placed_parameters

__all__ = ["AdamWConfig", "Optimizer"]


@dataclass(frozen=True, kw_only=True)
class AdamWConfig:
    """Settings of AdamW (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", arXiv:1711.05101).

    ``learning_rate`` is used by a step that is given none. ``gradient_clip`` is the largest global gradient norm, None
    for no limit. Decay acts on parameters of two or more dimensions whose name matches no shell-style pattern of
    ``no_decay``.
    """

    learning_rate: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    gradient_clip: float | None = 1.0
    no_decay: tuple[str, ...] = ()

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
        return found


class Optimizer:
    """Reduces gradients, clips them by the global norm and updates the parameters.

    Moments are fp32. A parameter that is not fp32 has an fp32 main weight that is updated and then rounded to it.

    Args:
        named_parameters: local parameters by global name; those that need no gradient are left alone.
        placements: a placement for every name.
        mesh: all its ranks must construct and step together.
        config: settings of AdamW.
        bucket_bytes: size of a gradient bucket.

    Raises:
        ValueError: for settings with problems and for what `GradientReducer` refuses.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, Tensor]],
        placements: Mapping[str, Placement],
        mesh: Mesh,
        config: AdamWConfig,
        *,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        if config.problems():
            raise ValueError("\n".join(config.problems()))
        self.config = config
        self._mesh = mesh
        self._placements = dict(placements)
        self._parameters = placed_parameters(named_parameters, placements, mesh.plan)
        self._reducer = GradientReducer(self._parameters.items(), placements, mesh, bucket_bytes)
        self._main = {
            name: parameter.detach() if parameter.dtype == torch.float32 else parameter.detach().float()
            for name, parameter in self._parameters.items()
        }
        self._exp_avg = {name: torch.zeros_like(main) for name, main in self._main.items()}
        self._exp_avg_sq = {name: torch.zeros_like(main) for name, main in self._main.items()}
        self._step = torch.zeros((), dtype=torch.int64)
        decayed = {name for name, main in self._main.items() if main.ndim >= 2 and not self._matches_no_decay(name)}
        self._groups = [
            (names, decay)
            for names, decay in (
                (sorted(decayed), config.weight_decay),
                (sorted(self._main.keys() - decayed), 0.0),
            )
            if names
        ]

    @torch.no_grad()
    def step(self, learning_rate: float | None = None) -> Tensor:
        """Update every parameter from its ``grad`` and return the global gradient norm before clipping.

        Bitwise deterministic, and without a host read of device values. All ranks must call together.

        Args:
            learning_rate: of this step; None takes the one of the config.
        """
        gradients = self._reducer.reduce()
        norm = global_gradient_norm(gradients, self._placements, self._mesh)
        if self.config.gradient_clip is not None:
            clip_gradients_(gradients, norm, self.config.gradient_clip)
        self._step += 1
        for names, decay in self._groups:
            self._update(names, gradients, self.config.learning_rate if learning_rate is None else learning_rate, decay)
        self._write_parameters()
        return norm

    def zero_grad(self) -> None:
        """Forget the gradients of all parameters."""
        for parameter in self._parameters.values():
            parameter.grad = None
            if (main_grad := getattr(parameter, "main_grad", None)) is not None:
                main_grad.zero_()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the local state, live and not copied, by global name.

        ``exp_avg/<name>``, ``exp_avg_sq/<name>``, ``main/<name>`` where the parameter is not fp32, and ``step``.
        """
        state = {"step": self._step}
        for name, parameter in self._parameters.items():
            state[f"exp_avg/{name}"] = self._exp_avg[name]
            state[f"exp_avg_sq/{name}"] = self._exp_avg_sq[name]
            if parameter.dtype != torch.float32:
                state[f"main/{name}"] = self._main[name]
        return state

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy a state of the same layout; main weights are also written to their parameters.

        Raises:
            ValueError: naming the keys that are missing, not known, or of another shape; nothing is changed then.
        """
        own = self.state_dict()
        problems = [f"{key} is missing" for key in sorted(own.keys() - state.keys())]
        problems += [f"{key} is not known" for key in sorted(state.keys() - own.keys())]
        problems += [
            f"{key} has shape {tuple(state[key].shape)}, expected {tuple(own[key].shape)}"
            for key in sorted(own.keys() & state.keys())
            if own[key].shape != state[key].shape
        ]
        if problems:
            raise ValueError("the optimizer state does not fit: " + "; ".join(problems))
        for key, tensor in own.items():
            tensor.copy_(state[key])
        self._write_parameters()

    def _update(self, names: list[str], gradients: Mapping[str, Tensor], learning_rate: float, decay: float) -> None:
        beta1, beta2 = self.config.betas
        step = int(self._step)
        main = [self._main[name] for name in names]
        grad = [gradients[name] for name in names]
        exp_avg = [self._exp_avg[name] for name in names]
        exp_avg_sq = [self._exp_avg_sq[name] for name in names]
        if decay:
            torch._foreach_mul_(main, 1 - learning_rate * decay)
        torch._foreach_lerp_(exp_avg, grad, 1 - beta1)
        torch._foreach_mul_(exp_avg_sq, beta2)
        torch._foreach_addcmul_(exp_avg_sq, grad, grad, value=1 - beta2)
        scale = torch._foreach_sqrt(exp_avg_sq)
        torch._foreach_div_(scale, math.sqrt(1 - beta2**step))
        torch._foreach_add_(scale, self.config.eps)
        torch._foreach_addcdiv_(main, exp_avg, scale, value=-learning_rate / (1 - beta1**step))

    def _write_parameters(self) -> None:
        for name, parameter in self._parameters.items():
            if parameter.dtype != torch.float32:
                parameter.detach().copy_(self._main[name])

    def _matches_no_decay(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.config.no_decay)
