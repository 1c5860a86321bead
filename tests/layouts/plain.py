"""One process again, with a mixture of experts in a few lines of torch: no dispatcher, no grouped kernel."""

from unittest.mock import patch

import torch
import torch.nn.functional as F
from coterie_routing import Routing
from coterie_trainer.config import Config
from coterie_trainer.model import MoE
from coterie_trainer.verify.running import Outcome, run_layout
from torch import Tensor


def every_expert_on_every_token(
    self: MoE, x_TD: Tensor, is_real_T: Tensor, memo: None = None
) -> tuple[Tensor, Routing]:
    routing = self.router(x_TD, is_real_T)
    is_chosen_TK = routing.ids_TK >= 0
    weights_TE = torch.zeros(len(x_TD), len(self.experts.down)).scatter_add(
        1, routing.ids_TK.clamp(min=0), torch.where(is_chosen_TK, routing.weights_TK, 0.0)
    )
    y_TD = torch.zeros_like(x_TD) if self.shared is None else self.shared(x_TD)
    for weights_T, gate_up, down in zip(weights_TE.T, self.experts.gate_up, self.experts.down, strict=True):
        gate_TH, up_TH = (x_TD @ gate_up.T).chunk(2, dim=1)
        y_TD = y_TD + weights_T[:, None] * (F.silu(gate_TH) * up_TH @ down.T)
    return y_TD, routing


def run_plain(rank: int, world: int, config: Config) -> Outcome | None:
    with patch.object(MoE, "forward", every_expert_on_every_token):
        return run_layout(rank, world, config)
