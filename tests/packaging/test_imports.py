"""Each package imports in silence and in seconds, without the optional libraries; a bad import is seen."""

import sys
from pathlib import Path

import pytest
from support.imports import OPTIONAL, import_faults
from support.layers import HUB, rules

OF_THE_HUB = ("tokenizers", "pyarrow", "rich")


@pytest.mark.parametrize("module", sorted(rules()))
def test_import_is_silent_and_quick(module: str) -> None:
    lazy = OPTIONAL if module == HUB else (*OPTIONAL, *OF_THE_HUB)
    assert import_faults(sys.executable, module, lazy=lazy) == []


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("print('hello')", "import bad printed:\nhello"),
        ("import sys; print('hello', file=sys.stderr)", "import bad printed:\nhello"),
        ("import warnings; warnings.warn('old')", "import bad failed with exit code 1"),
        ("import no_such_library", "import bad failed with exit code 1"),
        ("import time; time.sleep(60)", "import bad did not end within 6 s"),
        ("import time\nwhile time.process_time() < 0.8:\n    pass", "import bad took "),
        ("import tabnanny", "import bad loads tabnanny at once; import it where it is used"),
    ],
)
def test_bad_import_is_seen(tmp_path: Path, source: str, fault: str) -> None:
    (tmp_path / "bad.py").write_text(source, encoding="utf-8")
    # The environment variables of Python do not reach the process, so the folder comes by way of a wrapper.
    wrapper = tmp_path / "python"
    wrapper.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path}" exec "{sys.executable}" "$@"\n', encoding="utf-8")
    wrapper.chmod(0o755)
    (found,) = import_faults(str(wrapper), "bad", lazy=("tabnanny",), limit_s=0.5, base="json")
    assert found.startswith(fault)


def test_library_that_the_base_loads_is_not_held_against_the_package() -> None:
    assert import_faults(sys.executable, "json", lazy=("re",), base="re") == []
    assert len(import_faults(sys.executable, "tabnanny", lazy=("tokenize",), base="json")) == 1
