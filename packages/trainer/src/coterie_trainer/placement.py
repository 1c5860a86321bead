"""Where each parameter of the decoder lives, from its name alone."""

from coterie_export import ModelSpec
from coterie_parallel import DENSE, EXPERTS, TIED_EMBEDDING, Placement, Stages

__all__ = ["placement_of"]


def placement_of(name: str, spec: ModelSpec, stages: Stages | None) -> Placement:
    """Return the placement of a parameter; ``stages`` are all of a pipeline, None for none."""
    if name == "embed.weight" and spec.tied_embeddings and stages is not None and stages.ends_apart:
        return TIED_EMBEDDING
    return EXPERTS if ".moe.experts." in name else DENSE
