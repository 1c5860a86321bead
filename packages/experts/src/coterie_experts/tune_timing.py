"""The times that ``python -m coterie_experts.tune`` needs, on the current CUDA device in bfloat16."""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from statistics import median
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from coterie_experts.activation import Activation
from coterie_experts.grouped_swiglu import choose_backend, experts_of_tokens, grouped_experts
from coterie_experts.tables import TileTable, capability_of
from coterie_experts.token_rows import order_by_expert, rows_from_tokens, sort_slots, sum_over_choices
from coterie_experts.tune import Changes, LayerSize

if TYPE_CHECKING:
    from coterie_experts.grouped_swiglu.triton_tiles import Tile, TileSet

__all__ = ["DeviceTimer", "built_in_tiles", "kernel_calls"]

# A few milliseconds in which the host gets ahead.
_PAUSE_CYCLES = 10_000_000
# Processes that compile ahead, at most.
_COMPILERS = 16


class DeviceTimer:
    """A ``Timer`` of the current device.

    Raises:
        ValueError: there is no CUDA device, or the Triton back-end cannot run on it.
    """

    def __init__(self, *, rounds: int = 7) -> None:
        if not torch.cuda.is_available():
            raise ValueError("there is no CUDA device; nothing to record")
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._rounds = rounds
        self.capability = capability_of(self._device)
        self.dtype = "bfloat16"
        self.device = torch.cuda.get_device_name(self._device)
        self.backends = tuple(name for name in ("triton", "quack", "te", "torch") if self._obstacle(name) is None)
        obstacle = self._obstacle("triton")
        if obstacle is not None:
            raise ValueError(obstacle)
        self._calls: tuple[LayerSize, dict[str, Callable[[Changes], object]]] | None = None

    def prepare(self, size: LayerSize, changes: Mapping[str, Sequence[Changes]], *, within_s: float) -> None:
        """Compile in processes beside this one, whose results Triton keeps on the disk."""
        jobs = [(size, kernel, change) for kernel, tried in changes.items() for change in tried]
        # A context of the device takes some of its memory: few processes, and none that lives on beside the timing.
        pool = ProcessPoolExecutor(min(_COMPILERS, os.cpu_count() or 1), mp_context=get_context("spawn"))
        futures = []
        # Where a compiler takes its process down, what is left compiles when it is timed.
        with suppress(BrokenProcessPool):
            futures = [pool.submit(_compile, *job) for job in jobs]
        done = wait(futures, timeout=within_s)
        pool.shutdown(wait=not done.not_done, cancel_futures=True)

    def kernel_us(self, size: LayerSize, kernel: str, changes: Sequence[Changes]) -> list[float]:
        """Return the time of a kernel with each change of its tile; infinite where it does not compile or run.

        So it is of what changes nothing, which could win by noise alone.
        """
        if self._calls is None or self._calls[0] != size:
            # The tensors of the size before go first.
            self._calls = None
            torch.cuda.empty_cache()
            try:
                self._calls = size, kernel_calls(size, self._device)
            except torch.OutOfMemoryError as error:
                _say_left_out(f"{kernel} of {size}", error)
                return [float("inf")] * len(changes)
        call, built_in = self._calls[1][kernel], built_in_tiles(size)
        tried = [one for one in changes if not one or built_in.changed({kernel: one}) != built_in]
        times = self._in_turn({f"{kernel} {change}": partial(call, change) for change in tried})
        return [times.get(f"{kernel} {change}", float("inf")) for change in changes]

    def layer_us(self, size: LayerSize, table: TileTable) -> dict[str, float]:
        """Return the time of forward and backward of the layer with each back-end that can run."""
        self._calls = None
        torch.cuda.empty_cache()
        try:
            x_TD, ids_TK, weights_TK, gate_up, down, grad_y_TD = _tensors(size, self._device)
        except torch.OutOfMemoryError as error:
            _say_left_out(str(size), error)
            return dict.fromkeys(self.backends, float("inf"))
        leaves = [value.requires_grad_() for value in (x_TD, weights_TK, gate_up, down)]

        def both(backend: str) -> object:
            y_TD = _layer(backend, x_TD, ids_TK, weights_TK, gate_up, down, table)
            return torch.autograd.grad(y_TD, leaves, grad_y_TD)

        return self._in_turn({name: partial(both, name) for name in self.backends})

    def _obstacle(self, name: str) -> str | None:
        try:
            choose_backend(name, d_model=64, d_hidden=64, dtype=torch.bfloat16, device=self._device)
        except ValueError as error:
            return str(error)
        return None

    def _in_turn(self, calls: Mapping[str, Callable[[], object]]) -> dict[str, float]:
        """Return the median microseconds of each call, all of them in every round; infinite where one cannot run.

        The device never waits for the host in between: the first call after a pause would seem slower than it is.
        """
        works = [name for name, call in calls.items() if self._runs(name, call)]
        events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in works}
        torch.cuda._sleep(_PAUSE_CYCLES)  # type: ignore[no-untyped-call]
        for round_ in range(-1, self._rounds):
            # One round that does not count; then back and forth, so that no call always follows the same one.
            for name in reversed(works) if round_ % 2 else works:
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
                start.record()
                calls[name]()
                end.record()
                if round_ >= 0:
                    events[name].append((start, end))
        torch.cuda.synchronize(self._device)
        times = {name: median(start.elapsed_time(end) * 1e3 for start, end in pairs) for name, pairs in events.items()}
        return {name: times.get(name, float("inf")) for name in calls}

    def _runs(self, name: str, call: Callable[[], object]) -> bool:
        try:
            call()
            torch.cuda.synchronize(self._device)
        # Whatever a compiler raises where a tile asks too much of a GPU, or the device where memory is short.
        except Exception as error:
            _say_left_out(name, error)
            return False
        finally:
            # What it took goes to the next call, which may want other sizes.
            torch.cuda.empty_cache()
        return True


