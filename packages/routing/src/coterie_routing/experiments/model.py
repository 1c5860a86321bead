"""A small byte model with one mixture-of-experts layer, in plain torch."""

import torch
from torch import Tensor, nn

from coterie_routing.config import RouterConfig
from coterie_routing.router import Router, Routing

__all__ = ["ByteModel"]

_NUM_BYTES = 256
_NUM_HASHED = 2048
_LONGEST = 4


class ByteModel(nn.Module):
    """Predict the next byte from hashed runs of the last 1 to 4 bytes, the mean of all earlier ones, and one MoE layer.

    The mean is what tells a token in which kind of text it stands. All is causal. The experts are evaluated for every
    token and multiplied by the weight of the token's choice, 0 for most: the same numbers as a dispatch to the chosen
    ones, and at this size no slower.

    Attributes:
        router: The router under study.

    Args:
        config: Of the router; its `d_model` is the width D.
        expert_width: Hidden width H of each expert.
    """

    def __init__(self, config: RouterConfig, expert_width: int) -> None:
        super().__init__()
        width, hidden = config.d_model, config.num_experts * expert_width
        sizes = [_NUM_BYTES] + [_NUM_HASHED] * (_LONGEST - 1)
        self.embeddings = nn.ModuleList(nn.Embedding(size, width) for size in sizes)
        self.earlier = nn.Linear(width, width, bias=False)
        self.norm_before = nn.RMSNorm(width)
        self.router = Router(config)
        # The rows of the norm have length sqrt(D), so the logits begin with a deviation of 1.
        nn.init.normal_(self.router.weight, std=width**-0.5)
        self.up_DF = nn.Parameter(torch.randn(width, hidden) * width**-0.5)
        self.down_FD = nn.Parameter(torch.randn(hidden, width) * expert_width**-0.5)
        self.norm_after = nn.RMSNorm(width)
        self.head = nn.Linear(width, _NUM_BYTES)

    def forward(self, bytes_BS: Tensor) -> tuple[Tensor, Routing]:
        """Return the logits of the next byte, (B, S, 256), and the routing of the B * S tokens, by sequence.

        Args:
            bytes_BS: int64 (B, S), values 0 to 255.
        """
        x_BSD = self._embedded(bytes_BS)
        num_sequences, length, width = x_BSD.shape
        ones_S1 = torch.arange(1, length + 1, dtype=x_BSD.dtype)[:, None]
        x_BSD = x_BSD + self.earlier(x_BSD.cumsum(1) / ones_S1)
        inner_TD = self.norm_before(x_BSD).reshape(num_sequences * length, width)
        routing: Routing = self.router(inner_TD)
        gates_TE = torch.zeros_like(routing.scores_TE).scatter(1, routing.ids_TK, routing.weights_TK)
        hidden_TEH = nn.functional.silu(inner_TD @ self.up_DF).reshape(*gates_TE.shape, -1)
        outer_TD = (hidden_TEH * gates_TE[..., None]).flatten(1) @ self.down_FD
        logits_BSV = self.head(self.norm_after(x_BSD + outer_TD.reshape_as(x_BSD)))
        return logits_BSV, routing

    def _embedded(self, bytes_BS: Tensor) -> Tensor:
        """Return the sum of the embeddings of the runs that end at each byte; a run stops at the sequence's start."""
        x_BSD: Tensor = self.embeddings[0](bytes_BS)
        run_BS = bytes_BS
        for back in range(1, _LONGEST):
            earlier_BS = nn.functional.pad(bytes_BS, (back, 0))[:, : bytes_BS.shape[1]]
            # A linear congruential step mixes one more byte into the hash; it stays far below 2^63.
            run_BS = (run_BS * 1103515245 + earlier_BS * 12345 + 1) % 2147483647
            x_BSD = x_BSD + self.embeddings[back](run_BS % _NUM_HASHED)
        return x_BSD
