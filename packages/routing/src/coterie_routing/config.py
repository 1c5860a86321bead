"""What a router is: sizes, score function, how it selects and what becomes of the chosen scores."""

import math
from dataclasses import dataclass
from types import NoneType
from typing import Literal

from coterie_routing.assignment import Assignment

__all__ = ["RouterConfig", "BACKENDS", "SCORE_FUNCTIONS", "SELECTIONS"]

SCORE_FUNCTIONS: tuple[str, ...] = ("softmax", "sigmoid", "softmax_of_chosen")
SELECTIONS: tuple[str, ...] = ("top_k", "expert_choice")
BACKENDS: tuple[str, ...] = ("auto", "reference", "triton")


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """Describe a router.

    Nothing is checked here: `problems()` lists every fault, and `Router` refuses a config that has any.

    Attributes:
        d_model: Width D of the tokens.
        num_experts: Number of experts E, over all ranks.
        top_k: Number of experts K that each token chooses; with expert choice, the mean number.
        score_function: "softmax" over all E experts (Switch, OLMoE, Qwen 3), "sigmoid" of each (DeepSeek-V3), or
            "softmax_of_chosen", over the K chosen logits only (Shazeer et al. 2017, Mixtral, gpt-oss).
        renormalize: Divide the K chosen scores of a token by their sum. False keeps them as they are. The softmax of
            the chosen sums to 1 either way.
        route_scale: Factor on the weights, after the renormalisation.
        trained_top_k: K with which the model was trained, if it is not the K of now. The weights are scaled so that the
            sum of K outputs that are as good as independent keeps its size: by sqrt(trained_top_k / top_k) where a
            weight does not depend on K, and by the inverse where the weights of a token sum to a constant.
        num_groups: Number of groups of neighbouring experts, for a selection that is limited to some of them
            (DeepSeek-V3, arXiv:2412.19437). 1 means no groups.
        chosen_groups: Number of groups in which a token may choose: those with the largest sum of their two best
            scores, bias included.
        selection_bias: Give each expert a bias that is added to its score for the selection only
            (loss-free balancing, arXiv:2408.15664); the weights come from the scores without it.
        selection: "top_k": each token chooses its K best experts. "expert_choice": each expert chooses its best
            T * K / E tokens (arXiv:2202.09368), which is not causal; see `CausalityWarning`.
        capacity_factor: Most choices that an expert may keep, as a multiple of the mean load of the tokens of this
            call; the choices of lowest weight are dropped, and of equal ones the last. None drops nothing. Not causal;
            see `CausalityWarning`.
        jitter: In training, each input number is multiplied by a random one from 1 - jitter to 1 + jitter (Switch
            Transformer, arXiv:2101.03961). It comes from torch's generator, so it depends on the layout.
        assignment: Replaces the choice of experts, for benchmarks of a system. None lets the router choose.
        backend: "reference" is plain torch, "triton" one fused kernel for Hopper GPUs. "auto" takes the kernel where it
            was measured to be faster (bf16 tokens, up to 256 experts) and can run, else the reference.
    """

    d_model: int
    num_experts: int
    top_k: int
    score_function: Literal["softmax", "sigmoid", "softmax_of_chosen"] = "softmax"
    renormalize: bool = True
    route_scale: float = 1.0
    trained_top_k: int | None = None
    num_groups: int = 1
    chosen_groups: int = 1
    selection_bias: bool = False
    selection: Literal["top_k", "expert_choice"] = "top_k"
    capacity_factor: float | None = None
    jitter: float = 0.0
    assignment: Assignment | None = None
    backend: Literal["auto", "reference", "triton"] = "auto"

    @property
    def weight_scale(self) -> float:
        """The factor on every weight: `route_scale`, times the correction for another K than the trained one."""
        ratio = math.sqrt((self.trained_top_k or self.top_k) / self.top_k)
        # K independent outputs of size 1 add up to sqrt(K), and with weights of 1 / K to 1 / sqrt(K).
        sums_to_constant = self.renormalize or self.score_function == "softmax_of_chosen"
        return self.route_scale * (1 / ratio if sums_to_constant else ratio)

    def problems(self) -> list[str]:
        """Return one sentence for each fault, with values that would work; an empty list means a good config."""
        if wrong := self._type_problems():
            return wrong  # the comparisons below need numbers
        found = [
            f"{name} ({value!r}) must be one of: {', '.join(allowed)}"
            for name, value, allowed in (
                ("score_function", self.score_function, SCORE_FUNCTIONS),
                ("selection", self.selection, SELECTIONS),
                ("backend", self.backend, BACKENDS),
            )
            if value not in allowed
        ]
        if self.d_model < 1:
            found.append(f"d_model ({self.d_model}) must be at least 1")
        if self.num_experts < 1:
            found.append(f"num_experts ({self.num_experts}) must be at least 1")
        elif not 1 <= self.top_k <= self.num_experts:
            nearest = min(max(self.top_k, 1), self.num_experts)
            found.append(f"top_k ({self.top_k}) must be from 1 to num_experts ({self.num_experts}); nearest: {nearest}")
        else:
            found += self._group_problems()
            if self.assignment is not None:
                found += self.assignment.problems(num_experts=self.num_experts, top_k=self.top_k)
        found += self._weight_problems()
        if self.capacity_factor is not None and not (math.isfinite(self.capacity_factor) and self.capacity_factor > 0):
            found.append(
                f"capacity_factor ({self.capacity_factor}) must be a finite number above 0, or None; usual: 1.25"
            )
        if not 0 <= self.jitter < 1:
            found.append(f"jitter ({self.jitter}) must be from 0 to below 1; usual: 0.01")
        if self.selection == "expert_choice":
            found += self._expert_choice_problems()
        return found

    def _type_problems(self) -> list[str]:
        kinds: dict[str, tuple[type, ...]] = {
            **dict.fromkeys(("d_model", "num_experts", "top_k", "num_groups", "chosen_groups"), (int,)),
            **dict.fromkeys(("route_scale", "jitter"), (int, float)),
            **dict.fromkeys(("renormalize", "selection_bias"), (bool,)),
            "trained_top_k": (int, NoneType),
            "capacity_factor": (int, float, NoneType),
            "assignment": (Assignment, NoneType),
        }
        return [
            f"{name} must be {' or '.join(kind.__name__ for kind in kinds[name])}, not {value!r}"
            for name in kinds
            if not isinstance(value := getattr(self, name), kinds[name])
            or (isinstance(value, bool) and bool not in kinds[name])
        ]

    def _weight_problems(self) -> list[str]:
        found = []
        if self.top_k == 1 and self.score_function == "softmax_of_chosen":
            found.append(
                'top_k (1) with score_function ("softmax_of_chosen") makes every weight exactly 1, so the router gets '
                'no gradient; set score_function to "softmax" with renormalize = false, or top_k to 2 or more'
            )
        elif self.top_k == 1 and self.renormalize and self.selection != "expert_choice":
            found.append(
                "top_k (1) with renormalize (true) makes every weight exactly 1, so the router gets no gradient; "
                "set renormalize to false, or top_k to 2 or more"
            )
        if not (math.isfinite(self.route_scale) and self.route_scale > 0):
            found.append(f"route_scale ({self.route_scale}) must be a finite number above 0; 1.0 changes nothing")
        if self.trained_top_k is not None and self.trained_top_k < 1:
            found.append(f"trained_top_k ({self.trained_top_k}) must be at least 1, or None; the same K: {self.top_k}")
        return found

    def _group_problems(self) -> list[str]:
        if self.num_groups < 1 or self.num_experts % self.num_groups:
            works = [n for n in range(1, self.num_experts + 1) if self.num_experts % n == 0]
            nearest = min(works, key=lambda n: abs(n - self.num_groups))
            return [
                f"num_groups ({self.num_groups}) must divide num_experts ({self.num_experts}) into equal groups; "
                f"nearest: {nearest}"
            ]
        if not 1 <= self.chosen_groups <= self.num_groups:
            nearest = min(max(self.chosen_groups, 1), self.num_groups)
            return [
                f"chosen_groups ({self.chosen_groups}) must be from 1 to num_groups ({self.num_groups}); "
                f"nearest: {nearest}"
            ]
        size = self.num_experts // self.num_groups
        if self.top_k > self.chosen_groups * size:
            return [
                f"top_k ({self.top_k}) is more than a token can reach: chosen_groups ({self.chosen_groups}) x "
                f"{size} experts a group = {self.chosen_groups * size}; set chosen_groups to {-(-self.top_k // size)} "
                f"or more"
            ]
        return []

    def _expert_choice_problems(self) -> list[str]:
        found = []
        if self.renormalize:
            found.append(
                'renormalize (true) does not fit selection ("expert_choice"), where a token has no fixed number of '
                "experts; set it to false"
            )
        if self.score_function == "softmax_of_chosen":
            found.append('score_function ("softmax_of_chosen") does not fit selection ("expert_choice"); use "softmax"')
        given = {
            "trained_top_k": self.trained_top_k is not None,
            "num_groups": self.num_groups != 1,
            "selection_bias": self.selection_bias,
            "capacity_factor": self.capacity_factor is not None,
            "assignment": self.assignment is not None,
        }
        found += [
            f'{name} does not fit selection ("expert_choice"), where the load is even by construction; leave it out'
            for name, is_given in given.items()
            if is_given
        ]
        return found
