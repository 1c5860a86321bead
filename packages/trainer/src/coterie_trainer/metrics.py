"""What a run reports while it trains: a live line or plain lines, JSON lines in the run folder, and TensorBoard."""

import dataclasses
import importlib
import json
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

__all__ = ["METRICS_FILE", "EvaluationRecord", "Reporter", "StepRecord"]

METRICS_FILE = "metrics.jsonl"
"""Name of the file of JSON lines in the run folder."""


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One optimizer step, over all ranks.

    Attributes:
        step: Number of steps done, this one included.
        loss: Cross-entropy in nats per target token.
        balance_loss: Balance loss before its coefficient; 1.0 is even.
        z_loss: Router z-loss before its coefficient.
        gradient_norm: L2 norm of the gradient before clipping.
        learning_rate: Learning rate of the step.
        load_imbalance: Largest over mean load of an expert, in the worst layer; 1.0 is even.
        tokens: Tokens seen since the start of the run.
        tokens_per_second: Speed of all ranks together.
        data_wait_fraction: Share of the time that rank 0 waited for data, 0 to 1.
        remaining_s: Seconds left at this speed.
        bad_router_rows: Rows of router logits with a NaN or an infinity, over all layers; 0 in a sound run.
        rows_needed_max: Most rows that a rank needed in a layer since this process started, where buffers have a size.
        rows_dropped: Choices of experts that found no room and were left out, since this process started.
        replays: Times that gradients or an evaluation were computed again after buffers grew, since then too.
    """

    step: int
    loss: float
    balance_loss: float
    z_loss: float
    gradient_norm: float
    learning_rate: float
    load_imbalance: float
    tokens: int
    tokens_per_second: float
    data_wait_fraction: float
    remaining_s: float
    bad_router_rows: int = 0
    rows_needed_max: int = 0
    rows_dropped: int = 0
    replays: int = 0


@dataclass(frozen=True, kw_only=True)
class EvaluationRecord:
    """The held-out loss after ``step`` steps, in nats per target token, and in bits per byte of text.

    ``bits_per_byte`` is the loss in bits times the tokens per byte of the whole held-out split; it charges the few
    tokens that have no target (the first of each document) like the others.
    """

    step: int
    loss: float
    bits_per_byte: float


class Reporter:
    """Reports the progress of a run; for rank 0 only.

    On a terminal the last line is alive; elsewhere each record is one line of text. Every record also goes to
    ``metrics.jsonl`` at once. When a run goes on from step ``start_step``, the records of later steps are cut off, so
    that each step occurs once; so is a last line that a killed process left unfinished.

    Args:
        run_folder: Folder of the run; made if it is not there.
        total_steps: Steps of the whole run.
        start_step: Steps that are done already; -1 for a new run, which keeps no record of an attempt before it.
        tensorboard: Write TensorBoard events to ``run_folder/tensorboard`` if TensorBoard is installed.
        console: Where to print; None takes the standard output.
    """

    def __init__(
        self,
        run_folder: str | Path,
        total_steps: int,
        start_step: int = 0,
        tensorboard: bool = True,
        *,
        console: Console | None = None,
    ) -> None:
        self._total_steps = total_steps
        # Decided by the output alone: FORCE_COLOR, which rich takes for a terminal, is common where there is none.
        self._console = Console(force_terminal=sys.stdout.isatty()) if console is None else console
        folder = Path(run_folder)
        folder.mkdir(parents=True, exist_ok=True)
        _cut(folder / METRICS_FILE, start_step)
        self._file = open(folder / METRICS_FILE, "a", encoding="utf-8")  # noqa: SIM115 (closed by close)
        self._writer = _tensorboard_writer(folder / "tensorboard", start_step) if tensorboard else None
        self._live: Live | None = None
        if self._console.is_interactive:
            # Warnings go above the live line when both are on the terminal; a redirected stderr is left alone.
            self._live = Live(Text(), console=self._console, redirect_stderr=sys.stderr.isatty())
            self._live.start()

    def step(self, record: StepRecord) -> None:
        """Report one step."""
        self._write("step", record)
        line = step_line(record, self._total_steps)
        if self._live is not None:
            self._live.update(Text(line, no_wrap=True, overflow="ellipsis"))
        else:
            self.note(line)

    def evaluation(self, record: EvaluationRecord) -> None:
        """Report one evaluation."""
        self._write("evaluation", record)
        self.note(
            f"held-out after step {record.step}: loss {record.loss:.4f} | {record.bits_per_byte:.4f} bits per byte"
        )

    def note(self, text: str) -> None:
        """Print a line of text, above the live line if there is one."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
        self._console.file.flush()

    def close(self) -> None:
        """Leave the last live line on the terminal and close the files."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        self._file.close()
        if self._writer is not None:
            self._writer.close()

    def __enter__(self) -> "Reporter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write(self, kind: str, record: StepRecord | EvaluationRecord) -> None:
        values = dataclasses.asdict(record)
        # JSON has no NaN and no infinity; a strict reader gets null.
        strict = {key: value if math.isfinite(value) else None for key, value in values.items()}
        self._file.write(json.dumps({"kind": kind, **strict}, allow_nan=False) + "\n")
        self._file.flush()
        if self._writer is not None:
            for key, value in values.items():
                if key != "step":
                    self._writer.add_scalar(f"{kind}/{key}", value, record.step)
            self._writer.flush()


def step_line(record: StepRecord, total_steps: int) -> str:
    """Return the line that shows a step to a person."""
    dropped = [f"rows dropped so far {record.rows_dropped:,}"] if record.rows_dropped else []
    return " | ".join(
        [
            f"step {record.step:>{len(str(total_steps))}}/{total_steps}",
            f"loss {record.loss:.4f}",
            f"{record.tokens_per_second:,.0f} tokens/s",
            f"data wait {record.data_wait_fraction:.0%}",
            f"imbalance {record.load_imbalance:.2f}",
            f"grad norm {record.gradient_norm:.3f}",
            *dropped,
            f"left {_duration(record.remaining_s)}",
        ]
    )


def _duration(seconds: float) -> str:
    """Return a time span as "1d 02h", "2h 05m", "3m 20s" or "7s"."""
    if not math.isfinite(seconds):
        return "?"
    minutes, second = divmod(max(0, round(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02d}h"
    if hours:
        return f"{hours}h {minute:02d}m"
    return f"{minutes}m {second:02d}s" if minutes else f"{second}s"


def _cut(path: Path, start_step: int) -> None:
    """Keep the complete records up to ``start_step``; the file is replaced in one move."""
    if not path.is_file():
        return
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if line.endswith("\n") and isinstance(record, dict) and record.get("step", math.inf) <= start_step:
            kept.append(line)
    temporary = path.with_suffix(".incomplete")
    temporary.write_text("".join(kept), encoding="utf-8")
    os.replace(temporary, path)


def _tensorboard_writer(folder: Path, start_step: int) -> Any:
    """Return a TensorBoard writer that hides what an earlier process wrote of later steps; None if not installed."""
    try:
        tensorboard = importlib.import_module("torch.utils.tensorboard")
    except ImportError:
        return None
    return tensorboard.SummaryWriter(str(folder), purge_step=start_step + 1)
