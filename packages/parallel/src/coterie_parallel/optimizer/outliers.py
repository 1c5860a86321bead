"""Which steps are skipped, decided on the device."""

import torch
from torch import Tensor

from coterie_parallel.optimizer.config import OutlierConfig

__all__ = ["OutlierGuard"]


class OutlierGuard:
    """Keeps the losses and gradient norms of the last steps and tells whether new ones are far above them.

    The idea is that of the SkipStepOptimizer of https://github.com/allenai/OLMo-core; here only values above the mean
    are outliers, as a loss may fall. Values that are not finite are outliers, and are not kept.

    Attributes:
        values_2W: fp64, the last losses and norms, at the step number modulo the window.
        num_seen: int64 scalar, how many were kept so far.
    """

    def __init__(self, config: OutlierConfig, device: torch.device) -> None:
        self._config = config
        self.values_2W = torch.zeros(2, config.window, dtype=torch.float64, device=device)
        self.num_seen = torch.zeros((), dtype=torch.int64, device=device)

    def judge(self, loss: Tensor, norm: Tensor) -> Tensor:
        """Return a bool scalar, true for a step to skip, and keep both values; the host reads nothing."""
        latest_2 = torch.stack([loss, norm]).double()
        window = self._config.window
        is_kept_W = torch.arange(window, device=latest_2.device) < self.num_seen
        count = is_kept_W.sum()
        mean_2 = self.values_2W.sum(dim=1) / count.clamp(min=1)
        squares_2 = torch.where(is_kept_W, self.values_2W - mean_2[:, None], 0.0).square().sum(dim=1)
        deviation_2 = (squares_2 / (count - 1).clamp(min=1)).sqrt()
        is_far = (latest_2 > mean_2 + self._config.num_deviations * deviation_2).any()
        is_outlier = is_far & (self.num_seen >= self._config.first_judged)

        is_finite = latest_2.isfinite().all()
        place = (self.num_seen % window).view(1)
        before_21 = self.values_2W.index_select(1, place)
        self.values_2W.index_copy_(1, place, torch.where(is_finite, latest_2[:, None], before_21))
        self.num_seen += is_finite
        return is_outlier | ~is_finite
