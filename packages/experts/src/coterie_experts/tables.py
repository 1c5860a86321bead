"""What was measured on a GPU: the fastest back-ends by widths, and the tiles of the Triton kernels by shape class.

The package brings the record of one H200; ``python -m coterie_experts.tune`` writes one for another GPU, which a layer
reads where its config names it (``ExpertsConfig.tiles``).
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

__all__ = ["KERNELS", "TileTable", "capability_of", "load_table", "recorded_backends", "shape_class", "width_class"]

KERNELS = ("up", "down", "grad_hidden", "grad_rows", "grad_down", "grad_gate_up")
"""The matrix kernels of the Triton back-end; see ``triton_tiles.TileSet``."""

_CHANGEABLE: dict[str, type] = {"band": int, "flatten": bool, "num_stages": int, "ring": int}
_MOST = {"band": 1024, "num_stages": 8}
# 0 for the plain kernel; what the specialised kernels take.
_RINGS = (0, 3, 4)
_WIDTH_CLASSES = tuple("-".join(parts) for parts in product(("narrow", "wide"), ("small", "medium", "large")))
_SHAPE_CLASSES = tuple("-".join(parts) for parts in product(_WIDTH_CLASSES, ("few", "many")))
_BACKENDS = ("triton", "quack", "te", "torch", "reference")

# Capability and dtype to class of widths to back-ends, the fastest first: tests/experts/results/experts-1xh200.json.
_RECORDED: dict[tuple[str, str], dict[str, tuple[str, ...]]] = {
    ("9.0", "bfloat16"): {
        widths: ("triton", "quack", "torch") for widths in ("narrow-medium", "wide-small", "wide-medium", "wide-large")
    }
}


def width_class(d_model: int, d_hidden: int) -> str:
    """Return the class of the widths: ``narrow`` or ``wide`` (D from 3072), ``small``, ``medium`` or ``large`` (H)."""
    model = "wide" if d_model >= 3072 else "narrow"
    hidden = "small" if d_hidden <= 384 else "medium" if d_hidden <= 4096 else "large"
    return f"{model}-{hidden}"


def shape_class(d_model: int, d_hidden: int, *, num_rows: int, num_experts: int) -> str:
    """Return the class of the widths and whether experts have ``few`` rows (on average fewer than 1024) or ``many``."""
    return f"{width_class(d_model, d_hidden)}-{'few' if num_rows < 1024 * num_experts else 'many'}"


def capability_of(device: torch.device) -> str:
    """Return the compute capability of a CUDA device, as "9.0"."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"{major}.{minor}"


def recorded_backends(capability: str, dtype: torch.dtype, classes: str) -> tuple[str, ...] | None:
    """Return the back-ends that were measured for these widths on such a GPU, the fastest first, or None."""
    return _RECORDED.get((capability, _name_of(dtype)), {}).get(classes)


