"""torch.compile of a module that dispatches: one graph break for each exchange, and the numbers of eager mode."""

import subprocess
import sys

import pytest
import torch
from coterie_parallel import Axis, DispatchOptions, make_dispatcher
from torch import Tensor, nn
from torch._dynamo.utils import counters

# The compiler looks at the gradient of every tensor that a resumed frame gets.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

WIDTH, NUM_EXPERTS, TOP_K = 8, 4, 2


class Block(nn.Module):
    """A router, experts that square their rows, and a sum."""

    def __init__(self, name: str, saved_rows: str) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.mix = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator))
        self.router = nn.Parameter(torch.randn(WIDTH, NUM_EXPERTS, generator=generator))
        options = DispatchOptions(saved_rows=saved_rows)  # type: ignore[arg-type]
        self.dispatcher = make_dispatcher(name, num_experts=NUM_EXPERTS, axis=Axis.single("expert"), options=options)

    def forward(self, x_TD: Tensor) -> Tensor:
        h_TD = (x_TD @ self.mix).tanh()
        weights_TK, ids_TK = (h_TD @ self.router).softmax(1).topk(TOP_K)
        sent = self.dispatcher.dispatch(h_TD, ids_TK, weights_TK)
        with self.dispatcher.saved_rows(sent.handle):
            rows_RD = sent.rows_RD * sent.rows_RD * sent.row_weights_R.unsqueeze(1)
        return x_TD + self.dispatcher.combine(rows_RD, sent.handle).sin()


def _run(block: Block, function: nn.Module, num_tokens: int) -> list[Tensor]:
    x_TD = torch.randn(num_tokens, WIDTH, generator=torch.Generator().manual_seed(num_tokens)).requires_grad_()
    block.zero_grad()
    y_TD = function(x_TD)
    (y_TD * y_TD.detach().cos()).sum().backward()
    found = [y_TD.detach(), x_TD.grad, block.mix.grad, block.router.grad]
    assert all(one is not None for one in found)
    return [one.clone() for one in found if one is not None]


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch.compiler.reset()
    counters.clear()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    ("name", "saved_rows"),
    [("local", "copy"), ("all_to_all", "copy"), ("rowwise", "copy"), ("rowwise", "lease"), ("rowwise", "fetch")],
)
def test_a_compiled_block_has_the_gradients_of_eager_mode(name: str, saved_rows: str, backend: str) -> None:
    block = Block(name, saved_rows)
    compiled = torch.compile(block, backend=backend)
    for num_tokens in (9, 9, 7):
        expected = _run(block, block, num_tokens)
        assert all(map(torch.equal, _run(block, compiled, num_tokens), expected))


def test_nothing_inside_of_an_exchange_is_compiled() -> None:
    block = Block("all_to_all", "copy")
    _run(block, torch.compile(block, backend="eager"), 9)
    reasons = " ".join(counters["graph_break"])
    assert "AllToAllDispatcher.dispatch" in reasons
    assert "AllToAllDispatcher.combine" in reasons
    # Sizes that depend on data, which the route of the rows is full of, were never seen.
    assert "aten" not in reasons
    assert "item()" not in reasons


def test_one_graph_for_all_is_refused_with_the_reason() -> None:
    block = Block("local", "copy")
    with pytest.raises(RuntimeError, match="rows are exchanged between ranks"):
        torch.compile(block, backend="eager", fullgraph=True)(torch.zeros(3, WIDTH))


def test_a_dispatch_without_the_compiler_does_not_import_it() -> None:
    script = (
        "import sys, torch; from coterie_parallel import Axis, make_dispatcher\n"
        "dispatcher = make_dispatcher('local', num_experts=2, axis=Axis.single('expert'))\n"
        "dispatcher.dispatch(torch.zeros(1, 2), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1))\n"
        "print('torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
