"""From nested mappings, as TOML and JSON give them, to dataclasses and back; strict, with every fault reported."""

import dataclasses
import difflib
import json
import math
import tomllib
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal

__all__ = ["TableReader", "apply_override", "to_dict"]


def to_dict(config: Any) -> dict[str, Any]:
    """Return ``config`` as nested dicts of plain values that both TOML and JSON can hold (None as ``"none"``)."""

    def plain(value: Any) -> Any:
        if dataclasses.is_dataclass(value):
            return to_dict(value)
        return "none" if value is None else list(value) if isinstance(value, tuple) else value

    return {item.name: plain(getattr(config, item.name)) for item in dataclasses.fields(config)}


class TableReader:
    """Turns nested mappings into a dataclass of dataclasses and gathers what is wrong on the way.

    Args:
        root: The dataclass of the whole file; its fields are plain values or dataclasses, which may be left out where
            their type allows None.

    Attributes:
        problems: Everything that was wrong: unknown and missing keys, wrong types.
        complete: The tables at the top of the file that could be read, by name.
    """

    def __init__(self, root: type) -> None:
        self.root = root
        self.problems: list[str] = []
        self.complete: dict[str, Any] = {}

    def read(self, values: Mapping[str, Any]) -> Any:
        """Return an instance of the root, or None if a key that it needs is missing or wrong."""
        return self._table(self.root, values, "")

    def _table(self, kind: type, values: Mapping[str, Any], where: str) -> Any:
        hints = typing.get_type_hints(kind)
        self.problems += [self._unknown(key, value, where) for key, value in values.items() if key not in hints]
        found: dict[str, Any] = {}
        usable = True
        for item in dataclasses.fields(kind):
            name, hint = _dotted(where, item.name), hints[item.name]
            required = item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING
            if item.name not in values:
                if required:
                    self.problems.append(f"{name} is missing; it must be {_expected(hint)}")
                    usable = False
                continue
            value = values[item.name]
            kind_of_table = _table_kind(hint)
            if kind_of_table is not None and isinstance(value, Mapping):
                found[item.name] = self._table(kind_of_table, value, name)
                usable = usable and found[item.name] is not None
            elif _fits(hint, value):
                found[item.name] = _convert(hint, value)
            else:
                # Where there is a default, reading goes on with it, so that one report holds the other faults too.
                self.problems.append(f"{name} must be {_expected(hint)}, not {_shown(value)}")
                usable = usable and not required
        if not usable:
            return None
        result = kind(**found)
        if where and "." not in where:
            self.complete[where] = result
        return result

    def _unknown(self, key: str, value: Any, where: str) -> str:
        """Return the report of an unknown key, with the nearest known one and the table that it belongs to."""
        hints = typing.get_type_hints(self.root)
        tables = _tables(self.root)
        if isinstance(value, Mapping) and not where:
            return f"unknown table [{key}]; nearest: [{max(tables, key=lambda name: _likeness(key, name))}]"
        known = [("", name) for name in hints if name not in tables]
        known += [(table, name) for table, kind in tables.items() for name in _names(kind)]
        # Of names that are about equally like the key, the one in the same table is meant.
        table, name = max(known, key=lambda place: _likeness(key, place[1]) + (0.1 if place[0] == where else 0.0))
        place = f"in [{table}]" if table else "at the top of the file"
        return f"unknown key {_dotted(where, key)}; nearest: {name} {place}"


def apply_override(table: Any, text: str) -> str | None:
    """Write ``a.b=value`` into the nested dict ``table``; return what is wrong with it, if anything."""
    path, equals, value = text.partition("=")
    *parents, key = (part.strip() for part in path.split("."))
    if not equals or not key or not all(parents):
        return f"--set {text}: write table.key=value, as in --set model.num_experts=16"
    for parent in parents:
        if table.get(parent) == "none":  # the text for None: a table that is left out
            del table[parent]
        table = table.setdefault(parent, {})
        if not isinstance(table, dict):
            return f"--set {text}: {parent} is a value, not a table"
    table[key] = _override_value(value.strip())
    return None


def _override_value(text: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    value = parsed["value"]
    return value if len(parsed) == 1 and isinstance(value, bool | int | float | str | list | dict) else text


def _fits(hint: Any, value: Any) -> bool:
    """Return whether a TOML or JSON value can become a field of type ``hint``; true and false are no numbers."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return isinstance(value, str) and value in arguments
    if origin in (types.UnionType, typing.Union):
        return value is None or value == "none" or any(_fits(part, value) for part in arguments if part is not _NONE)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            return False
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return all(_fits(arguments[0], part) for part in value)
        return len(value) == len(arguments) and all(map(_fits, arguments, value))
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return hint in (str, bool) and isinstance(value, hint)


def _convert(hint: Any, value: Any) -> Any:
    """Return ``value``, which fits ``hint``, in the type that ``hint`` names."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None or value == "none":
            return None
        return _convert(next(part for part in arguments if part is not _NONE and _fits(part, value)), value)
    if origin is tuple:
        kinds = arguments[:1] * len(value) if arguments[-1] is Ellipsis else arguments
        return tuple(map(_convert, kinds, value))
    return float(value) if hint is float else value


def _table_kind(hint: Any) -> type | None:
    """Return the dataclass that a field of type ``hint`` holds, alone or as the choice beside None."""
    kinds = (part for part in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(part))
    return typing.cast(type | None, next(kinds, None))


def _tables(root: type, where: str = "") -> dict[str, type]:
    """Return all tables below ``root`` by their dotted names."""
    found: dict[str, type] = {}
    for name, hint in typing.get_type_hints(root).items():
        kind = _table_kind(hint)
        if kind is not None:
            found[_dotted(where, name)] = kind
            found |= _tables(kind, _dotted(where, name))
    return found


_NONE = type(None)
_WORDS = {int: "a whole number", float: "a finite number", str: "text in quotes", bool: "true or false"}


def _expected(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(f'"{name}"' for name in arguments)
    if origin in (types.UnionType, typing.Union):
        return ", or ".join([*(_expected(part) for part in arguments if part is not _NONE), '"none"'])
    if origin is tuple:
        count = "" if arguments[-1] is Ellipsis else f"{len(arguments)} "
        return f"a list of {count}values, each {_expected(arguments[0])}"
    return "a table" if dataclasses.is_dataclass(hint) else _WORDS[hint]


def _likeness(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()


def _names(kind: Any) -> list[str]:
    return [item.name for item in dataclasses.fields(kind)]


def _dotted(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _shown(value: Any) -> str:
    return "a table" if isinstance(value, Mapping) else json.dumps(value, default=str, ensure_ascii=False)
