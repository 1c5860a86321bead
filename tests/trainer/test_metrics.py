import dataclasses
import io
import json
import math
import sys
import types

import pytest
from coterie_trainer.metrics import METRICS_FILE, EvaluationRecord, Reporter, StepRecord
from rich.console import Console

RECORD = StepRecord(
    step=7,
    loss=3.14159,
    balance_loss=1.02,
    z_loss=0.5,
    gradient_norm=0.8125,
    learning_rate=1e-3,
    load_imbalance=1.333,
    tokens=57344,
    tokens_per_second=12345.6,
    data_wait_fraction=0.0149,
    remaining_s=200.0,
)
LINE = "step   7/500 | loss 3.1416 | 12,346 tokens/s | data wait 1% | imbalance 1.33 | grad norm 0.812 | left 3m 20s"
EVALUATION = EvaluationRecord(step=7, loss=2.5, bits_per_byte=1.25)


def plain_console():
    return Console(file=io.StringIO(), force_terminal=False, width=40)


def terminal(width=160):
    return Console(
        file=io.StringIO(), force_terminal=True, force_interactive=True, width=width, _environ={"TERM": "xterm"}
    )


def at_step(step):
    return dataclasses.replace(RECORD, step=step)


def read(folder):
    return [json.loads(line) for line in (folder / METRICS_FILE).read_text().splitlines()]


def steps(folder):
    return [(record["kind"], record["step"]) for record in read(folder)]


def test_without_a_terminal_each_record_is_one_plain_line(tmp_path):
    console = plain_console()
    with Reporter(tmp_path, 500, tensorboard=False, console=console) as reporter:
        reporter.step(RECORD)
        reporter.evaluation(EVALUATION)
        reporter.note("a [bold]note[/] of 100 %")
    assert console.file.getvalue().splitlines() == [
        LINE,
        "held-out after step 7: loss 2.5000 | 1.2500 bits per byte",
        "a [bold]note[/] of 100 %",
    ]


def test_on_a_terminal_the_last_line_is_alive(tmp_path):
    console = terminal()
    reporter = Reporter(tmp_path, 500, tensorboard=False, console=console)
    reporter.step(at_step(1))
    reporter.note("a note")
    reporter.step(RECORD)
    reporter.close()
    shown = console.file.getvalue()
    assert screen(shown) == ["a note", LINE]
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") == 1  # the cursor is hidden, and comes back


def test_the_live_line_fits_a_narrow_terminal(tmp_path):
    console = terminal(width=30)
    with Reporter(tmp_path, 500, tensorboard=False, console=console) as reporter:
        reporter.step(RECORD)
    assert screen(console.file.getvalue()) == [LINE[:29] + "…"]


def screen(output):
    """Play terminal output: the control sequences for the cursor and the line are obeyed, the others have no effect."""
    lines, row, i = [""], 0, 0
    while i < len(output):
        if output.startswith("\x1b[2K", i):
            lines[row], i = "", i + 4
        elif output.startswith("\x1b[1A", i):
            row, i = row - 1, i + 4
        elif output.startswith("\x1b[", i):
            i = next(end for end in range(i + 2, len(output)) if output[end].isalpha()) + 1
        elif output[i] == "\n":
            row, i = row + 1, i + 1
            if row == len(lines):
                lines.append("")
        else:
            lines[row], i = lines[row] + output[i].replace("\r", ""), i + 1
    return [line.rstrip() for line in lines if line.strip()]