def _say_left_out(name: str, error: Exception) -> None:
    reason = str(error).partition("\n")[0][:120]
    print(f"  {name} is left out: {type(error).__name__}: {reason}", flush=True)


def built_in_tiles(size: LayerSize) -> "TileSet":
    """Return the tiles that changes are tried on: those of the package, without what it records for the class."""
    from coterie_experts.grouped_swiglu.triton_tiles import choose_tiles

    return choose_tiles(
        interpreted=False,
        d_model=size.d_model,
        d_hidden=size.d_hidden,
        num_rows=size.tokens * size.choices,
        num_experts=size.num_experts,
        table=TileTable(capability="", dtype="", tiles={size.shape_class: {}}),
    )


def kernel_calls(size: LayerSize, device: torch.device) -> dict[str, Callable[[Changes], object]]:
    """Return, for each matrix kernel of the Triton back-end, a call with changes of its tile."""
    from coterie_experts.grouped_swiglu import triton_launch as launch
    from coterie_experts.grouped_swiglu.triton_layout import pad_rows

    x_TD, ids_TK, weights_TK, gate_up, down, grad_y_TD = _tensors(size, device)
    slots_N, offsets_e = sort_slots(ids_TK, size.num_experts)
    tiles = built_in_tiles(size)
    layout = pad_rows(
        offsets_e, weights_TK.flatten(), slot_of_row_N=slots_N, num_choices=size.choices, block=tiles.block_rows
    )
    swiglu = Activation()
    pre_P2H, activation_PH = launch.pre_and_activation(x_TD, layout, gate_up, tiles, activation=swiglu, bias=None)

    def with_tiles(kernel: str, run: "Callable[[TileSet], object]") -> Callable[[Changes], object]:
        return lambda changes: run(tiles.changed({kernel: changes}))

    def rows(rows_PK: Tensor, weights: Tensor, transposed: bool, tile: "Tile") -> Tensor:
        return launch.rows_to_tokens(
            rows_PK,
            weights,
            layout,
            tile,
            transposed=transposed,
            num_choices=size.choices,
        )

    runs: dict[str, Callable[[TileSet], object]] = {
        "up": lambda t: launch.pre_and_activation(x_TD, layout, gate_up, t, activation=swiglu, bias=None),
        "down": lambda t: rows(activation_PH, down, True, t.down),
        "grad_hidden": lambda t: launch.hidden_gradients(
            grad_y_TD, pre_P2H, layout, down, t, activation=swiglu, bias=None, overwrite=False
        ),
        "grad_rows": lambda t: rows(pre_P2H, gate_up, False, t.grad_rows),
        "grad_down": lambda t: launch.weight_gradient(
            grad_y_TD, activation_PH, layout, t.grad_down, transposed=False, main_grad=None
        ),
        "grad_gate_up": lambda t: launch.weight_gradient(
            x_TD, pre_P2H, layout, t.grad_gate_up, transposed=True, main_grad=None
        ),
    }
    return {kernel: with_tiles(kernel, run) for kernel, run in runs.items()}


def _compile(size: LayerSize, kernel: str, changes: Changes) -> None:
    # Few tokens, and few experts: a kernel knows of their number whether it is 1 and whether it is a multiple of 16.
    num_experts = 16 if size.num_experts % 16 == 0 else min(2, size.num_experts)
    small = replace(size, tokens=64, num_experts=num_experts, choices=min(size.choices, num_experts))
    try:
        kernel_calls(small, torch.device("cuda", torch.cuda.current_device()))[kernel](changes)
        torch.cuda.synchronize()
    finally:
        torch.cuda.empty_cache()


def _tensors(size: LayerSize, device: torch.device) -> tuple[Tensor, ...]:
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator, device=device) * std).bfloat16()

    noise_TE = torch.rand(size.tokens, size.num_experts, generator=generator, device=device)
    return (
        normal(size.tokens, size.d_model),
        noise_TE.topk(size.choices).indices,
        torch.rand(size.tokens, size.choices, generator=generator, device=device) + 0.1,
        normal(size.num_experts, 2 * size.d_hidden, size.d_model, std=size.d_model**-0.5),
        normal(size.num_experts, size.d_model, size.d_hidden, std=size.d_hidden**-0.5),
        normal(size.tokens, size.d_model),
    )


def _layer(
    backend: str, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, gate_up: Tensor, down: Tensor, table: TileTable
) -> Tensor:
    if backend in ("triton", "quack"):
        return experts_of_tokens(x_TD, ids_TK, weights_TK, gate_up, down, backend=backend, table=table)
    order = order_by_expert(ids_TK, down.shape[0])
    row_weights_N = weights_TK.flatten().index_select(0, order.slot_of_row_N)
    rows_ND = rows_from_tokens(x_TD, order)
    y_ND = grouped_experts(rows_ND, row_weights_N, order.offsets_e, gate_up, down, backend=backend, table=table)
    return sum_over_choices(y_ND, order)
