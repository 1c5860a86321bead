"""How received rows are kept for the backward pass, in one process: peak bytes, leases, rows that are sent again."""

from collections.abc import Callable

import pytest
import torch
from coterie_parallel import Axis, Dispatcher, DispatchOptions, make_dispatcher
from coterie_parallel.dispatch.rowwise import exchange
from coterie_parallel.dispatch.rowwise.buffers import peak_row_bytes
from coterie_parallel.dispatch.rowwise.dispatcher import RowwiseDispatcher
from coterie_parallel.dispatch.rowwise.peers import PeerTensor
from coterie_parallel.dispatch.rowwise.placement import RowPlan
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

SAVED = ["copy", "lease", "fetch"]
NUM_TOKENS, WIDTH, TOP_K, NUM_EXPERTS = 48, 512, 3, 4
IDS_TK = torch.rand(NUM_TOKENS, NUM_EXPERTS, generator=torch.Generator().manual_seed(0)).argsort(1)[:, :TOP_K]
WEIGHTS_TK = torch.rand(NUM_TOKENS, TOP_K, generator=torch.Generator().manual_seed(1))


def rowwise(saved_rows: str, *, alignment: int = 16) -> RowwiseDispatcher:
    options = DispatchOptions(saved_rows=saved_rows)
    made = make_dispatcher(
        "rowwise", num_experts=NUM_EXPERTS, axis=Axis.single("expert"), alignment=alignment, options=options
    )
    assert isinstance(made, RowwiseDispatcher)
    return made


def layer(dispatcher: Dispatcher, x_TD: Tensor, *, with_context: bool = True) -> Tensor:
    """Square each row and weigh it, as experts that save their input."""
    sent = dispatcher.dispatch(x_TD, IDS_TK, WEIGHTS_TK)
    if with_context:
        with dispatcher.saved_rows(sent.handle):
            rows_RD = sent.rows_RD * sent.rows_RD * sent.row_weights_R.unsqueeze(1)
    else:
        rows_RD = sent.rows_RD * sent.rows_RD
    return dispatcher.combine(rows_RD, sent.handle)


def saving_layer(dispatcher: Dispatcher, x_TD: Tensor) -> Tensor:
    """Save the rows and their weights and nothing else."""
    sent = dispatcher.dispatch(x_TD, IDS_TK, WEIGHTS_TK)
    with dispatcher.saved_rows(sent.handle):
        rows_RD = _Weighted.apply(sent.rows_RD, sent.row_weights_R)
    return dispatcher.combine(rows_RD, sent.handle)


class _Weighted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows_RD, weights_R):
        ctx.save_for_backward(rows_RD, weights_R)
        return rows_RD * weights_R.unsqueeze(1)

    @staticmethod
    def backward(ctx, grad_RD):
        rows_RD, weights_R = ctx.saved_tensors
        return grad_RD * weights_R.unsqueeze(1), torch.linalg.vecdot(grad_RD, rows_RD)


def inputs() -> Tensor:
    return torch.randn(NUM_TOKENS, WIDTH, generator=torch.Generator().manual_seed(2)).requires_grad_()


def live_bytes(compute: Callable[[], object]) -> int:
    """Return what is allocated by ``compute`` and still there while its value is."""
    # Without acc_events torch 2.10 warns that the events of earlier cycles are gone.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        value = compute()
    events = profiler.profiler.kineto_results.events()
    del value
    return sum(event.nbytes() for event in events if event.name() == "[memory]")


