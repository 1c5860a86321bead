"""What a model is: its sizes, and the canonical names and shapes of its tensors."""

import math
from dataclasses import dataclass, fields
from types import NoneType
from typing import Any, Literal

__all__ = ["ModelSpec", "Shape"]

Shape = tuple[int, ...]

_NormPlacement = Literal["pre", "post"]
_QkNorm = Literal["head", "width"] | None
_ScoreFunction = Literal["softmax", "sigmoid"]

_KINDS: dict[Any, tuple[type, ...]] = {
    int: (int,),
    float: (float, int),
    bool: (bool,),
    int | None: (int, NoneType),
    _NormPlacement: (str,),
    _QkNorm: (str, NoneType),
    _ScoreFunction: (str,),
}
_MAY_BE_ZERO = ("num_dense_layers", "dense_hidden", "shared_hidden")
_CHOICES: dict[str, tuple[str | None, ...]] = {
    "norm_placement": ("pre", "post"),
    "qk_norm": (None, "head", "width"),
    "score_function": ("softmax", "sigmoid"),
}


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """One decoder-only mixture-of-experts language model, complete enough to rebuild its forward pass.

    RMSNorm in fp32, causal grouped-query attention with rotary positions in the "rotate half" form (the first half of
    a head is paired with the second) and scale ``1 / sqrt(head_dim)``, SwiGLU in every feed-forward.

    Attributes:
        vocab_size: Rows of the embedding and of the output head.
        d_model: Width of the residual stream.
        num_layers: Decoder layers, dense and routed together.
        num_heads: Query heads.
        num_kv_heads: Key and value heads; divides ``num_heads``.
        head_dim: Width of one head, even; ``num_heads * head_dim`` need not be ``d_model``.
        norm_eps: Epsilon of every RMSNorm.
        norm_placement: ``"pre"``: ``x + f(norm(x))``. ``"post"``: ``x + norm(f(x))``, the reordered norm of OLMo 2.
        qk_norm: None, ``"head"`` (one RMSNorm weight of ``head_dim``, applied to each head) or ``"width"`` (over all
            heads of q, and of k, at once). Applied before the rotary positions.
        rope_theta: Base of the rotary frequencies.
        max_sequence_length: Longest sequence the model was made for.
        num_dense_layers: Leading layers with a dense feed-forward; fewer than ``num_layers``.
        dense_hidden: Hidden width of those; without dense layers it means nothing and an import gives 0.
        num_experts: Routed experts of each other layer.
        top_k: Experts a token visits.
        expert_hidden: Hidden width of one routed expert.
        shared_hidden: Hidden width of the shared expert, added with weight 1; 0 for none.
        score_function: ``"softmax"`` over the experts, or ``"sigmoid"`` of each logit.
        renormalize: Divide the chosen scores by their sum.
        route_scale: Factor on the weights after that.
        selection_bias: A bias per expert takes part in the choice and not in the weights (arXiv:2408.15664).
        num_groups: Groups of neighbouring experts, for a choice that is limited to some of them; 1 for none.
        chosen_groups: Groups a token may choose from: those with the largest sum of their two best scores.
        tied_embeddings: The output head is the embedding; there is no ``head.weight``.
        bos_id: Token that begins a text, if there is one.
        eos_id: Token that ends a text, if there is one.
        pad_id: Token that fills a row, if there is one.
    """

    vocab_size: int
    d_model: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    top_k: int
    expert_hidden: int
    max_sequence_length: int
    norm_eps: float = 1e-6
    norm_placement: _NormPlacement = "pre"
    qk_norm: _QkNorm = None
    rope_theta: float = 10000.0
    num_dense_layers: int = 0
    dense_hidden: int = 0
    shared_hidden: int = 0
    score_function: _ScoreFunction = "softmax"
    renormalize: bool = True
    route_scale: float = 1.0
    selection_bias: bool = False
    num_groups: int = 1
    chosen_groups: int = 1
    tied_embeddings: bool = False
    bos_id: int | None = None
    eos_id: int | None = None
    pad_id: int | None = None

    def problems(self) -> list[str]:
        """Return every fault of this spec, each with the values that would work; an empty list means none."""
        if found := self._type_problems():
            return found  # the comparisons below need numbers
        for field in fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name in _MAY_BE_ZERO else 1
            if field.type is int and value < least:
                found.append(f"{field.name} ({value}) must be at least {least}")
            if field.type is float and not (value > 0 and math.isfinite(value)):
                found.append(f"{field.name} ({value}) must be a positive finite number")
            if field.name in _CHOICES and value not in _CHOICES[field.name]:
                known = ", ".join(repr(choice) for choice in _CHOICES[field.name])
                found.append(f"{field.name} ({value!r}) must be one of {known}")
            if field.name.endswith("_id") and value is not None and not 0 <= value < self.vocab_size:
                found.append(f"{field.name} ({value}) must be None or from 0 to vocab_size - 1 ({self.vocab_size - 1})")
        if self.num_heads > 0 and self.num_kv_heads > 0 and self.num_heads % self.num_kv_heads:
            divisors = [n for n in range(1, self.num_heads + 1) if self.num_heads % n == 0]
            found.append(f"num_kv_heads ({self.num_kv_heads}) must divide num_heads ({self.num_heads}): {divisors}")
        if self.head_dim % 2:
            nearest = f"{self.head_dim - 1} or {self.head_dim + 1}" if self.head_dim > 1 else "2"
            found.append(f"head_dim ({self.head_dim}) must be even for rotary positions; nearest: {nearest}")
        if self.top_k > self.num_experts > 0:
            found.append(f"top_k ({self.top_k}) must be from 1 to num_experts ({self.num_experts})")
        if self.num_groups > 0 and self.num_experts % self.num_groups:
            divisors = [n for n in range(1, self.num_experts + 1) if self.num_experts % n == 0]
            found.append(f"num_groups ({self.num_groups}) must divide num_experts ({self.num_experts}): {divisors}")
        if self.chosen_groups > self.num_groups > 0:
            found.append(f"chosen_groups ({self.chosen_groups}) must be from 1 to num_groups ({self.num_groups})")
        if self.num_dense_layers >= self.num_layers > 0:
            found.append(
                f"num_dense_layers ({self.num_dense_layers}) must be from 0 to num_layers - 1 ({self.num_layers - 1}):"
                " at least one layer is routed"
            )
        if self.num_dense_layers > 0 and self.dense_hidden == 0:
            found.append(f"dense_hidden (0) must be at least 1 with num_dense_layers ({self.num_dense_layers})")
        return found

    def tensor_shapes(self) -> dict[str, Shape]:
        """Return the shape of every tensor of the model by its canonical name, in canonical order.

        Weights are ``[out, in]``; in every ``gate_up`` the gate rows come first.

        Raises:
            ValueError: The spec has problems.
        """
        if found := self.problems():
            raise ValueError("\n".join(found))
        d = self.d_model
        shapes: dict[str, Shape] = {"embed.weight": (self.vocab_size, d)}
        for i in range(self.num_layers):
            layer = f"layers.{i}."
            shapes[layer + "attention_norm.weight"] = (d,)
            shapes |= {layer + name: shape for name, shape in self._attention_shapes().items()}
            shapes[layer + "mlp_norm.weight"] = (d,)
            if i < self.num_dense_layers:
                shapes[layer + "mlp.gate_up.weight"] = (2 * self.dense_hidden, d)
                shapes[layer + "mlp.down.weight"] = (d, self.dense_hidden)
            else:
                shapes |= {layer + name: shape for name, shape in self._moe_shapes().items()}
        shapes["norm.weight"] = (d,)
        if not self.tied_embeddings:
            shapes["head.weight"] = (self.vocab_size, d)
        return shapes

    def _attention_shapes(self) -> dict[str, Shape]:
        d, q_width, kv_width = self.d_model, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes: dict[str, Shape] = {
            "attention.q.weight": (q_width, d),
            "attention.k.weight": (kv_width, d),
            "attention.v.weight": (kv_width, d),
            "attention.o.weight": (d, q_width),
        }
        if self.qk_norm is not None:
            per_head = self.qk_norm == "head"
            shapes["attention.q_norm.weight"] = (self.head_dim if per_head else q_width,)
            shapes["attention.k_norm.weight"] = (self.head_dim if per_head else kv_width,)
        return shapes

    def _moe_shapes(self) -> dict[str, Shape]:
        d, num_experts, hidden = self.d_model, self.num_experts, self.expert_hidden
        shapes: dict[str, Shape] = {"moe.router.weight": (num_experts, d)}
        if self.selection_bias:
            shapes["moe.router.selection_bias"] = (num_experts,)
        shapes["moe.experts.gate_up"] = (num_experts, 2 * hidden, d)
        shapes["moe.experts.down"] = (num_experts, d, hidden)
        if self.shared_hidden:
            shapes["moe.shared.gate_up.weight"] = (2 * self.shared_hidden, d)
            shapes["moe.shared.down.weight"] = (d, self.shared_hidden)
        return shapes

    def _type_problems(self) -> list[str]:
        wrong = []
        for field in fields(self):
            value = getattr(self, field.name)
            kinds = _KINDS[field.type]
            # bool is a subclass of int, but `top_k = true` is a slip
            if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
                names = " or ".join("None" if kind is NoneType else kind.__name__ for kind in kinds)
                wrong.append(f"{field.name} must be {names}, not {value!r}")
        return wrong
