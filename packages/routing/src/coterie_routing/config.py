"""What a router is: sizes, score function and the treatment of the chosen scores."""

import math
from dataclasses import dataclass
from typing import Literal

__all__ = ["RouterConfig", "SCORE_FUNCTIONS"]

SCORE_FUNCTIONS: tuple[str, ...] = ("softmax", "sigmoid")


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """Describe a top-k router.

    Nothing is checked here: `problems()` lists every fault, and `Router` refuses a config that has any.

    Attributes:
        d_model: Width D of the tokens.
        num_experts: Number of experts E, over all ranks.
        top_k: Number of experts K that each token chooses.
        score_function: "softmax" over all E experts (Mixtral, Qwen 3, OLMoE) or "sigmoid" of each (DeepSeek-V3).
        renormalize: Divide the K chosen scores of a token by their sum. False keeps them as they are.
        route_scale: Factor on the weights, after the renormalisation.
        selection_bias: Give each expert a bias that is added to its score for the selection only
            (loss-free balancing, arXiv:2408.15664); the weights come from the scores without it.
    """

    d_model: int
    num_experts: int
    top_k: int
    score_function: Literal["softmax", "sigmoid"] = "softmax"
    renormalize: bool = True
    route_scale: float = 1.0
    selection_bias: bool = False

    def problems(self) -> list[str]:
        """Return one sentence for each fault, with values that would work; an empty list means a good config."""
        found = []
        if self.d_model < 1:
            found.append(f"d_model ({self.d_model}) must be at least 1")
        if self.num_experts < 1:
            found.append(f"num_experts ({self.num_experts}) must be at least 1")
        elif not 1 <= self.top_k <= self.num_experts:
            nearest = min(max(self.top_k, 1), self.num_experts)
            found.append(f"top_k ({self.top_k}) must be from 1 to num_experts ({self.num_experts}); nearest: {nearest}")
        if self.top_k == 1 and self.renormalize:
            found.append(
                "top_k (1) with renormalize (true) makes every weight exactly 1, so the router gets no gradient; "
                "set renormalize to false, or top_k to 2 or more"
            )
        if self.score_function not in SCORE_FUNCTIONS:
            found.append(f"score_function ({self.score_function!r}) must be one of: {', '.join(SCORE_FUNCTIONS)}")
        if not (math.isfinite(self.route_scale) and self.route_scale > 0):
            found.append(f"route_scale ({self.route_scale}) must be a finite number above 0; 1.0 changes nothing")
        return found