@pytest.mark.parametrize("saved_rows", SAVED)
def test_bytes_are_those_of_the_formula(saved_rows: str) -> None:
    dispatcher = rowwise(saved_rows)

    def forward(num_layers: int) -> Tensor:
        x_TD = start_TD
        for _ in range(num_layers):
            x_TD = saving_layer(dispatcher, x_TD)
        return x_TD

    start_TD = inputs()
    forward(4).sum().backward()
    mover = dispatcher._exchange
    capacity = mover.buffers.capacity
    # All pairs, which is the most that one rank can need, and room for the padding of four experts.
    assert capacity == NUM_TOKENS * TOP_K + 4 * 16
    sizes = dict(capacity=capacity, num_tokens=NUM_TOKENS, width=WIDTH, itemsize=4)
    peer_bytes = {"copy": 3, "lease": 4 + 2, "fetch": 4}[saved_rows] * capacity * WIDTH * 4
    assert mover.local_bytes() == peer_bytes + 2 * 4 * capacity
    other_bytes = peak_row_bytes(saved_rows, num_layers=4, **sizes) - peer_bytes
    assert other_bytes == {
        "copy": 4 * capacity * WIDTH * 4,
        "lease": 0,
        "fetch": 4 * NUM_TOKENS * WIDTH * 4,
    }[saved_rows]  # fmt: skip

    with_four = live_bytes(lambda: forward(4))
    assert dispatcher.grow() is None  # gives back the leases of what was thrown away
    found = with_four - live_bytes(lambda: forward(1))
    # Weights of rows and places of pairs, the small change of the docstring; and a few integers of each expert.
    change = 3 * (4 * capacity + 12 * NUM_TOKENS * TOP_K)
    assert 0 <= found - other_bytes * 3 // 4 - change <= 3 * 200
    assert mover.local_bytes() == peer_bytes + 2 * 4 * capacity


