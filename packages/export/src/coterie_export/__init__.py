"""Convert hybrid mixture-of-experts checkpoints to Hugging Face formats and back, with every tensor accounted for."""

from coterie_export.spec import ModelSpec

__all__ = ["ModelSpec"]
