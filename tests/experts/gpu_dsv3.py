"""Where dsv3-local32 loses time to SonicMoE: `python3 tests/experts/gpu_dsv3.py --packages DIR [--json FILE]`.

The variants and what is expected of them are in packages/experts/NOTES.md, under the names printed here. Each is held
to ours first. Then, one call of each in turn: whole layers, the same in CUDA graphs with the clock and the power of the
chip beside them, and single kernels. Nothing here is a gate.
"""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, untyped-decorator, no-untyped-call"

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median

from gpu_cases import SIZES, Size, make
from gpu_opponents import add_packages, both, contender, differences, in_turn, leaves_of

# isort: split
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from coterie_experts import Activation
from coterie_experts.grouped_swiglu import triton_launch as launch
from coterie_experts.grouped_swiglu.triton_backward import _segment, _store_gradient
from coterie_experts.grouped_swiglu.triton_layout import PaddedLayout, pad_rows
from coterie_experts.grouped_swiglu.triton_tiles import Tile, TileSet, choose_tiles, place_of_tile
from coterie_experts.token_rows import sort_slots
from support.device_timing import about, write_json
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

SIZE = SIZES["dsv3-local32"]
SWIGLU = Activation()
Calls = dict[str, Callable[[], object]]


@triton.jit
def grad_of_weights_copied(
    left_desc,
    rows_desc,
    out_desc,
    segments_ptr,
    num_experts,
    num_padded,
    num_left_columns,
    num_rows_columns,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    BAND: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    """`grad_of_weights_in_turn` with both sides in padded rows, so that both come by TMA and nothing is gathered."""
    row_tiles = tl.cdiv(num_left_columns, ROWS)
    column_tiles = tl.cdiv(num_rows_columns, COLUMNS)
    tiles_of_expert = row_tiles * column_tiles
    num_tiles = num_experts * tiles_of_expert
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), flatten=True):
        expert, start, count = _segment(segments_ptr, tile // tiles_of_expert, num_experts)
        row_tile, column_tile = place_of_tile(tile % tiles_of_expert, row_tiles, column_tiles, BAND)
        first_row = row_tile * ROWS
        first_column = column_tile * COLUMNS
        start = tl.where(count > 0, start, num_padded)
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for step in range(tl.maximum(tl.cdiv(count, DEPTH), 1)):
            left = left_desc.load([start + step * DEPTH, first_row])
            right = rows_desc.load([start + step * DEPTH, first_column])
            total = tl.dot(left.T, right, total, input_precision="ieee")
        if TRANSPOSED:
            _store_gradient(out_desc, expert, first_column, first_row, total.T, False)
        else:
            _store_gradient(out_desc, expert, first_row, first_column, total, False)


def copied_rows(x_SD: Tensor, layout: PaddedLayout) -> Tensor:
    """Return rows in the padded layout; padding takes the first row, which meets zeros."""
    return x_SD.index_select(0, layout.source_P.clamp(min=0))


def weight_gradient_copied(
    x_SD: Tensor, rows_PV: Tensor, layout: PaddedLayout, tile: Tile, *, transposed: bool
) -> Tensor:
    """Return what `launch.weight_gradient` does, from rows that are copied into place first."""
    left_PW = copied_rows(x_SD, layout)
    num_experts, width, rows_width = layout.segments_e3.shape[0], x_SD.shape[1], rows_PV.shape[1]
    out = rows_PV.new_empty(num_experts, *((rows_width, width) if transposed else (width, rows_width)))
    block = [1, tile.columns, tile.rows] if transposed else [1, tile.rows, tile.columns]
    num_tiles = num_experts * triton.cdiv(width, tile.rows) * triton.cdiv(rows_width, tile.columns)
    grad_of_weights_copied[(min(num_tiles, launch._num_programs(tile, out.device)),)](
        TensorDescriptor.from_tensor(left_PW, [tile.depth, tile.rows]),
        TensorDescriptor.from_tensor(rows_PV, [tile.depth, tile.columns]),
        TensorDescriptor.from_tensor(out, block),
        layout.segments_e3,
        num_experts,
        layout.num_padded,
        width,
        rows_width,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        BAND=tile.band,
        TRANSPOSED=transposed,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out


def weight_gradient_quack(x_SD: Tensor, rows_PV: Tensor, layout: PaddedLayout, *, transposed: bool) -> Tensor:
    """Return the same by the kernel of quack, over the padded segments: a row of zeros stands for padding."""
    from quack.gemm_interface import gemm

    num_experts, width, rows_width = layout.segments_e3.shape[0], x_SD.shape[1], rows_PV.shape[1]
    out = rows_PV.new_empty(num_experts, *((rows_width, width) if transposed else (width, rows_width)))
    block = layout.num_padded // layout.expert_M.shape[0]
    by_id = torch.empty_like(layout.segments_e3).index_copy_(0, layout.segments_e3[:, 0].long(), layout.segments_e3)
    ends = (by_id[:, 2] + block - 1).div(block, rounding_mode="floor").mul(block).cumsum(0)
    gemm(
        F.pad(x_SD, (0, 0, 0, 1)).T,
        rows_PV,
        out=out.mT if transposed else out,
        cu_seqlens_k=F.pad(ends, (1, 0)).to(torch.int32),
        A_idx=torch.where(layout.counted_P < 0, x_SD.shape[0], layout.counted_P),
        tuned=False,
    )
    return out


def in_one_part(
    rows_PK: Tensor,
    weights: Tensor,
    layout: PaddedLayout,
    tile: Tile,
    *,
    transposed: bool,
    num_choices: int,
    bias: Tensor | None = None,
) -> Tensor:
    """`launch.rows_to_tokens` with the products of all columns at once."""
    num_columns = weights.shape[1] if transposed else weights.shape[2]
    position_TK = layout.position_N.view(-1, num_choices)
    products = rows_PK.new_empty(layout.num_padded, num_columns)
    out_TD = rows_PK.new_empty(position_TK.shape[0], num_columns)
    launch._multiply(
        rows_PK,
        weights,
        layout,
        tile,
        transposed=transposed,
        first=0,
        width=num_columns,
        bias=bias,
        products=products,
    )
    launch.sum_rows(products, position_TK, out_TD)
    return out_TD


def patched(name: str, function: object, call: Callable[[], object]) -> object:
    """Call with another function of this name in `triton_launch`."""
    plain = getattr(launch, name)
    setattr(launch, name, function)
    try:
        return call()
    finally:
        setattr(launch, name, plain)


def copied_gradient(
    gathered: Tensor, rows: Tensor, layout: PaddedLayout, tile: Tile, *, transposed: bool, main_grad: None
) -> Tensor:
    return weight_gradient_copied(gathered, rows, layout, tile, transposed=transposed)


def quack_gradient(
    gathered: Tensor, rows: Tensor, layout: PaddedLayout, tile: Tile, *, transposed: bool, main_grad: None
) -> Tensor:
    return weight_gradient_quack(gathered, rows, layout, transposed=transposed)


PATCHES = {
    "one part": ("rows_to_tokens", in_one_part),
    "copied wgrad": ("weight_gradient", copied_gradient),
    "quack wgrad": ("weight_gradient", quack_gradient),
}
LAYERS = ("triton", *PATCHES, "sonic", "quack")


def layer(name: str, values: list[Tensor], leaves: list[Tensor]) -> Callable[[], tuple[Tensor, ...]]:
    """Return a call of forward and backward of a layer or a variant of ours."""
    call = partial(both, contender("triton" if name in PATCHES else name, None), values, leaves)
    return partial(patched, *PATCHES[name], call) if name in PATCHES else call


def kernels(size: Size) -> Calls:
    """Return calls of single kernels: ours, and what might take their place."""
    x, ids, weights, gate_up, down, grad_y = make(size)
    slots, offsets = sort_slots(ids, size.E)
    tiles: TileSet = choose_tiles(
        interpreted=x.device.type == "cpu",
        d_model=size.D,
        d_hidden=size.H,
        num_rows=size.T * size.K,
        num_experts=size.E,
    )
    layout = pad_rows(offsets, weights.flatten(), slot_of_row_N=slots, num_choices=size.K, block=tiles.block_rows)
    up = partial(launch.pre_and_activation, x, layout, gate_up, tiles, activation=SWIGLU, bias=None)
    pre, act = up()
    copied = copied_rows(x, layout)
    products = torch.empty_like(pre)
    ours = {"main_grad": None}
    calls: Calls = {
        "up": up,
        # What up would take with its rows copied, at best: the product alone. And the copy.
        "up, copied": lambda: launch._multiply(
            copied, gate_up, layout, tiles.down, transposed=True, first=0, width=2 * size.H, products=products
        ),
        "copy": lambda: copied_rows(x, layout),
        "hidden": lambda: launch.hidden_gradients(
            grad_y, pre, layout, down, tiles, activation=SWIGLU, bias=None, overwrite=False
        ),
    }
    for rows, gathered, transposed, name in ((act, grad_y, False, "grad_down"), (pre, x, True, "grad_gate_up")):
        tile = getattr(tiles, name)
        arguments = (gathered, rows, layout)
        calls[name] = partial(launch.weight_gradient, *arguments, tile, transposed=transposed, **ours)
        calls[f"{name}, copied"] = partial(weight_gradient_copied, *arguments, tile, transposed=transposed)
        calls[f"{name}, quack"] = partial(weight_gradient_quack, *arguments, transposed=transposed)
    calls["down"] = lambda: launch.rows_to_tokens(act, down, layout, tiles.down, transposed=True, num_choices=size.K)
    calls["grad_rows"] = lambda: launch.rows_to_tokens(
        pre, gate_up, layout, tiles.grad_rows, transposed=False, num_choices=size.K
    )
    return calls


def compile_ahead(name: str) -> str:
    """Run a layer, or the kernels, on fewer tokens in a process of its own: what is compiled is then on the disk."""
    start = time.monotonic()
    # Of the same class of shapes.
    small = replace(SIZE, T=1024 * SIZE.E // SIZE.K)
    try:
        if name == "kernels":
            working(kernels(small))
        else:
            values = make(small)
            layer(name, values, leaves_of(values))()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{name}: {type(error).__name__} {str(error)[:200]}"
    finally:
        torch.cuda.empty_cache()
    return f"{name}: {time.monotonic() - start:.0f} s"


def working(calls: Calls) -> Calls:
    """Return those that run."""
    found: Calls = {}
    for name, call in calls.items():
        try:
            call()
            torch.cuda.synchronize()
            found[name] = call
        except Exception as error:
            print(f"  {name} does not run: {type(error).__name__} {str(error)[:200]}", flush=True)
    return found


def captured(call: Callable[[], object]) -> Callable[[], None]:
    """Return the replay of a graph of this call."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            kept = call()
    torch.cuda.current_stream().wait_stream(stream)

    def replay() -> None:
        graph.replay()

    replay.kept = kept  # type: ignore[attr-defined]
    return replay


def chip_beside(call: Callable[[], object], seconds: float = 2.0) -> str:
    """Return the clock of the processors and the power while a call is repeated, as `nvidia-smi` reads them."""
    query = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits", "-lms", "50"]
    try:
        reader = subprocess.Popen(query, stdout=subprocess.PIPE, text=True)
    except OSError as error:
        return str(error)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        call()
        torch.cuda.synchronize()
    reader.terminate()
    lines = [line.split(",") for line in reader.communicate(timeout=10)[0].splitlines()]
    # The second half, when the chip is as warm as it gets.
    numbers = [(float(one[0]), float(one[1])) for one in lines[len(lines) // 2 :] if len(one) == 2]
    return ", ".join(f"{median(column):.0f}" for column in zip(*numbers, strict=True)) + " MHz, W"


def report(title: str, times: dict[str, list[float]], against: str) -> dict[str, object]:
    """Print and return medians in microseconds and median ratios to one of the calls, round by round."""
    row: dict[str, object] = {"name": title}
    for name, one in times.items():
        ratio = median(mine / theirs for mine, theirs in zip(one, times[against], strict=True))
        row[f"{name} us"], row[f"{name} over {against}"] = median(one), ratio
        print(f"  {title}: {name} {median(one):.0f} us, {ratio:.3f} of {against}", flush=True)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", action="append", default=[], metavar="DIR")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit", default="")
    arguments = parser.parse_args()
    add_packages(arguments.packages)
    with ProcessPoolExecutor(
        arguments.workers,
        mp_context=get_context("spawn"),
        initializer=add_packages,
        initargs=(arguments.packages,),
    ) as pool:
        for done in as_completed([pool.submit(compile_ahead, name) for name in ("sonic", "kernels", *LAYERS)]):
            print(done.result(), flush=True)
    values = make(SIZE)
    leaves = leaves_of(values)
    calls: Calls = {}
    ours: tuple[Tensor, ...] = ()
    for name in LAYERS:
        try:
            call = layer(name, values, leaves)
            results = call()
            ours = ours or results
            wrong = differences(name, results, ours)
            if wrong:
                raise AssertionError("; ".join(wrong))
            calls[name] = call
        except Exception as error:
            print(f"  {name} is left out: {type(error).__name__} {str(error)[:300]}", flush=True)
    del ours, results
    rows = [report("layers", in_turn(calls, arguments.rounds), "triton")]
    graphs: Calls = {}
    for name in ("triton", "one part", "sonic"):
        if name in calls:
            try:
                graphs[name] = captured(calls[name])
            except Exception as error:
                print(f"  {name} in a graph: {type(error).__name__} {str(error)[:300]}", flush=True)
    rows.append(report("graphs", in_turn(graphs, arguments.rounds), "triton"))
    for name in graphs:
        rows[-1][f"{name} chip"] = chip_beside(graphs[name])
        print(f"  {name}: {rows[-1][f'{name} chip']}", flush=True)
    del graphs, calls, values, leaves
    torch.cuda.empty_cache()
    rows.append(report("kernels", in_turn(working(kernels(SIZE)), arguments.rounds), "up"))
    if arguments.json:
        write_json(arguments.json, about(arguments.commit), rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
