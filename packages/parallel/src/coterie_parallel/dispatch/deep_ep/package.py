"""Find the installed DeepEP, and say what to install where there is none that works."""

from importlib import import_module
from types import ModuleType

from coterie_parallel.dispatch.deep_ep_options import SURFACES

__all__ = ["find_package", "pick_surface"]

_ADVICE = (
    "Install it with `pip install sgl-deep-ep`, which brings the module deep_ep built for one torch and one CUDA; the "
    'package deep-ep 1.0.0 of the index can not be built by anybody. Or use dispatcher "all_to_all".'
)


def find_package() -> ModuleType | str:
    """Return the module ``deep_ep``, or a sentence that says why it can not be used and what to do about it.

    Nothing is imported before this is called. Any exception counts: without a GPU the import raises ImportError, with
    another NCCL than the linked one AssertionError, with another torch than it was built for OSError or RuntimeError.
    """
    try:
        module = import_module("deep_ep")
    except ModuleNotFoundError as error:
        if error.name == "deep_ep":
            return f'dispatcher "deep_ep" needs DeepEP, and no module deep_ep is installed. {_ADVICE}'
        return _unusable(error)
    except Exception as error:
        return _unusable(error)
    if not any(hasattr(module, name) for name in SURFACES):
        version = getattr(module, "__version__", "of unknown version")
        return f'dispatcher "deep_ep": the installed deep_ep {version} has none of {", ".join(SURFACES)}. {_ADVICE}'
    return module


def pick_surface(module: ModuleType, wanted: str) -> str:
    """Return the name of the class of ``module`` to use: ``wanted``, or for "auto" the newest that is there.

    Raises:
        ValueError: if ``wanted`` is not there; another one is never taken instead.
    """
    there = [name for name in SURFACES if hasattr(module, name)]
    if wanted == "auto":
        return there[0]
    if wanted not in there:
        version = getattr(module, "__version__", "of unknown version")
        raise ValueError(
            f'surface ({wanted!r}) is not in the installed deep_ep {version}; it has {", ".join(there)}; "auto" takes '
            f"{there[0]}"
        )
    return wanted


def _unusable(error: Exception) -> str:
    return (
        'dispatcher "deep_ep" needs DeepEP, and the installed module deep_ep can not be imported here: '
        f"{type(error).__name__}: {error}. The extension must be built for the torch, the CUDA and the NCCL that load "
        f"it, on a machine with a GPU. {_ADVICE}"
    )
