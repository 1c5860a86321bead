"""The AdamW updates of one step, by our kernels on a GPU and by torch elsewhere."""

import importlib.util
from collections.abc import Mapping
from types import ModuleType

import torch
from torch import Tensor

from coterie_parallel.optimizer.config import AdamWConfig
from coterie_parallel.optimizer.state import ShardState

__all__ = ["MOMENTS", "AdamWStep", "kernels_of"]

MOMENTS = ("exp_avg", "exp_avg_sq")


def kernels_of(device: torch.device) -> ModuleType | None:
    """Return the module of our kernels where they run; None where torch computes the same."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return None
    from coterie_parallel.optimizer import triton_adamw

    return triton_adamw


class AdamWStep:
    """Updates the shards of one step; nothing is read from the device.

    Args:
        config: settings.
        step: int64 scalar, the number of this step, counted from 1.
        rate: learning rate.
        norm: fp64 scalar, the global gradient norm, by which gradients are clipped on the way.
        is_skipped: scalar, on the device; true: no weight and no moment changes.
    """

    def __init__(self, config: AdamWConfig, *, step: Tensor, rate: float, norm: Tensor, is_skipped: Tensor) -> None:
        self._config, self._rate, self._step = config, rate, step
        self._is_skipped = is_skipped.float()
        self._kernels = kernels_of(step.device)
        self._divisor = torch.ones_like(norm) if config.gradient_clip is None else norm / config.gradient_clip
        self._divisor = self._divisor.clamp(min=1.0)
        if self._kernels is not None:
            first, second = (1 - beta ** step.double() for beta in config.betas)
            self._scales = torch.stack([1 / self._divisor, 1 / first, second.rsqrt()]).float()

    def update_(self, state: ShardState, factors: Mapping[str, float], decays: Mapping[str, float]) -> bool:
        """Update a shard, ``factors`` of the rate and decays by name; return whether its weights are rounded too."""
        if self._kernels is None:
            self._update_by_torch(state, factors, decays)
            return False
        weights = state.rounded()
        with torch.cuda.device_of(self._step):  # type: ignore[no-untyped-call]  # where Triton launches
            for name, main in state.main.items():
                self._kernels.adamw_(
                    main,
                    state.bucket.pieces[name],
                    *(state.moments[moment][name] for moment in MOMENTS),
                    weights[name],
                    scales=self._scales,
                    is_skipped=self._is_skipped,
                    rate=self._rate * factors[name],
                    decay=decays[name],
                    betas=self._config.betas,
                    eps=self._config.eps,
                )
        return True

    def _update_by_torch(self, state: ShardState, factors: Mapping[str, float], decays: Mapping[str, float]) -> None:
        # Here the kernel that clips by the way divides the gradients and writes them back.
        divisor = None if self._config.gradient_clip is None else self._divisor.float()
        moments = [list(state.moments[moment].values()) for moment in MOMENTS]
        exact = [[piece.float() for piece in pieces] for pieces in moments]  # the same tensors if they are fp32
        by_setting: dict[tuple[float, float], list[int]] = {}
        for number, (name, piece) in enumerate(state.main.items()):
            if piece.numel():
                by_setting.setdefault((factors[name], decays[name]), []).append(number)
        main, gradients = list(state.main.values()), list(state.bucket.pieces.values())
        steps = self._step.float()
        beta1, beta2 = self._config.betas
        for (factor, decay), numbers in by_setting.items():
            torch._fused_adamw_(
                [main[number] for number in numbers],
                [gradients[number] for number in numbers],
                [exact[0][number] for number in numbers],
                [exact[1][number] for number in numbers],
                [],
                [steps] * len(numbers),
                lr=self._rate * factor,
                beta1=beta1,
                beta2=beta2,
                weight_decay=decay,
                eps=self._config.eps,
                amsgrad=False,
                maximize=False,
                grad_scale=divisor,
                found_inf=self._is_skipped,
            )
        if self._config.moments_dtype != "float32":
            for rounded, pieces in zip(moments, exact, strict=True):
                torch._foreach_copy_(rounded, pieces)
