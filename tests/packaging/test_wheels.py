"""The check of the built wheels passes a good one and names what is wrong with a bad one."""

import io
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.wheels import archive_faults, projects, wheel_faults

Files = dict[str, str]

INFORMATION = "coterie_hub-0.2.0.dist-info"
METADATA = """Metadata-Version: 2.4
Name: coterie-hub
Version: 0.2.0
License-Expression: Apache-2.0
Requires-Dist: torch>=2.10
Requires-Dist: coterie-leaf<0.2,>=0.1
Provides-Extra: fast
Requires-Dist: quick>=1; extra == 'fast'
Description-Content-Type: text/markdown

# coterie-hub

What it is.
"""


@pytest.fixture
def workspace(tmp_path: Path) -> dict[str, dict[str, Any]]:
    (tmp_path / "README.md").write_text("# coterie-hub\n\nWhat it is.\n", encoding="utf-8")
    hub = {
        "name": "coterie-hub",
        "version": "0.2.0",
        "dependencies": ["torch>=2.10", "coterie-leaf>=0.1,<0.2"],
        "optional-dependencies": {"fast": ["quick>=1"]},
        "scripts": {"hub": "coterie_hub:main"},
        "folder": tmp_path,
    }
    return {"coterie-hub": hub, "coterie-leaf": {"name": "coterie-leaf", "version": "0.1.3", "dependencies": []}}


def good() -> Files:
    return {
        "coterie_hub/__init__.py": "",
        "coterie_hub/py.typed": "",
        f"{INFORMATION}/METADATA": METADATA,
        f"{INFORMATION}/licenses/LICENSE": "",
        f"{INFORMATION}/entry_points.txt": "",
    }


def without(name: str) -> Callable[[Files], Files]:
    return lambda files: {file: text for file, text in files.items() if file != name}


def stating(old: str, new: str) -> Callable[[Files], Files]:
    assert old in METADATA
    return lambda files: files | {f"{INFORMATION}/METADATA": METADATA.replace(old, new)}


@pytest.mark.parametrize(
    ("change", "faults"),
    [
        (lambda files: files, []),
        (without("coterie_hub/py.typed"), ["coterie_hub/py.typed is missing"]),
        (without(f"{INFORMATION}/licenses/LICENSE"), [f"{INFORMATION}/licenses/LICENSE is missing"]),
        (without(f"{INFORMATION}/entry_points.txt"), ["its commands are missing"]),
        (lambda files: files | {"tests/test_it.py": ""}, ["tests/test_it.py does not belong in it"]),
        (stating("What it is.", ""), ["the README is not its description"]),
        (stating("Apache-2.0", "MIT"), ["License-Expression is MIT, not Apache-2.0"]),
        (stating("Provides-Extra: fast\n", ""), ["Provides-Extra is None, not ['fast']"]),
        (
            stating("coterie-leaf<0.2,>=0.1", "coterie-leaf"),
            ["Requires-Dist coterie-leaf is no range with both ends"],
        ),
        (
            stating("coterie-leaf<0.2,>=0.1", "coterie-leaf>=0.1"),
            ["Requires-Dist coterie-leaf>=0.1 is no range with both ends"],
        ),
        (
            stating("coterie-leaf<0.2,>=0.1", "coterie-leaf<0.1.3,>=0.1"),
            ["Requires-Dist coterie-leaf<0.1.3,>=0.1 excludes 0.1.3 built here"],
        ),
        (
            stating("Requires-Dist: coterie-leaf<0.2,>=0.1\n", ""),
            ["Requires-Dist names coterie-leaf 0 times"],
        ),
    ],
)
def test_wheel(
    tmp_path: Path, workspace: dict[str, dict[str, Any]], change: Callable[[Files], Files], faults: list[str]
) -> None:
    wheel = tmp_path / "it.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in change(good()).items():
            archive.writestr(name, text)
    assert wheel_faults(wheel, "coterie-hub", workspace) == faults


@pytest.mark.parametrize("missing", [None, "LICENSE", "README.md", "CHANGELOG.md", "src/coterie_hub/__init__.py"])
def test_archive(tmp_path: Path, workspace: dict[str, dict[str, Any]], missing: str | None) -> None:
    names = {"LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml", "src/coterie_hub/__init__.py"} - {missing}
    path = tmp_path / "it.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name in sorted(names):
            archive.addfile(tarfile.TarInfo(f"coterie_hub-0.2.0/{name}"), io.BytesIO())
    assert archive_faults(path, "coterie-hub", workspace) == ([f"{missing} is missing"] if missing else [])


def test_workspace_projects_are_the_five() -> None:
    names = {"coterie-experts", "coterie-export", "coterie-parallel", "coterie-routing", "coterie-trainer"}
    assert set(projects()) == names
