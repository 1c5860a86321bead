"""Start values of the experts, the same for every layout."""

import hashlib
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from coterie_experts.latent import LatentExperts
    from coterie_experts.module import GroupedExperts
    from coterie_experts.shared import SharedExpert

__all__ = ["init_experts", "init_latent_experts", "init_shared_expert"]


@torch.no_grad()
def init_experts(module: "GroupedExperts", *, seed: int, name: str, std: float, down_std: float | None = None) -> None:
    """Fill the experts with normal numbers that depend on the seed, the layer's name and the global expert id alone.

    So any split of the experts over ranks holds bit-equal experts, on any device and in any dtype (numbers are drawn on
    the CPU in float32, then rounded), and all experts of a layer differ. Biases become zero.

    Args:
        module: its ``first_expert`` says which experts it holds.
        seed: of the whole model.
        name: of this layer, different for every layer of the model.
        std: standard deviation of ``gate_up``, or ``up`` where there is no gate.
        down_std: standard deviation of ``down``; ``std`` if not given.

    Raises:
        ValueError: the module is on the meta device; use ``module.to_empty(device=...)`` first.
    """
    deviations = {"down": std if down_std is None else down_std}
    for parameter_name, parameter in _parameters(module):
        deviation = deviations.get(parameter_name, std)
        _fill(parameter, f"{seed}/{name}/{parameter_name}", module.first_expert, deviation)


@torch.no_grad()
def init_shared_expert(
    module: "SharedExpert", *, seed: int, name: str, std: float, down_std: float | None = None
) -> None:
    """Fill a shared expert with normal numbers that depend on the seed and its name alone; biases become zero.

    The arguments and errors are those of ``init_experts``.
    """
    deviations = {"down": std if down_std is None else down_std}
    for parameter_name, parameter in _parameters(module):
        _fill(parameter[None], f"{seed}/{name}/{parameter_name}", 0, deviations.get(parameter_name, std))


@torch.no_grad()
def init_latent_experts(
    module: "LatentExperts",
    *,
    seed: int,
    name: str,
    std: float,
    latent_std: float | None = None,
    down_std: float | None = None,
) -> None:
    """Fill the projections, which are the same on every rank, and the experts, as ``init_experts`` does.

    Args:
        module: all or a share of the experts.
        seed: of the whole model.
        name: of this layer; the experts take ``{name}.experts``.
        std: standard deviation of ``latent_in``.
        latent_std: of what has the latent width as its input: ``latent_out`` and the first projection of the experts;
            ``std`` if not given.
        down_std: of ``down``; ``std`` if not given.

    Raises:
        ValueError: as ``init_experts``.
    """
    latent_std = std if latent_std is None else latent_std
    init_experts(
        module.experts,
        seed=seed,
        name=f"{name}.experts",
        std=latent_std,
        down_std=std if down_std is None else down_std,
    )
    _fill(module.latent_in[None], f"{seed}/{name}/latent_in", 0, std)
    _fill(module.latent_out[None], f"{seed}/{name}/latent_out", 0, latent_std)


def _parameters(module: torch.nn.Module) -> list[tuple[str, Tensor]]:
    """Return the weights of a module of experts, and set its biases to zero."""
    found: list[tuple[str, Tensor]] = []
    for name, parameter in module.named_parameters():
        if parameter.is_meta:
            raise ValueError(
                "experts on the meta device hold no numbers; call to_empty(device=...) before they are initialised"
            )
        if name.endswith("_bias"):
            parameter.zero_()
        else:
            found.append((name, parameter))
    return found


def _fill(weights: Tensor, key: str, first_expert: int, std: float) -> None:
    # torch's CPU generator looks at 32 bits of its seed. A hash per expert would meet the same 32 bits twice now and
    # then (128 experts in 60 layers: 1 model in 70), so one hash per tensor is counted up by the expert's id.
    if not 0 <= std < math.inf:
        raise ValueError(f"a standard deviation ({std!r}) must be a finite number from 0")
    base = int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "little")
    generator = torch.Generator()
    numbers = torch.empty(weights.shape[1:], dtype=torch.float32, device="cpu")
    for local, weight in enumerate(weights):
        generator.manual_seed((base + first_expert + local) % 2**32)
        weight.copy_(numbers.normal_(0.0, std, generator=generator))
