"""Experts that work at a narrower width than the model: project down, run the experts there, project back."""

from collections.abc import Callable
from dataclasses import replace
from numbers import Integral
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coterie_experts.config import ExpertsConfig
from coterie_experts.deferred import Defer
from coterie_experts.grouped_swiglu import misfits, without_autocast
from coterie_experts.initialisation import init_latent_experts
from coterie_experts.main_grad import into_main_grad
from coterie_experts.module import GroupedExperts

__all__ = ["LatentExperts"]


class LatentExperts(nn.Module):
    """Hold grouped experts of width L between two dense projections D -> L and L -> D that all experts share.

    The latent experts of Nemotron-H (``moe_latent_size`` in transformers): rows that travel between ranks, and the
    weights of the experts, are D / L times narrower. The router still sees the tokens at width D. The projections
    are ``latent_in`` (L, D) and ``latent_out`` (D, L), whole on every rank, without bias; ``experts`` is a
    ``GroupedExperts`` whose ``d_model`` is L. Gradients go to ``main_grad`` where it exists.

    On one rank ``forward_tokens`` does everything. With a dispatcher the projections belong outside, so that what is
    sent is narrow::

        sent = dispatch(latent.to_latent(x_TD), ids_TK, weights_TK)
        y_TD = latent.from_latent(combine(latent(sent.rows, sent.row_weights, sent.offsets), sent.handle))

    The projection back is linear, so it may follow the sum over a token's experts, and costs once a token.

    Args:
        config: of the layer as the model sees it; its ``d_model`` is D.
        d_latent: width L.
        first_expert: as in ``GroupedExperts``; so are the others.
        num_local_experts: likewise.
        device: likewise.
        dtype: likewise.

    Attributes:
        defer_weight_gradients: that of ``experts``; gradients of the projections are not deferred.

    Raises:
        ValueError: as ``GroupedExperts``, for L in place of D, or L is not 1 to D.
    """

    def __init__(
        self,
        config: ExpertsConfig,
        *,
        d_latent: int,
        first_expert: int = 0,
        num_local_experts: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        problems = config.problems()
        # What a caller gave, whatever its annotation says.
        given: Any = d_latent
        if isinstance(given, bool) or not isinstance(given, Integral):
            problems.append(f"d_latent ({given!r}) must be a whole number")
        elif not problems and not 1 <= d_latent <= config.d_model:
            problems.append(f"d_latent ({d_latent}) must be 1 to d_model ({config.d_model})")
        if problems:
            raise ValueError("\n".join(problems))
        self.config = config
        self.latent_in = nn.Parameter(torch.empty(d_latent, config.d_model, device=device, dtype=dtype))
        try:
            self.experts = GroupedExperts(
                replace(config, d_model=d_latent),
                first_expert=first_expert,
                num_local_experts=num_local_experts,
                device=device,
                dtype=dtype,
            )
        except ValueError as error:
            # The experts call their width d_model.
            raise ValueError(str(error).replace("d_model", "d_latent")) from None
        self.latent_out = nn.Parameter(torch.empty(config.d_model, d_latent, device=device, dtype=dtype))
        if not self.latent_in.is_meta:
            init_latent_experts(
                self,
                seed=0,
                name="latent",
                std=config.d_model**-0.5,
                latent_std=d_latent**-0.5,
                down_std=config.d_hidden**-0.5,
            )

    @property
    def defer_weight_gradients(self) -> Defer | None:
        """Return what takes the weight gradients of the experts, None where they are computed at once."""
        return self.experts.defer_weight_gradients

    @defer_weight_gradients.setter
    def defer_weight_gradients(self, defer: Defer | None) -> None:
        self.experts.defer_weight_gradients = defer

    def to_latent(self, x_TD: Tensor) -> Tensor:
        """Return the tokens at the width of the experts, (..., D) to (..., L).

        Raises:
            ValueError: the last size is not D, or the dtype or the device is not that of the parameters.
        """
        return _linear(x_TD, self.latent_in, "x")

    def from_latent(self, y_TL: Tensor) -> Tensor:
        """Return what the experts gave at the width of the model, (..., L) to (..., D).

        Raises:
            ValueError: as ``to_latent``, for L.
        """
        return _linear(y_TL, self.latent_out, "y")

    def forward(
        self,
        rows_RL: Tensor,
        row_weights_R: Tensor,
        offsets_e: Tensor,
        *,
        ask_out: Callable[[], Tensor | None] | None = None,
        ask_grad_rows: Callable[[], Tensor | None] | None = None,
    ) -> Tensor:
        """Send rows of width L, in expert order, through their experts; rows of width L come back.

        See ``GroupedExperts.forward``. The projections are not part of it: see the class.
        """
        rows: Tensor = self.experts(rows_RL, row_weights_R, offsets_e, ask_out=ask_out, ask_grad_rows=ask_grad_rows)
        return rows

    def forward_tokens(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Project tokens down, send them through the experts they chose, add up, and project back.

        Equals ``from_latent(experts.forward_tokens(to_latent(x), ids, weights))``; the arguments and errors are those
        of ``GroupedExperts.forward_tokens``.
        """
        return self.from_latent(self.experts.forward_tokens(self.to_latent(x_TD), ids_TK, weights_TK))

    def extra_repr(self) -> str:
        """Return the sizes for ``print(module)``."""
        return f"d_model={self.config.d_model}, d_latent={self.latent_in.shape[0]}"


def _linear(x: Tensor, weight_NM: Tensor, name: str) -> Tensor:
    width = weight_NM.shape[1]
    found = []
    if x.dim() < 1 or x.shape[-1] != width:
        found.append(f"{name} must have shape (..., {width}), but has {tuple(x.shape)}")
    found += misfits(name, x, weight_NM)
    if found:
        raise ValueError("\n".join(found))
    # In the dtype of the parameters, as the experts.
    with without_autocast(x.device):
        return F.linear(x, into_main_grad(weight_NM))
