"""From text to batches: corpora, a tokenizer, flat token files, and sequences in an order that knows no ranks."""

from coterie_trainer.data.dataset import (
    Batch,
    EvaluationBatches,
    Prefetch,
    Sequences,
    TrainBatches,
    open_split,
    prefetch,
)
from coterie_trainer.data.shards import merge_token_folders, verify
from coterie_trainer.data.tokenize import TokenizeSummary, prepare_stdlib, tokenize_files

__all__ = [
    "Batch",
    "EvaluationBatches",
    "Prefetch",
    "Sequences",
    "TokenizeSummary",
    "TrainBatches",
    "merge_token_folders",
    "open_split",
    "prefetch",
    "prepare_stdlib",
    "tokenize_files",
    "verify",
]
