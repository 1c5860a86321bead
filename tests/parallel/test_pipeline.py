"""Stages on several ranks compute what one process computes, in every schedule, and fail with the error of a stage."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from coterie_parallel import (
    DENSE,
    TIED_EMBEDDING,
    AdamWConfig,
    CollectiveError,
    Mesh,
    Optimizer,
    ParallelConfig,
    Pipeline,
    WeightGradients,
    global_gradient_norm,
    make_plan,
    make_stages,
)
from coterie_parallel.local_ranks import RankPool
from torch import Tensor, nn

WIDTH, BATCH = 6, 3
CASES = {
    "gpipe": (dict(pipeline=2, pipeline_schedule="gpipe"), 3),
    "1f1b": (dict(pipeline=4, pipeline_schedule="1f1b"), 5),
    "one layer at an end": (dict(pipeline=4, pipeline_schedule="1f1b", layers_per_stage=(1, 3, 4, 0)), 4),
    "interleaved_1f1b": (dict(pipeline=2, pipeline_schedule="interleaved_1f1b", stages_per_rank=4), 4),
    "zbv": (dict(pipeline=2, pipeline_schedule="zbv"), 3),
    "zbv of four": (dict(pipeline=4, pipeline_schedule="zbv"), 2),
    "dualpipev": (dict(pipeline=2, pipeline_schedule="dualpipev"), 5),
    "two columns": (dict(pipeline=2, data=2, pipeline_schedule="1f1b"), 2),
}
NUM_LAYERS = 8


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    # Torch's module takes seconds to import.
    with RankPool(limit_s=60.0, preload=["torch.distributed.pipelining"]) as ranks:
        yield ranks


class Layers(nn.Module):
    """Some of the layers of a model; each multiplies and squashes, scaled by its own keyword argument."""

    def __init__(self, numbers: range) -> None:
        super().__init__()
        generator = torch.Generator()
        self.layers = nn.ModuleDict()
        for number in numbers:
            layer = nn.Linear(WIDTH, WIDTH, bias=False)
            layer.weight.data = torch.randn(WIDTH, WIDTH, generator=generator.manual_seed(number), dtype=torch.float64)
            self.layers[str(number)] = layer

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = torch.tanh(layer(x) * scale)
        return x + 0  # a stage without a layer returns a tensor of its own too


def _inputs(num: int, rows: slice = slice(None)) -> dict[str, list[Tensor]]:
    generator = torch.Generator().manual_seed(9)

    def draw(*shape: int) -> list[Tensor]:
        return [torch.randn(BATCH, *shape, generator=generator, dtype=torch.float64)[rows] for _ in range(num)]

    return {"inputs": draw(WIDTH), "targets": draw(WIDTH), "scale": draw(1)}


def _run(rank: int, world: int, config: dict[str, Any], num: int, defers: bool) -> dict[str, Any]:
    parallel = ParallelConfig(**config)
    with Mesh(make_plan(parallel, world), rank, timeout_s=20) as mesh:
        stages = make_stages(parallel, NUM_LAYERS)
        local = stages.on_rank(mesh.axis("pipeline").index)
        modules = {stage.index: Layers(stage.layers) for stage in local}
        weights = WeightGradients() if defers else None
        for module in modules.values():
            if weights is not None:
                weights.of_linear_layers(module)
        # Each column has a row of its own.
        own = slice(mesh.axis("data").index, mesh.axis("data").index + 1) if mesh.axis("data").size > 1 else slice(None)
        data = _inputs(num, own)
        losses: list[float] = []
        entered: list[int] = []

        def loss(out: Tensor, target: Tensor) -> Tensor:
            value = ((out - target) ** 2).sum()
            losses.append(value.item())
            return value

        @contextmanager
        def around_last() -> Any:
            entered.append(sum(layer.grad is not None for module in modules.values() for layer in module.parameters()))
            yield

        pipeline = Pipeline(
            stages,
            modules,
            mesh,
            num_micro_batches=num,
            input_like=data["inputs"][0],
            hidden_like=data["inputs"][0],
            loss=loss,
            weights=weights,
        )
        with torch.no_grad():
            pipeline.run(**data)
        evaluated, losses[:] = list(losses), []
        for _ in range(2):
            pipeline.run(**data, around_last_backward=around_last)
        with torch.no_grad():
            pipeline.run(**data)
        gradients = {
            name: parameter.grad.clone()
            for module in modules.values()
            for name, parameter in module.named_parameters()
            if parameter.grad is not None
        }
        return {
            "evaluated": evaluated,
            "losses": losses,
            "gradients": gradients,
            "entered": entered,
            "norms": [float(global_gradient_norm(gradients.values(), mesh, order=order)) for order in (2.0, math.inf)],
        }


@pytest.mark.parametrize("name", CASES)
def test_every_schedule_gives_the_losses_and_gradients_of_one_process(pool: RankPool, name: str) -> None:
    config, num = CASES[name]
    plan_data = int(config.get("data", 1))
    # Also in a schedule that has no use for it.
    defers = name in ("zbv", "zbv of four", "dualpipev", "two columns")
    results = pool.run(_run, int(config["pipeline"]) * plan_data, config, num, defers)
    whole = Layers(range(NUM_LAYERS))
    data = _inputs(num, slice(0, plan_data) if plan_data > 1 else slice(None))
    expected = []
    for x, target, scale in zip(data["inputs"], data["targets"], data["scale"], strict=True):
        loss = ((whole(x, scale) - target) ** 2).sum()
        (2 * loss).backward()  # two runs
        expected.append(loss.item())
    last = [result for result in results if result["evaluated"]]
    assert len(last) == plan_data
    for part in ("evaluated", "losses"):
        # The forward alone, then two trainings and the forward again.
        sums = torch.tensor([result[part] for result in last]).sum(0)
        torch.testing.assert_close(sums, torch.tensor(expected * (1 if part == "evaluated" else 3)))
    gradients: dict[str, Tensor] = {}
    for result in results:
        for key, grad in result["gradients"].items():
            gradients[key] = gradients[key] + grad if key in gradients else grad
    assert gradients.keys() == dict(whole.named_parameters()).keys()
    for key, parameter in whole.named_parameters():
        torch.testing.assert_close(gradients[key], parameter.grad, rtol=1e-10, atol=1e-10)
    if plan_data == 1:
        norms = [
            float(torch.cat([one.grad.flatten() for one in whole.parameters()]).norm(order))
            for order in (2.0, math.inf)
        ]
        for result in results:  # the same on all stages (P18)
            assert result["norms"] == pytest.approx(norms, rel=1e-5)
            assert result["norms"] == results[0]["norms"]
    assert all(len(result["entered"]) == (0 if defers else 2) for result in results)


class Broken(Layers):
    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        raise ValueError("expert ids that do not exist")


class BrokenBackward(Layers):
    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        out = super().forward(x, scale)

        def fail(grad: Tensor) -> None:
            raise KeyError("broken backward")

        out.register_hook(fail)
        return out


class Wrong(Layers):
    """Returns something else than was declared, or the right thing in other memory."""

    def __init__(self, numbers: range, kind: str) -> None:
        super().__init__(numbers)
        self.kind = kind

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        out = super().forward(x, scale)
        if self.kind == "dtype":
            return out.float()
        return out[:, :3] if self.kind == "shape" else out.T.contiguous().T


class BrokenOnce(Layers):
    is_broken = True

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        if self.is_broken:
            self.is_broken = False
            raise RuntimeError("first time")
        return super().forward(x, scale)


def _broken_loss(out: Tensor, target: Tensor) -> Tensor:
    raise IndexError("no such word") from KeyError("its cause")


def _fail(rank: int, world: int, kind: str) -> tuple[str, str, float]:
    """Return what a rank raises and in how many seconds."""
    is_late = kind in ("late", "late in evaluation")
    timeout_s = 3.0 if is_late else 30.0
    parallel = ParallelConfig(pipeline=world, pipeline_schedule="gpipe" if kind == "evaluation" else "1f1b")
    with Mesh(make_plan(parallel, world), rank, timeout_s=timeout_s) as mesh:
        stages = make_stages(parallel, NUM_LAYERS)
        (stage,) = stages.on_rank(rank)
        where = {"forward": world - 1, "evaluation": 1, "backward": 1, "dtype": 0, "shape": 0, "again": 0}.get(kind)
        made: Any = {"forward": Broken, "evaluation": Broken, "backward": BrokenBackward, "again": BrokenOnce}.get(kind)
        made = made or (lambda layers: Wrong(layers, kind))
        module = made(stage.layers) if rank == where else Layers(stage.layers)
        num = {"few": 1, "ranks": 2 + rank}.get(kind, world)
        data = _inputs(world)
        like = data["inputs"][0]
        start = time.monotonic()
        try:
            pipeline = Pipeline(
                make_stages(ParallelConfig(), NUM_LAYERS) if kind == "one stage" else stages,
                {} if kind == "no module" and rank == 1 else {rank: module},
                mesh,
                num_micro_batches=num,
                input_like=like.float() if kind == "ranks" and rank == 1 else like,
                hidden_like=like,
                loss=_broken_loss if kind == "loss" else lambda out, target: (out - target).sum(),
            )
            if kind == "lengths":
                data["inputs"][1] = torch.randn(BATCH + 1, WIDTH, dtype=torch.float64)
            elif kind == "number":
                data = _inputs(3)
            elif kind == "other lengths":
                data = {name: [one[:1] for one in tensors] for name, tensors in data.items()}
            elif (kind, rank) in {("late", 1), ("late in evaluation", 0)}:
                return "", "", 0.0
            with torch.set_grad_enabled(kind not in ("evaluation", "late in evaluation")):
                pipeline.run(**data)
            with torch.no_grad():
                pipeline.run(**data)
        except Exception as error:
            if kind == "again" and "first time" in str(error):
                try:
                    pipeline.run(**data)
                except Exception as later:
                    error = later
            cause = f" from {error.__cause__!r}" if error.__cause__ else ""
            return type(error).__name__, f"{error}{cause}", time.monotonic() - start
    return "", "", 0.0


@pytest.mark.parametrize(
    ("kind", "world", "broken", "name", "text"),
    [
        ("forward", 4, 3, "ValueError", "expert ids that do not exist"),
        ("evaluation", 4, 1, "ValueError", "expert ids that do not exist"),
        ("backward", 2, 1, "KeyError", "'broken backward'"),
        ("loss", 2, 1, "IndexError", "no such word from KeyError('its cause')"),
        (
            "dtype",
            2,
            0,
            "ValueError",
            "stage 0 returned (3, 6) of torch.float32, and hidden_like is (3, 6) of torch.float64",
        ),
        (
            "shape",
            2,
            0,
            "ValueError",
            "stage 0 returned (3, 3) of torch.float64, and hidden_like is (3, 6) of torch.float64",
        ),
    ],
)
def test_what_a_rank_raises_keeps_its_type_and_its_peers_end_at_once_and_name_it(
    pool: RankPool, kind: str, world: int, broken: int, name: str, text: str
) -> None:
    results = pool.run(_fail, world, kind)
    axis = f"'pipeline' axis (ranks {', '.join(map(str, range(world)))})"
    for rank, (found, message, seconds) in enumerate(results):
        assert seconds < 5  # of 30
        if rank == broken:
            assert found == name
            assert message == text
        else:
            assert found == CollectiveError.__name__
            assert f"{axis} failed on rank {rank}: rank {broken} raised {name}: {text.split(' from ')[0]}" in message


def test_a_later_run_says_that_an_earlier_one_has_failed(pool: RankPool) -> None:
    for name, message, _ in pool.run(_fail, 2, "again"):
        assert name == ValueError.__name__
        assert message.startswith("this pipeline failed in an earlier run")
        assert message.endswith("build a new Mesh and a new Pipeline on all its ranks")


def _sent(rank: int, world: int, is_turned: bool) -> list[float]:
    parallel = ParallelConfig(pipeline=2)
    with Mesh(make_plan(parallel, world), rank, timeout_s=10) as mesh:
        stages, losses, data = make_stages(parallel, NUM_LAYERS), [], _inputs(2)
        (stage,) = stages.on_rank(rank)
        module = Wrong(stage.layers, "turned") if is_turned and rank == 0 else Layers(stage.layers)

        def loss(out: Tensor, target: Tensor) -> Tensor:
            losses.append((out - target).square().sum())
            return losses[-1]

        like = data["inputs"][0]
        pipeline = Pipeline(
            stages, {rank: module}, mesh, num_micro_batches=2, input_like=like, hidden_like=like, loss=loss
        )
        pipeline.run(**data)
        with torch.no_grad():
            pipeline.run(**data)
        return [one.item() for one in losses]


def test_an_output_in_another_order_of_memory_is_sent_all_the_same(pool: RankPool) -> None:
    _, expected = pool.run(_sent, 2, False)
    assert len(expected) == 4
    assert min(expected) > 0
    assert pool.run(_sent, 2, True)[1] == expected


@pytest.mark.parametrize(("kind", "late"), [("late", 1), ("late in evaluation", 0)])
def test_a_late_peer_is_an_error_that_names_the_axis(pool: RankPool, kind: str, late: int) -> None:
    results = pool.run(_fail, 2, kind)
    assert results[1 - late][0] == CollectiveError.__name__
    assert "'pipeline' axis (ranks 0, 1)" in results[1 - late][1]


@pytest.mark.parametrize(
    ("kind", "texts"),
    [
        ("lengths", ["needs as many inputs, all of one shape; got 2 of (3, 6), (4, 6)"]),
        ("number", ["a pipeline of 2 micro-batches needs as many inputs, all of one shape; got 3 of (3, 6)"]),
        ("other lengths", ["inputs are (1, 6) of torch.float64, and input_like is (3, 6) of torch.float64"]),
        ("few", ["(1) must be at least 2, the number of stages, with pipeline_schedule", 'use "gpipe"']),
        ("one stage", ["the pipeline axis has 2 ranks and the stages are for 1", "modules are for the stages [1]"]),
        ("no module", ["modules are for the stages [], and those of this rank are [1]"]),
        (
            "ranks",
            [
                "num_micro_batches must be the same on all ranks of the pipeline axis; it is 2 on rank 0, 3 on rank 1",
                "input_like must be the same on all ranks",
            ],
        ),
    ],
)
def test_what_does_not_fit_is_refused_on_all_ranks(pool: RankPool, kind: str, texts: list[str]) -> None:
    for name, message, _ in pool.run(_fail, 2, kind):
        assert name == "ValueError"
        for text in texts:
            assert text in message


def _tied(rank: int, world: int) -> tuple[dict[str, Tensor], float]:
    with Mesh(make_plan(ParallelConfig(pipeline=3, data=2), world), rank, timeout_s=20) as mesh:
        at = mesh.axis("pipeline").index
        generator = torch.Generator().manual_seed(1)
        shared, own = torch.randn(5, 4, generator=generator), torch.randn(3, generator=generator)
        named = {f"layer{at}": nn.Parameter(own * (at + 1))}
        if at != 1:
            named["embed.weight"] = nn.Parameter(shared)
        placements = {name: TIED_EMBEDDING if name == "embed.weight" else DENSE for name in named}
        optimizer = Optimizer(named.items(), placements, mesh, AdamWConfig(gradient_clip=1.0))
        for name, parameter in named.items():
            parameter.grad = torch.full_like(parameter, float(rank + 1 if name == "embed.weight" else 1))
        norm = optimizer.step(0.1)
        return {name: parameter.detach().clone() for name, parameter in named.items()}, float(norm)


def test_a_tied_embedding_gets_the_gradients_of_both_ends_and_counts_once_in_the_norm(pool: RankPool) -> None:
    results = pool.run(_tied, 6)
    # Ranks 0, 1 have the embedding, 4 and 5 the head: 1 + 2 + 5 + 6 = 14 in each of 20 elements; 2 in 3 x 3 others.
    norm = math.sqrt(20 * 14.0**2 + 9 * 2.0**2)
    assert all(found == pytest.approx(norm, rel=1e-6) for _, found in results)
    copies = [weights["embed.weight"] for weights, _ in results if "embed.weight" in weights]
    assert len(copies) == 4
    assert all(torch.equal(copy, copies[0]) for copy in copies)
    assert not torch.equal(copies[0], torch.randn(5, 4, generator=torch.Generator().manual_seed(1)))


def test_deferred_weight_gradients_are_added_once_and_in_fp32_where_there_is_a_main_grad() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(4, 3, bias=False)
    x = torch.randn(2, 5, 4, requires_grad=True)
    layer(x).square().sum().backward()
    expected_x, expected = x.grad, layer.weight.grad
    x.grad, layer.weight.grad = None, None
    weights = WeightGradients()
    weights.of_linear_layers(layer)
    layer(x).square().sum().backward()
    first = weights.take()
    assert torch.equal(x.grad, expected_x)
    assert layer.weight.grad is None
    first()
    torch.testing.assert_close(layer.weight.grad, expected)
    first()  # nothing is left
    torch.testing.assert_close(layer.weight.grad, expected)
    layer(x).square().sum().backward()
    weights.take()()
    torch.testing.assert_close(layer.weight.grad, 2 * expected)
    layer.weight.grad, layer.weight.main_grad = None, torch.zeros(3, 4)
    layer(x).square().sum().backward()
    weights.take()()
    torch.testing.assert_close(layer.weight.main_grad, expected)
    assert layer.weight.grad is None
    with torch.no_grad():
        layer(x)
    weights.take()()
    torch.testing.assert_close(layer.weight.main_grad, expected)


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def test_layers_that_are_more_than_a_product_keep_their_gradients_in_the_backward() -> None:
    torch.manual_seed(0)
    plain = nn.Linear(4, 3)
    layers = [Scaled(4, 3), nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), plain]
    x = torch.randn(5, 4)
    weights = WeightGradients()
    for layer in layers[:2]:
        expected = layer(x)
        expected.sum().backward()
        gradients = [parameter.grad.clone() for parameter in layer.parameters()]
        layer.zero_grad()
        weights.of_linear_layers(layer)
        assert torch.equal(layer(x), expected)
        layer(x).sum().backward()
        assert all(map(torch.equal, [parameter.grad for parameter in layer.parameters()], gradients))
    weights.of_linear_layers(plain)
    with torch.autocast("cpu", torch.bfloat16):
        out = plain(x)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert plain.weight.grad is not None
    plain.weight.grad = None
    plain(x[0]).sum().backward()  # a single vector
    weights.take()()
    torch.testing.assert_close(plain.weight.grad, x[0].expand(3, 4))


def test_a_bias_gets_its_gradient_at_once() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(4, 3), torch.randn(5, 4)
    expected = layer(x)
    weights = WeightGradients()
    weights.of_linear_layers(layer)
    torch.testing.assert_close(layer(x), expected)
    layer(x).sum().backward()
    assert torch.equal(layer.bias.grad, torch.full((3,), 5.0))
    assert layer.weight.grad is None
