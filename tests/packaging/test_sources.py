"""Rules for the files of the repository: size, versions, licences, no lock file, no address of an index."""

import re
import subprocess
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from support.layers import ROOT

PACKAGES = sorted(file.parent for file in ROOT.glob("packages/*/pyproject.toml"))
MOST_LINES = 500
# In brackets, so that this file does not match itself.
INDEX_ADDRESS = re.compile(r"py[p]i\.org|pythonhoste[d]|download\.pytorc[h]|https?://\S+/simpl[e]\b|index-ur[l]")


def tracked_files() -> list[Path]:
    """Return the files under version control, and those that would be added to it."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


FILES = tracked_files()


def newest_entry(changelog: str) -> str | None:
    """Return the version in the first second-level heading of a changelog."""
    matched = re.search(r"^## \[?(\d+\.\d+\.\d+\S*?)\]?(?: .*)?$", changelog, re.MULTILINE)
    return matched.group(1) if matched else None


def test_no_source_file_is_long() -> None:
    sources = [file for file in FILES if file.suffix in (".py", ".sh", ".toml") or file == ROOT / ".ci" / "run"]
    assert ROOT / "noxfile.py" in sources
    lines = {str(file.relative_to(ROOT)): len(file.read_text(encoding="utf-8").splitlines()) for file in sources}
    assert {name: count for name, count in lines.items() if count > MOST_LINES} == {}


def test_no_index_address() -> None:
    assert INDEX_ADDRESS.search("--extra-index-" + "url x")
    assert INDEX_ADDRESS.search("https://mirror.example/" + "simple")
    assert not INDEX_ADDRESS.search("https://example.org/a-simple-page, pip install from PyPI")
    named = [
        str(file.relative_to(ROOT))
        for file in FILES
        if INDEX_ADDRESS.search(file.read_bytes().decode("utf-8", errors="ignore"))
    ]
    assert named == []


def test_no_lock_file_is_tracked() -> None:
    assert [file.name for file in FILES if file.name == "uv.lock"] == []


def test_root_is_a_virtual_workspace_of_five() -> None:
    root = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "project" not in root
    assert "build-system" not in root
    assert root["tool"]["uv"]["workspace"]["members"] == ["packages/*"]
    assert [package.name for package in PACKAGES] == ["experts", "export", "parallel", "routing", "trainer"]


@pytest.mark.parametrize(
    ("changelog", "version"),
    [
        ("# C\n\n## 0.2.0\n\n- New.\n\n## 0.1.0\n", "0.2.0"),
        ("## 1.0.0rc1 (2026-01-02)\n## 0.9.0", "1.0.0rc1"),
        ("## [0.3.1] - 2026-01-02\n", "0.3.1"),
        ("# Changes\n\nnone yet\n", None),
    ],
)
def test_newest_entry(changelog: str, version: str | None) -> None:
    assert newest_entry(changelog) == version


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_version_is_the_newest_in_the_changelog(package: Path) -> None:
    project = tomllib.loads((package / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert newest_entry((package / "CHANGELOG.md").read_text(encoding="utf-8")) == project["version"]


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_package_folder_is_complete(package: Path) -> None:
    project = tomllib.loads((package / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["name"] == f"coterie-{package.name}"
    assert project["license"] == "Apache-2.0"
    assert (package / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert (package / "src" / f"coterie_{package.name}" / "py.typed").is_file()
    assert len((package / "README.md").read_text(encoding="utf-8").splitlines()) > 5


def test_test_folders_hide_no_installed_library() -> None:
    # tests/ comes first on the path: a folder that is a Python package hides a library of the same name. For that
    # reason tests/packaging has no __init__.py: there is a library named packaging, and pytest needs it.
    folders = {file.parent.name for file in (ROOT / "tests").glob("*/__init__.py")}
    assert folders & set(packages_distributions()) == set()
    assert "packaging" not in folders
