"""Recompute changes no bit, counts nothing twice and keeps less, with every dispatcher and when a step is replayed."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from coterie_parallel import (
    AdamWConfig,
    DispatchOptions,
    Mesh,
    Optimizer,
    ParallelConfig,
    accumulate_in_fp32,
    make_plan,
)
from coterie_trainer.config import TrainConfig
from coterie_trainer.data.dataset import Batch
from coterie_trainer.initialization import initialize
from coterie_trainer.layers import attention_context
from coterie_trainer.model import build_model, placements
from coterie_trainer.recompute import combination_problems, name_problems
from coterie_trainer.step import Stepper, evaluate
from coterie_trainer.step_watch import StepWatch
from support.ranks import run_ranks
from torch import Tensor, nn

from trainer.specs import SPECS

SPEC = dataclasses.replace(SPECS["shared_expert"], num_layers=3, qk_norm="head")
"""One dense layer and two with experts, a shared expert and a selection bias."""
POST_NORM = dataclasses.replace(SPECS["post_norm"], num_layers=2)

CHOICES = [("block",), ("attention",), ("experts",), ("dispatch",), ("attention", "experts", "dispatch")]
DISPATCHERS = {
    "local": ("local", DispatchOptions()),
    "all_to_all": ("all_to_all", DispatchOptions()),
    "all_to_all, overlap": ("all_to_all", DispatchOptions(overlap=True)),
    "rowwise, copy": ("rowwise", DispatchOptions(capacity_factor=4.0)),
    "rowwise, copy, overlap": ("rowwise", DispatchOptions(capacity_factor=4.0, overlap=True)),
    "rowwise, lease": ("rowwise", DispatchOptions(capacity_factor=4.0, saved_rows="lease")),
    "rowwise, fetch": ("rowwise", DispatchOptions(capacity_factor=4.0, saved_rows="fetch")),
    "rowwise, exact": ("rowwise", DispatchOptions(overflow="exact", capacity_factor=0.6)),
    "rowwise, grows": ("rowwise", DispatchOptions(capacity_factor=0.6)),
}


def _is_allowed(recompute: tuple[str, ...], options: DispatchOptions) -> bool:
    return not combination_problems(recompute, ParallelConfig(**dataclasses.asdict(options)))


def _batches(rank: int, world: int) -> list[Batch]:
    """Two micro-batches of this rank, with padding at the end of one sequence."""
    generator = torch.Generator().manual_seed(rank * 17 + world)
    found = []
    for number in range(2):
        tokens_BS = torch.randint(64, (2, 12), generator=generator)
        documents_BS = torch.tensor([[0] * 5 + [1] * 7, [0] * 9 + [-1] * 3], dtype=torch.int32)
        targets_BS = tokens_BS.roll(-1, 1).masked_fill(documents_BS < number, -1)
        found.append(Batch(tokens_BS=tokens_BS, targets_BS=targets_BS, document_ids_BS=documents_BS))
    return found


def _train(
    mesh: Mesh,
    recompute: tuple[str, ...],
    dispatcher: str,
    *,
    spec: object = SPEC,
    dtype: torch.dtype = torch.float32,
    steps: int = 2,
) -> dict[str, object]:
    """Return all numbers of some steps, every gradient of the last and every parameter after it."""
    name, options = DISPATCHERS[dispatcher]
    is_bf16 = dtype == torch.bfloat16
    model = build_model(
        spec,
        expert_axis=mesh.axis("expert"),
        dispatcher=name,
        options=options,
        recompute=recompute,
        dtype=dtype,
        expert_backend="reference" if is_bf16 else "auto",
    )
    initialize(model, seed=0, std=0.1)
    accumulate_in_fp32(model.parameters())
    optimizer = Optimizer(model.named_parameters(), placements(model), mesh, AdamWConfig())
    train = TrainConfig(
        steps=2, sequences_per_step=4, sequences_per_micro_batch=2, balance_coefficient=0.5, z_coefficient=0.1,
        bias_rule="sign" if spec.selection_bias else None, bias_rate=0.01,
    )  # fmt: skip
    stepper = Stepper(model, optimizer, mesh, train)
    found: dict[str, object] = {}
    batches = _batches(mesh.axis("data").index, mesh.axis("data").size)
    for step in range(steps):
        for key, value in dataclasses.asdict(stepper.run(batches, learning_rate=1e-3)).items():
            found[f"{step}/{key}"] = value
    found["load"] = stepper.load_LE
    found["evaluation"] = evaluate(model, batches, mesh)
    found.update({f"gradient/{key}": one.clone() for key, one in optimizer.reducer.gathered().items()})
    found.update({f"model/{key}": one.detach().clone() for key, one in model.state_dict().items()})
    found["replays"] = stepper.capacity.num_replays
    model.close()
    return found


def _assert_same_bits(found: dict[str, object], expected: dict[str, object]) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        is_same = torch.equal(found[key], value) if isinstance(value, Tensor) else found[key] == value
        assert is_same, (key, found[key], value)


@contextmanager
def _mesh(rank: int = 0, world: int = 1) -> Iterator[Mesh]:
    with Mesh(make_plan(ParallelConfig(data=world, expert=world), world), rank, timeout_s=30.0) as mesh:
        yield mesh


@pytest.mark.parametrize("spec", [SPEC, POST_NORM], ids=["shared expert", "post-norm"])
@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_one_rank_computes_the_same_bits(dispatcher: str, spec: object) -> None:
    with _mesh() as mesh:
        expected = _train(mesh, (), dispatcher, spec=spec)
        assert expected["replays"] == (1 if dispatcher == "rowwise, grows" else 0)
        for recompute in CHOICES:
            if _is_allowed(recompute, DISPATCHERS[dispatcher][1]):
                _assert_same_bits(_train(mesh, recompute, dispatcher, spec=spec), expected)


def test_gradients_that_accumulate_in_fp32_are_added_once() -> None:
    with _mesh() as mesh:
        expected = _train(mesh, (), "local", dtype=torch.bfloat16)
        for recompute in (CHOICES[0], CHOICES[-1]):
            _assert_same_bits(_train(mesh, recompute, "local", dtype=torch.bfloat16), expected)


def _train_on_ranks(rank: int, world: int) -> list[str]:
    """Return what differs; two ranks that share the experts."""
    problems = []
    with _mesh(rank, world) as mesh:
        for dispatcher, (name, options) in DISPATCHERS.items():
            if name == "local":
                continue
            expected = _train(mesh, (), dispatcher, steps=1)
            for recompute in (("block",), ("dispatch",), ("attention", "experts", "dispatch")):
                if _is_allowed(recompute, options):
                    try:
                        _assert_same_bits(_train(mesh, recompute, dispatcher, steps=1), expected)
                    except AssertionError as error:
                        problems.append(f"{dispatcher}, {recompute}: {error}")
    return problems


def test_two_ranks_compute_the_same_bits() -> None:
    assert run_ranks(_train_on_ranks, 2) == [[], []]


def _passes(recompute: tuple[str, ...], *, forget: bool = False) -> list[Tensor]:
    """Return the choices of each pass of the router of a layer, whose weights are moved before the backward."""
    model = build_model(dataclasses.replace(SPEC, num_layers=2), recompute=recompute)
    initialize(model, seed=0, std=0.3)
    router = model.layers[1].moe.router
    found: list[Tensor] = []
    memos = []
    plain = router.forward

    def noted(x_TD: Tensor, is_real_T: Tensor, *, memo: object = None) -> object:
        routing = plain(x_TD, is_real_T, memo=None if forget else memo)
        memos.append(memo)
        found.append(routing.ids_TK.clone())
        return routing

    router.forward = noted
    batch = _batches(0, 1)[0]
    output = model(batch.tokens_BS, batch.document_ids_BS)
    router.weight.data.copy_(router.weight.data.flip(0))  # unseen by autograd
    loss = output.hidden_BSD.square().sum() + output.routings[0].sums.z_sum
    loss.backward()
    assert len({id(memo) for memo in memos}) == 1
    return found


def test_the_second_pass_of_a_block_routes_as_the_first() -> None:
    assert len(_passes(())) == 1
    assert torch.equal(*_passes(("block",)))
    assert not torch.equal(*_passes(("block",), forget=True)), "the case must provoke another choice"


def test_no_other_part_routes_twice() -> None:
    assert len(_passes(("attention", "experts", "dispatch"))) == 1


def test_noise_of_the_router_is_drawn_once() -> None:
    gradients = []
    for recompute in ((), ("block",)):
        model = build_model(SPEC, recompute=recompute)
        initialize(model, seed=0, std=0.3)
        for layer in model.layers[1:]:
            layer.moe.router.config = dataclasses.replace(layer.moe.router.config, jitter=0.5)
        torch.manual_seed(0)
        batch = _batches(0, 1)[0]
        model(batch.tokens_BS, batch.document_ids_BS).hidden_BSD.square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


def test_evaluation_computes_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise AssertionError("an evaluation has no backward")

    for name in ("checkpoint", "SentAgain"):
        monkeypatch.setattr(f"coterie_trainer.recompute.{name}", refuse)
    monkeypatch.setattr("coterie_trainer.model.SentAgain", refuse)
    batch = _batches(0, 1)[0]
    for recompute in (("block",), ("attention", "experts", "dispatch")):
        model = build_model(SPEC, recompute=recompute)
        initialize(model, seed=0, std=0.1)
        with _mesh() as mesh:
            assert evaluate(model, [batch], mesh) > 0
        with pytest.raises(AssertionError, match="no backward"):
            model(batch.tokens_BS, batch.document_ids_BS)


def _saved_numbers(module: nn.Module, *args: object) -> int:
    """Return how many numbers of four bytes autograd keeps for the backward of one call, parameters aside."""
    own = {parameter.untyped_storage()._cdata for parameter in module.parameters()}
    seen: dict[int, int] = {}
    kept = []

    def pack(saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        if storage._cdata not in own:
            seen[storage._cdata] = storage.nbytes()
            kept.append(saved)
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        output = module(*args)
    assert output is not None
    return sum(seen.values()) // 4


NUM_TOKENS = 32
"""In one sequence."""


def _layer(recompute: tuple[str, ...]) -> nn.Module:
    model = build_model(SPEC, recompute=recompute)
    initialize(model, seed=0, std=0.1)
    return model.layers[1]


def test_attention_keeps_projections_and_mixed_values() -> None:
    documents_BS = torch.zeros(1, NUM_TOKENS, dtype=torch.int32)
    context = attention_context(documents_BS, SPEC.head_dim, SPEC.rope_theta)
    x_BSD = torch.randn(1, NUM_TOKENS, SPEC.d_model).requires_grad_()
    plain, again = (_saved_numbers(_layer(one).attention, x_BSD, context) for one in ((), ("attention",)))
    width, kv_width = SPEC.num_heads * SPEC.head_dim, SPEC.num_kv_heads * SPEC.head_dim
    assert again == NUM_TOKENS * (SPEC.d_model + 2 * width + 2 * kv_width)
    assert plain > 1.5 * again


def _moe_inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x_TD = torch.randn(NUM_TOKENS, SPEC.d_model, generator=generator).requires_grad_()
    return x_TD, torch.ones(NUM_TOKENS, dtype=torch.bool)


def test_experts_keep_their_input_alone() -> None:
    plain, again = (_saved_numbers(_layer(one).moe, *_moe_inputs()) for one in ((), ("experts",)))
    num_rows = NUM_TOKENS * SPEC.top_k
    assert plain - again == num_rows * 2 * SPEC.expert_hidden + NUM_TOKENS * 4 * SPEC.shared_hidden


def test_a_block_keeps_its_input_alone() -> None:
    kept = []
    tokens_BS = torch.zeros(1, NUM_TOKENS, dtype=torch.int64)
    for num_layers in (2, 3):
        model = build_model(dataclasses.replace(SPEC, num_layers=num_layers), recompute=("block",))
        initialize(model, seed=0, std=0.1)
        kept.append(_saved_numbers(model, tokens_BS, torch.zeros(1, NUM_TOKENS, dtype=torch.int32)))
    assert kept[1] - kept[0] == NUM_TOKENS * SPEC.d_model


def _live_numbers(recompute: tuple[str, ...], dispatcher: str) -> tuple[int, int]:
    """Return how many numbers of four bytes are alive after a forward of the experts, and after its backward too."""
    options = DispatchOptions(capacity_factor=1.0) if dispatcher == "rowwise" else None
    with StepWatch() as watch:
        model = build_model(SPEC, dispatcher=dispatcher, options=options, recompute=recompute)
        initialize(model, seed=0, std=0.1)
        inputs = _moe_inputs()
        moe = model.layers[1].moe
        with torch.no_grad():
            moe(*inputs)  # buffers are made
        before = watch.live_bytes
        y_TD, routing = moe(*inputs)
        kept = watch.live_bytes - before
        loss = y_TD.sum() + routing.sums.z_sum
        loss.backward()
        left = watch.live_bytes - before
        model.close()
    return kept // 4, left // 4


@pytest.mark.parametrize("dispatcher", ["local", "all_to_all", "rowwise"])
def test_dispatch_keeps_no_rows(dispatcher: str) -> None:
    num_rows = NUM_TOKENS * SPEC.top_k
    plain, plain_left = _live_numbers((), dispatcher)
    sent, sent_left = _live_numbers(("dispatch",), dispatcher)
    assert plain - sent == num_rows * SPEC.d_model
    assert sent_left == plain_left, "rows that were sent again are forgotten"
    all_parts, _ = _live_numbers(("experts", "dispatch"), dispatcher)
    assert plain - all_parts >= num_rows * (SPEC.d_model + 2 * SPEC.expert_hidden) + NUM_TOKENS * 4 * SPEC.shared_hidden


def _live_numbers_of_blocks(options: DispatchOptions) -> int:
    """Return how many numbers of four bytes are alive after a forward that is computed again, and were not before."""
    batch = _batches(0, 1)[0]
    with StepWatch() as watch:
        model = build_model(SPEC, dispatcher="rowwise", options=options, recompute=("block",))
        initialize(model, seed=0, std=0.1)
        model(batch.tokens_BS, batch.document_ids_BS).hidden_BSD.sum().backward()  # buffers are made
        before = watch.live_bytes
        output = model(batch.tokens_BS, batch.document_ids_BS)
        kept = watch.live_bytes - before
        model.close()
    assert output is not None
    return kept // 4


def test_a_block_keeps_no_rows_whatever_the_dispatcher_would_do() -> None:
    found = {
        saved_rows: _live_numbers_of_blocks(DispatchOptions(capacity_factor=1.0, saved_rows=saved_rows))
        for saved_rows in ("copy", "lease", "fetch")
    }
    assert len(set(found.values())) == 1, found


@pytest.mark.parametrize("names", [*CHOICES, ()])
def test_names_that_are_allowed(names: tuple[str, ...]) -> None:
    assert name_problems(names) == []
    assert combination_problems(names, ParallelConfig()) == []


def test_every_fault_of_the_names_is_reported() -> None:
    assert name_problems(("block", "atention", "experts", "experts")) == [
        'recompute ("atention") must be a list of any of: block, attention, experts, dispatch; [] for none',
        'recompute names "experts" 2 times; once is enough',
        'recompute ("block") holds all other parts, so it stands alone; leave out experts',
    ]
    with pytest.raises(ValueError, match="atention"):
        build_model(SPEC, recompute=("atention",))


@pytest.mark.parametrize(
    ("names", "options", "text"),
    [
        (("dispatch",), dict(saved_rows="fetch"), "both send rows again"),
        (("dispatch",), dict(saved_rows="lease"), 'set saved_rows = "copy"'),
        (("block",), dict(overflow="drop"), 'set overflow to "grow" or "exact"'),
        (("experts", "dispatch"), dict(overflow="drop"), 'set overflow to "grow" or "exact"'),
    ],
)
def test_what_cannot_be_combined_is_refused(names: tuple[str, ...], options: dict[str, str], text: str) -> None:
    (problem,) = combination_problems(names, ParallelConfig(dispatcher="rowwise", **options))
    assert text in problem
