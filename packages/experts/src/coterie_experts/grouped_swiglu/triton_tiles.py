"""Shapes of tiles by class of problem, and the order in which programs take them."""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, untyped-decorator, no-untyped-call"

from collections.abc import Mapping
from dataclasses import dataclass, replace

import triton
import triton.language as tl

from coterie_experts.tables import TileTable, shape_class

__all__ = ["Tile", "TileSet", "choose_tiles", "place_of_tile"]


@dataclass(frozen=True, kw_only=True)
class Tile:
    """How one kernel cuts its matrix product.

    Attributes:
        rows: of the output tile.
        columns: of the output tile.
        depth: of one step along the reduction.
        num_stages: of the pipeline of loads of a plain kernel.
        band: column tiles that are swept over all row tiles before the next ones.
        parts: in which the end of a tile is computed, or added to a ``main_grad``, where the kernel can.
        flatten: make one loop of the loops over tiles and steps, so that loads run ahead over the end of a tile;
            of a plain kernel.
        ring: stages of the ring of a specialised kernel; 0 for the plain one, as always for ``grad_hidden``.
    """

    rows: int
    columns: int
    depth: int
    num_stages: int = 3
    band: int = 8
    parts: int = 1
    flatten: bool = False
    ring: int = 0


@dataclass(frozen=True, kw_only=True)
class TileSet:
    """The tiles of the kernels of one layer; those of rows share ``rows``, the padding of the segments.

    Attributes:
        up: rows times gate and up weights; ``columns`` counts hidden units, each a gate and an up column.
        down: activation times down weights.
        grad_hidden: gradient of the output times down weights, to the hidden units.
        grad_rows: gradient of the pre-activation times gate and up weights.
        grad_down: weight gradient (D, H); its ``rows`` cut D, its ``columns`` H.
        grad_gate_up: weight gradient (2H, D); its ``rows`` cut D, its ``columns`` 2H.
    """

    up: Tile
    down: Tile
    grad_hidden: Tile
    grad_rows: Tile
    grad_down: Tile
    grad_gate_up: Tile

    def __post_init__(self) -> None:
        assert len({tile.rows for tile in (self.up, self.down, self.grad_hidden, self.grad_rows)}) == 1
        assert self.block_rows % max(self.grad_down.depth, self.grad_gate_up.depth) == 0

    @property
    def block_rows(self) -> int:
        """Return the number of rows that a segment is padded to a multiple of."""
        return self.up.rows

    def changed(self, changes: Mapping[str, Mapping[str, int | bool]]) -> "TileSet":
        """Return these tiles with, for each kernel named, other values of the attributes named."""
        return replace(self, **{kernel: replace(getattr(self, kernel), **values) for kernel, values in changes.items()})


# One H200, bfloat16; see NOTES.md.
_HOPPER = TileSet(
    up=Tile(rows=128, columns=128, depth=64, ring=3),
    down=Tile(rows=128, columns=256, depth=64, ring=3, flatten=True),
    grad_hidden=Tile(rows=128, columns=256, depth=64, parts=4, band=4),
    grad_rows=Tile(rows=128, columns=256, depth=64, ring=3),
    grad_down=Tile(rows=128, columns=256, depth=64, ring=4, parts=2, flatten=True),
    grad_gate_up=Tile(rows=128, columns=256, depth=64, ring=4, parts=2),
)

# What a class of shapes has other than the above; the classes are those of ``shape_class``. Flattened loops pay where a
# tile has few steps, and so does a fourth stage of a ring.
_HOPPER_BY_CLASS: dict[str, dict[str, dict[str, int | bool]]] = {
    "narrow-medium-few": {
        "up": {"ring": 4},
        "down": {"band": 4, "ring": 4},
        "grad_rows": {"band": 4, "flatten": True},
        "grad_down": {"band": 4},
        "grad_gate_up": {"band": 4},
    },
    "wide-small-many": {"down": {"band": 4, "ring": 4}, "grad_rows": {"flatten": True}},
    "wide-medium-many": {
        "up": {"band": 4},
        "down": {"band": 16},
        "grad_hidden": {"band": 16},
        "grad_rows": {"band": 16, "flatten": True},
    },
}

# So small that the small cases of a test have several tiles in each direction, with remains.
_INTERPRETER = TileSet(
    up=Tile(rows=32, columns=16, depth=16, band=2),
    down=Tile(rows=32, columns=16, depth=16, band=2),
    grad_hidden=Tile(rows=32, columns=32, depth=16, band=2, parts=2),
    grad_rows=Tile(rows=32, columns=16, depth=16, band=2),
    grad_down=Tile(rows=16, columns=16, depth=16, band=2, parts=4),
    grad_gate_up=Tile(rows=16, columns=16, depth=16, band=2, parts=2),
)


def choose_tiles(
    *,
    interpreted: bool,
    d_model: int,
    d_hidden: int,
    num_rows: int,
    num_experts: int,
    table: TileTable | None = None,
) -> TileSet:
    """Return the tiles for a layer: those of its shape class in the table, else in the record of the package."""
    if interpreted:
        return _INTERPRETER
    name = shape_class(d_model, d_hidden, num_rows=num_rows, num_experts=num_experts)
    changes = table.tiles.get(name) if table is not None else None
    return _HOPPER.changed(_HOPPER_BY_CLASS.get(name, {}) if changes is None else changes)


@triton.jit
def place_of_tile(tile, num_row_tiles, num_column_tiles, BAND: tl.constexpr):
    """Return (row tile, column tile) of a linear tile number.

    Bands of column tiles are swept over all row tiles, so that the programs in flight share few rows and few weights.
    """
    tiles_of_band = tl.maximum(num_row_tiles, 1) * BAND
    band = tile // tiles_of_band
    # At least 1: a tile past the last one has no band, and its number is still to be computed without a fault.
    width = tl.maximum(tl.minimum(num_column_tiles - band * BAND, BAND), 1)
    inside = tile - band * tiles_of_band
    return inside // width, band * BAND + inside % width
