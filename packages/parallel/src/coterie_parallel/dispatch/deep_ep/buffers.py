"""Make the buffer of a surface, sized once, and what drives it."""

import inspect
import math
from types import ModuleType
from typing import Any

from coterie_parallel.axis import Axis
from coterie_parallel.dispatch.deep_ep.expanded import ExpandedTransport
from coterie_parallel.dispatch.deep_ep.folded import ElasticFoldedTransport, LegacyTransport
from coterie_parallel.dispatch.deep_ep.transport import Transport
from coterie_parallel.dispatch.deep_ep_options import DeepEPOptions

__all__ = ["delivers_expanded", "make_transport"]

BYTES_OF_BF16 = 2


def delivers_expanded(module: ModuleType, surface: str) -> bool:
    """Return whether ``surface`` delivers one row a (token, choice) also in a cached dispatch: V2.1 and newer."""
    return "do_zero_padding" in inspect.signature(getattr(module, surface).dispatch).parameters


def make_transport(
    module: ModuleType,
    surface: str,
    *,
    axis: Axis,
    num_experts: int,
    alignment: int,
    max_tokens: int,
    width: int,
    num_choices: int,
    read_counts: bool,
    timeout_s: float,
    options: DeepEPOptions,
) -> Transport:
    """Return the transport over a new buffer; all ranks of ``axis`` must call it together with equal arguments."""
    if surface == "Buffer":
        return LegacyTransport(
            _legacy_buffer(module, axis, width),
            num_experts=num_experts,
            num_ranks=axis.size,
            max_tokens=max_tokens,
            alignment=alignment,
            read_counts=read_counts,
        )
    seconds = max(1, math.ceil(timeout_s))
    # Sized for bf16 also with an FP8 payload: the backward pass dispatches gradients in bf16.
    buffer = getattr(module, surface)(
        axis.group,
        num_max_tokens_per_rank=max_tokens,
        hidden=width,
        num_topk=num_choices,
        deterministic=options.deterministic,
        allow_hybrid_mode=options.hybrid,
        num_cpu_timeout_secs=seconds,
        num_gpu_timeout_secs=seconds,
        explicitly_destroy=True,
    )
    if delivers_expanded(module, surface):
        return ExpandedTransport(
            buffer,
            num_experts=num_experts,
            max_tokens=max_tokens,
            alignment=alignment,
            num_sms=options.num_sms,
            read_counts=read_counts,
        )
    return ElasticFoldedTransport(
        buffer,
        num_experts=num_experts,
        num_ranks=axis.size,
        max_tokens=max_tokens,
        alignment=alignment,
        num_sms=options.num_sms,
        read_counts=read_counts,
    )


def _legacy_buffer(module: ModuleType, axis: Axis, width: int) -> Any:
    configs = [module.Buffer.get_dispatch_config(axis.size), module.Buffer.get_combine_config(axis.size)]
    width_bytes = width * BYTES_OF_BF16
    return module.Buffer(
        axis.group,
        max(config.get_nvl_buffer_size_hint(width_bytes, axis.size) for config in configs),
        max(config.get_rdma_buffer_size_hint(width_bytes, axis.size) for config in configs),
        explicitly_destroy=True,
    )
