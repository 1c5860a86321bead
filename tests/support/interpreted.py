"""Run a test file under Triton's interpreter, on CPU tensors in fp32."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

__all__ = ["needs_triton", "run_interpreted"]

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


def run_interpreted(file: Path, *, timeout_s: float = 250.0) -> None:
    """Run pytest on a file in a process of its own and raise what it printed unless all its tests pass.

    Triton reads TRITON_INTERPRET when a kernel is defined, so a process that has compiled kernels cannot do both.
    """
    # The interpreter of triton 3.6 makes numbers of arrays in a way that numpy gives up.
    expected_warning = "ignore:Conversion of an array with ndim:DeprecationWarning"
    plugins = ["-p", "no:cacheprovider", "-p", "support.quick_interpreter"]
    search_path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", *plugins, "-W", expected_warning, str(file)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": search_path},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
