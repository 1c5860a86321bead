"""Names and tensors of a model, from canonical to Hugging Face and back, with both key sets checked.

One function, ``pieces``, says which parts of a canonical tensor go under which names, as views. Export hands the views
out; import makes the canonical tensors and fills the same views. So the two directions cannot disagree.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice

import torch
from torch import Tensor

from coterie_export.family import Family
from coterie_export.spec import ModelSpec, Shape

__all__ = ["LAYOUTS", "check_file_shapes", "file_shapes", "from_hf", "pieces", "to_hf"]

LAYOUTS = ("per_expert", "stacked")
_SHOWN = 10


def to_hf(
    spec: ModelSpec, tensors: Mapping[str, Tensor], *, family: Family, layout: str = "per_expert"
) -> dict[str, Tensor]:
    """Return the tensors under their Hugging Face names, as views of the given ones.

    Args:
        spec: The model; ``family`` must be able to hold it.
        tensors: Exactly those of ``spec.tensor_shapes()``.
        family: The table of names.
        layout: ``"per_expert"``, as ``save_pretrained`` writes, or ``"stacked"``.

    Raises:
        ValueError: The family cannot hold the model, or a key or shape is not as it should be.
    """
    _require_fit(spec, family)
    shapes = spec.tensor_shapes()
    if report := _report(shapes, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, "model"):
        raise ValueError(report)
    converted: dict[str, Tensor] = {}
    for name, shape in _canonical_shapes(spec, family).items():
        # the family's files hold a selection bias that the model does not have: zero is no bias
        tensor = tensors[name] if name in shapes else torch.zeros(shape)
        for target, view in pieces(name, tensor, family, layout):
            assert target not in converted, f"{family.name} writes {target} twice"
            converted[target] = view
    return converted


def from_hf(spec: ModelSpec, tensors: Mapping[str, Tensor], *, family: Family) -> dict[str, Tensor]:
    """Return the tensors under their canonical names, in new memory; either expert layout is taken.

    Raises:
        ValueError: The family cannot hold the model, or a key, shape or dtype is not as it should be.
    """
    _require_fit(spec, family)
    layout = check_file_shapes(spec, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, family=family)
    wanted = spec.tensor_shapes()
    converted: dict[str, Tensor] = {}
    for name, shape in _canonical_shapes(spec, family).items():
        first, _ = next(pieces(name, torch.empty(shape, device="meta"), family, layout))
        tensor = torch.empty(shape, dtype=tensors[first].dtype)
        for source, view in pieces(name, tensor, family, layout):
            if tensors[source].dtype != tensor.dtype:
                raise ValueError(f"{source} is {tensors[source].dtype}, but {first} is {tensor.dtype}")
            view.copy_(tensors[source])
        if name in wanted:
            converted[name] = tensor
        elif tensor.any():
            raise ValueError(f"{first} is not zero, but config.json says selection_bias = false")
    return converted


def file_shapes(spec: ModelSpec, *, family: Family, layout: str = "per_expert") -> dict[str, Shape]:
    """Return the shape of every tensor in the files of a model, by its Hugging Face name, in canonical order."""
    return {
        target: tuple(view.shape)
        for name, shape in _canonical_shapes(spec, family).items()
        for target, view in pieces(name, torch.empty(shape, device="meta"), family, layout)
    }


def check_file_shapes(spec: ModelSpec, found: Mapping[str, Shape], *, family: Family) -> str:
    """Return the expert layout of files with these tensors.

    Raises:
        ValueError: A key is missing or not known, or a shape differs; the first ten of each, and what may be the cause.
    """
    expected = {"per_expert": file_shapes(spec, family=family)}
    if expected["per_expert"] == found:
        return "per_expert"
    expected["stacked"] = file_shapes(spec, family=family, layout="stacked")
    layout = max(LAYOUTS, key=lambda layout: len(expected[layout].keys() & found.keys()))
    if report := _report(expected[layout], found, f"{family.name} ({layout} layout)"):
        other = LAYOUTS[1 - LAYOUTS.index(layout)]
        if (expected[other].keys() - expected[layout].keys()) & found.keys():
            report += "\nsome layers keep their experts stacked and some one by one: one file must use one layout"
        raise ValueError(report)
    return layout


def pieces(name: str, tensor: Tensor, family: Family, layout: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the name in the files and the view of ``tensor`` for each part of one canonical tensor."""
    layer = re.match(r"layers\.(\d+)\.", name)
    index = layer[1] if layer else ""
    key = re.sub(r"^layers\.\d+\.", "layers.{i}.", name)
    targets = (family.stacked_names.get(key) if layout == "stacked" else None) or family.names[key]
    by_expert = "{e}" in targets[0]
    for expert, part in enumerate(tensor.unbind(0) if by_expert else (tensor,)):
        assert part.shape[0] % len(targets) == 0, f"{name} cannot be cut into {len(targets)} equal parts"
        for target, view in zip(targets, part.chunk(len(targets)), strict=True):
            yield target.format(i=index, e=expert), view


def _require_fit(spec: ModelSpec, family: Family) -> None:
    if found := family.problems(spec):
        raise ValueError("\n".join(found))


def _canonical_shapes(spec: ModelSpec, family: Family) -> dict[str, Shape]:
    return replace(spec, selection_bias=spec.selection_bias or family.keeps_selection_bias).tensor_shapes()


def _report(expected: Mapping[str, Shape], found: Mapping[str, Shape], what: str) -> str:
    """Return what differs between the tensors that should be there and those that are; empty when nothing does."""
    missing = [name for name in expected if name not in found]
    unexpected = [name for name in found if name not in expected]
    differing = [
        f"{name} is {list(found[name])}, not {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    lines = [
        f"{len(names)} {kind} for {what}: {', '.join(names[:_SHOWN])}{', ...' if len(names) > _SHOWN else ''}"
        for kind, names in (
            ("missing tensors", missing),
            ("unexpected tensors", unexpected),
            ("tensors of a wrong shape", differing),
        )
        if names
    ]
    return "\n".join([*lines, *_prefix_hint(missing, unexpected)])


def _prefix_hint(missing: list[str], unexpected: list[str]) -> list[str]:
    """Return a line that names the right prefix, if missing and unexpected names differ by their beginning only."""
    for name in islice(unexpected, _SHOWN):
        parts = name.split(".")
        for candidate in missing:
            wanted = candidate.split(".")
            same = 0
            while same < min(len(parts), len(wanted) - 1) and parts[-1 - same] == wanted[-1 - same]:
                same += 1
            if same >= 2 and same >= len(wanted) - 1:
                right = ".".join(wanted[: len(wanted) - same])
                wrong = ".".join(parts[: len(parts) - same])
                these = f"these names begin with {wrong!r}" if wrong else "these names lack it"
                return [f"the nearest known prefix is {right!r}; {these}"]
    return []
