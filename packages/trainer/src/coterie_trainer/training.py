"""The training run: build, resume, loop, evaluate, save."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from coterie_export import ModelSpec
from coterie_parallel import (
    AdamWConfig,
    Chunk,
    Mesh,
    Optimizer,
    all_gather_objects,
    make_plan,
    make_stages,
)
from torch import Tensor

from coterie_trainer.checkpoint import Checkpoints, global_tensors
from coterie_trainer.config import Config, ConfigError, assignment, config_problems
from coterie_trainer.data.dataset import EvaluationBatches, Sequences, TrainBatches, has_tokens, open_split, prefetch
from coterie_trainer.fsdp import FsdpOptimizer, shard_model, sharded_tensors
from coterie_trainer.initialization import initialize
from coterie_trainer.launch import Process, StopRequest, distributed
from coterie_trainer.metrics import EvaluationRecord, Reporter, StepRecord
from coterie_trainer.model import build_model, placements
from coterie_trainer.run_folder import check_same_run, locked, write_run
from coterie_trainer.schedule import learning_rate
from coterie_trainer.step import PendingResult, Stepper, StepResult, evaluate

__all__ = ["Run", "train"]


def train(config: Config, process: Process, stop: StopRequest) -> None:
    """Train until ``config.train.steps``, from the last checkpoint of the run folder when there is one.

    Args:
        config: the whole run.
        process: this process among all of the run.
        stop: asks for an early end; the step in flight is finished and saved.

    Raises:
        ConfigError: the config has problems; all are listed.
        ValueError: the run folder holds another run, or the data does not fit.
    """
    problems = config_problems(config, process.world)
    if problems:
        raise ConfigError(problems)
    device = pick_device(config.device, process.local_rank)
    check_same_run(config)
    with ExitStack() as stack:
        if process.rank == 0:
            stack.enter_context(locked(config.run_folder))
        stack.enter_context(distributed(process, timeout_s=config.parallel.timeout_s, device=device))
        plan = make_plan(config.parallel, process.world, num_experts=config.model.num_experts, top_k=config.model.top_k)
        mesh = Mesh(plan, process.rank, timeout_s=config.parallel.timeout_s, device=device)
        with closing(Run(config, mesh, device)) as run:
            run.loop(stop)
        mesh.close()  # only after a good end: NCCL's farewell waits for peers, which may be gone after a fault


def pick_device(name: str, local_rank: int) -> torch.device:
    """Return the device of a process: its own GPU, or the CPU."""
    if name == "cuda" or (name == "auto" and torch.cuda.is_available()):
        if local_rank >= torch.cuda.device_count():
            raise ValueError(
                f"process {local_rank} of this machine has no GPU of its own, torch sees {torch.cuda.device_count()}; "
                'start fewer processes, or set device = "cpu"'
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")


class Run:
    """Everything of one rank: data, model, optimizer, checkpoints.

    Args:
        config: a config without problems.
        mesh: the named axes of ranks.
        device: where this rank computes.

    Attributes:
        steps_ahead: how many steps may be under way while the numbers of earlier ones are read.
    """

    def __init__(self, config: Config, mesh: Mesh, device: torch.device) -> None:
        self.config, self.mesh = config, mesh
        self.dtype = getattr(torch, config.dtype)
        train, data = config.train, mesh.axis("data")
        self.train_split = open_split(config.data.path, "train")
        has_held_out = has_tokens(config.data.path, "held_out")
        self.held_out_split = open_split(config.data.path, "held_out") if has_held_out else None
        self.batches = TrainBatches(
            self.train_split,
            config.data.sequence_length,
            sequences_per_step=train.sequences_per_step,
            sequences_per_micro_batch=train.sequences_per_micro_batch,
            data_index=data.index,
            data_size=data.size,
            seed=config.seed,
        )
        self.spec = model_spec(config, self.train_split)
        pipeline = mesh.axis("pipeline")
        self.stages = make_stages(config.parallel, self.spec.num_layers) if pipeline.size > 1 else None
        self.model = build_model(
            self.spec,
            expert_axis=mesh.axis("expert"),
            dispatcher=config.parallel.dispatcher,
            options=config.parallel.dispatch_options(),
            expert_backend=config.model.expert_backend,
            assignment=assignment(train),
            recompute=train.recompute,
            attention_backend=config.model.attention_backend,
            compiles=train.compile,
            stages=None if self.stages is None else self.stages.on_rank(pipeline.index),
            device=device,
            # FSDP2 keeps fp32 weights and gathers them in the dtype of the run.
            dtype=torch.float32 if config.parallel.data_parallel == "fsdp" else self.dtype,
        )
        initialize(self.model, seed=config.seed, std=config.model.init_std)
        self.placements = placements(self.model, self.stages)
        self.optimizer = self._optimizer()
        self.stepper = Stepper(self.model, self.optimizer, mesh, train, self.stages)
        self.checkpoints = Checkpoints(config.run_folder, mesh.axis("world"), pipeline, keep=config.checkpoint.keep)
        self.step = 0
        self.tokens_seen = 0
        # A GPU would idle while its host waits for the numbers of the newest step.
        self.steps_ahead = 1 if device.type == "cuda" else 0

    def loop(self, stop: StopRequest) -> None:
        """Run the steps that are left, with evaluations and checkpoints where the config wants them."""
        config, steps = self.config, self.config.train.steps
        # Rank 0 chooses: a network file system may show a new folder to some ranks later than to others.
        latest = all_gather_objects(self.checkpoints.latest_step(), self.mesh.axis("world"))[0]
        if latest is not None:
            self.load(latest)
        with self._reporter(is_new=latest is None) as reporter:
            note: Callable[[str], None] = reporter.note if reporter else lambda text: None
            if self.step >= steps:
                note(f"{config.run_folder} is complete at step {self.step}; raise train.steps to go on")
                return
            if latest is not None:
                note(f"going on from the checkpoint of step {latest}")
            elif config.train.evaluate_every:
                self._evaluate(reporter, stop)
            with prefetch(self.batches, self.step, steps, pin_memory=self.mesh.device.type == "cuda") as stream:
                clock = _Clock()
                on_the_way: deque[_Step] = deque()
                for batches in stream:
                    rate = self._rate()
                    pending = self.stepper.start(batches, learning_rate=rate, stop_requested=stop.requested)
                    self.step += 1
                    on_the_way.append(_Step(self.step, rate, pending, stream.waited_s))
                    evaluates = self.step == steps or _is_due(self.step, config.train.evaluate_every)
                    saves = self.step == steps or _is_due(self.step, config.checkpoint.every)
                    num_kept = 0 if evaluates or saves else self.steps_ahead
                    is_stopped = False
                    while len(on_the_way) > (0 if is_stopped else num_kept):
                        is_stopped |= self._take_in(on_the_way.popleft(), reporter, clock)
                    if evaluates:
                        self._evaluate(reporter, stop)
                    if saves or is_stopped:
                        self.save()
                    if is_stopped and self.step < steps:
                        note(f"interrupted: stopped after step {self.step}; start the same command again to go on")
                        return
            if stop.requested:
                note(f"interrupted: the run is complete at step {self.step}")

    def _take_in(self, step: "_Step", reporter: Reporter | None, clock: "_Clock") -> bool:
        """Count and report a step that has ended; return whether any rank was asked to stop."""
        result = step.pending.read()
        self.tokens_seen += result.num_tokens
        clock.add(result.num_tokens, step.waited_s)
        self._show_notes(reporter)
        is_last = self.step == self.config.train.steps or result.stop_requested
        if reporter and (step.number % self.config.log.every == 0 or is_last):
            reporter.step(self._record(step, result, clock))
        return result.stop_requested

    def close(self) -> None:
        """Give up the buffers that the model shares with other ranks; after an error too."""
        self.model.close()

    def tensors(self) -> dict[str, Tensor | Chunk]:
        """Return all that a checkpoint holds, under global names, sharing memory with the live state."""
        self.optimizer.wait_for_weights()
        found: dict[str, Tensor | Chunk]
        if isinstance(self.optimizer, FsdpOptimizer):
            shards = sharded_tensors(self.model, self.mesh, self.dtype)
            found = {f"model/{name}": tensor for name, tensor in shards.items()}
        else:
            local = {f"model/{name}": tensor for name, tensor in self.model.state_dict().items()}
            found = global_tensors(local, self.placements, self.mesh.axis("expert"))
        found.update(self.optimizer.global_state())
        found["trainer/load_LE"] = self.stepper.load_LE
        found["trainer/tokens_seen"] = torch.tensor(self.tokens_seen)
        return found

    def save(self) -> None:
        """Write a checkpoint of the present step."""
        self.checkpoints.save(self.step, self.tensors())

    def load(self, step: int) -> None:
        """Restore model, optimizer and counters from the checkpoint of ``step``."""
        tensors = self.tensors()
        self.checkpoints.load(step, tensors)
        # The optimizer's tensors were filled in place; this rewrites the parameters from its main weights.
        self.optimizer.load_state_dict(self.optimizer.state_dict())
        load_LE, tokens_seen = tensors["trainer/load_LE"], tensors["trainer/tokens_seen"]
        assert isinstance(load_LE, Tensor)
        assert isinstance(tokens_seen, Tensor)
        self.stepper.load_LE, self.tokens_seen = load_LE, int(tokens_seen)
        self.step = step

    def _optimizer(self) -> Optimizer | FsdpOptimizer:
        """Return what sums gradients and updates the weights, which are laid out for that first."""
        settings = adamw_config(self.config)
        if self.config.parallel.data_parallel == "fsdp":
            shard_model(self.model, self.mesh, dtype=self.dtype)
            return FsdpOptimizer(self.model, self.mesh, settings, dtype=self.dtype)
        return Optimizer(self.model.named_parameters(), self.placements, self.mesh, settings)

    def _rate(self) -> float:
        optimizer = self.config.optimizer
        return learning_rate(
            self.step,
            steps=self.config.train.steps,
            peak=optimizer.learning_rate,
            warmup_steps=optimizer.warmup_steps,
            schedule=optimizer.schedule,
            decay_steps=optimizer.decay_steps,
            final_fraction=optimizer.final_fraction,
        )

    def _evaluate(self, reporter: Reporter | None, stop: StopRequest) -> None:
        split, train, data = self.held_out_split, self.config.train, self.mesh.axis("data")
        if split is None:
            return
        batches = EvaluationBatches(
            split,
            self.config.data.sequence_length,
            sequences_per_micro_batch=train.sequences_per_micro_batch,
            data_index=data.index,
            data_size=data.size,
            limit=train.evaluate_sequences,
        )
        loss = evaluate(
            self.model,
            batches,
            self.mesh,
            lambda: stop.requested,
            self.stepper.capacity,
            self.stepper.runner,
            num_micro_batches=train.sequences_per_step // (data.size * train.sequences_per_micro_batch),
        )
        self._show_notes(reporter)
        if loss is None:  # asked to stop: the loop ends with its next step
            return
        tokens_per_byte = split.num_tokens / split.num_bytes
        if reporter:
            reporter.evaluation(
                EvaluationRecord(step=self.step, loss=loss, bits_per_byte=loss / math.log(2) * tokens_per_byte)
            )

    def _show_notes(self, reporter: Reporter | None) -> None:
        for text in self.stepper.capacity.take_notes():
            if reporter:
                reporter.note(text)

    def _record(self, step: "_Step", result: StepResult, clock: "_Clock") -> StepRecord:
        tokens_per_second, data_wait_fraction, step_s = clock.read()
        return StepRecord(
            step=step.number,
            loss=result.loss,
            balance_loss=result.balance_loss,
            z_loss=result.z_loss,
            gradient_norm=result.gradient_norm,
            learning_rate=step.rate,
            load_imbalance=result.load_imbalance,
            tokens=self.tokens_seen,
            bad_router_rows=result.bad_router_rows,
            rows_needed_max=self.stepper.capacity.rows_needed_max,
            rows_dropped=self.stepper.capacity.rows_dropped,
            replays=self.stepper.capacity.num_replays,
            tokens_per_second=tokens_per_second,
            data_wait_fraction=data_wait_fraction,
            remaining_s=step_s * (self.config.train.steps - step.number),
        )

    @contextmanager
    def _reporter(self, *, is_new: bool) -> Iterator[Reporter | None]:
        """Open the reporter on rank 0; other ranks report nothing."""
        if self.mesh.axis("world").index != 0:
            yield None
            return
        write_run(self.config, self.spec)
        reporter = Reporter(
            Path(self.config.run_folder),
            total_steps=self.config.train.steps,
            start_step=-1 if is_new else self.step,  # -1: not even an evaluation before the first step stays
            tensorboard=self.config.log.tensorboard,
        )
        try:
            yield reporter
        finally:
            reporter.close()


class _Step(NamedTuple):
    """A step whose numbers may still be on their way, its learning rate, and the time waited for data until then."""

    number: int
    rate: float
    pending: PendingResult
    waited_s: float


class _Clock:
    """Times the steps since the last reading."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._waited_at_start = self._waited = 0.0
        self._tokens = self._steps = 0

    def add(self, num_tokens: int, waited_s: float) -> None:
        """Count one step; ``waited_s`` is the total time waited for data so far."""
        self._tokens += num_tokens
        self._steps += 1
        self._waited = waited_s

    def read(self) -> tuple[float, float, float]:
        """Return tokens per second, the share of time spent waiting for data, and seconds per step; start anew."""
        now = time.perf_counter()
        elapsed = max(now - self._start, 1e-9)
        reading = self._tokens / elapsed, (self._waited - self._waited_at_start) / elapsed, elapsed / self._steps
        self._start, self._waited_at_start = now, self._waited
        self._tokens = self._steps = 0
        return reading


def model_spec(config: Config, split: Sequences) -> ModelSpec:
    """Return the spec of the model that a config and its data ask for."""
    return config.model.to_spec(split.vocab_size, config.data.sequence_length, split.eos_id)


def adamw_config(config: Config) -> AdamWConfig:
    """Return the optimizer settings in the form of coterie-parallel."""
    return config.optimizer.to_adamw()


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