@dataclass(frozen=True, kw_only=True)
class TileTable:
    """A record of one GPU.

    Attributes:
        capability: compute capability, as "9.0".
        dtype: as "bfloat16".
        device: its name, for people.
        backends: class of widths to back-ends, the fastest first.
        tiles: shape class to kernel to what its tile has other than the built-in one: ``band``, ``flatten``,
            ``num_stages`` and ``ring``, which ``grad_hidden`` has not. None of these changes a bit of a result.
    """

    capability: str
    dtype: str
    device: str = ""
    backends: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    tiles: Mapping[str, Mapping[str, Mapping[str, int | bool]]] = field(default_factory=dict)

    def misfit(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """Return why the table does not speak of this CUDA device and dtype, or None if it does."""
        found = capability_of(device), _name_of(dtype)
        if found == (self.capability, self.dtype):
            return None
        return (
            f"the tiles file is of compute capability {self.capability} and {self.dtype}, but this is {found[0]} and "
            f"{found[1]}; record one here with python -m coterie_experts.tune, or leave tiles out"
        )

    def problems(self) -> list[str]:
        """Return every fault as one sentence."""
        found = []
        for name, backends in self.backends.items():
            if name not in _WIDTH_CLASSES:
                found.append(f"backends: class {name!r} is not one of {', '.join(_WIDTH_CLASSES)}")
            if not backends:
                found.append(f"backends of {name}: must name at least one of {', '.join(_BACKENDS)}")
            found += [
                f"backends of {name}: {backend!r} is not one of {', '.join(_BACKENDS)}"
                for backend in backends
                if backend not in _BACKENDS
            ]
        for name, kernels in self.tiles.items():
            if name not in _SHAPE_CLASSES:
                found.append(f"tiles: class {name!r} is not one of {', '.join(_SHAPE_CLASSES)}")
            for kernel, changes in kernels.items():
                if kernel not in KERNELS:
                    found.append(f"tiles of {name}: {kernel!r} is not one of {', '.join(KERNELS)}")
                faults = [_fault(kernel, key, value) for key, value in changes.items()]
                found += [f"tiles of {name}, {kernel}: {fault}" for fault in faults if fault is not None]
        return found

    def write(self, path: Path) -> None:
        """Write the table whole or not at all."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        beside = path.with_name(path.name + ".part")
        beside.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        beside.replace(path)


def load_table(path: str | Path) -> TileTable:
    """Read a table that ``python -m coterie_experts.tune`` wrote.

    Raises:
        ValueError: there is no such file, or it is not such a table; with all its faults.
    """
    try:
        values: Any = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"tiles file {path}: {type(error).__name__}: {error}") from error
    problems = _form_problems(values)
    if not problems:
        table = TileTable(**{**values, "backends": {k: tuple(v) for k, v in values.get("backends", {}).items()}})
        problems = table.problems()
    if problems:
        raise ValueError("\n".join(f"tiles file {path}: {problem}" for problem in problems))
    return table


def _form_problems(values: Any) -> list[str]:
    """Return what is wrong with the form of what a file holds, as sentences."""
    if not isinstance(values, dict):
        return [f"{values!r:.80} is not an object with {', '.join(_FORMS)}"]
    found = [f"{name!r} is not one of {', '.join(_FORMS)}" for name in values if name not in _FORMS]
    for name, (form, has_form) in _FORMS.items():
        if name not in values:
            found += [f"{name} is missing: {form}"] if name in ("capability", "dtype") else []
        elif not has_form(values[name]):
            found.append(f"{name} ({values[name]!r:.80}) must be {form}")
    return found


def _is_string(value: Any) -> bool:
    return isinstance(value, str)


def _is_list_of_strings(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_string, value))


def _is_object(value: Any, of: Callable[[Any], bool] = lambda value: True) -> bool:
    return isinstance(value, dict) and all(map(of, value.values()))


_FORMS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "capability": ('a string such as "9.0"', _is_string),
    "dtype": ('a string such as "bfloat16"', _is_string),
    "device": ("a string", _is_string),
    "backends": ("an object of lists of names", partial(_is_object, of=_is_list_of_strings)),
    "tiles": ("an object of objects of objects", partial(_is_object, of=partial(_is_object, of=_is_object))),
}


def _fault(kernel: str, key: str, value: int | bool) -> str | None:
    """Return what is wrong with this attribute of the tile of a kernel, with what would be right, or None."""
    valid = {name: kind for name, kind in _CHANGEABLE.items() if (kernel, name) != ("grad_hidden", "ring")}
    if key not in valid:
        return f"{key!r} is not one of {', '.join(valid)}"
    if type(value) is not valid[key]:
        return f"{key} ({value!r}) must be {'true or false' if valid[key] is bool else 'a whole number'}"
    if key == "ring" and value not in _RINGS:
        return f"ring ({value}) must be one of {', '.join(map(str, _RINGS))}"
    if key in _MOST and not 1 <= value <= _MOST[key]:
        return f"{key} ({value}) must be from 1 to {_MOST[key]}"
    return None


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
