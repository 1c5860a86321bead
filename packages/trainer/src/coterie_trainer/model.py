"""The decoder: dense and mixture-of-experts blocks built from a `ModelSpec`, with the experts of this rank only."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import torch
import torch.nn.functional as F
from coterie_experts import GroupedExperts
from coterie_export import ModelSpec
from coterie_parallel import (
    Axis,
    Dispatched,
    Dispatcher,
    DispatchOptions,
    Placement,
    Stage,
    Stages,
    dispatcher_class,
    make_dispatcher,
)
from coterie_routing import Assignment, ChoiceMemo, Router, Routing
from torch import Tensor, nn

from coterie_trainer.attention import AttentionBackend, AttentionContext, attention_context
from coterie_trainer.layers import Attention, FeedForward, RMSNorm, compile_dense
from coterie_trainer.model_config import ExpertBackend, experts_config, router_config
from coterie_trainer.placement import placement_of
from coterie_trainer.recompute import SentAgain, again, name_problems, order_problems

__all__ = ["Decoder", "ModelOutput", "MoE", "build_model", "dispatchers", "placements"]


@dataclass(frozen=True)
class ModelOutput:
    """What one forward returns.

    Attributes:
        hidden_BSD: last hidden states after the final norm, which `Decoder.logits` turns into logits; the residual
            stream of a pipeline stage that is not the last.
        routings: what the router of each MoE layer decided and counted, in layer order.
    """

    hidden_BSD: Tensor
    routings: list[Routing]


class MoE(nn.Module):
    """Routed experts and an optional shared expert: route, dispatch, run the resident experts, combine.

    ``recompute`` names what the backward computes again, see `coterie_trainer.recompute`; "block" is said by a memo.
    """

    def __init__(
        self,
        spec: ModelSpec,
        dispatcher: Dispatcher,
        *,
        expert_backend: ExpertBackend = "auto",
        first_expert: int = 0,
        num_local_experts: int | None = None,
        assignment: Assignment | None = None,
        recompute: Collection[str] = (),
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        routing = router_config(spec, assignment)
        if "block" in recompute:
            # The fused kernel takes no memo yet, and both passes must save the same tensors.
            routing = replace(routing, backend="reference")
        self.router = Router(routing, device=device)
        self.dispatcher = dispatcher
        # The same numbers without a copy of the rows; for kernels that gather and sum by themselves.
        self.fuses_dispatch = type(dispatcher) is dispatcher_class("local") and "dispatch" not in recompute
        self.recomputes_experts, self.sends_again = "experts" in recompute, "dispatch" in recompute
        self.experts = GroupedExperts(
            experts_config(spec, backend=expert_backend),
            first_expert=first_expert,
            num_local_experts=num_local_experts,
            device=device,
        )
        self.shared = FeedForward(spec.d_model, spec.shared_hidden, device) if spec.shared_hidden else None

    def forward(self, x_TD: Tensor, is_real_T: Tensor, memo: ChoiceMemo | None = None) -> tuple[Tensor, Routing]:
        """Return the block's output (T, D) and its routing; padding (``is_real_T`` False) is not routed.

        ``memo`` is given where the whole call is computed again in the backward: the second one routes as the first.
        """
        dispatcher = self.dispatcher
        routing = self.router(x_TD, is_real_T, memo=memo)
        if self.fuses_dispatch and x_TD.is_cuda:
            y_TD = self._run_tokens(x_TD, routing)
            return (y_TD if self.shared is None else y_TD + self._run_shared(x_TD)), routing
        sends_again = self.sends_again and torch.is_grad_enabled()
        with dispatcher.unsaved_rows() if sends_again or memo is not None else nullcontext():
            pending = dispatcher.dispatch_start(x_TD, routing.ids_TK, routing.weights_TK)
        is_early = self.shared is not None and dispatcher.options.overlap
        shared_TD = self._run_shared(x_TD) if is_early else None
        dispatched = dispatcher.dispatch_finish(pending)
        if sends_again:
            sent = SentAgain(dispatcher, x_TD, routing.ids_TK, routing.weights_TK, dispatched.rows_RD)
            arrived = dispatched._replace(rows_RD=sent.before(dispatched.rows_RD))
            with sent.keeping():
                rows_RD = self._run_experts(arrived)
            rows_RD = sent.after(rows_RD)
        else:
            with dispatcher.saved_rows(dispatched.handle) if memo is None else nullcontext():
                rows_RD = self._run_experts(dispatched)
        y_TD = dispatcher.combine(rows_RD, dispatched.handle)
        if self.shared is not None and not is_early:
            shared_TD = self._run_shared(x_TD)
        return y_TD if shared_TD is None else y_TD + shared_TD, routing

    def _run_tokens(self, x_TD: Tensor, routing: Routing) -> Tensor:
        arguments = x_TD, routing.ids_TK, routing.weights_TK
        run = self.experts.forward_tokens
        out_TD: Tensor = again(run, *arguments) if self.recomputes_experts else run(*arguments)
        return out_TD

    def _run_experts(self, arrived: Dispatched) -> Tensor:
        rows = arrived.rows_RD, arrived.row_weights_R, arrived.offsets_e
        # Where the dispatcher lends memory, rows and their gradients are written where peers read them.
        run = partial(
            self.experts,
            ask_out=partial(self.dispatcher.memory_for_combine, arrived.handle),
            ask_grad_rows=partial(self.dispatcher.memory_for_gradients, arrived.handle),
        )
        out_RD: Tensor = again(run, *rows) if self.recomputes_experts else run(*rows)
        return out_RD

    def _run_shared(self, x_TD: Tensor) -> Tensor:
        assert self.shared is not None
        out_TD: Tensor = again(self.shared, x_TD) if self.recomputes_experts else self.shared(x_TD)
        return out_TD


class Block(nn.Module):
    """One decoder layer, with the norm before each part ("pre") or after it ("post", the reordered norm of OLMo 2)."""

    def __init__(
        self,
        spec: ModelSpec,
        feed_forward: FeedForward | MoE,
        device: torch.device | str | None,
        *,
        recompute: Collection[str] = (),
    ) -> None:
        super().__init__()
        self.norm_first = spec.norm_placement == "pre"
        self.attention_norm = RMSNorm(spec.d_model, spec.norm_eps, device)
        self.attention = Attention(spec, device, recompute="attention" in recompute)
        self.mlp_norm = RMSNorm(spec.d_model, spec.norm_eps, device)
        self.is_moe = isinstance(feed_forward, MoE)
        if self.is_moe:
            self.moe = feed_forward
        else:
            self.mlp = feed_forward

    def forward(
        self, x_BSD: Tensor, context: AttentionContext, is_real_BS: Tensor, memo: ChoiceMemo | None = None
    ) -> tuple[Tensor, Routing | None]:
        """Return the new residual stream (B, S, D) and, for a MoE layer, its routing; ``memo`` as for `MoE`."""
        if self.norm_first:
            x_BSD, normed = self.mlp_norm.after_sum(x_BSD, self.attention(self.attention_norm(x_BSD), context))
            mixed, routing = self._feed_forward(normed, is_real_BS, memo)
            return x_BSD + mixed, routing
        x_BSD = self.attention_norm.added_to(x_BSD, self.attention(x_BSD, context))
        mixed, routing = self._feed_forward(x_BSD, is_real_BS, memo)
        return self.mlp_norm.added_to(x_BSD, mixed), routing

    def _feed_forward(
        self, x_BSD: Tensor, is_real_BS: Tensor, memo: ChoiceMemo | None
    ) -> tuple[Tensor, Routing | None]:
        if not self.is_moe:
            return self.mlp(x_BSD), None
        y_TD, routing = self.moe(x_BSD.flatten(0, 1), is_real_BS.flatten(), memo)
        return y_TD.view_as(x_BSD), routing


class Decoder(nn.Module):
    """A decoder-only language model whose parameter names and shapes are those of its `ModelSpec`.

    Build it on the meta device with `build_model`, which also materialises it; the experts held are those of this
    rank, everything else is whole. ``recompute`` names what the backward computes again. In a pipeline it holds the
    parts of ``stages`` only, under the same names: layers of other ranks are None.
    """

    def __init__(
        self,
        spec: ModelSpec,
        feed_forwards: Mapping[int, FeedForward | MoE],
        device: torch.device | str,
        *,
        recompute: Collection[str] = (),
        attention_backend: AttentionBackend = "auto",
        stages: Sequence[Stage] | None = None,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.attention_backend: AttentionBackend = attention_backend
        self.recomputes_blocks = "block" in recompute
        has_first = stages is None or any(stage.is_first for stage in stages)
        has_last = stages is None or any(stage.is_last for stage in stages)
        if has_first or (has_last and spec.tied_embeddings):
            self.embed = nn.Embedding(spec.vocab_size, spec.d_model, device=device)
        self.layers = nn.ModuleList()
        for index in range(spec.num_layers):
            here = index in feed_forwards
            block = Block(spec, feed_forwards[index], device, recompute=recompute) if here else None
            self.layers.add_module(str(index), block)
        if has_last:
            self.norm = RMSNorm(spec.d_model, spec.norm_eps, device)
            if not spec.tied_embeddings:
                self.head = nn.Linear(spec.d_model, spec.vocab_size, bias=False, device=device)

    def forward(self, tokens_BS: Tensor, document_ids_BS: Tensor, num_documents: int | None = None) -> ModelOutput:
        """Run the decoder.

        Args:
            tokens_BS: int64 ids, each below the vocabulary size.
            document_ids_BS: int32 number of the document a position belongs to inside its sequence; -1 is padding.
            num_documents: see `Batch`; with it attention on a GPU needs no mask.
        """
        layers = range(self.spec.num_layers)
        x_BSD, routings = self._run_layers(self.embed(tokens_BS), document_ids_BS, num_documents, layers)
        return ModelOutput(self.norm(x_BSD), routings)

    def run_stage(
        self, stage: Stage, x: Tensor, document_ids_BS: Tensor, num_documents: int | None = None
    ) -> ModelOutput:
        """Run one stage of a pipeline.

        Args:
            stage: one of those that this was built with.
            x: tokens (B, S) for the first stage, else the residual stream (B, S, D) that the stage before returned.
            document_ids_BS: as for `forward`.
            num_documents: as for `forward`.
        """
        x_BSD = self.embed(x) if stage.is_first else x
        x_BSD, routings = self._run_layers(x_BSD, document_ids_BS, num_documents, stage.layers)
        return ModelOutput(self.norm(x_BSD) if stage.is_last else x_BSD, routings)

    def _run_layers(
        self, x_BSD: Tensor, document_ids_BS: Tensor, num_documents: int | None, layers: Iterable[int]
    ) -> tuple[Tensor, list[Routing]]:
        context = attention_context(
            document_ids_BS,
            self.spec.head_dim,
            self.spec.rope_theta,
            dtype=x_BSD.dtype,
            num_documents=num_documents,
            backend=self.attention_backend,
        )
        is_real_BS = document_ids_BS >= 0
        routings: list[Routing] = []
        for index in layers:
            layer = self.layers[index]
            if self.recomputes_blocks and torch.is_grad_enabled():
                draws = any(isinstance(one, Router) and one.config.jitter > 0 for one in layer.modules())
                x_BSD, routing = again(layer, x_BSD, context, is_real_BS, ChoiceMemo(), preserve_rng=draws)
            else:
                x_BSD, routing = layer(x_BSD, context, is_real_BS)
            if routing is not None:
                routings.append(routing)
        return x_BSD, routings

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits (..., V) of hidden states (..., D)."""
        weight = self.embed.weight if self.spec.tied_embeddings else self.head.weight
        return F.linear(hidden, weight)

    def close(self) -> None:
        """Give up the buffers of the dispatcher; the model can not run any more after that."""
        for dispatcher in dispatchers(self):
            dispatcher.close()


