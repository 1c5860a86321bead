"""Which back-end runs, and why."""

import functools
import logging
from dataclasses import dataclass

import torch

from coterie_experts.activation import ACTIVATIONS
from coterie_experts.config import BACKENDS
from coterie_experts.grouped_swiglu import quack_native, specialised, te_native, torch_native, triton_native
from coterie_experts.tables import TileTable, capability_of, recorded_backends, width_class

__all__ = ["BackendChoice", "choose_backend"]

# Of parameters and rows, for any back-end.
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_LOG = logging.getLogger("coterie_experts")


@dataclass(frozen=True, kw_only=True)
class BackendChoice:
    """The back-end that will run (``name``) and one sentence that says why (``reason``)."""

    name: str
    reason: str


def choose_backend(
    backend: str,
    *,
    d_model: int,
    d_hidden: int,
    dtype: torch.dtype,
    device: torch.device,
    activation: str = "swiglu",
    bias: bool = False,
    table: TileTable | None = None,
) -> BackendChoice:
    """Pick the back-end for these sizes, dtype and device; ``meta`` counts as a device that can do anything.

    ``auto`` takes the first that can run of those that were measured for such widths on such a GPU, in ``table`` or in
    the record of the package, and logs each choice once (logger ``coterie_experts``).

    Raises:
        ValueError: a name or the dtype is unknown, the named back-end cannot run here, or the table is of another
            GPU; the text says what to do.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend ({backend!r}) must be one of {', '.join(BACKENDS)}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation ({activation!r}) must be one of {', '.join(ACTIVATIONS)}")
    if dtype not in _DTYPES:
        raise ValueError(f"dtype ({dtype}) must be one of {', '.join(map(str, _DTYPES))}")
    misfit = table.misfit(device, dtype) if table is not None and device.type == "cuda" else None
    if misfit is not None:
        raise ValueError(misfit)

    def obstacle_of(name: str) -> str | None:
        sizes = {"d_model": d_model, "d_hidden": d_hidden}
        if name == "te":
            return te_native.obstacle(**sizes, dtype=dtype, device=device, bias=bias)
        if name == "quack":
            return quack_native.obstacle(**sizes, dtype=dtype, device=device, activation=activation, bias=bias)
        obstacle = torch_native.obstacle if name == "torch" else triton_native.obstacle
        return obstacle(**sizes, dtype=dtype, device=device)

    if backend == "reference":
        return BackendChoice(name="reference", reason="'reference' was asked for by name")
    if backend != "auto":
        obstacle = obstacle_of(backend)
        if obstacle is not None:
            raise ValueError(f"backend {backend!r} cannot run: {obstacle}; or choose backend 'auto' or 'reference'")
        return BackendChoice(
            name=backend, reason="; ".join([f"{backend!r} was asked for by name", *_left_out(backend, device)])
        )

    names, why = _in_order(d_model, d_hidden, dtype, device, table)
    refused: list[str] = []
    for name in names:
        obstacle = None if name == "reference" else obstacle_of(name)
        if obstacle is None:
            # The reference is what is left.
            reasons = (
                refused
                if name == "reference" and refused
                else [f"{name!r} can run {dtype} on {device.type}", why, *refused, *_left_out(name, device)]
            )
            choice = BackendChoice(name=name, reason="; ".join(reasons))
            _say_once(choice, dtype, device.type, width_class(d_model, d_hidden))
            return choice
        refused.append(f"{name!r} cannot run: {obstacle}")
    raise AssertionError("the reference can always run")


def _left_out(name: str, device: torch.device) -> list[str]:
    obstacle = specialised.obstacle(device) if name == "triton" else None
    return [] if obstacle is None else [f"without its specialised kernels, with the plain kernels alone: {obstacle}"]


def _in_order(
    d_model: int, d_hidden: int, dtype: torch.dtype, device: torch.device, table: TileTable | None
) -> tuple[tuple[str, ...], str]:
    """Return back-ends to try in order, and what to say of the one that is taken."""
    if device.type != "cuda":
        return ("torch", "reference"), "F.grouped_mm is faster than loops"
    widths, capability = width_class(d_model, d_hidden), capability_of(device)
    measured = table.backends.get(widths) if table is not None else None
    if measured is None:
        measured = recorded_backends(capability, dtype, widths)
    what = f"{widths} widths on compute capability {capability}"
    if measured is None:
        why = f"nothing was measured for {what}; python -m coterie_experts.tune records it"
        return ("triton", "torch", "reference"), why
    return (*measured, "reference"), f"measured with swiglu for {what}, fastest first: {', '.join(measured)}"


@functools.cache
def _say_once(choice: BackendChoice, dtype: torch.dtype, device_type: str, widths: str) -> None:
    _LOG.info("experts on %s, %s, %s widths: %s, because %s", device_type, dtype, widths, choice.name, choice.reason)