def test_a_pipe_gets_plain_lines_even_where_colour_is_forced(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    with Reporter(tmp_path, 500, tensorboard=False) as reporter:
        reporter.step(RECORD)
    assert capsys.readouterr().out == LINE + "\n"


def test_every_number_is_in_the_file_before_the_next_step(tmp_path):
    reporter = Reporter(tmp_path / "run [1]", 500, tensorboard=False, console=plain_console())
    reporter.step(RECORD)
    assert read(tmp_path / "run [1]") == [{"kind": "step", **dataclasses.asdict(RECORD)}]
    reporter.evaluation(EVALUATION)
    assert read(tmp_path / "run [1]")[1:] == [{"kind": "evaluation", **dataclasses.asdict(EVALUATION)}]
    reporter.close()


def test_what_is_no_number_stays_json(tmp_path):
    with Reporter(tmp_path, 500, tensorboard=False, console=plain_console()) as reporter:
        reporter.step(dataclasses.replace(RECORD, loss=math.nan, gradient_norm=math.inf))
    (record,) = read(tmp_path)
    assert record == {"kind": "step", **dataclasses.asdict(RECORD), "loss": None, "gradient_norm": None}


def test_each_step_occurs_once_after_a_resume(tmp_path):
    with Reporter(tmp_path, 9, tensorboard=False, console=plain_console()) as reporter:
        for step in range(1, 6):
            reporter.step(at_step(step))
        reporter.evaluation(dataclasses.replace(EVALUATION, step=3))
        reporter.evaluation(dataclasses.replace(EVALUATION, step=5))
    with Reporter(tmp_path, 9, 3, tensorboard=False, console=plain_console()) as reporter:
        assert steps(tmp_path) == [("step", 1), ("step", 2), ("step", 3), ("evaluation", 3)]
        reporter.step(at_step(4))
    assert steps(tmp_path) == [("step", 1), ("step", 2), ("step", 3), ("evaluation", 3), ("step", 4)]
    with Reporter(tmp_path, 9, tensorboard=False, console=plain_console()):
        assert steps(tmp_path) == []


@pytest.mark.parametrize("cut", [1, 2, 40])
def test_a_last_line_that_was_not_finished_is_dropped(tmp_path, cut):
    with Reporter(tmp_path, 9, tensorboard=False, console=plain_console()) as reporter:
        for step in (1, 2, 3):
            reporter.step(at_step(step))
    path = tmp_path / METRICS_FILE
    path.write_bytes(path.read_bytes()[:-cut])
    with Reporter(tmp_path, 9, 3, tensorboard=False, console=plain_console()) as reporter:
        reporter.step(at_step(3))
    assert steps(tmp_path) == [("step", 1), ("step", 2), ("step", 3)]


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.4, "0s"),
        (59.4, "59s"),
        (59.6, "1m 00s"),
        (3599.0, "59m 59s"),
        (3600.0, "1h 00m"),
        (86399.0, "23h 59m"),
        (90000.0, "1d 01h"),
        (math.inf, "?"),
        (math.nan, "?"),
        (-1.0, "0s"),
    ],
)
def test_the_remaining_time(tmp_path, seconds, shown):
    console = plain_console()
    with Reporter(tmp_path, 9, tensorboard=False, console=console) as reporter:
        reporter.step(dataclasses.replace(RECORD, remaining_s=seconds))
    assert console.file.getvalue().endswith(f"| left {shown}\n")


class SummaryWriter:
    """Keeps what it is given, in the shape of TensorBoard's."""

    made = ()

    def __init__(self, log_dir, purge_step):
        self.log_dir, self.purge_step, self.scalars, self.closed = log_dir, purge_step, {}, False
        SummaryWriter.made = (*SummaryWriter.made, self)

    def add_scalar(self, tag, value, step):
        self.scalars[tag, step] = value

    def flush(self):
        pass

    def close(self):
        self.closed = True


def test_tensorboard_gets_the_same_numbers(tmp_path, monkeypatch):
    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    monkeypatch.setattr(SummaryWriter, "made", ())
    with Reporter(tmp_path, 9, 6, console=plain_console()) as reporter:
        reporter.step(RECORD)
        reporter.evaluation(EVALUATION)
    (writer,) = SummaryWriter.made
    assert (writer.log_dir, writer.purge_step, writer.closed) == (str(tmp_path / "tensorboard"), 7, True)
    expected = {(f"step/{key}", 7): value for key, value in dataclasses.asdict(RECORD).items() if key != "step"}
    assert writer.scalars == {**expected, ("evaluation/loss", 7): 2.5, ("evaluation/bits_per_byte", 7): 1.25}
    with Reporter(tmp_path, 9, tensorboard=False, console=plain_console()):
        assert len(SummaryWriter.made) == 1


def test_the_absence_of_tensorboard_is_silent(tmp_path, monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with Reporter(tmp_path, 500, console=plain_console()) as reporter:
        reporter.step(RECORD)
    assert not (tmp_path / "tensorboard").exists()
    assert capfd.readouterr() == ("", "")
