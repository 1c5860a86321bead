"""Run the stages of this rank in the order that a schedule of `torch.distributed.pipelining` gives."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NoReturn

import torch
from torch import Tensor, nn

from coterie_parallel.collectives import (
    CollectiveError,
    all_gather_objects,
    end_waits,
    start_receive,
    start_send,
)
from coterie_parallel.mesh import Mesh
from coterie_parallel.pipeline.deferred import WeightGradients
from coterie_parallel.pipeline.failure import failures_told, tell_failure
from coterie_parallel.pipeline.stages import SCHEDULES, Stages, micro_batch_problems

__all__ = ["Pipeline"]


class Pipeline:
    """The stages of this rank and their schedule, for micro-batches of one number and one shape.

    Args:
        stages: of the whole model.
        modules: by index, those of this rank. Each takes one tensor, the input of the model or what the stage before
            returned, and keyword arguments of its own rank, and returns one tensor.
        mesh: all ranks of its pipeline axis must construct and run together.
        num_micro_batches: that flow through in one run.
        input_like: an input of the model for one micro-batch; only shape and dtype count.
        hidden_like: what every stage returns for one micro-batch, likewise.
        loss: makes of the output of the last stage and of a target a scalar, of which `run` takes the gradient; nothing
            is divided by the number of micro-batches.
        weights: collects the weight gradients that the modules leave for later. The schedules that defer these need it;
            with the others they are computed right after each backward.

    Raises:
        ValueError: on all ranks, with everything that does not fit on any of them: fewer than two ranks, modules of
            other stages, a number of micro-batches that the schedule can not run, no place for weight gradients that it
            defers, or ranks that disagree in numbers, shapes or dtypes.
    """

    def __init__(
        self,
        stages: Stages,
        modules: Mapping[int, nn.Module],
        mesh: Mesh,
        *,
        num_micro_batches: int,
        input_like: Tensor,
        hidden_like: Tensor,
        loss: Callable[[Tensor, Tensor], Tensor],
        weights: WeightGradients | None = None,
    ) -> None:
        schedule = SCHEDULES[stages.schedule]
        self._axis = axis = mesh.axis("pipeline")
        self._local = local = stages.on_rank(axis.index)
        self._input_like, self._hidden_like = _meta(input_like), _meta(hidden_like)
        problems = micro_batch_problems(stages.schedule, stages.num_ranks, len(stages.stages), num_micro_batches)
        if axis.size != stages.num_ranks or axis.size < 2:
            problems.append(
                f"the pipeline axis has {axis.size} ranks and the stages are for {stages.num_ranks}; both must be the "
                "same number of at least 2"
            )
        if schedule.defers_weights and weights is None:
            problems.append(f'pipeline_schedule ("{stages.schedule}") defers weight gradients; pass weights=')
        wanted = [stage.index for stage in local]
        if sorted(modules) != wanted:
            problems.append(f"modules are for the stages {sorted(modules)}, and those of this rank are {wanted}")
        problems += self._disagreements(problems, num_micro_batches)
        if problems:
            raise ValueError("\n".join(problems))
        from torch.distributed import pipelining

        from coterie_parallel.pipeline.torch_stage import WatchedStage

        self.num_micro_batches = num_micro_batches
        self._rank_of = {stage.index: stage.rank for stage in stages.stages}
        self._modules = {index: _Checked(module, index, self._hidden_like) for index, module in modules.items()}
        self._loss, self._device = loss, mesh.device
        self._defers = weights is not None
        self._has_first = any(stage.is_first for stage in local)
        self._has_last = any(stage.is_last for stage in local)
        self._failure: BaseException | None = None
        self._has_failed = False
        self._backwards_left = 0
        self._num_backwards = num_micro_batches * len(local)
        self._around_last: Callable[[], AbstractContextManager[None]] = nullcontext
        self._torch_stages = [
            WatchedStage(
                self._modules[stage.index],
                stage.index,
                len(stages.stages),
                mesh.device,
                input_args=self._input_like if stage.is_first else self._hidden_like,
                output_args=self._hidden_like,
                group=axis.group,
                dw_builder=None if weights is None else weights.take,
            )
            for stage in local
        ]
        for one in self._torch_stages:
            one.around_backward = self._around_backward
            one.on_failure = self._note
        make = getattr(pipelining, schedule.class_name)
        self._schedule = make(
            self._torch_stages[0] if schedule.stages_per_rank == 1 else self._torch_stages,
            num_micro_batches,
            loss_fn=self._loss_of,
            scale_grads=False,
        )

    def run(
        self,
        inputs: Sequence[Tensor],
        targets: Sequence[Tensor],
        *,
        around_last_backward: Callable[[], AbstractContextManager[None]] = nullcontext,
        **others: Sequence[Tensor],
    ) -> None:
        """Run forward and, where gradients are enabled, backward of all micro-batches.

        Args:
            inputs: of the model, one for each micro-batch, all of one shape; the same on all ranks of the axis.
            targets: for the loss, likewise.
            around_last_backward: entered around the backward after which no gradient of this rank comes; not where
                weight gradients are left for later, as then there is none.
            others: keyword arguments of the modules, one tensor for each micro-batch.

        Raises:
            ValueError: another number of micro-batches than this was made for, or another shape or dtype, of inputs or
                of what a stage returns; or a run before this one has failed.
            CollectiveError: a peer raised, with what it raised; or died, or was late. With gloo a peer that raises is
                known at once; a GPU waits for the time-out of its group, or for the launcher to end it.
        """
        if self._has_failed:
            raise ValueError(
                "this pipeline failed in an earlier run, and its connections are closed; build a new Mesh and a new "
                "Pipeline on all its ranks"
            )
        for name, tensors in {"inputs": inputs, "targets": targets, **others}.items():
            shapes = list(dict.fromkeys(tuple(one.shape) for one in tensors))
            if len(tensors) != self.num_micro_batches or len(shapes) != 1:
                raise ValueError(
                    f"a pipeline of {self.num_micro_batches} micro-batches needs as many {name}, all of one shape; got "
                    f"{len(tensors)}" + (f" of {', '.join(map(str, shapes))}" if shapes else "")
                )
        if not _is_like(inputs[0], self._input_like):
            raise ValueError(f"inputs are {_described(inputs[0])}, and input_like is {_described(self._input_like)}")
        try:
            if torch.is_grad_enabled():
                self._around_last = around_last_backward
                self._run_schedule(inputs, targets, others)
            else:
                self._run_forward(inputs, targets, others)
        except Exception as error:
            self._fail(error)

    def _run_schedule(
        self, inputs: Sequence[Tensor], targets: Sequence[Tensor], others: Mapping[str, Sequence[Tensor]]
    ) -> None:
        self._backwards_left = self._num_backwards
        with self._noting():
            arguments = [torch.cat(list(inputs))] if self._has_first else []
            target = torch.cat(list(targets)) if self._has_last else None
            joined = {name: torch.cat(list(tensors)) for name, tensors in others.items()}
        self._schedule.step(*arguments, target=target, return_outputs=False, **joined)

    def _run_forward(
        self, inputs: Sequence[Tensor], targets: Sequence[Tensor], others: Mapping[str, Sequence[Tensor]]
    ) -> None:
        """Run all micro-batches through one stage after the other: torch's runtime can not do it for all schedules."""
        arrived: Sequence[Tensor] = inputs
        sends = []
        for stage in self._local:
            source, to = (self._rank_of.get(stage.index + step) for step in (-1, 1))
            receives = []
            if source is not None and source != self._axis.index:
                arrived = [
                    torch.empty(self._hidden_like.shape, dtype=self._hidden_like.dtype, device=self._device)
                    for _ in range(self.num_micro_batches)
                ]
                receives = [start_receive(one, self._axis, source=source) for one in arrived]
            left = []
            for number, x in enumerate(arrived):
                if receives:
                    receives[number].wait()
                with self._noting():
                    out = self._modules[stage.index](x, **{name: tensors[number] for name, tensors in others.items()})
                if stage.is_last:
                    self._loss_of(out, targets[number])
                elif to != self._axis.index:
                    assert to is not None
                    sends.append((out, start_send(out, self._axis, to=to)))  # the tensor must live until it is sent
                else:
                    left.append(out)
            arrived = left
        for _, pending in sends:
            pending.wait()

    def _disagreements(self, problems: list[str], num_micro_batches: int) -> list[str]:
        """Return what is wrong on other ranks, and in what the ranks differ; all of the axis call."""
        own = {
            "num_micro_batches": str(num_micro_batches),
            "input_like": _described(self._input_like),
            "hidden_like": _described(self._hidden_like),
        }
        everywhere = all_gather_objects((problems, own), self._axis)
        found = [
            f"rank {rank}: {text}"
            for rank, (others, _) in zip(self._axis.ranks, everywhere, strict=True)
            for text in others
            if text not in problems
        ]
        for name in own:
            values = {rank: one[name] for rank, (_, one) in zip(self._axis.ranks, everywhere, strict=True)}
            if len(set(values.values())) > 1:
                said = ", ".join(f"{value} on rank {rank}" for rank, value in values.items())
                found.append(f"{name} must be the same on all ranks of the pipeline axis; it is {said}")
        return found

    def _loss_of(self, out: Tensor, target: Tensor) -> Tensor:
        with self._noting():
            return self._loss(out, target)

    @contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._note(error)
            raise

    def _note(self, error: BaseException) -> None:
        """Keep what a computation of this rank raised: torch raises another error in its place."""
        self._failure = self._failure or error

    def _fail(self, error: Exception) -> NoReturn:
        """End the waits of the peers, and raise what a computation of this rank raised, else what a peer did."""
        axis, failure = self._axis, self._failure
        self._failure, self._has_failed = None, True
        if failure is not None:
            tell_failure(failure, axis)
        end_waits(axis)
        if failure is not None:
            raise failure from failure.__cause__
        # What no computation raised comes from sends and receives.
        told = failures_told(axis) or [f"a peer stopped, died or was later than the time-out. {error}"]
        raise CollectiveError(
            f"a send or receive on the {axis.name!r} axis (ranks {', '.join(map(str, axis.ranks))}) failed on rank "
            f"{axis.ranks[axis.index]}: {'; '.join(told)}"
        ) from error

    def _around_backward(self) -> AbstractContextManager[None]:
        self._backwards_left -= 1
        is_last = self._backwards_left == 0 and not self._defers
        return self._around_last() if is_last else nullcontext()


class _Checked(nn.Module):
    """A stage that returns what was declared: a peer waits for as many bytes, and takes whatever comes."""

    def __init__(self, module: nn.Module, index: int, like: Tensor) -> None:
        super().__init__()
        self._module, self._index, self._like = module, index, like

    def forward(self, x: Tensor, **others: Tensor) -> Tensor:
        """Return the output of the stage, contiguous."""
        out: Tensor = self._module(x, **others)
        if not _is_like(out, self._like):
            given, declared = _described(out), _described(self._like)
            raise ValueError(f"stage {self._index} returned {given}, and hidden_like is {declared}")
        return out.contiguous()


def _is_like(one: Tensor, like: Tensor) -> bool:
    return isinstance(one, Tensor) and one.shape == like.shape and one.dtype == like.dtype


def _described(one: Tensor) -> str:
    return f"{tuple(one.shape)} of {one.dtype}" if isinstance(one, Tensor) else f"no tensor but {type(one).__name__}"


def _meta(like: Tensor) -> Tensor:
    # What requires no gradient gets none sent.
    return torch.empty(like.shape, dtype=like.dtype, device="meta", requires_grad=like.is_floating_point())
