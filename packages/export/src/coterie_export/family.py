"""What a table of a Hugging Face model family says, and the two directions of its ``config.json``."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from coterie_export.spec import ModelSpec

__all__ = ["Computed", "Family"]

_MISSING = object()


@dataclass(frozen=True, kw_only=True)
class Computed:
    """A ``config.json`` field that is no plain copy of one spec field.

    Attributes:
        write: The field's value for a spec.
        read: The spec fields that it gives, from a whole config; raises ValueError if they cannot express it.
    """

    write: Callable[[ModelSpec], Any]
    read: Callable[[Mapping[str, Any]], dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Family:
    """One Hugging Face model family as a table.

    Attributes:
        name: ``model_type`` in ``config.json``.
        architecture: The class that transformers loads.
        needs: For a spec field, the values that the family can express; a field that is not named may have any.
        fields: ``config.json`` field to the spec field that it copies.
        computed: ``config.json`` fields that need more than a copy.
        fixed: ``config.json`` fields with one value; a config that says otherwise is refused on import.
        aliases: Other spellings of a ``config.json`` field, accepted on import.
        names: Canonical name to the names in the files. ``{i}`` is the layer. ``{e}`` takes the first dimension apart,
            expert by expert; several names share what is left in equal parts, along its first dimension.
        stacked_names: The same for files that keep the experts of a layer in one tensor, where that differs.
        float32: Endings of the names of tensors that stay float32 when the weights are written in a shorter type.
        keeps_selection_bias: The files hold a selection bias for every router; a spec without one writes zeros.
        limits: Further refusals, as sentences.
    """

    name: str
    architecture: str
    needs: Mapping[str, tuple[Any, ...]]
    fields: Mapping[str, str]
    names: Mapping[str, tuple[str, ...]]
    stacked_names: Mapping[str, tuple[str, ...]]
    computed: Mapping[str, Computed] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    float32: tuple[str, ...] = ()
    keeps_selection_bias: bool = False
    limits: Callable[[ModelSpec], list[str]] = lambda spec: []

    def problems(self, spec: ModelSpec) -> list[str]:
        """Return why this family cannot hold the model, each with the values that would work."""
        if found := spec.problems():
            return found
        for name, allowed in self.needs.items():
            value = getattr(spec, name)
            if value not in allowed:
                works = " or ".join(repr(choice) for choice in allowed)
                found.append(f"{self.name} cannot express {name} = {value!r}; it needs {works}")
        return found + self.limits(spec)

    def config(self, spec: ModelSpec, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
        """Return the fields of ``config.json``; nothing is left to a default of the program that reads it.

        The base of the rotary frequencies stands in ``rope_parameters``, where transformers 5 looks, and in
        ``rope_theta``, where older programs do.
        """
        values: dict[str, Any] = {
            "architectures": [self.architecture],
            "model_type": self.name,
            "dtype": str(dtype).removeprefix("torch."),
            "rope_parameters": {"rope_type": "default", "rope_theta": float(spec.rope_theta)},
            "rope_theta": float(spec.rope_theta),
        }
        values |= {name: getattr(spec, source) for name, source in self.fields.items()}
        values |= {name: computed.write(spec) for name, computed in self.computed.items()}
        return values | dict(self.fixed)

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        """Return the model that a ``config.json`` of this family describes.

        Raises:
            ValueError: A field is missing, or says something that a ModelSpec cannot express; all of them at once.
        """
        # transformers 5 keeps the rotary settings in a table of their own, which wins over the fields beside it
        flat = {**config, **(config.get("rope_parameters") or config.get("rope_scaling") or {})}
        for alias, name in self.aliases.items():
            flat.setdefault(name, flat.get(alias, _MISSING))
        if flat.get("num_key_value_heads") is None and "num_attention_heads" in flat:
            flat["num_key_value_heads"] = flat["num_attention_heads"]
        if flat.get("head_dim") is None and {"hidden_size", "num_attention_heads"} <= flat.keys():
            flat["head_dim"] = flat["hidden_size"] // flat["num_attention_heads"]
        optional = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
        values: dict[str, Any] = {name: allowed[0] for name, allowed in self.needs.items() if len(allowed) == 1}
        found = []
        for name, target in {**self.fields, "rope_theta": "rope_theta"}.items():
            value = flat.get(name, optional.get(name, _MISSING))
            if value is _MISSING:
                found.append(f"config.json lacks {name}")
            values[target] = value
        for name, fixed in {**self.fixed, "rope_type": "default"}.items():
            if flat.get(name, fixed) != fixed:
                found.append(f"config.json says {name} = {flat[name]!r}; only {fixed!r} can be read")
        if not found:
            for computed in self.computed.values():
                try:
                    values |= computed.read(flat)
                except (KeyError, ValueError) as error:
                    found.append(f"config.json lacks {error}" if isinstance(error, KeyError) else str(error))
        if not found:
            spec = ModelSpec(**values)
            found = self.problems(spec)
        if found:
            raise ValueError("\n".join(found))
        return spec
