"""Sizes, activation and back-end of a layer of experts."""

from dataclasses import dataclass
from numbers import Integral
from os import PathLike
from typing import Any, Literal, get_args

from coterie_experts.activation import Activation, ActivationName

__all__ = ["Backend", "BACKENDS", "ExpertsConfig"]

Backend = Literal["auto", "reference", "torch", "triton", "quack", "te"]
BACKENDS: tuple[str, ...] = get_args(Backend)


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """Describe one layer of experts.

    Args:
        d_model: width D of a token.
        d_hidden: hidden width H of one expert.
        num_experts: number E of experts in the layer, over all ranks.
        backend: ``reference`` (loops, any dtype), ``torch`` (``F.grouped_mm``), ``triton`` (our kernels, bfloat16 on
            compute capability 9), the extras ``quack`` (kernels of quack-kernels, likewise, SwiGLU without biases) and
            ``te`` (GroupedLinear of Transformer Engine), or ``auto``, which takes the one that was measured fastest
            among those that can run. A named back-end never falls back to another.
        activation: ``swiglu``, ``swiglu_clamped`` or ``relu_squared``; see ``Activation``.
        swiglu_alpha: of ``swiglu_clamped``.
        swiglu_limit: of ``swiglu_clamped``.
        bias: give each expert a bias in both projections.
        tiles: a file that ``python -m coterie_experts.tune`` wrote, for ``auto`` and the tiles of ``triton`` on the GPU
            that it was recorded on; elsewhere it is read and not used.
    """

    d_model: int
    d_hidden: int
    num_experts: int
    backend: Backend = "auto"
    activation: ActivationName = "swiglu"
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0
    bias: bool = False
    tiles: str | None = None

    @property
    def activation_function(self) -> Activation:
        """Return the activation with its numbers."""
        return Activation(name=self.activation, alpha=self.swiglu_alpha, limit=self.swiglu_limit)

    def problems(self) -> list[str]:
        """Return every fault of this config as one sentence each; an empty list means it can be built."""
        # What a caller gave, whatever its annotation says.
        sizes: dict[str, Any] = {"d_model": self.d_model, "d_hidden": self.d_hidden, "num_experts": self.num_experts}
        found = []
        for name, size in sizes.items():
            if isinstance(size, bool) or not isinstance(size, Integral):
                found.append(f"{name} ({size!r}) must be a whole number")
            elif size < 1:
                found.append(f"{name} ({size}) must be at least 1")
        bias: Any = self.bias
        if not isinstance(bias, bool):
            found.append(f"bias ({bias!r}) must be true or false")
        tiles: Any = self.tiles
        if not isinstance(tiles, str | PathLike | None):
            found.append(f"tiles ({tiles!r}) must be the name of a file, or None")
        if self.backend not in BACKENDS:
            found.append(f"backend ({self.backend!r}) must be one of {', '.join(BACKENDS)}")
        return found + self.activation_function.problems()
