"""Import one installed package in a process of its own and say what is wrong with it: noise, haste, eager loading."""

import os
import subprocess
import tempfile
import time
from pathlib import Path

__all__ = ["HEAVY", "import_faults"]

# Optional libraries, which no package loads before it is asked to: an import must work without them and stay quick.
HEAVY = ("triton", "transformers", "transformer_engine", "quack", "deep_ep", "tensorboard")

_PROBE = "import sys, {module}; open(sys.argv[1], 'w').write(' '.join(sys.modules))"


def import_faults(python: str, module: str, *, limit_s: float = 10.0, heavy: tuple[str, ...] = HEAVY) -> list[str]:
    """Return what is wrong with `import module` in the interpreter `python`: an empty list is a clean import.

    The import must end within `limit_s` seconds, raise no warning, print nothing, and load none of the `heavy`
    libraries unless torch by itself loads them.
    """
    _run(python, "torch", limit_s=120.0)  # The first import of torch compiles it, which says nothing about us.
    by_torch, _, _ = _run(python, "torch", limit_s=120.0)
    start = time.perf_counter()
    try:
        loaded, code, output = _run(python, module, limit_s=limit_s)
    except subprocess.TimeoutExpired:
        return [f"import {module} did not end within {limit_s:g} s"]
    seconds = time.perf_counter() - start
    if code != 0:
        return [f"import {module} failed with exit code {code}:\n{output}"]
    faults = [f"import {module} printed:\n{output}"] if output else []
    eager = sorted(set(heavy) & {name.split(".")[0] for name in loaded - by_torch})
    if eager:
        faults.append(f"import {module} loads {', '.join(eager)} at once; import it where it is used")
    if seconds > limit_s:
        faults.append(f"import {module} took {seconds:.1f} s; the limit is {limit_s:g} s")
    return faults


def _run(python: str, module: str, *, limit_s: float) -> tuple[set[str], int, str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    with tempfile.TemporaryDirectory() as folder:
        names = Path(folder) / "modules"
        done = subprocess.run(
            [python, "-W", "error", "-c", _PROBE.format(module=module), str(names)],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=limit_s,
            check=False,
        )
        loaded = set(names.read_text(encoding="utf-8").split()) if names.exists() else set()
    return loaded, done.returncode, done.stdout
