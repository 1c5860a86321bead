"""The experts in the layouts of Hugging Face checkpoints, as views on the same memory.

=====================  ==========================================================================
here                   ``gate_up`` (e, 2H, D) with the gate rows first, ``down`` (e, D, H)
fused                  ``gate_up_proj`` (e, 2H, D), ``down_proj`` (e, D, H): the same tensors, other names
per expert             ``{i}.gate_proj.weight`` (H, D), ``{i}.up_proj.weight`` (H, D), ``{i}.down_proj.weight`` (D, H)
=====================  ==========================================================================
"""

from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ["fused_views", "per_expert_views", "load_views"]


def fused_views(gate_up: Tensor, down: Tensor) -> dict[str, Tensor]:
    """Return ``gate_up_proj`` and ``down_proj`` of the fused layout; they share memory with the arguments."""
    return {"gate_up_proj": gate_up.detach(), "down_proj": down.detach()}


def per_expert_views(gate_up: Tensor, down: Tensor, *, first_expert: int = 0) -> dict[str, Tensor]:
    """Return three tensors for each expert, named by global expert id; they share memory with the arguments."""
    views = {}
    pairs = zip(gate_up.detach().unbind(), down.detach().unbind(), strict=True)
    for expert, (gate_up_one, down_one) in enumerate(pairs, start=first_expert):
        gate, up = gate_up_one.chunk(2)
        views[f"{expert}.gate_proj.weight"] = gate
        views[f"{expert}.up_proj.weight"] = up
        views[f"{expert}.down_proj.weight"] = down_one
    return views


@torch.no_grad()
def load_views(views: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Copy ``tensors`` into ``views`` (of either layout), and so into the experts behind them.

    Raises:
        ValueError: names or shapes differ; every difference is named and nothing has been copied.
    """
    problems = [f"{name} is missing" for name in views if name not in tensors]
    problems += [f"{name} is not known" for name in tensors if name not in views]
    problems += [
        f"{name} must have shape {tuple(view.shape)} but has {tuple(tensors[name].shape)}"
        for name, view in views.items()
        if name in tensors and tensors[name].shape != view.shape
    ]
    if problems:
        raise ValueError("\n".join(problems))
    for name, view in views.items():
        view.copy_(tensors[name])
