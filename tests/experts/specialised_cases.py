"""Problems for the specialised kernels, what is asked of them, and the same in torch: for `gpu_specialised.py`."""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, untyped-decorator, no-untyped-call"

from dataclasses import dataclass, replace

from gpu_cases import Size, make

# isort: split
import torch
import triton
from coterie_experts import Activation
from coterie_experts.grouped_swiglu import triton_launch as launch
from coterie_experts.grouped_swiglu.specialised import gradients, products, up
from coterie_experts.grouped_swiglu.triton_layout import PaddedLayout, pad_rows
from coterie_experts.grouped_swiglu.triton_tiles import Tile, TileSet, choose_tiles
from coterie_experts.token_rows import sort_slots
from torch import Tensor

__all__ = ["Changes", "Kernel", "Problem", "Results", "by_torch", "fits", "run"]

Results = tuple[Tensor, ...]
Changes = dict[str, int | bool]


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """What is asked of a kernel, whose name is that in `TileSet`."""

    name: str
    activation: str = "swiglu"
    has_bias: bool = False
    is_scattered: bool = False
    has_main_grad: bool = False

    def __str__(self) -> str:
        words = {
            self.activation: self.activation != "swiglu",
            "bias": self.has_bias,
            "scattered": self.is_scattered,
            "main_grad": self.has_main_grad,
        }
        return " ".join([self.name, *(word for word, is_so in words.items() if is_so)])

    @property
    def function(self) -> Activation:
        return Activation(name=self.activation)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One case: its layout, its tiles, and rows of random numbers."""

    size: Size
    layout: PaddedLayout
    tiles: TileSet
    x: Tensor
    down: Tensor
    gate_up: Tensor
    grad_y: Tensor
    act_PH: Tensor
    pre_PU: Tensor

    @classmethod
    def of(cls, size: Size, *, tiles_of: Size, kind: str = "balanced") -> "Problem":
        x, ids, weights, gate_up, down, grad_y = make(size, kind)
        if kind == "with gaps":
            # Choices that are not routed, and rows of weight zero.
            ids[::5, 0] = -1
            weights[3::7] = 0.0
        slots, offsets = sort_slots(ids, size.E)
        tiles = choose_tiles(
            interpreted=x.device.type == "cpu",
            d_model=tiles_of.D,
            d_hidden=tiles_of.H,
            num_rows=tiles_of.T * tiles_of.K,
            num_experts=tiles_of.E,
        )
        layout = pad_rows(offsets, weights.flatten(), slot_of_row_N=slots, num_choices=size.K, block=tiles.block_rows)
        pre = torch.randn(layout.num_padded, 2 * size.H, dtype=x.dtype, device=x.device)
        weight_P1 = layout.weight_P[:, None]
        # As the kernels leave them: zeros where the weight is zero, whatever is held.
        act = torch.where(weight_P1 != 0, Activation().forward(pre.float()) * weight_P1, 0.0).to(x.dtype)
        pre = torch.where(weight_P1 != 0, pre, 0.0)
        return cls(
            size=size,
            layout=layout,
            tiles=tiles,
            x=x,
            down=down,
            gate_up=gate_up,
            grad_y=grad_y,
            act_PH=act,
            pre_PU=pre,
        )

    def up_of(self, kernel: Kernel) -> Tensor:
        """Return the first weights, (E, 2H or H, D)."""
        return self.gate_up if kernel.function.is_gated else self.gate_up[:, : self.size.H].contiguous()

    def bias_of(self, kernel: Kernel) -> Tensor | None:
        """Return a bias of what the kernel multiplies with, the same at every call."""
        if not kernel.has_bias:
            return None
        width = self.size.D if kernel.name == "down" else self.up_of(kernel).shape[1]
        generator = torch.Generator(self.x.device).manual_seed(3)
        return torch.randn(self.size.E, width, generator=generator, device=self.x.device).to(self.x.dtype)

    def main_grad_of(self, kernel: Kernel) -> Tensor | None:
        """Return what a gradient is to be added to, new at every call."""
        if not kernel.has_main_grad:
            return None
        shape = self.down.shape if kernel.name == "grad_down" else self.gate_up.shape
        return torch.full(shape, 0.5, device=self.x.device)

    def columns_of_product(self, kernel: Kernel) -> int:
        """Return how many columns of a product `rows_to_tokens` has at a time."""
        if kernel.is_scattered:
            return self.size.D
        depth, least = (self.size.H, 1024) if kernel.name == "down" else (2 * self.size.H, 2048)
        part = triton.cdiv(self.size.D, triton.cdiv(self.size.D, max(least, depth)))
        block = getattr(self.tiles, kernel.name).columns
        return min(triton.cdiv(part, block) * block, self.size.D)

    def flops(self, kernel: Kernel) -> float:
        if kernel.name in ("down", "grad_rows"):
            depth = self.size.H * (1 if kernel.name == "down" else 2)
            return 2.0 * self.size.T * self.size.K * depth * self.columns_of_product(kernel)
        return self.size.flops * (2 if kernel.name in ("up", "grad_gate_up") else 1) / 3

    def rows_of(self, kernel: Kernel) -> Tensor | None:
        """Return which rows of a result are compared: what stands for something, or None for all."""
        if kernel.name in ("grad_down", "grad_gate_up"):
            return None
        if kernel.is_scattered:
            return torch.arange(self.layout.position_N.shape[0], device=self.x.device)[self.layout.position_N >= 0]
        return self.layout.position_N[self.layout.position_N >= 0].long()


def fits(kernel: Kernel, problem: Problem, changes: Changes) -> bool:
    """Say whether the specialised kernel can do a case with such changes of its tile."""
    size, tile = problem.size, replace(getattr(problem.tiles, kernel.name), **changes)
    if kernel.name in ("down", "grad_rows"):
        return products.fits(tile=tile)
    if kernel.name == "up":
        return up.fits(d_model=size.D, tile=tile)
    rows_width = size.H if kernel.name == "grad_down" else 2 * size.H
    return gradients.fits(gathered_width=size.D, rows_width=rows_width, tile=tile)


def run(
    kernel: Kernel, problem: Problem, changes: Changes, *, into: Tensor | None = None, **settings: object
) -> Results:
    """Return what a kernel gives: the plain one with a ring of 0; ``settings`` are those of the specialised one.

    A gradient is added ``into`` the tensor that is given, or into a new one.
    """
    layout = problem.layout
    tiles = problem.tiles.changed({kernel.name: changes})
    tile: Tile = getattr(tiles, kernel.name)
    ring = tile.ring
    shared = {
        "layout": layout,
        **({"num_programs": launch._num_programs(tile, problem.x.device), **settings} if ring else {}),
    }
    if kernel.name in ("down", "grad_rows"):
        is_down = kernel.name == "down"
        rows, weights = (problem.act_PH, problem.down) if is_down else (problem.pre_PU, problem.gate_up)
        width = problem.columns_of_product(kernel)
        places = layout.position_N if kernel.is_scattered else layout.source_P
        # Scattered, a slot is a row: what a layer of one choice has.
        layout = replace(layout, source_P=layout.slot_P) if kernel.is_scattered else layout
        out = rows.new_empty(places.shape[0], width)
        (products.multiply if ring else launch._multiply)(
            rows,
            weights,
            **{**shared, "layout": layout},
            tile=tile,
            transposed=is_down,
            first=0,
            width=width,
            bias=problem.bias_of(kernel),
            **{"targets" if kernel.is_scattered else "products": out},
        )
        return (out,)
    if kernel.name == "up":
        more = {"activation": kernel.function, "bias": problem.bias_of(kernel), **shared}
        if ring:
            return up.pre_and_activation(problem.x, up=problem.up_of(kernel), tile=tile, **more)
        return launch.pre_and_activation(problem.x, up=problem.up_of(kernel), tiles=tiles, **more)
    is_down = kernel.name == "grad_down"
    gathered, rows = (problem.grad_y, problem.act_PH) if is_down else (problem.x, problem.pre_PU)
    main_grad = problem.main_grad_of(kernel) if into is None else into
    out = (gradients.weight_gradient if ring else launch.weight_gradient)(
        gathered, rows, tile=tile, transposed=not is_down, main_grad=main_grad, **shared
    )
    return (out if main_grad is None else main_grad,)


def by_torch(kernel: Kernel, problem: Problem) -> Results:
    """Return what `run` does, in float32 and without a kernel of ours."""
    layout, block = problem.layout, problem.tiles.block_rows
    num_tiles = int(layout.num_tiles_1)
    expert_P = layout.expert_M[:num_tiles].long().repeat_interleave(block)

    def gathered(x: Tensor, source_P: Tensor) -> Tensor:
        return torch.where(source_P[:, None] >= 0, x[source_P.clamp(min=0)].float(), 0.0)

    def times_weights(rows_PK: Tensor, weights_ENK: Tensor) -> Tensor:
        out = rows_PK.new_zeros(layout.num_padded, weights_ENK.shape[1])
        for tile, expert in enumerate(layout.expert_M[:num_tiles].tolist()):
            these = slice(tile * block, (tile + 1) * block)
            out[these] = rows_PK[these] @ weights_ENK[expert].float().T
        return out

    def biased(rows_PN: Tensor) -> Tensor:
        bias = problem.bias_of(kernel)
        if bias is None:
            return rows_PN
        rows_PN = rows_PN.clone()
        rows_PN[: expert_P.shape[0]] += bias.float()[expert_P]
        return rows_PN

    def counted(rows_PN: Tensor) -> Tensor:
        return torch.where(layout.weight_P[:, None] != 0, rows_PN * layout.weight_P[:, None], 0.0)

    if kernel.name in ("down", "grad_rows"):
        is_down = kernel.name == "down"
        rows, weights = (problem.act_PH, problem.down) if is_down else (problem.pre_PU, problem.gate_up.mT)
        out = times_weights(rows.float(), weights)
        out = out + layout.weight_P[:, None] * biased(torch.zeros_like(out))
        if kernel.is_scattered:
            out = out[layout.position_N.clamp(min=0).long()]
        return (out[:, : problem.columns_of_product(kernel)],)
    if kernel.name == "up":
        product = times_weights(gathered(problem.x, layout.source_P), problem.up_of(kernel))
        return product, counted(kernel.function.forward(biased(product)))
    is_down = kernel.name == "grad_down"
    left = gathered(problem.grad_y if is_down else problem.x, layout.counted_P)
    right = (problem.act_PH if is_down else problem.pre_PU).float()
    out = left.new_zeros(problem.size.E, left.shape[1], right.shape[1])
    for expert, start, count in layout.segments_e3.tolist():
        out[expert] = left[start : start + count].T @ right[start : start + count]
    out = out if is_down else out.mT
    return (out + 0.5 if kernel.has_main_grad else out,)
