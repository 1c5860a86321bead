"""The specialised kernels: that they compile for an H200, which cases they take, and what runs where they cannot."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from coterie_experts import Activation, choose_backend
from coterie_experts.grouped_swiglu import specialised, triton_native
from support.interpreted import needs_triton
from torch import Tensor

pytestmark = needs_triton
CUDA, META = torch.device("cuda"), torch.device("meta")
# Shared memory of a program.
MOST_BYTES = 232_448
SIZES = {"d_model": 64, "d_hidden": 32, "dtype": torch.bfloat16}


def without_ptxas() -> str | None:
    import triton

    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    missing = [name for name in ("ptxas", "cuobjdump") if not (folder / name).exists()]
    return f"Triton came without {' and '.join(missing)}" if missing else specialised._obstacle_of_triton()


def is_triton_39() -> bool:
    import triton

    return triton.__version__.startswith("3.9.")


@pytest.mark.parametrize("module", ["products", "up", "gradients"])
def test_kernels_compile_without_spills(module: str, tmp_path: Path) -> None:
    if reason := without_ptxas():
        pytest.skip(reason)
    script = Path(__file__).with_name("compile_specialised.py")
    done = subprocess.run(
        [sys.executable, str(script), module],
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    kernels = json.loads(done.stdout)
    assert kernels
    for name, needs in kernels.items():
        # Two warpgroups, each with the four products of a step of 64.
        assert needs["wgmma"] == 8, name
        # Where gradients are added, Triton 3.9 lets a thread put four numbers there for a while at the end of a tile.
        assert needs["stack"] <= (16 if "main_grad" in name and is_triton_39() else 0), (name, needs)
        assert needs["local"] == 0, (name, needs)
        assert needs["shared"] <= MOST_BYTES, (name, needs)


def tiles(num_rows: int = 1 << 20) -> Any:
    from coterie_experts.grouped_swiglu.triton_tiles import choose_tiles

    return choose_tiles(interpreted=False, d_model=2048, d_hidden=1024, num_rows=num_rows, num_experts=8)


def test_fits_refuses_what_does_not_fit() -> None:
    gradients, products, up = modules()
    chosen = tiles()
    widths = {"gathered_width": 2048, "rows_width": 1024}
    for fits, tile in (
        (lambda tile: up.fits(d_model=2048, tile=tile), chosen.up),
        (lambda tile: products.fits(tile=tile), chosen.down),
        (lambda tile: products.fits(tile=tile), chosen.grad_rows),
        (lambda tile: gradients.fits(**widths, tile=tile), chosen.grad_down),
        (lambda tile: gradients.fits(**widths, tile=tile), chosen.grad_gate_up),
    ):
        assert fits(tile)
        # Five stages of 48 KiB are more than there is.
        for change in ({"ring": 0}, {"ring": 1}, {"ring": 5}, {"rows": 64}, {"columns": 64}, {"depth": 32}):
            assert not fits(replace(tile, **change)), change
    # A copy of a gathered row begins and ends where a step does.
    assert not up.fits(d_model=2040, tile=chosen.up)
    assert not gradients.fits(gathered_width=2040, rows_width=1024, tile=chosen.grad_down)
    assert gradients.fits(gathered_width=2048, rows_width=1000, tile=chosen.grad_down)


def modules() -> tuple[Any, Any, Any]:
    if reason := specialised._obstacle_of_triton():
        pytest.skip(reason)
    from coterie_experts.grouped_swiglu.specialised import gradients, products, up

    return gradients, products, up


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(triton_native, "obstacle", lambda **sizes: None)
    specialised._obstacle_of_triton.cache_clear()


@pytest.fixture(autouse=True)
def _nothing_kept() -> Any:
    yield
    specialised._obstacle_of_triton.cache_clear()


@pytest.mark.usefixtures("hopper")
def test_without_gluon_the_reason_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "coterie_experts.grouped_swiglu.specialised.gradients", None)
    obstacle = specialised.obstacle(CUDA)
    assert obstacle is not None
    assert obstacle.startswith("this Triton has not the Gluon that they are written in (ModuleNotFoundError: ")
    for backend in ("triton", "auto"):
        reason = choose_backend(backend, **SIZES, device=CUDA).reason
        assert reason.endswith(f"; without its specialised kernels, with the plain kernels alone: {obstacle}")
    on_cpu = choose_backend("torch", **{**SIZES, "dtype": torch.float32}, device=torch.device("cpu"))
    assert "specialised" not in on_cpu.reason


@pytest.mark.usefixtures("hopper")
def test_unknown_triton_and_other_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    assert specialised.obstacle(torch.device("cpu")) == "they do not run on cpu"
    assert specialised.obstacle(META) is None
    monkeypatch.setattr(triton, "__version__", "3.60.0")
    assert specialised.obstacle(CUDA) == "they are known to work with Triton 3.6 to 3.9, and this is 3.60.0"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 0))
    assert specialised.obstacle(CUDA) == "they need compute capability 9"


class Launched(Exception):
    """What ran, and with what."""


def plain(name: str) -> Any:
    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            def run(*args: object, **kwargs: object) -> None:
                raise Launched(name)

            return run

    return Kernel()


def layout() -> Any:
    from coterie_experts.grouped_swiglu.triton_layout import PaddedLayout

    def integers(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=torch.int32, device=META)

    return PaddedLayout(
        source_P=integers(512),
        counted_P=integers(512),
        slot_P=integers(512),
        position_N=integers(64),
        weight_P=torch.empty(512, device=META),
        expert_M=integers(4),
        has_zero_M=integers(4),
        num_tiles_1=integers(1),
        segments_e3=integers(2, 3),
    )


def launches(chosen: Any, d_model: int) -> dict[str, Callable[[], object]]:
    """Return calls of the launches of a layer with 128 hidden units, by the names of what runs in them."""
    from coterie_experts.grouped_swiglu import triton_launch as launch

    def rows(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=torch.bfloat16, device=META)

    x, act, padded = rows(32, d_model), rows(512, 128), layout()
    up, down = rows(2, 256, d_model), rows(2, d_model, 128)
    same = {"activation": Activation(), "bias": None}
    gradient = {"transposed": False, "main_grad": None}
    return {
        "pre_and_activation": lambda: launch.pre_and_activation(x, padded, up, chosen, **same),
        "multiply": lambda: launch.rows_to_tokens(act, down, padded, chosen.down, transposed=True, num_choices=2),
        "multiply, rows": lambda: launch.rows_to_rows(
            act, down, padded, chosen.down, padded.segments_e3[:, 0], transposed=True
        ),
        "weight_gradient": lambda: launch.weight_gradient(x, act, padded, chosen.grad_down, **gradient),
    }


PLAIN = {
    "pre_and_activation": "up_with_activation",
    "multiply": "rows_times_weights",
    "weight_gradient": "grad_of_weights_in_turn",
}


def test_launches_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    from coterie_experts.grouped_swiglu import triton_launch as launch

    for module, name in zip(modules(), ("weight_gradient", "multiply", "pre_and_activation"), strict=True):

        def specialised_launch(*args: object, _name: str = name, num_programs: int, **kwargs: object) -> None:
            raise Launched(f"specialised {_name}, {num_programs}")

        monkeypatch.setattr(module, name, specialised_launch)
    for name in PLAIN.values():
        monkeypatch.setattr(launch, name, plain(name))

    def ran(d_model: int = 256, ring: int | None = None) -> list[str]:
        chosen = tiles()
        if ring is not None:
            chosen = chosen.changed({name: {"ring": ring} for name in chosen.__dataclass_fields__})
        found = []
        for call in launches(chosen, d_model).values():
            with pytest.raises(Launched) as raised:
                call()
            found.append(str(raised.value))
        return found

    # As many programs as processors, on this device three, where there are as many tiles.
    special = [f"specialised {name.partition(',')[0]}" for name in launches(tiles(), 256)]
    assert ran() == [f"{name}, 3" for name in special]
    alone = [PLAIN[name.partition(",")[0]] for name in launches(tiles(), 256)]
    assert ran(ring=0) == alone
    assert ran(ring=9) == alone
    # Only products take any width.
    assert [name.partition(",")[0] for name in ran(d_model=264)] == [
        one if "multiply" in one else other for one, other in zip(special, alone, strict=True)
    ]
    monkeypatch.setattr(specialised, "obstacle", lambda device: "no")
    assert ran() == alone
