"""The package as a user meets it: README, import, and no collective without an explicit group."""

import ast
import subprocess
import sys
from pathlib import Path

import coterie_parallel
import pytest

SOURCE = Path(coterie_parallel.__file__).parent
README = Path(__file__).parents[2] / "packages/parallel/README.md"


def test_the_example_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    code, rest = README.read_text(encoding="utf-8").split("```python\n")[1].split("```\n", 1)
    printed = rest.split("```text\n")[1].split("```\n")[0]
    exec(compile(code, str(README), "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out == printed


def test_import_prints_nothing_and_takes_nothing_but_torch() -> None:
    code = (
        "import sys, torch, torch.distributed\n"
        "before = set(sys.modules)\n"
        "import coterie_parallel, coterie_parallel.conformance\n"
        "own = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "assert own <= {'coterie_parallel', 'torch'} | set(sys.stdlib_module_names), own\n"
        "assert not torch.distributed.is_initialized()\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_every_public_name_is_there_and_documented() -> None:
    for name in coterie_parallel.__all__:
        value = getattr(coterie_parallel, name)
        assert callable(value) is False or value.__doc__, name


def test_no_collective_uses_the_default_group() -> None:
    # P20: a group that is not named is the wrong one as soon as there is a second axis.
    calls = []
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("dist."):
                calls.append((path.name, ast.unparse(node.func), [keyword.arg for keyword in node.keywords]))
    collectives = [call for call in calls if call[0] == "collectives.py"]
    assert len(collectives) >= 6
    assert all("group" in keywords for _, _, keywords in collectives), collectives
    # `local_ranks` starts and ends the processes of a command, and makes no call in between.
    others = {(path, function) for path, function, _ in calls if path not in ("collectives.py", "local_ranks.py")}
    assert others == {
        ("mesh.py", f"dist.{name}")
        for name in ("new_group", "destroy_process_group", "is_initialized", "get_world_size", "get_rank")
    }
    (new_group,) = [keywords for _, function, keywords in calls if function == "dist.new_group"]
    assert {"timeout", "group_desc"} <= set(new_group)
