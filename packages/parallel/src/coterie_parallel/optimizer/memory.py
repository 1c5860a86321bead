"""What a rank holds and sends for parameters, gradients and optimizer, from sizes alone."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from coterie_parallel.gradients import BucketLayout, ReductionConfig, bucket_layouts
from coterie_parallel.gradients.buffers import buffer_numels
from coterie_parallel.optimizer.config import AdamWConfig
from coterie_parallel.placement import Placement
from coterie_parallel.plan import Plan

__all__ = ["OptimizerMemory", "optimizer_memory"]


@dataclass(frozen=True, kw_only=True)
class OptimizerMemory:
    """Bytes on one rank; the same on every rank, as all shards of a bucket have one size.

    Attributes:
        parameters: the weights that the model computes with.
        autograd_gradients: ``Parameter.grad`` of fp32 parameters, which autograd keeps over the micro-batches.
        main_gradients: the fp32 buckets; if gradients are sharded, this rank's shards of them and the two buffers that
            they are sent from; nothing for fp32 parameters that no other rank has, whose gradients stay where autograd
            leaves them.
        main_weights: the fp32 shards of parameters that are not fp32.
        moments: the shards of the moments.
        counters: step counts and the window of outliers.
        transient: the most that is there for a moment: what the exchange of one bucket's gradients or weights needs,
            and, sharded, gradients that wait for their bucket to be complete. These are counted as they come when every
            parameter has a gradient, in the reverse order of the forward; where one has none, all behind it wait for
            the end of the backward. On a GPU buckets follow one another; on a CPU several may be under way, two if
            gradients are sharded. The allocator of a GPU keeps what an exchange has used for the stream of exchanges.
        gradient_bytes_sent: what this rank sends to sum the gradients once: in a step, or, sharded, in a micro-batch.
        weight_bytes_sent: what it sends in a step to bring its new weights to the others.
        num_messages: collectives in a step with one reduction, those of Muon and of the norm included.
    """

    parameters: int
    autograd_gradients: int
    main_gradients: int
    main_weights: int
    moments: int
    counters: int
    transient: int
    gradient_bytes_sent: int
    weight_bytes_sent: int
    num_messages: int

    @property
    def allocated_by_optimizer(self) -> int:
        """What the optimizer holds between steps, parameters not counted."""
        return self.main_gradients + self.main_weights + self.moments + self.counters

    @property
    def total(self) -> int:
        """Everything at its largest moment."""
        return self.parameters + self.autograd_gradients + self.allocated_by_optimizer + self.transient


def optimizer_memory(
    parameters: Mapping[str, tuple[Sequence[int], torch.dtype]],
    placements: Mapping[str, Placement],
    plan: Plan,
    config: AdamWConfig,
) -> OptimizerMemory:
    """Return what an `Optimizer` of these settings needs on each rank, to the byte.

    Args:
        parameters: local shape and dtype by name, in the order of the forward; those that need a gradient.
        placements: a placement for every name.
        plan: the layout of the ranks.
        config: settings of the optimizer.
    """
    shapes = {name: tuple(shape) for name, (shape, _) in parameters.items()}
    sizes = [(name, math.prod(shape), dtype) for name, (shape, dtype) in parameters.items()]
    kinds = {name: config.kind_of(name, len(shape)) for name, shape in shapes.items()}
    reduction = config.reduction
    layouts = bucket_layouts(sizes[::-1], placements, plan, reduction.bucket_bytes, kinds)
    shared = [layout for layout in layouts if layout.num_shards > 1]
    send_bytes = getattr(torch, reduction.send_dtype).itemsize
    moment_bytes = getattr(torch, config.moments_dtype).itemsize
    transients = [0]
    for layout in shared:
        transients.append(_sum_bytes(layout, reduction))
        transients.append((layout.numel + layout.shard_numel) * layout.dtype.itemsize)
    if reduction.sharded:
        transients.append(_most_in_backward(shared, [name for name, _, _ in sizes[::-1]], reduction))
    is_sharded = {slot.name: reduction.sharded and layout.num_shards > 1 for layout in layouts for slot in layout.slots}
    muon = config.muon
    muon_exchanges = {
        (layout.axis, muon.iteration_dtype(layout.dtype))
        for layout in shared
        if muon is not None and layout.kind == "muon"
    }
    counters = 2 * 8 + (0 if config.outliers is None else 2 * 8 * config.outliers.window + 8)
    world_messages = (1 if config.outliers is None else 2) if plan.world > 1 else 0
    return OptimizerMemory(
        parameters=sum(numel * dtype.itemsize for _, numel, dtype in sizes),
        autograd_gradients=sum(
            4 * numel for name, numel, dtype in sizes if dtype == torch.float32 and not is_sharded[name]
        ),
        main_gradients=sum(
            4 * (layout.shard_numel if reduction.sharded else layout.numel)
            for layout in layouts
            if layout.num_shards > 1 or layout.dtype != torch.float32
        )
        + (4 * sum(buffer_numels(shared)) if reduction.sharded else 0),
        main_weights=sum(4 * layout.shard_numel for layout in layouts if layout.dtype != torch.float32),
        moments=sum((2 if layout.kind == "adamw" else 1) * moment_bytes * layout.shard_numel for layout in layouts),
        counters=counters,
        transient=max(transients),
        gradient_bytes_sent=sum((layout.numel - layout.shard_numel) * send_bytes for layout in shared),
        weight_bytes_sent=sum((layout.numel - layout.shard_numel) * layout.dtype.itemsize for layout in shared),
        num_messages=2 * len(shared) + 2 * len(muon_exchanges) + world_messages,
    )


def _sum_bytes(layout: BucketLayout, reduction: ReductionConfig) -> int:
    """Return what the sum of one bucket allocates beside the gradients themselves."""
    send_bytes = getattr(torch, reduction.send_dtype).itemsize
    received = layout.numel if reduction.sum_order == "ranks" else layout.shard_numel
    rounded = layout.numel * send_bytes + 4 * layout.shard_numel if reduction.send_dtype == "bfloat16" else 0
    return int(received * send_bytes + rounded)


def _most_in_backward(shared: Sequence[BucketLayout], order: Sequence[str], reduction: ReductionConfig) -> int:
    """Return the most bytes of gradients that wait to be sent and of a sum, as sharded gradients come in ``order``."""
    number_of = {slot.name: number for number, layout in enumerate(shared) for slot in layout.slots}
    bytes_of = {slot.name: slot.numel * layout.dtype.itemsize for layout in shared for slot in layout.slots}
    missing = [{slot.name for slot in layout.slots} for layout in shared]
    waiting = most = sent = 0
    for name in order:
        if name not in number_of:
            continue
        waiting += bytes_of[name]
        most = max(most, waiting)
        missing[number_of[name]].remove(name)
        while sent < len(shared) and not missing[sent] and shared[sent].axis != "embedding":
            waiting -= sum(bytes_of[slot.name] for slot in shared[sent].slots)
            # Autograd keeps a gradient until the hook that sends its bucket, or a later one, has returned.
            kept = bytes_of[name] if number_of[name] <= sent else 0
            most = max(most, waiting + kept + _sum_bytes(shared[sent], reduction))
            sent += 1
    for layout in shared[sent:]:
        waiting -= sum(bytes_of[slot.name] for slot in layout.slots)
        most = max(most, waiting + _sum_bytes(layout, reduction))
    return most
