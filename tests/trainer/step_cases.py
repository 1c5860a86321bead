"""What the scripts of the training step on one device share: cases, the model with its optimizer, batches, clocks."""

import dataclasses
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), *(str(path) for path in sorted(ROOT.glob("packages/*/src")))]

import torch  # noqa: E402
from coterie_export import ModelSpec  # noqa: E402
from coterie_parallel import (  # noqa: E402
    AdamWConfig,
    DispatchOptions,
    Mesh,
    Optimizer,
    ParallelConfig,
    make_plan,
)
from coterie_trainer.attention import count_documents  # noqa: E402
from coterie_trainer.config import TrainConfig, assignment  # noqa: E402
from coterie_trainer.data.dataset import Batch  # noqa: E402
from coterie_trainer.model import Decoder, build_model, placements  # noqa: E402
from coterie_trainer.step import Stepper  # noqa: E402
from support.device_timing import about as about_gpu  # noqa: E402
from torch import Tensor, nn  # noqa: E402

__all__ = ["CASES", "Case", "Clock", "Setup", "about", "limited", "make_batches", "make_step"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and its batch.

    Attributes:
        spec: of the model. Its 4 heads of keys are what the figures of OLMo-core say: tokens/s and TFLOP/s give its
            FLOPs a token, and no other number of heads does.
        sequences: of a micro-batch; ``micro_batches`` of a step.
        olmo_core: tokens/s of OLMo-core 3.0.0 on one H200; None where there is no figure.
    """

    spec: ModelSpec
    sequences: int
    micro_batches: int
    olmo_core: float | None = None

    @property
    def tokens(self) -> int:
        """Return the tokens of a micro-batch."""
        return self.sequences * self.spec.max_sequence_length

    def with_sequences(self, sequences: int | None) -> "Case":
        """Return this case with micro-batches of another size; a step keeps its tokens."""
        if sequences is None:
            return self
        micro_batches, rest = divmod(self.sequences * self.micro_batches, sequences)
        assert rest == 0, f"{self.sequences * self.micro_batches} sequences do not make micro-batches of {sequences}"
        return dataclasses.replace(self, sequences=sequences, micro_batches=micro_batches)

    def model_flops_per_token(self) -> int:
        """Return 6 N + 6 L S A: forward and backward of the N weights that a token meets, and of causal attention.

        N: projections, router, K experts and the shared one of all L layers, and the head; S: sequence length; A: width
        of all queries. Half of the S * S scores are counted, recomputed work and the embedding are not.
        """
        spec = self.spec
        attention = 2 * spec.d_model * spec.head_dim * (spec.num_heads + spec.num_kv_heads)
        hidden = spec.top_k * spec.expert_hidden + spec.shared_hidden
        layer = attention + spec.d_model * spec.num_experts + 3 * spec.d_model * hidden
        weights = spec.num_layers * layer + spec.vocab_size * spec.d_model
        scores = spec.num_layers * spec.max_sequence_length * spec.num_heads * spec.head_dim
        return 6 * (weights + scores)


_SPEC = ModelSpec(
    vocab_size=100_352,
    d_model=2048,
    num_layers=8,
    num_heads=16,
    num_kv_heads=4,
    head_dim=128,
    norm_eps=1e-6,
    norm_placement="pre",
    qk_norm="head",
    rope_theta=500_000.0,
    max_sequence_length=4096,
    num_dense_layers=0,
    dense_hidden=0,
    num_experts=64,
    top_k=8,
    expert_hidden=1024,
    shared_hidden=0,
    score_function="softmax",
    renormalize=True,
    route_scale=1.0,
    selection_bias=False,
    tied_embeddings=False,
    bos_id=None,
    eos_id=None,
    pad_id=None,
)
_SWEEP = dict(num_layers=4, top_k=4, expert_hidden=2048, shared_hidden=2048)
_TINY = dict(
    vocab_size=128, d_model=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, max_sequence_length=32
) | dict(num_experts=8, top_k=2, expert_hidden=16, shared_hidden=16)

CASES = {
    "olmo8": Case(spec=_SPEC, sequences=4, micro_batches=2, olmo_core=53_604),
    "sweep-e8": Case(
        spec=dataclasses.replace(_SPEC, **_SWEEP, num_experts=8), sequences=4, micro_batches=32, olmo_core=139_725
    ),
    "sweep-e128": Case(
        spec=dataclasses.replace(_SPEC, **_SWEEP, num_experts=128), sequences=4, micro_batches=32, olmo_core=106_164
    ),
    "tiny": Case(spec=dataclasses.replace(_SPEC, **_TINY), sequences=2, micro_batches=2),
}


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How the step runs.

    Attributes:
        device: "cuda" or "cpu".
        dispatcher: "local", where the experts gather and sum by themselves, or "rowwise" with room for all rows, so
            that nothing ever overflows on one rank.
        saved_rows: of "rowwise".
        compiled: whether the dense layers are compiled.
        documents: "whole": each sequence is one; "packed": about eight in each.
        load: what decides the experts: "router", "random" or "uniform".
        recompute: see `coterie_trainer.recompute`.
        moments: dtype of Adam's moments.
    """

    device: str = "cuda"
    dispatcher: str = "local"
    saved_rows: str = "copy"
    compiled: bool = True
    documents: str = "whole"
    load: str = "random"
    recompute: tuple[str, ...] = ()
    moments: str = "float32"

    @property
    def dtype(self) -> torch.dtype:
        """Return bf16 on a GPU; a CPU has no fast one."""
        return torch.bfloat16 if self.device == "cuda" else torch.float32


def make_step(case: Case, setup: Setup) -> tuple[Decoder, Optimizer, Stepper]:
    """Return the model with seeded weights, its optimizer and its stepper, on a mesh of one rank."""
    train = TrainConfig(
        steps=1,
        sequences_per_step=case.sequences * case.micro_batches,
        sequences_per_micro_batch=case.sequences,
        assignment=None if setup.load == "router" else setup.load,
        recompute=setup.recompute,
    )
    options = (
        DispatchOptions(capacity_factor=1.0, saved_rows=setup.saved_rows) if setup.dispatcher == "rowwise" else None
    )
    mesh = Mesh(make_plan(ParallelConfig(), 1), 0, timeout_s=60.0, device=setup.device)
    model = build_model(
        case.spec,
        dispatcher=setup.dispatcher,
        options=options,
        assignment=assignment(train),
        recompute=setup.recompute,
        compiles=setup.compiled and setup.device == "cuda",
        device=setup.device,
        dtype=setup.dtype,
    )
    _initialize(model)
    config = AdamWConfig(moments_dtype=setup.moments)
    optimizer = Optimizer(model.named_parameters(), placements(model), mesh, config)
    return model, optimizer, Stepper(model, optimizer, mesh, train)


@torch.no_grad()
def _initialize(model: nn.Module) -> None:
    """Draw the weights on the device: `initialize` draws the same for every device, on the host, in minutes."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.ones_(parameter) if parameter.ndim == 1 else nn.init.normal_(parameter, std=0.02)
    for buffer in model.buffers():
        buffer.zero_()


def make_batches(case: Case, setup: Setup, *, seed: int = 0) -> list[Batch]:
    """Return the micro-batches of a step, random tokens, on the host as the data loader gives them."""
    generator = torch.Generator().manual_seed(seed)
    shape = case.sequences, case.spec.max_sequence_length
    found = []
    for _ in range(case.micro_batches):
        tokens_BS = torch.randint(case.spec.vocab_size, shape, generator=generator)
        ids_BS = document_ids(shape, setup.documents, generator)
        targets_BS = torch.full(shape, -1)
        targets_BS[:, :-1] = tokens_BS[:, 1:].masked_fill(ids_BS[:, 1:] != ids_BS[:, :-1], -1)
        batch = Batch(
            tokens_BS=tokens_BS,
            targets_BS=targets_BS,
            document_ids_BS=ids_BS,
            num_documents=count_documents(ids_BS),
        )
        found.append(batch.pin_memory() if setup.device == "cuda" else batch)
    return found


def document_ids(shape: tuple[int, int], documents: str, generator: torch.Generator) -> Tensor:
    """Return ids of one document for each sequence, or of about eight with ends anywhere."""
    if documents == "whole":
        return torch.zeros(shape, dtype=torch.int32)
    starts_BS = torch.rand(shape, generator=generator) < 7 / shape[1]
    return starts_BS.cumsum(1).to(torch.int32)


class Clock:
    """Times work on a device, with one look at it before and one after."""

    def __init__(self, device: str) -> None:
        self.device = device

    def ms(self, function: Callable[[], object], *, calls: int = 10, warmups: int = 3) -> float:
        """Return the mean milliseconds of a call; calls follow one another without a wait of the host.

        On a CPU, where nothing is measured, one call does.
        """
        if self.device == "cpu":
            calls, warmups = 1, 0
        for _ in range(warmups):
            function()
        self._wait()
        begin = time.perf_counter()
        for _ in range(calls):
            function()
        self._wait()
        return (time.perf_counter() - begin) * 1e3 / calls

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


@contextmanager
def limited(seconds: int, what: str) -> Iterator[None]:
    """Raise TimeoutError when the block takes longer; what a device does is noticed when the host waits for it."""

    def late(number: int, frame: object) -> None:
        raise TimeoutError(f"{what} took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def about(device: str, commit: str) -> dict[str, object]:
    """Return where and when, also on a CPU."""
    if device == "cuda":
        return about_gpu(commit)
    return {"device": "cpu", "torch": torch.__version__, "python": sys.version.split()[0], "commit": commit}