def dispatchers(model: nn.Module) -> list[Dispatcher]:
    """Return the dispatchers of a model, each once."""
    return list({id(one.dispatcher): one.dispatcher for one in model.modules() if isinstance(one, MoE)}.values())


def build_model(
    spec: ModelSpec,
    *,
    expert_axis: Axis | None = None,
    dispatcher: str = "local",
    options: DispatchOptions | None = None,
    expert_backend: ExpertBackend = "auto",
    assignment: Assignment | None = None,
    recompute: Sequence[str] = (),
    attention_backend: AttentionBackend = "auto",
    compiles: bool = False,
    stages: Sequence[Stage] | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Decoder:
    """Build a decoder on the meta device and give it uninitialised storage on ``device``.

    Args:
        spec: sizes of the whole model.
        expert_axis: the axis over which experts are split; None when one process holds them all.
        dispatcher: name of the communication back-end; all layers share one.
        options: of that back-end; None for the default ones.
        expert_backend: name of the expert kernels.
        assignment: decides the load in place of the routers; each layer has a seed of its own.
        recompute: what the backward computes again, see `coterie_trainer.recompute`.
        attention_backend: name of one in `coterie_trainer.attention`.
        compiles: run what lies between the matrix products of dense layers as compiled functions.
        stages: those of this rank in a pipeline; None for the whole model.
        device: where the parameters live.
        dtype: dtype of all parameters.

    Raises:
        ValueError: the spec or ``recompute`` has faults, or the dispatcher is unknown or cannot run here or so.
    """
    problems = spec.problems() + name_problems(recompute)
    problems += order_problems(recompute, dispatcher, DispatchOptions() if options is None else options)
    if problems:
        raise ValueError("\n".join(problems))
    axis = expert_axis if expert_axis is not None else Axis.single("expert")
    num_local_experts = spec.num_experts // axis.size
    meta = torch.device("meta")
    shared = make_dispatcher(dispatcher, num_experts=spec.num_experts, axis=axis, options=options)
    whole = [range(spec.num_layers)]
    feed_forwards: dict[int, FeedForward | MoE] = {}
    for index in chain.from_iterable(whole if stages is None else [stage.layers for stage in stages]):
        if index < spec.num_dense_layers:
            feed_forwards[index] = FeedForward(spec.d_model, spec.dense_hidden, meta)
            continue
        feed_forwards[index] = MoE(
            spec,
            shared,
            expert_backend=expert_backend,
            first_expert=axis.index * num_local_experts,
            num_local_experts=num_local_experts,
            assignment=None if assignment is None else replace(assignment, seed=assignment.seed + index),
            recompute=recompute,
            device=meta,
        )
    model = Decoder(spec, feed_forwards, meta, recompute=recompute, attention_backend=attention_backend, stages=stages)
    for parameter in model.parameters():  # not Module.to: buffers such as the selection bias stay fp32
        parameter.data = parameter.data.to(dtype)
    model = model.to_empty(device=device)
    return compile_dense(model) if compiles else model


def placements(model: Decoder, stages: Stages | None = None) -> dict[str, Placement]:
    """Say for each parameter over which axes it is replicated and over which it is sharded.

    Args:
        model: of this rank.
        stages: all of a pipeline; None for none.
    """
    return {name: placement_of(name, model.spec, stages) for name, _ in model.named_parameters()}
