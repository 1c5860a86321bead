"""A model whose gradients are known: four sources of tokens, spread over ranks and micro-batches in any layout."""

import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from coterie_parallel import (
    DENSE,
    EXPERTS,
    AdamWConfig,
    Chunk,
    Mesh,
    MuonConfig,
    Optimizer,
    ParallelConfig,
    ReductionConfig,
    accumulate_in_fp32,
    make_plan,
)
from torch import Tensor, nn

NUM_SOURCES = 4
NUM_STEPS = 3
RATES = (0.02, 0.01, 0.005)

# Widths that divide by nothing; "tiny" has fewer elements than there are ranks, "unused" never has a gradient, and
# "lonely" has one from the first source only, so that most ranks have none at all.
SHAPES: dict[str, tuple[int, ...]] = {
    "embed.weight": (37, 9),
    "tiny.weight": (3,),
    "block.q.weight": (9, 9),
    "block.k.weight": (5, 9),
    "block.wide.weight": (9, 31),
    "block.router.weight": (8, 9),
    "block.experts.up": (8, 14, 9),
    "block.experts.down": (8, 9, 7),
    "block.unused.weight": (11,),
    "block.lonely.weight": (6, 9),
    "norm.weight": (9,),
}
TOTAL = sum(math.prod(shape) for shape in SHAPES.values())
PLACEMENTS = {name: EXPERTS if ".experts." in name else DENSE for name in SHAPES}


@dataclass(frozen=True)
class Case:
    """One way to run the same three steps; every case but the inexact ones must give the numbers of one process."""

    name: str
    config: AdamWConfig = field(default_factory=lambda: AdamWConfig(gradient_clip=500.0))
    dtype: torch.dtype = torch.float32
    micro_batches: bool = True
    forward_overlap: bool = False

    def reduction(self, **changes: Any) -> "Case":
        config = replace(self.config, reduction=replace(self.config.reduction, **changes))
        return replace(self, config=config)


SMALL = AdamWConfig(
    gradient_clip=500.0,
    weight_decays=(("embed.*", 0.0), ("tiny.*", 0.3)),
    learning_rate_factors=(("*.router.*", 0.5),),
    reduction=ReductionConfig(bucket_bytes=2000),
)
MUON = replace(SMALL, muon=MuonConfig(dtype="float32"))
CASES = [
    Case("plain", SMALL, micro_batches=False),
    Case("overlap", SMALL),
    Case("no overlap", SMALL).reduction(overlap=False),
    Case("one bucket", SMALL).reduction(bucket_bytes=2**20),
    Case("sharded", SMALL).reduction(sharded=True),
    Case("backend order", SMALL).reduction(sum_order="backend"),
    Case("sent as bf16", SMALL).reduction(send_dtype="bfloat16"),
    Case("into the forward", SMALL, forward_overlap=True),
    Case("bf16", SMALL, dtype=torch.bfloat16),
    Case("bf16 sharded", SMALL, dtype=torch.bfloat16).reduction(sharded=True),
    Case("muon", MUON),
    Case("muon sharded bf16", MUON, dtype=torch.bfloat16).reduction(sharded=True),
]
LAYOUTS = {2: [1, 2], 4: [1, 2, 4]}


class Part(nn.Module):
    """Some parameters and the loss whose gradient is given."""

    def __init__(self, named: dict[str, Tensor]) -> None:
        super().__init__()
        self.names = list(named)
        for number, tensor in enumerate(named.values()):
            self.register_parameter(f"p{number}", nn.Parameter(tensor))

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from zip(self.names, self.parameters(), strict=True)

    def forward(self, gradients: dict[str, Tensor | None]) -> Tensor:
        terms = [
            (parameter.float() * gradient).sum()
            for name, parameter in self.named()
            if (gradient := gradients[name]) is not None
        ]
        return torch.stack(terms).sum() if terms else torch.zeros(())


def whole_weights(dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def gradient(name: str, source: int, step: int) -> Tensor | None:
    """Return the gradient that the tokens of one source give, for all experts; None for no gradient.

    Whole numbers, so small that the sums of all sources are exact in bf16, in any order.
    """
    if name == "block.unused.weight" or (name == "block.lonely.weight" and source > 0):
        return None
    seed = 1000 * step + 100 * source + list(SHAPES).index(name)
    values = torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(seed))
    return (16 * values).round().clamp(-60, 60)


