"""Start values of the experts, the same for every layout."""

import hashlib
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from coterie_experts.module import GroupedExperts

__all__ = ["init_experts"]


@torch.no_grad()
def init_experts(module: "GroupedExperts", *, seed: int, name: str, std: float, down_std: float | None = None) -> None:
    """Fill the experts with normal numbers that depend on the seed, the layer's name and the global expert id alone.

    So any split of the experts over ranks holds bit-equal experts, on any device and in any dtype (numbers are drawn on
    the CPU in float32, then rounded), and all experts of a layer differ.

    Args:
        module: its ``first_expert`` says which experts it holds.
        seed: of the whole model.
        name: of this layer, different for every layer of the model.
        std: standard deviation of ``gate_up``.
        down_std: standard deviation of ``down``; ``std`` if not given.

    Raises:
        ValueError: the module is on the meta device; use ``module.to_empty(device=...)`` first.
    """
    if module.gate_up.is_meta:
        raise ValueError("experts on the meta device hold no numbers; call to_empty(device=...) before init_experts")
    _fill(module.gate_up, f"{seed}/{name}/gate_up", module.first_expert, std)
    _fill(module.down, f"{seed}/{name}/down", module.first_expert, std if down_std is None else down_std)


def _fill(weights: Tensor, key: str, first_expert: int, std: float) -> None:
    # torch's CPU generator looks at 32 bits of its seed. A hash per expert would meet the same 32 bits twice now and
    # then (128 experts in 60 layers: 1 model in 70), so one hash per tensor is counted up by the expert's id.
    base = int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "little")
    generator = torch.Generator()
    for local, weight in enumerate(weights):
        generator.manual_seed((base + first_expert + local) % 2**32)
        weight.copy_(torch.empty(weight.shape).normal_(0.0, std, generator=generator))
