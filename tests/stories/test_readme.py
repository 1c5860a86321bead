"""The examples of the README files run, and print what is written under them."""

import re
from pathlib import Path

import pytest

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
