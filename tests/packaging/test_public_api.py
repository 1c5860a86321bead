"""The public names of each package are pinned; a change must be meant, and is one command."""

import importlib
from pathlib import Path

import pytest
from support.layers import ROOT
from support.public_api import differences, exported, main, modules_without_all, pinned_file

PACKAGES = sorted(file.parent.name for file in ROOT.glob("packages/*/pyproject.toml"))


@pytest.mark.parametrize("package", PACKAGES)
def test_public_names_are_the_pinned_ones(package: str) -> None:
    assert differences(package) == [], "if this is meant: python tests/support/public_api.py --update"


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_exists(package: str) -> None:
    module = importlib.import_module(f"coterie_{package}")
    names = pinned_file(package).read_text(encoding="utf-8").split()
    assert [name for name in names if not hasattr(module, name)] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_module_states_its_names(package: str) -> None:
    assert modules_without_all(ROOT / "packages" / package / "src") == []


def test_exported() -> None:
    assert exported('__all__ = ["b", "a"]\n') == ["a", "b"]
    assert exported("x = 1\n") is None


def test_module_without_all_is_seen(tmp_path: Path) -> None:
    for name, source in {
        "named.py": '__all__ = ["f"]\ndef f(): ...\n',
        "missing.py": "class C: ...\n",
        "_private.py": "def f(): ...\n",
        "only_private.py": "def _f(): ...\nX = 1\n",
        "__init__.py": "def f(): ...\n",
    }.items():
        (tmp_path / name).write_text(source, encoding="utf-8")
    assert modules_without_all(tmp_path) == ["__init__.py", "missing.py"]


def test_new_and_lost_names_differ_until_the_update(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    package = tmp_path / "packages" / "routing"
    module = package / "src" / "coterie_routing" / "__init__.py"
    module.parent.mkdir(parents=True)
    (package / "pyproject.toml").touch()
    module.write_text('__all__ = ["Router", "old"]\n', encoding="utf-8")
    assert main(["--update"], tmp_path) == 0
    assert main([], tmp_path) == 0
    module.write_text('__all__ = ["Router", "new"]\n', encoding="utf-8")
    capsys.readouterr()
    assert main([], tmp_path) == 1
    assert capsys.readouterr().out == "coterie_routing: + new\ncoterie_routing: - old\n"
    assert main(["--update"], tmp_path) == 0
    assert differences("routing", tmp_path) == []
