"""A stand-in for `transformer_engine.pytorch` with its `GroupedLinear`, in plain torch.

Signature and attributes as in Transformer Engine 2: a parameter `weight0`, `weight1`, ... for each product, read when
it is called. It refuses what that refuses, and a number of rows of 0, whose gradient it does not promise.
"""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

import torch
from torch import Tensor, nn

__all__ = ["GroupedLinear", "install"]


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
    ) -> None:
        super().__init__()
        assert not bias
        assert not fuse_wgrad_accumulation
        assert num_gemms > 0
        self.num_gemms = num_gemms
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
        return torch.cat([x @ weight.T for x, weight in zip(inp.split(m_splits), weights, strict=True)])


def install(modules: dict[str, ModuleType] = sys.modules) -> None:
    """Make `from transformer_engine.pytorch import GroupedLinear` find the class above."""
    package, module = ModuleType("transformer_engine"), ModuleType("transformer_engine.pytorch")
    package.__spec__ = ModuleSpec("transformer_engine", None)
    module.GroupedLinear = GroupedLinear
    package.pytorch = module
    modules |= {"transformer_engine": package, "transformer_engine.pytorch": module}
