"""The experts in the layouts of Hugging Face, as views on the same memory where its order allows.

==================  =============================================================================================
here                ``gate_up`` (e, 2H, D) with the gate rows first, or ``up`` (e, H, D); ``down`` (e, D, H); biases
                    ``gate_up_bias`` (e, 2H), ``down_bias`` (e, D)
fused               ``gate_up_proj`` (e, 2H, D) or ``up_proj`` (e, H, D), ``down_proj`` (e, D, H): the same tensors,
                    other names. The modules of transformers 5 for Mixtral, Qwen3-MoE, OLMoE, DeepSeek-V3; without a
                    gate Nemotron-H
per expert          ``{i}.gate_proj.weight`` (H, D), ``{i}.up_proj.weight`` (H, D), ``{i}.down_proj.weight`` (D, H):
                    views. Checkpoints of most models; those of Mixtral say w1, w3 and w2
interleaved         ``gate_up_proj`` (e, D, 2H) with columns gate 0, up 0, gate 1, up 1, ..., ``down_proj`` (e, H, D),
                    ``gate_up_proj_bias`` (e, 2H) in the same order, ``down_proj_bias`` (e, D): the module of gpt-oss.
                    ``down_proj`` is a view, the two of gate and up are copies: no stride steps in their order
==================  =============================================================================================
"""

from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = [
    "MIXTRAL_NAMES",
    "fused_views",
    "interleaved_tensors",
    "load_interleaved",
    "load_views",
    "per_expert_views",
]

MIXTRAL_NAMES = ("w1", "w3", "w2")
"""What Mixtral's checkpoints call gate, up and down, for ``per_expert_views``."""


def fused_views(up: Tensor, down: Tensor, *, gated: bool = True) -> dict[str, Tensor]:
    """Return ``gate_up_proj``, or ``up_proj`` if not gated, and ``down_proj``; they share memory with the arguments.

    Raises:
        ValueError: as ``per_expert_views``.
    """
    _check_gated(up, down, gated)
    return {"gate_up_proj" if gated else "up_proj": up.detach(), "down_proj": down.detach()}


