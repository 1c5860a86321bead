"""Import one installed package in a process of its own and say what is wrong with it: noise, haste, eager loading."""

import functools
import os
import resource
import subprocess
import tempfile
from pathlib import Path

__all__ = ["OPTIONAL", "import_faults"]

# No package loads these before it is asked to: an import must work without them and stay quick.
OPTIONAL = ("triton", "transformers", "transformer_engine", "quack", "deep_ep", "tensorboard")

_PROBE = "import sys, {module}\nwith open(sys.argv[1], 'w') as file:\n    file.write(' '.join(sys.modules))"


def import_faults(
    python: str, module: str, *, lazy: tuple[str, ...] = OPTIONAL, limit_s: float = 10.0, base: str = "torch"
) -> list[str]:
    """Return what is wrong with `import module` in the interpreter `python`: an empty list is a clean import.

    The import must raise no warning, print nothing, take at most `limit_s` seconds of processor time (a busy machine
    makes the clock on the wall say little), and load none of the `lazy` libraries unless `base` by itself does.
    """
    by_base = _loaded_by(python, base)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    try:
        loaded, code, output = _run(python, module, timeout_s=12 * limit_s)
    except subprocess.TimeoutExpired:
        return [f"import {module} did not end within {12 * limit_s:g} s"]
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    if code != 0:
        return [f"import {module} failed with exit code {code}:\n{output}"]
    faults = [f"import {module} printed:\n{output}"] if output else []
    eager = sorted(set(lazy) & {name.split(".")[0] for name in loaded - by_base})
    if eager:
        faults.append(f"import {module} loads {', '.join(eager)} at once; import it where it is used")
    if seconds > limit_s:
        faults.append(f"import {module} took {seconds:.1f} s; the limit is {limit_s:g} s")
    return faults


@functools.cache
def _loaded_by(python: str, module: str) -> frozenset[str]:
    # The first import of torch in a new environment also compiles it to byte code, which says nothing about us.
    return frozenset(_run(python, module, timeout_s=300.0)[0])


def _run(python: str, module: str, *, timeout_s: float) -> tuple[set[str], int, str]:
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
            timeout=timeout_s,
            check=False,
        )
        loaded = set(names.read_text(encoding="utf-8").split()) if names.exists() else set()
    return loaded, done.returncode, done.stdout
