"""The ``[model]`` table of a run, and what it says to the packages of routers, experts and formats."""

import dataclasses
from dataclasses import dataclass
from typing import Literal

from coterie_experts import ExpertsConfig
from coterie_export import ModelSpec
from coterie_routing import Assignment, RouterConfig

from coterie_trainer.attention import AttentionBackend
from coterie_trainer.bounds import above_zero, at_least, nearest

__all__ = ["ExpertBackend", "ModelConfig", "experts_config", "router_config"]

ExpertBackend = Literal["auto", "reference", "torch", "triton", "quack", "te"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The sizes and the variants of the decoder; ``head_dim`` None means ``d_model / num_heads``."""

    num_layers: int
    d_model: int
    num_heads: int
    num_kv_heads: int
    head_dim: int | None = None
    norm_placement: Literal["pre", "post"] = "pre"
    norm_eps: float = 1e-6
    qk_norm: Literal["head", "width"] | None = None
    rope_theta: float = 10000.0
    num_dense_layers: int = 0
    dense_hidden: int = 0
    num_experts: int
    top_k: int
    expert_hidden: int
    shared_hidden: int = 0
    score_function: Literal["softmax", "sigmoid"] = "softmax"
    renormalize: bool = True
    route_scale: float = 1.0
    selection_bias: bool = False
    num_groups: int = 1
    chosen_groups: int = 1
    tied_embeddings: bool = False
    init_std: float = 0.02
    attention_backend: AttentionBackend = "auto"
    expert_backend: ExpertBackend = "auto"

    def to_spec(self, vocab_size: int, max_sequence_length: int, eos_id: int | None) -> ModelSpec:
        """Return the complete description of the model, with what only the data knows filled in."""
        return ModelSpec(
            vocab_size=vocab_size,
            d_model=self.d_model,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.d_model // self.num_heads if self.head_dim is None else self.head_dim,
            norm_eps=self.norm_eps,
            norm_placement=self.norm_placement,
            qk_norm=self.qk_norm,
            rope_theta=self.rope_theta,
            max_sequence_length=max_sequence_length,
            num_dense_layers=self.num_dense_layers,
            dense_hidden=self.dense_hidden,
            num_experts=self.num_experts,
            top_k=self.top_k,
            expert_hidden=self.expert_hidden,
            shared_hidden=self.shared_hidden,
            score_function=self.score_function,
            renormalize=self.renormalize,
            route_scale=self.route_scale,
            selection_bias=self.selection_bias,
            num_groups=self.num_groups,
            chosen_groups=self.chosen_groups,
            tied_embeddings=self.tied_embeddings,
            bos_id=None,
            eos_id=eos_id,
            pad_id=None,
        )

    def problems(self) -> list[str]:
        """Return every fault of these settings, those that the router and the experts find included."""
        sizes = ("num_layers", "d_model", "num_heads", "num_kv_heads", "num_experts", "expert_hidden")
        found = at_least(self, 1, *sizes) + at_least(self, 0, "num_dense_layers", "dense_hidden", "shared_hidden")
        found += above_zero(self, "norm_eps", "rope_theta", "init_std")
        if self.num_heads >= 1 and self.num_kv_heads >= 1 and self.num_heads % self.num_kv_heads:
            works = ", ".join(str(n) for n in range(1, self.num_heads + 1) if self.num_heads % n == 0)
            found.append(
                f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads}); "
                f"num_kv_heads that work with {self.num_heads} heads: {works}"
            )
        found += self._head_dim_problems()
        if self.num_dense_layers >= self.num_layers >= 1:
            found.append(
                f"num_dense_layers ({self.num_dense_layers}) must be below num_layers ({self.num_layers}): at least "
                f"one layer has experts; at most {self.num_layers - 1} works"
            )
        if self.num_dense_layers >= 1 and self.dense_hidden == 0:
            found.append(
                f"dense_hidden (0) must be at least 1 for the {self.num_dense_layers} dense layers "
                f"(num_dense_layers); usual: {4 * self.d_model}"
            )
        # Sizes are judged above, under their names in the file; the packages get sound ones and judge the rest.
        sound = dataclasses.replace(
            self,
            d_model=max(1, self.d_model),
            num_experts=self.num_experts if self.num_experts >= 1 else max(1, self.top_k),
            expert_hidden=max(1, self.expert_hidden),
        )
        found += router_config(sound).problems()
        found += [
            problem.replace("d_hidden", "expert_hidden")
            for problem in experts_config(sound, backend=sound.expert_backend).problems()
        ]
        return found

    def _head_dim_problems(self) -> list[str]:
        if self.head_dim is not None:
            if self.head_dim < 2 or self.head_dim % 2:
                return [
                    f"head_dim ({self.head_dim}) must be even and at least 2, as rotary embeddings pair its halves; "
                    f"nearest: {nearest(self.head_dim, 2)}"
                ]
        elif self.d_model >= 1 and self.num_heads >= 1 and self.d_model % (2 * self.num_heads):
            return [
                f"d_model ({self.d_model}) must be a multiple of 2 x num_heads ({self.num_heads}) when head_dim is not "
                f"given, so that each head has an even width; nearest: {nearest(self.d_model, 2 * self.num_heads)}"
            ]
        return []


def router_config(model: ModelConfig | ModelSpec, assignment: Assignment | None = None) -> RouterConfig:
    """Return what a model's settings, or its spec, say to the router; an assignment decides the load in its place."""
    return RouterConfig(
        d_model=model.d_model,
        num_experts=model.num_experts,
        top_k=model.top_k,
        score_function=model.score_function,
        renormalize=model.renormalize,
        route_scale=model.route_scale,
        selection_bias=model.selection_bias,
        num_groups=model.num_groups,
        chosen_groups=model.chosen_groups,
        assignment=assignment,
    )


def experts_config(model: ModelConfig | ModelSpec, *, backend: ExpertBackend) -> ExpertsConfig:
    """Return what a model's settings, or its spec, say to the routed experts."""
    return ExpertsConfig(
        d_model=model.d_model, d_hidden=model.expert_hidden, num_experts=model.num_experts, backend=backend
    )