def per_expert_views(
    up: Tensor,
    down: Tensor,
    *,
    first_expert: int = 0,
    gated: bool = True,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> dict[str, Tensor]:
    """Return the tensors of each expert, named by global expert id; they share memory with the arguments.

    Args:
        up: ``gate_up`` (e, 2H, D), or ``up`` (e, H, D) if not gated.
        down: (e, D, H).
        first_expert: global id of the first expert in the tensors.
        gated: whether there are gate rows; without them there are two tensors for each expert and not three.
        names: of gate, up and down.

    Raises:
        ValueError: the shapes of ``up`` and ``down`` differ from the above, as where ``gated`` is wrong; two names are
            alike.
    """
    _check_gated(up, down, gated)
    if len(names) != 3 or len(set(names)) != 3:
        raise ValueError(f"names ({names!r}) must be three different ones: of gate, up and down")
    views = {}
    gate_name, up_name, down_name = names
    pairs = zip(up.detach().unbind(), down.detach().unbind(), strict=True)
    for expert, (up_one, down_one) in enumerate(pairs, start=first_expert):
        if gated:
            views[f"{expert}.{gate_name}.weight"], up_one = up_one.chunk(2)
        views[f"{expert}.{up_name}.weight"] = up_one
        views[f"{expert}.{down_name}.weight"] = down_one
    return views


def interleaved_tensors(gate_up: Tensor, down: Tensor, gate_up_bias: Tensor, down_bias: Tensor) -> dict[str, Tensor]:
    """Return the four tensors of gpt-oss's experts; those of ``down`` share memory with the arguments.

    Raises:
        ValueError: shapes differ from the above.
    """
    views = _interleaved_views(gate_up, down, gate_up_bias, down_bias)
    return {name: view.flatten(-2) if name.startswith("gate_up") else view for name, view in views.items()}


@torch.no_grad()
def load_interleaved(
    gate_up: Tensor, down: Tensor, gate_up_bias: Tensor, down_bias: Tensor, tensors: Mapping[str, Tensor]
) -> None:
    """Copy the four tensors of gpt-oss's experts into ours.

    Raises:
        ValueError: as ``load_views``.
    """
    views = _interleaved_views(gate_up, down, gate_up_bias, down_bias)
    shapes = {
        name: (*view.shape[:-2], 2 * view.shape[-2]) if name.startswith("gate_up") else tuple(view.shape)
        for name, view in views.items()
    }
    _raise_differences(shapes, views, tensors)
    for name, view in views.items():
        view.copy_(
            tensors[name].view(*tensors[name].shape[:-1], -1, 2) if name.startswith("gate_up") else tensors[name]
        )


@torch.no_grad()
def load_views(views: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Copy ``tensors`` into ``views`` (fused or per expert), and so into the experts behind them.

    Raises:
        ValueError: names or shapes differ, or a view is on ``meta``; every fault is named and nothing has been copied.
    """
    _raise_differences({name: tuple(view.shape) for name, view in views.items()}, views, tensors)
    for name, view in views.items():
        view.copy_(tensors[name])


def _check_gated(up: Tensor, down: Tensor, gated: bool) -> None:
    shapes = tuple(up.shape), tuple(down.shape)
    if up.dim() == down.dim() == 3:
        num_experts, d_model, d_hidden = down.shape
        if shapes[0] == (num_experts, (2 if gated else 1) * d_hidden, d_model):
            return
        if shapes[0] == (num_experts, (1 if gated else 2) * d_hidden, d_model):
            rows = "no gate rows" if gated else "gate rows"
            raise ValueError(f"up {shapes[0]} has {rows} beside down {shapes[1]}: pass gated={not gated}")
    raise ValueError(
        f"up must be (e, 2H, D), or (e, H, D) with gated=False, and down (e, D, H), but they are {shapes[0]} and "
        f"{shapes[1]} with gated={gated}"
    )


def _interleaved_views(gate_up: Tensor, down: Tensor, gate_up_bias: Tensor, down_bias: Tensor) -> dict[str, Tensor]:
    """Return views with gate and up side by side in a last dimension of their own: (e, D, H, 2) and (e, H, 2)."""
    _check_gated(gate_up, down, True)
    num_experts, d_model, d_hidden = down.shape
    shapes = tuple(gate_up_bias.shape), tuple(down_bias.shape)
    if shapes != ((num_experts, 2 * d_hidden), (num_experts, d_model)):
        raise ValueError(
            f"beside down {tuple(down.shape)} gate_up_bias must be {(num_experts, 2 * d_hidden)} and down_bias "
            f"{(num_experts, d_model)}, but they are {shapes[0]} and {shapes[1]}"
        )
    return {
        "gate_up_proj": gate_up.detach().view(num_experts, 2, d_hidden, d_model).permute(0, 3, 2, 1),
        "gate_up_proj_bias": gate_up_bias.detach().view(num_experts, 2, d_hidden).mT,
        "down_proj": down.detach().mT,
        "down_proj_bias": down_bias.detach(),
    }


def _raise_differences(
    shapes: Mapping[str, tuple[int, ...]], views: Mapping[str, Tensor], tensors: Mapping[str, Tensor]
) -> None:
    problems = [f"{name} is on meta: it has no memory to load into" for name, view in views.items() if view.is_meta]
    problems += [f"{name} is missing" for name in shapes if name not in tensors]
    problems += [f"{name} is not known" for name in tensors if name not in shapes]
    problems += [
        f"{name} must have shape {shape} but has {tuple(tensors[name].shape)}"
        for name, shape in shapes.items()
        if name in tensors and tuple(tensors[name].shape) != shape
    ]
    problems += [
        f"{name} is {tensor.dtype} on {tensor.device}: it has no real numbers to load"
        for name, tensor in tensors.items()
        if tensor.is_meta or tensor.is_complex()
    ]
    if problems:
        raise ValueError("\n".join(problems))
