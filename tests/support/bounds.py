"""Floors and limits of the rows that a measurement wrote, kept in a TOML file beside it."""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["broken_bounds"]


def broken_bounds(rows: Sequence[Mapping[str, object]], file: Path) -> list[str]:
    """Return a sentence for every bound that a row breaks, or that no row has a value for although one was to have.

    Args:
        rows: each with a name.
        file: tables ``floors`` and ``limits`` of bounds. A bound is named "PREFIX KEY": it holds the value of KEY in
            all rows whose name begins with PREFIX. Bounds whose prefix no row has are those of another script.
    """
    bounds = tomllib.loads(file.read_text(encoding="utf-8"))
    found = []
    for table, sign, word in (("floors", -1, "below"), ("limits", 1, "above")):
        for name, bound in bounds.get(table, {}).items():
            prefix, key = name.rsplit(" ", 1)
            own = [row for row in rows if str(row["name"]).startswith(prefix)]
            if own and not any(key in row for row in own):
                found.append(f"no row of {prefix!r} has {key}")
            for row in own:
                value = row.get(key)
                # Not a number is neither above nor below, and no good.
                if isinstance(value, int | float) and not sign * value <= sign * bound:
                    found.append(f"{row['name']}: {key} is {value:.4g}, {word} {bound:g}")
    return found
