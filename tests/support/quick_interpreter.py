"""A plugin of pytest for `run_interpreted`: it makes Triton's interpreter quicker.

At each call of a kernel or of one of its functions the interpreter looks through everything in `triton.language` for
what it has to replace, which takes longer than many calls. Inside a kernel all is replaced already: this finds that out
from the first name, as all of a module are replaced and put back together.
"""

import inspect
import os

__all__: list[str] = []


def _look_once() -> None:
    import triton.language as tl
    from triton.runtime import interpreter

    replace = interpreter._patch_builtin
    first_of: dict[object, str | None] = {}

    def replace_if_any(package: object, *how: object) -> None:
        if package not in first_of:
            names = (name for name, one in inspect.getmembers(package) if tl.core.is_builtin(one))
            first_of[package] = next(names, None)
        first = first_of[package]
        if first is not None and tl.core.is_builtin(getattr(package, first)):
            replace(package, *how)

    interpreter._patch_builtin = replace_if_any


if os.environ.get("TRITON_INTERPRET") == "1":
    _look_once()
