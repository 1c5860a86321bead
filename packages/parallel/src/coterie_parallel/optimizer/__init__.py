"""The distributed optimizer: AdamW and Muon on shards of fp32 main weights and moments."""

from coterie_parallel.optimizer.config import AdamWConfig, MuonConfig, OutlierConfig
from coterie_parallel.optimizer.memory import OptimizerMemory, optimizer_memory
from coterie_parallel.optimizer.muon import orthogonalize
from coterie_parallel.optimizer.optimizer import Optimizer

__all__ = [
    "AdamWConfig",
    "MuonConfig",
    "Optimizer",
    "OptimizerMemory",
    "OutlierConfig",
    "optimizer_memory",
    "orthogonalize",
]