def _gradients(dispatcher: Dispatcher, run: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    x_TD = inputs()
    y_TD = run(x_TD)
    (y_TD * y_TD.detach().cos()).sum().backward()
    return y_TD.detach(), x_TD.grad


@pytest.mark.parametrize("saved_rows", SAVED)
@pytest.mark.parametrize("which", ["each", "both"])
def test_a_recomputed_forward_gives_the_same_bits(saved_rows: str, which: str) -> None:
    local = make_dispatcher("local", num_experts=NUM_EXPERTS, axis=Axis.single("expert"), alignment=16)
    expected = _gradients(local, lambda x: layer(local, layer(local, x.sin()).sin()))
    dispatcher = rowwise(saved_rows)

    def block(x_TD: Tensor) -> Tensor:
        return layer(dispatcher, x_TD.sin())

    def recomputed(x_TD: Tensor) -> Tensor:
        if which == "each":
            return checkpoint(block, checkpoint(block, x_TD, use_reentrant=False), use_reentrant=False)
        return checkpoint(lambda x: block(block(x)), x_TD, use_reentrant=False)

    for _ in range(2):  # twice, so that leases that were not given back would show
        found = _gradients(dispatcher, recomputed)
        assert all(map(torch.equal, found, expected))
    assert dispatcher._exchange.buffers.held() == []


def test_a_recomputed_forward_ends_early_and_still_exchanges_are_kept_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    dispatcher = rowwise("copy")
    phases = []
    layer(dispatcher, inputs()).sum().backward()
    peers = dispatcher._exchange.peers
    monkeypatch.setattr(peers, "signal", phases.append)
    # The block ends with its combine, which saves nothing: the recomputed forward stops before it.
    checkpoint(lambda x: layer(dispatcher, x), inputs(), use_reentrant=False).sum().backward()
    forward = ["counts", "rows", "outputs"]
    assert phases == [*forward, "rows", "counts", "rows", "outputs"]
    phases.clear()
    checkpoint(lambda x: layer(dispatcher, x), inputs(), use_reentrant=False, early_stop=False).sum().backward()
    # Outputs of the recomputed combine, then gradients offered in the same buffer: a signal separates them.
    assert phases == [*forward, "rows", *forward, "free", "outputs"]


def test_gradients_stay_while_a_recomputed_forward_sends_rows() -> None:
    """The backward of combine sends gradients before the experts ask for rows that are computed again."""
    dispatcher = rowwise("copy")
    x_TD = inputs()
    checkpoint(lambda x: layer(dispatcher, x), x_TD, use_reentrant=False).sum().backward()
    found = x_TD.grad.clone()
    x_TD.grad = None
    layer(dispatcher, x_TD).sum().backward()
    assert torch.equal(found, x_TD.grad)


def test_leases_are_given_back_in_any_order_and_buffers_are_not_made_again() -> None:
    dispatcher = rowwise("lease")
    for _ in range(3):
        # Two branches of one graph, then a chain: different orders of the backward passes.
        x_TD = inputs()
        y_TD = layer(dispatcher, x_TD) + layer(dispatcher, x_TD.cos())
        layer(dispatcher, y_TD).sum().backward()
    buffers = dispatcher._exchange.buffers
    assert buffers.held() == []
    assert [len(pool) for pool in buffers._pool.values()] == [3]
    with torch.no_grad():
        for _ in range(5):
            layer(dispatcher, x_TD)
    assert [len(pool) for pool in buffers._pool.values()] == [3]


def test_a_forward_without_a_backward_gives_its_lease_back_at_the_end_of_the_step() -> None:
    dispatcher = rowwise("lease")
    kept = layer(dispatcher, inputs())
    layer(dispatcher, inputs())
    assert dispatcher._exchange.buffers.held() == [True, False]
    assert dispatcher.grow() is None
    assert dispatcher._exchange.buffers.held() == [True]
    layer(dispatcher, inputs())
    assert [len(pool) for pool in dispatcher._exchange.buffers._pool.values()] == [2]
    kept.sum().backward()


@pytest.fixture
def unseen_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write rows as peers and kernels do: autograd sees nothing of it."""
    plain = exchange.put_rows

    def unseen(x_TD: Tensor, weights_TK: Tensor | None, plan: RowPlan, rows: PeerTensor, *more, **how) -> None:
        with torch.autograd._unsafe_preserve_version_counter(rows.local):
            plain(x_TD, weights_TK, plan, rows, *more, **how)

    monkeypatch.setattr(exchange, "put_rows", unseen)


@pytest.mark.usefixtures("unseen_writes")
def test_rows_that_were_given_back_are_not_used_again() -> None:
    dispatcher = rowwise("lease", alignment=1)  # no padding that is cleared in sight of autograd
    x_TD = inputs()
    y_TD = layer(dispatcher, x_TD)
    y_TD.sum().backward(retain_graph=True)
    layer(dispatcher, inputs()).sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y_TD.sum().backward()


@pytest.mark.usefixtures("unseen_writes")
def test_fetched_rows_need_the_context() -> None:
    dispatcher = rowwise("fetch", alignment=1)
    first = layer(dispatcher, inputs(), with_context=False)
    second = layer(dispatcher, inputs(), with_context=False)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (first + second).sum().backward()


def test_fetched_rows_need_the_backward_of_combine() -> None:
    dispatcher = rowwise("fetch")
    sent = dispatcher.dispatch(inputs(), IDS_TK, WEIGHTS_TK)
    with dispatcher.saved_rows(sent.handle):
        rows_RD = sent.rows_RD * sent.rows_RD
    with pytest.raises(RuntimeError, match="only in the backward pass of their combine"):
        rows_RD.sum().backward()


def test_tokens_that_were_changed_in_place_are_not_sent_again() -> None:
    dispatcher = rowwise("fetch")
    x_TD = inputs().cos()
    y_TD = layer(dispatcher, x_TD)
    with torch.no_grad():
        x_TD.mul_(2)
    with pytest.raises(RuntimeError, match="changed in place"):
        y_TD.sum().backward()


@pytest.mark.parametrize("saved_rows", SAVED)
def test_views_of_rows_and_experts_whose_tokens_need_no_gradient(saved_rows: str) -> None:
    """Frozen tokens: only the experts have parameters, and they save slices of the rows."""
    found = []
    for dispatcher in (
        make_dispatcher("local", num_experts=NUM_EXPERTS, axis=Axis.single("expert"), alignment=16),
        rowwise(saved_rows),
    ):
        weight_DD = (torch.eye(WIDTH) * 2).requires_grad_()
        total = torch.zeros(())
        for _ in range(2):
            sent = dispatcher.dispatch(inputs().detach(), IDS_TK, WEIGHTS_TK)
            ends = sent.offsets_e.tolist()
            with dispatcher.saved_rows(sent.handle):
                parts = [sent.rows_RD[: ends[1]] @ weight_DD, sent.rows_RD[ends[1] : ends[3]].sin() @ weight_DD]
                rest_RD = sent.rows_RD[ends[3] :].detach() * 0
            y_TD = dispatcher.combine(torch.cat([*parts, rest_RD]), sent.handle)
            total = total + (y_TD * y_TD.detach().cos()).sum()
        total.backward()
        found.append(weight_DD.grad)
    assert dispatcher._exchange.buffers.held() == []
    assert torch.equal(*found)
