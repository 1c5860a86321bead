"""Convert hybrid mixture-of-experts checkpoints to Hugging Face formats and back, with every tensor accounted for."""

from coterie_export.compare import compare_logits, load_with_transformers
from coterie_export.conversion import from_hf, to_hf
from coterie_export.families import FAMILIES, family_problems, fitting_families, get_family
from coterie_export.family import Computed, Family
from coterie_export.folder import export_model, import_model, verify
from coterie_export.spec import ModelSpec

__all__ = [
    "ModelSpec",
    "export_model",
    "import_model",
    "verify",
    "compare_logits",
    "load_with_transformers",
    "family_problems",
    "fitting_families",
    "get_family",
    "to_hf",
    "from_hf",
    "Family",
    "Computed",
    "FAMILIES",
]
