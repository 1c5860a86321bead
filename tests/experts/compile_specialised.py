"""Compile specialised kernels for an H200 without one: `python3 tests/experts/compile_specialised.py MODULE`.

Prints what each kernel needs, as JSON by name: shared memory in bytes, products by `wgmma`, bytes on the stack, where
registers that spill go. `--all` compiles more of what a layer may ask for. Run by `test_specialised.py`.
"""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, untyped-decorator, no-untyped-call"

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
import triton
from coterie_experts import Activation
from coterie_experts.grouped_swiglu.specialised import gradients, products, up
from coterie_experts.grouped_swiglu.triton_layout import PaddedLayout
from coterie_experts.grouped_swiglu.triton_tiles import TileSet, choose_tiles
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

__all__ = ["calls"]

T, D, H, E, K = 512, 1024, 512, 16, 2
BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class NoDevice:
    """What Triton asks of a driver before it compiles."""

    utils = SimpleNamespace(get_device_properties=lambda device: {"max_shared_mem": 232_448})

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def tiles_of(num_rows: int = 2048 * E) -> TileSet:
    return choose_tiles(interpreted=False, d_model=D, d_hidden=H, num_rows=num_rows, num_experts=E)


def calls(module: str, *, more: bool) -> dict[str, Callable[[], object]]:
    """Return what to compile by name: with the package's tiles, and what needs most registers and shared memory."""
    padded, integer = T * K + 128 * E, partial(empty, dtype=torch.int32)
    layout = PaddedLayout(
        source_P=integer(padded),
        counted_P=integer(padded),
        slot_P=integer(padded),
        position_N=integer(T * K),
        weight_P=empty(padded, dtype=torch.float32),
        expert_M=integer(padded // 128),
        has_zero_M=integer(padded // 128),
        num_tiles_1=integer(1),
        segments_e3=integer(E, 3),
    )
    many, few = tiles_of(), tiles_of(num_rows=E)
    gated, plain = Activation(name="swiglu_clamped"), Activation(name="relu_squared")
    found: dict[str, Callable[[], object]] = {}
    if module == "products":

        def product(tile, *, is_down: bool = True, bias: bool = False, scattered: bool = False) -> None:
            rows, weights = (
                (empty(padded, H), empty(E, D, H)) if is_down else (empty(padded, 2 * H), empty(E, 2 * H, D))
            )
            out = {"targets": empty(T * K, D)} if scattered else {"products": empty(padded, D)}
            products.multiply(
                rows,
                weights,
                layout,
                tile,
                transposed=is_down,
                first=0,
                width=D,
                bias=empty(E, D) if bias else None,
                **out,
                **shared,
            )

        shared = {"num_programs": 132, "warmup": True}
        found["grad_rows"] = partial(product, many.grad_rows, is_down=False)
        found["down, few rows, bias, scattered"] = partial(product, few.down, bias=True, scattered=True)
        if more:
            found["down"] = partial(product, many.down)
            found["down, few rows"] = partial(product, few.down)
            found["down, bias"] = partial(product, many.down, bias=True)
            found["down, scattered"] = partial(product, many.down, scattered=True)
            found["grad_rows, scattered"] = partial(product, many.grad_rows, is_down=False, scattered=True)
        return found
    shared = {"num_programs": 132, "warmup": True}
    if module == "up":

        def layer(tile, activation: Activation, bias: bool) -> None:
            width = 2 * H if activation.is_gated else H
            more = {"activation": activation, "bias": empty(E, width) if bias else None, **shared}
            up.pre_and_activation(empty(T, D), layout, empty(E, width, D), tile, **more)

        tile = many.up
        found["swiglu_clamped, bias"] = partial(layer, tile, gated, True)
        found["swiglu"] = partial(layer, tile, Activation(), False)
        if more:
            found["swiglu, bias"] = partial(layer, tile, Activation(), True)
            found["relu_squared"] = partial(layer, tile, plain, False)
            found["relu_squared, bias"] = partial(layer, tile, plain, True)
            for ring in (3, 4):
                if ring != tile.ring:
                    found[f"swiglu_clamped, bias, {ring} stages"] = partial(
                        layer, replace(tile, ring=ring), gated, True
                    )
        return found
    assert module == "gradients"

    def gradient(tile, *, is_down: bool, main_grad: bool) -> None:
        width = H if is_down else 2 * H
        shape = (E, D, H) if is_down else (E, 2 * H, D)
        gradients.weight_gradient(
            empty(T, D),
            empty(padded, width),
            layout,
            tile,
            transposed=not is_down,
            main_grad=empty(*shape, dtype=torch.float32) if main_grad else None,
            **shared,
        )

    for is_down, tile in ((True, many.grad_down), (False, many.grad_gate_up)):
        name = "grad_down" if is_down else "grad_gate_up"
        for ring in (3, 4) if more else (tile.ring,):
            for main_grad in (False, True):
                key = f"{name}, {ring} stages{', main_grad' if main_grad else ''}"
                found[key] = partial(gradient, replace(tile, ring=ring), is_down=is_down, main_grad=main_grad)
    if more:
        return found
    chosen = f"grad_down, {many.grad_down.ring} stages", f"grad_gate_up, {many.grad_gate_up.ring} stages, main_grad"
    return {name: found[name] for name in chosen}


def needs(kernel) -> dict[str, int]:
    """Return what a compiled kernel needs."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        said = subprocess.run(
            [str(BIN / "cuobjdump"), "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = {key.lower(): int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", said)}
    return {**found, "shared": kernel.metadata.shared, "wgmma": kernel.asm["ptx"].count("wgmma.mma_async")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("module", choices=("products", "up", "gradients"))
    parser.add_argument("--all", action="store_true")
    arguments = parser.parse_args()
    driver.set_active(NoDevice())
    compiled = []
    plain_run = JITFunction.run

    def run(self, *args, **kwargs):
        compiled.append(plain_run(self, *args, **kwargs))
        return compiled[-1]

    JITFunction.run = run
    found = {}
    for name, call in calls(arguments.module, more=arguments.all).items():
        call()
        found[name] = needs(compiled[-1])
    print(json.dumps(found))


if __name__ == "__main__":
    main()
