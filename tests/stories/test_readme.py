"""The examples of the README files run, and print what is written under them."""

import re
from pathlib import Path

import pytest
from support.ranks import run_ranks

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"```python\n(.*?)```(?:\n\n(?:[^\n`]+\n\n)?```text\n(.*?)```)?", re.DOTALL)
EXAMPLES = [
    pytest.param(*match.groups(), id=f"{path.parent.name}-{number}")
    for path in (ROOT / "README.md", ROOT / "packages" / "trainer" / "README.md")
    for number, match in enumerate(BLOCK.finditer(path.read_text(encoding="utf-8")))
]


@pytest.mark.parametrize(("code", "output"), EXAMPLES)
def test_the_example_runs(
    code: str, output: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    if output is not None:
        assert printed == output


def _parallel_examples() -> list[tuple[str, str]]:
    return BLOCK.findall((ROOT / "packages" / "parallel" / "README.md").read_text(encoding="utf-8"))


def test_the_examples_of_the_parallel_package_run_one_after_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    for code, output in _parallel_examples():
        exec(compile(code, "README.md", "exec"), names)
        assert capsys.readouterr().out == output


def _optimizer_example(rank: int, world: int) -> list[tuple[object, ...]]:
    printed: list[tuple[object, ...]] = []
    names: dict[str, object] = {"print": lambda *values: printed.append(values)}
    for code, _ in _parallel_examples()[1:]:
        exec(compile(code.replace("rank, world = 0, 1", f"rank, world = {rank}, {world}"), "README.md", "exec"), names)
    return printed


def test_the_optimizer_example_runs_on_two_ranks_too() -> None:
    for rank, (_, last_loss, replicas, chunk) in enumerate(run_ranks(_optimizer_example, 2)):
        assert re.match(rf"loss of rank {rank} 0\.\d, ", str(last_loss[0]))
        assert replicas == ("replicas:", [])
        assert chunk == (f"offsets of rank {rank}: ({128 * rank},) of (256,), step 100",)
