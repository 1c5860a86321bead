"""Expert, pipeline and data parallelism for mixture-of-experts training: mesh, dispatchers, gradients, optimizer."""

from coterie_parallel.axis import Axis
from coterie_parallel.collectives import (
    CollectiveError,
    all_gather,
    all_gather_objects,
    all_reduce_max,
    all_reduce_sum,
    all_reduce_sum_,
    barrier,
    broadcast_,
    exchange_rows,
)
from coterie_parallel.dispatch import (
    DeepEPOptions,
    Dispatched,
    Dispatcher,
    DispatchOptions,
    Guarantees,
    dispatcher_class,
    known_dispatchers,
    make_dispatcher,
)
from coterie_parallel.gradients import (
    GradientReducer,
    ReductionConfig,
    accumulate_in_fp32,
    clip_gradients_,
    count_elements,
    global_gradient_norm,
)
from coterie_parallel.mesh import Mesh
from coterie_parallel.optimizer import (
    AdamWConfig,
    MuonConfig,
    Optimizer,
    OptimizerMemory,
    OutlierConfig,
    optimizer_memory,
    orthogonalize,
)
from coterie_parallel.pipeline.deferred import WeightGradients
from coterie_parallel.pipeline.runner import Pipeline
from coterie_parallel.pipeline.stages import SCHEDULES, Stage, Stages, make_stages, stage_problems
from coterie_parallel.placement import DENSE, EXPERTS, TIED_EMBEDDING, Chunk, Placement, replica_problems
from coterie_parallel.plan import AXES, Coordinates, ParallelConfig, Plan, make_plan, plan_problems

__all__ = [
    "ParallelConfig",
    "Plan",
    "Coordinates",
    "make_plan",
    "plan_problems",
    "AXES",
    "Axis",
    "Mesh",
    "CollectiveError",
    "all_gather",
    "all_gather_objects",
    "all_reduce_max",
    "all_reduce_sum",
    "all_reduce_sum_",
    "barrier",
    "broadcast_",
    "exchange_rows",
    "Dispatched",
    "Dispatcher",
    "DispatchOptions",
    "DeepEPOptions",
    "Guarantees",
    "dispatcher_class",
    "known_dispatchers",
    "make_dispatcher",
    "DENSE",
    "EXPERTS",
    "TIED_EMBEDDING",
    "Chunk",
    "Placement",
    "replica_problems",
    "GradientReducer",
    "ReductionConfig",
    "accumulate_in_fp32",
    "clip_gradients_",
    "count_elements",
    "global_gradient_norm",
    "AdamWConfig",
    "MuonConfig",
    "OutlierConfig",
    "Optimizer",
    "OptimizerMemory",
    "optimizer_memory",
    "orthogonalize",
    "SCHEDULES",
    "Stage",
    "Stages",
    "make_stages",
    "stage_problems",
    "Pipeline",
    "WeightGradients",
]
