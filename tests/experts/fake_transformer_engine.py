"""A stand-in for `transformer_engine.pytorch` with its `GroupedLinear`, in plain torch.

Signature and attributes as in Transformer Engine 2.10 to 2.20: a parameter `weight0`, `weight1`, ... for each product,
read when it is called, and a backward pass that autograd cannot differentiate and that empties what it kept. It
refuses what that refuses, and a number of rows of 0, whose gradient it does not promise.
"""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["GroupedLinear", "install"]


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inp: Tensor, m_splits: list[int], save_original_input: bool, *weights: Tensor) -> Tensor:
        # The kernels read the memory of a weight as if it had no gaps.
        assert all(weight.is_contiguous() for weight in weights)
        parts = inp.split(m_splits)
        ctx.save_for_backward(*weights, *((inp,) if save_original_input else parts))
        ctx.m_splits, ctx.is_whole = m_splits, save_original_input
        return torch.cat([part @ weight.T for part, weight in zip(parts, weights, strict=True)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        num_gemms = len(ctx.m_splits)
        saved = ctx.saved_tensors
        weights, kept = saved[:num_gemms], saved[num_gemms:]
        # No graph of the gradient, whoever asks for one.
        with torch.no_grad():
            grads = grad.split(ctx.m_splits)
            grad_inp = torch.cat([part @ weight for part, weight in zip(grads, weights, strict=True)])
            weight_grads: list[Tensor | None] = [None] * num_gemms
            if ctx.needs_input_grad[3]:
                parts = kept[0].split(ctx.m_splits) if ctx.is_whole else kept
                weight_grads = [
                    one.T @ part if part.numel() > 0 else torch.zeros_like(weight)
                    for one, part, weight in zip(grads, parts, weights, strict=True)
                ]
                for part in parts:
                    part.data = torch.empty(0)
        return (grad_inp, None, None, *weight_grads)


class GroupedLinear(nn.Module):
    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: object = None,
        tp_size: int = 1,
        get_rng_state_tracker: object = None,
        rng_tracker_name: str | None = None,
        init_method: object = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: torch.device | str = "cuda",
        ub_overlap_rs: bool = False,
        ub_overlap_ag: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
    ) -> None:
        super().__init__()
        assert not bias
        assert not fuse_wgrad_accumulation
        assert num_gemms > 0
        self.num_gemms = num_gemms
        self.save_original_input = save_original_input
        for number in range(num_gemms):
            weight = torch.empty(out_features, in_features, dtype=params_dtype, device=device)
            self.register_parameter(f"weight{number}", nn.Parameter(weight))

    def forward(self, inp: Tensor, m_splits: list[int], is_first_microbatch: bool | None = None) -> Tensor:
        assert isinstance(m_splits, list)
        assert len(m_splits) == self.num_gemms
        assert min(m_splits) > 0
        assert sum(m_splits) == inp.shape[0]
        weights: Sequence[Tensor] = [getattr(self, f"weight{number}") for number in range(self.num_gemms)]
        assert all(weight.dtype == inp.dtype and not weight.is_meta for weight in weights)
        y: Tensor = _Products.apply(inp, m_splits, self.save_original_input, *weights)
        return y


def install(modules: dict[str, ModuleType] = sys.modules) -> None:
    """Make `from transformer_engine.pytorch import GroupedLinear` find the class above."""
    package, module = ModuleType("transformer_engine"), ModuleType("transformer_engine.pytorch")
    package.__spec__ = ModuleSpec("transformer_engine", None)
    module.GroupedLinear = GroupedLinear
    package.pytorch = module
    modules |= {"transformer_engine": package, "transformer_engine.pytorch": module}
