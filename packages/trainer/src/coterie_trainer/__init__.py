"""Train mixture-of-experts language models, from a laptop to a cluster.

The names below are loaded when they are first used, so that ``coterie --help`` need not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coterie_trainer.checkpoint import CheckpointError, Checkpoints, read_tensors
    from coterie_trainer.config import Config, ConfigError, load_config
    from coterie_trainer.exporting import check_export, decoder_from_tensors, export_run, read_run
    from coterie_trainer.generation import generate
    from coterie_trainer.initialization import initialize
    from coterie_trainer.launch import Process, StopRequest
    from coterie_trainer.model import Decoder, ModelOutput, build_model
    from coterie_trainer.training import train

_HOME = {
    "Config": "config",
    "ConfigError": "config",
    "load_config": "config",
    "Decoder": "model",
    "ModelOutput": "model",
    "build_model": "model",
    "initialize": "initialization",
    "Process": "launch",
    "StopRequest": "launch",
    "train": "training",
    "CheckpointError": "checkpoint",
    "Checkpoints": "checkpoint",
    "read_tensors": "checkpoint",
    "check_export": "exporting",
    "decoder_from_tensors": "exporting",
    "export_run": "exporting",
    "read_run": "exporting",
    "generate": "generation",
}

__all__ = [
    "Config",
    "ConfigError",
    "load_config",
    "Decoder",
    "ModelOutput",
    "build_model",
    "initialize",
    "Process",
    "StopRequest",
    "train",
    "CheckpointError",
    "Checkpoints",
    "read_tensors",
    "check_export",
    "decoder_from_tensors",
    "export_run",
    "read_run",
    "generate",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'coterie_trainer' has no attribute {name!r}")
    return getattr(import_module(f"coterie_trainer.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