def rank_gradient(name: str, sources: list[int], step: int, part: slice) -> Tensor | None:
    found = [one for source in sources if (one := gradient(name, source, step)) is not None]
    return None if not found else sum(one[part] for one in found)  # type: ignore[return-value]


def run_steps(case: Case, mesh: Mesh, *, steps: range = range(NUM_STEPS), state: Any = None) -> dict[str, Any]:
    """Run the steps of a case on this rank and return what it holds then."""
    runner = Runner(case, mesh)
    if state is not None:
        state(runner)
    for step in steps:
        runner.step(step)
    return runner.result()


class Runner:
    """The parts of the model on one rank, their optimizer, and the steps."""

    def __init__(self, case: Case, mesh: Mesh) -> None:
        self.case, self.mesh = case, mesh
        expert, data = mesh.axis("expert"), mesh.axis("data")
        weights = whole_weights(case.dtype)
        for name, weight in weights.items():
            if PLACEMENTS[name] is EXPERTS:
                weights[name] = weight.chunk(expert.size)[expert.index].clone()
        self.parts = [
            Part({name: weight for name, weight in weights.items() if name.startswith(prefix)})
            for prefix in ("embed", "tiny", "block", "norm")
        ]
        self.named = {name: parameter for part in self.parts for name, parameter in part.named()}
        accumulate_in_fp32(self.named.values())
        self.optimizer = Optimizer(self.named.items(), PLACEMENTS, mesh, case.config)
        if case.forward_overlap:
            self.optimizer.overlap_with_forward(self.parts[1:])  # the embedding is left to the step
        share = NUM_SOURCES // data.size
        self.micro_batches = [[data.index * share + number] for number in range(share)]
        # The experts of a rank see the tokens of every rank of its expert axis.
        first = mesh.axis("expert_data").index * expert.size
        self.for_experts = [[(first + peer) * share + number for peer in range(expert.size)] for number in range(share)]
        num_local = 8 // expert.size
        self.own = slice(expert.index * num_local, (expert.index + 1) * num_local)
        self.gradients: dict[str, Tensor] = {}
        self.norms: list[float] = []

    def backward(self, step: int) -> None:
        for number, sources in enumerate(self.micro_batches):
            is_last = number == len(self.micro_batches) - 1
            context = self.optimizer.micro_batch(is_last=is_last) if self.case.micro_batches else nullcontext()
            gradients = {
                name: rank_gradient(name, self.for_experts[number], step, self.own)
                if PLACEMENTS[name] is EXPERTS
                else rank_gradient(name, sources, step, slice(None))
                for name in SHAPES
            }
            with context:
                loss = torch.stack([part(gradients) for part in self.parts]).sum()
                loss.backward()

    def step(self, step: int) -> None:
        self.optimizer.zero_grad()
        self.backward(step)
        self.norms.append(float(self.optimizer.step(RATES[step])))
        self.gradients = self.optimizer.reducer.gathered()

    def result(self) -> dict[str, Any]:
        self.optimizer.wait_for_weights()
        state = self.optimizer.global_state()
        return {
            "weights": {name: parameter.detach().clone() for name, parameter in self.named.items()},
            "gradients": self.gradients,
            "norms": self.norms,
            "step": int(state["step"]),
            "chunks": {
                name: (value.offsets[0], value.global_shape[0], value.tensor.clone())
                for name, value in state.items()
                if isinstance(value, Chunk)
            },
        }


def one_process() -> Mesh:
    return Mesh(make_plan(ParallelConfig(), 1), 0, timeout_s=5)


def assemble(results: list[dict[str, Any]], expert: int) -> dict[str, dict[str, Tensor]]:
    """Return whole weights, gradients and state from the results of all ranks; every element of state is there once."""
    found: dict[str, dict[str, Tensor]] = {"weights": {}, "gradients": {}, "state": {}}
    for kind in ("weights", "gradients"):
        for name, tensor in results[0][kind].items():
            if PLACEMENTS[name] is EXPERTS:
                tensor = torch.cat([results[rank][kind][name] for rank in range(expert)])
            found[kind][name] = tensor
    for name in results[0]["chunks"]:
        chunks = sorted((result["chunks"][name] for result in results), key=lambda chunk: (chunk[0], len(chunk[2])))
        end = 0
        for offset, size, tensor in chunks:
            assert len(tensor) == 0 or offset == end, (name, offset, end)
            assert size == chunks[0][1]
            end += len(tensor)
        assert end == chunks[0][1], name
        found["state"][name] = torch.cat([tensor for _, _, tensor in chunks])
    return found
