"""Data-parallel gradients: fp32 buckets, reduce-scattered; their global norm and clipping.

Every rank's loss is (the local sum over its target tokens) / (the target tokens of the whole step), so the reduction
is a plain sum and nothing divides.
"""

from coterie_parallel.gradients.layout import BucketLayout, Slot, bucket_layouts
from coterie_parallel.gradients.norm import clip_gradients_, count_elements, global_gradient_norm, global_sums
from coterie_parallel.gradients.reducer import Bucket, GradientReducer, ReductionConfig, accumulate_in_fp32

__all__ = [
    "Bucket",
    "BucketLayout",
    "GradientReducer",
    "ReductionConfig",
    "Slot",
    "accumulate_in_fp32",
    "bucket_layouts",
    "clip_gradients_",
    "count_elements",
    "global_gradient_norm",
    "global_sums",
]
