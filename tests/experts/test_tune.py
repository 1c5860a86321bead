"""The record of a GPU: shape classes, the file, and the command that writes it, with times that are made up."""

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from coterie_experts import ExpertsConfig, GroupedExperts, TileTable, choose_backend, load_table, tune_timing
from coterie_experts.grouped_swiglu import choice as choice_module
from coterie_experts.grouped_swiglu import quack_native, triton_native
from coterie_experts.tables import KERNELS, recorded_backends, shape_class, width_class
from coterie_experts.tune import SIZES, LayerSize, _fastest_first, candidates, main, record
from support.interpreted import needs_triton

CUDA = torch.device("cuda")
SMALL = LayerSize(tokens=64, d_model=64, d_hidden=32, num_experts=4, choices=2)


class FakeTimer:
    """Band 16 is fastest for `up`, by 10 %; band 4 for `down`, by less than counts; each call takes a second."""

    capability, dtype, device = "9.0", "bfloat16", "This GPU"
    backends = ("triton", "torch", "quack")

    def __init__(self) -> None:
        self.now_s = 0.0
        self.stop_at_s = float("inf")

    def prepare(self, size: LayerSize, changes: Mapping[str, Sequence[object]], *, within_s: float) -> None:
        assert set(changes) == set(KERNELS)
        assert within_s >= 0

    def kernel_us(self, size: LayerSize, kernel: str, changes: Sequence[Mapping[str, object]]) -> list[float]:
        self.now_s += 1
        if self.now_s > self.stop_at_s:
            raise KeyboardInterrupt
        assert changes[0] == {}
        fastest = {"up": ({"band": 16}, 90.0), "down": ({"band": 4}, 99.5)}.get(kernel)
        return [fastest[1] if fastest is not None and change == fastest[0] else 100.0 for change in changes]

    def layer_us(self, size: LayerSize, table: TileTable) -> dict[str, float]:
        assert size.shape_class in table.tiles
        return {"triton": 2.0, "torch": 3.0, "quack": 1.0}


def test_classes() -> None:
    assert width_class(2048, 1024) == "narrow-medium"
    assert width_class(3072, 384) == "wide-small"
    assert width_class(3071, 4097) == "narrow-large"
    assert shape_class(7168, 2048, num_rows=1024 * 32, num_experts=32) == "wide-medium-many"
    assert shape_class(7168, 2048, num_rows=1024 * 32 - 1, num_experts=32) == "wide-medium-few"
    assert len({size.shape_class for size in SIZES}) == len(SIZES)


def test_records_what_wins_and_nothing_that_is_noise(tmp_path: Path) -> None:
    timer, said, saved = FakeTimer(), [], []
    table = record([SMALL], timer, limit_s=100, save=saved.append, say=said.append, clock=lambda: timer.now_s)
    assert table.tiles == {"narrow-small-few": {"up": {"band": 16}}}
    assert table.backends == {"narrow-small": ("quack", "triton", "torch")}
    assert saved == [table]
    assert said[0] == "[1/1] T 64, D 64, H 32, E 4, K 2: narrow-small-few"
    assert "  up: {'band': 16}, 90 us (built-in: 100)" in said
    assert "  down: built-in, 100 us (built-in: 100)" in said
    table.write(tmp_path / "tiles.json")
    assert load_table(tmp_path / "tiles.json") == table
    assert [file.name for file in tmp_path.iterdir()] == ["tiles.json"]


def test_first_back_end_stays_first_within_the_margin() -> None:
    assert _fastest_first({"triton": 101.0, "torch": 300.0, "quack": 100.0}) == ("triton", "quack", "torch")
    assert _fastest_first({"triton": 105.0, "torch": 300.0, "quack": 100.0}) == ("quack", "triton", "torch")
    assert _fastest_first({"triton": float("inf"), "torch": 3.0}) == ("torch",)


def test_limit_ends_between_kernels_and_keeps_whole_sizes(tmp_path: Path) -> None:
    timer, said, saved = FakeTimer(), [], []
    sizes = [SMALL, replace(SMALL, d_model=4096), replace(SMALL, d_hidden=1024)]
    # Six kernels of a second each, and two more.
    record(sizes, timer, limit_s=8, save=saved.append, say=said.append, clock=lambda: timer.now_s)
    assert timer.now_s == 8
    assert list(saved[-1].tiles) == ["narrow-small-few"]
    assert said[-1] == "the limit of 8 s is over; 1 of 3 sizes are recorded"


def test_interrupted_command_leaves_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    timer, file = FakeTimer(), tmp_path / "tiles.json"
    timer.stop_at_s = 7
    sizes = ["--size", "64,64,32,4,2", "--size", "64,4096,32,4,2"]
    assert main(["--out", str(file), *sizes], timer) == 0
    assert list(load_table(file).tiles) == ["narrow-small-few"]
    assert "interrupted" in capsys.readouterr().out
    timer.stop_at_s = timer.now_s
    file.unlink()
    assert main(["--out", str(file), *sizes], timer) == 1
    assert not file.exists()


@pytest.mark.parametrize("text", ["1,2,3,4", "1,2,3,4,x", "1,2,3,4,0", "1,2,3,4,5"])
def test_wrong_sizes_are_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--size", text], FakeTimer())
    assert (
        f"a size must be T,D,H,E,K: five numbers from 1 on with K at most E, but is '{text}'" in capsys.readouterr().err
    )


def test_widths_that_no_kernel_has_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--size", "64,65,63,4,2"], FakeTimer())
    text = "size '64,65,63,4,2' cannot be measured: d_model (65) and d_hidden (63) must be a multiple of 8"
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("text", ["nan", "-5", "0", "inf", "1e300", "soon"])
def test_wrong_limits_are_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([f"--limit-s={text}"], FakeTimer())
    assert f"--limit-s: '{text}' must be a number of seconds above 0" in capsys.readouterr().err


def test_files_that_cannot_be_written_are_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    for out, text in (
        ("", "'' must be a file to write, not a folder"),
        (".", "'.' must be a file to write, not a folder"),
        ("nodir/x.json", "'nodir/x.json' cannot be written: there is no folder 'nodir'"),
        ("file/x.json", "'file/x.json' cannot be written: there is no folder 'file'"),
    ):
        timer = FakeTimer()
        with pytest.raises(SystemExit):
            main(["--size", "64,64,32,4,2", "--out", out], timer)
        assert timer.now_s == 0
        assert f"--out: {text}" in capsys.readouterr().err
    # Also without --out: the default is a file of the folder that one is in.
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(SystemExit):
        main(["--size", "64,64,32,4,2"], FakeTimer())
    assert "folder '.' is read-only" in capsys.readouterr().err


class WideFails(FakeTimer):
    """Nothing can run where the model is wide."""

    def layer_us(self, size: LayerSize, table: TileTable) -> dict[str, float]:
        times = super().layer_us(size, table)
        return dict.fromkeys(times, float("inf")) if size.d_model >= 3072 else times


def test_sizes_that_nothing_could_run_are_not_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, wide, small = tmp_path / "tiles.json", ["--size", "64,4096,32,4,2"], ["--size", "64,64,32,4,2"]
    assert main(["--out", str(file), *wide], WideFails()) == 1
    assert not file.exists()
    said = capsys.readouterr().out
    assert "  none of triton, torch, quack could run this layer; nothing is recorded for it" in said
    assert said.endswith("nothing was recorded\n")
    assert main(["--out", str(file), *wide, *small], WideFails()) == 0
    assert "1 of 2 sizes recorded" in capsys.readouterr().out
    assert list(load_table(file).tiles) == ["narrow-small-few"]
    assert list(load_table(file).backends) == ["narrow-small"]


def test_without_a_gpu_the_command_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(SystemExit):
        main([])
    assert "there is no CUDA device" in capsys.readouterr().err


def test_candidates_begin_with_the_built_in_tile() -> None:
    for kernel in KERNELS:
        tried = candidates(kernel)
        assert tried[0] == {}
        for change in tried:
            assert TileTable(capability="", dtype="", tiles={"wide-small-few": {kernel: change}}).problems() == []


def _end_this_process(size: object, kernel: str, note: Path) -> None:
    note.touch()
    os._exit(1)


def test_a_compiler_that_dies_ends_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tune_timing, "_compile", _end_this_process)
    monkeypatch.setattr(tune_timing, "_COMPILERS", 1)
    timer = tune_timing.DeviceTimer.__new__(tune_timing.DeviceTimer)
    for note in (tmp_path / "first", tmp_path / "second"):
        # In the place of a change of the tile.
        timer.prepare(SIZES[0], {"up": [note] * 3}, within_s=60)
        assert note.exists(), "no compiler was started"


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ("", "JSONDecodeError"),
        ("[]", "is not an object with capability, dtype"),
        ('{"capability": "9.0"}', "dtype is missing: a string such as"),
        ('{"capability": 9, "dtype": "bf16"}', "capability .9. must be a string such as"),
        ('{"capability": "9.0", "dtype": "bfloat16", "speed": 1}', "'speed' is not one of capability"),
        ('{"capability": "9.0", "dtype": "bf16", "backends": {"wide-small": "torch"}}', "must be an object of lists"),
        (
            '{"capability": "9.0", "dtype": "bf16", "tiles": {"wide-small-few": {"up": 4}}}',
            "must be an object of objects",
        ),
        ('{"capability": "9.0", "dtype": "bf16", "backends": {"wide-small": ["cuda"]}}', "'cuda' is not one of triton"),
        (
            '{"capability": "9.0", "dtype": "bf16", "tiles": {"wide-small-few": {"left": {}}}}',
            "'left' is not one of up, down",
        ),
        (
            '{"capability": "9.0", "dtype": "bf16", "tiles": {"wide-small-few": {"up": {"rows": 64}}}}',
            "'rows' is not one of band, flatten",
        ),
        (
            '{"capability": "9.0", "dtype": "bf16", "tiles": {"wide-small-few": {"up": {"band": true}}}}',
            "band .True. must be a whole number",
        ),
        (
            '{"capability": "9.0", "dtype": "bf16", "tiles": {"wide-small-few": {"up": {"band": 0}}}}',
            "band .0. must be from 1 to 1024",
        ),
        (
            '{"capability": "9.0", "dtype": "bf16", "tiles": {"wide-small-few": {"up": {"band": 2147483647}}}}',
            "must be from 1 to 1024",
        ),
        ("[" * 20_000, "RecursionError"),
    ],
)
def test_files_that_are_no_table(values: str, text: str, tmp_path: Path) -> None:
    file = tmp_path / "tiles.json"
    file.write_text(values)
    with pytest.raises(ValueError, match=rf"tiles file .*tiles\.json: .*{text}"):
        load_table(file)
    with pytest.raises(ValueError, match="tiles file"):
        GroupedExperts(ExpertsConfig(d_model=8, d_hidden=4, num_experts=2, tiles=str(file)))


def test_what_would_have_no_effect_is_refused() -> None:
    def problems(**changes: object) -> list[str]:
        return table(**changes).problems()

    def of_kernel(kernel: str, **changes: object) -> list[str]:
        return problems(tiles={"narrow-medium-many": {kernel: changes}})

    (text,) = problems(tiles={"narow-medium-many": {"up": {"band": 4}}})
    assert text.startswith("tiles: class 'narow-medium-many' is not one of narrow-small-few, narrow-small-many, ")
    (text,) = problems(backends={"narrow-medium-many": ("triton",)})
    assert text == (
        "backends: class 'narrow-medium-many' is not one of narrow-small, narrow-medium, narrow-large, wide-small, "
        "wide-medium, wide-large"
    )
    (text,) = problems(backends={"narrow-medium": ()})
    assert text == "backends of narrow-medium: must name at least one of triton, quack, te, torch, reference"
    for ring in (-1, 1, 2, 5):
        assert of_kernel("up", ring=ring) == [f"tiles of narrow-medium-many, up: ring ({ring}) must be one of 0, 3, 4"]
    for ring in (0, 3, 4):
        assert of_kernel("up", ring=ring) == []
    assert of_kernel("grad_hidden", ring=3) == [
        "tiles of narrow-medium-many, grad_hidden: 'ring' is not one of band, flatten, num_stages"
    ]


def test_every_class_of_a_layer_is_known() -> None:
    for d_model in (64, 4096):
        for d_hidden in (64, 1024, 8192):
            for num_rows in (1, 10**6):
                size = shape_class(d_model, d_hidden, num_rows=num_rows, num_experts=2)
                widths = width_class(d_model, d_hidden)
                assert table(tiles={size: {}}, backends={widths: ("triton",)}).problems() == []


def test_missing_file_and_file_on_the_cpu(tmp_path: Path) -> None:
    config = ExpertsConfig(d_model=8, d_hidden=4, num_experts=2, tiles=str(tmp_path / "none.json"))
    with pytest.raises(ValueError, match=r"none\.json: FileNotFoundError"):
        GroupedExperts(config)
    TileTable(capability="12.0", dtype="bfloat16").write(tmp_path / "none.json")
    assert GroupedExperts(config).backend == "torch"


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "This GPU")
    monkeypatch.setattr(triton_native, "obstacle", lambda **sizes: None)
    choice_module._say_once.cache_clear()


def auto(table: TileTable | None = None, *, d_model: int = 64) -> tuple[str, str]:
    chosen = choose_backend("auto", d_model=d_model, d_hidden=32, dtype=torch.bfloat16, device=CUDA, table=table)
    return chosen.name, chosen.reason


def table(**changes: object) -> TileTable:
    return TileTable(**{"capability": "9.0", "dtype": "bfloat16", **changes})


@pytest.mark.usefixtures("hopper")
def test_auto_takes_the_fastest_that_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = table(backends={"narrow-small": ("quack", "triton", "torch")})
    monkeypatch.setattr(quack_native, "obstacle", lambda **sizes: "not here")
    name, reason = auto(measured)
    assert name == "triton"
    assert reason == (
        "'triton' can run torch.bfloat16 on cuda; measured with swiglu for narrow-small widths on compute capability "
        "9.0, fastest first: quack, triton, torch; 'quack' cannot run: not here"
    )
    monkeypatch.setattr(quack_native, "obstacle", lambda **sizes: None)
    assert auto(measured)[0] == "quack"
    # Other widths are not in the table, and the record of the package has them.
    assert auto(measured, d_model=4096)[0] == recorded_backends("9.0", torch.bfloat16, "wide-small")[0]


@pytest.mark.usefixtures("hopper")
def test_auto_on_a_gpu_that_nobody_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (12, 0))
    name, reason = auto()
    assert name == "triton"
    assert "nothing was measured for narrow-small widths on compute capability 12.0" in reason
    assert "python -m coterie_experts.tune records it" in reason


@pytest.mark.usefixtures("hopper")
def test_auto_says_each_choice_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="coterie_experts"):
        for _ in range(3):
            auto()
        assert len(caplog.records) == 1
        assert "narrow-small widths: triton, because" in caplog.text
        auto(d_model=4096)
        assert len(caplog.records) == 2


@pytest.mark.usefixtures("hopper")
def test_table_of_another_gpu_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"compute capability 10\.0 and bfloat16, but this is 9\.0 and bfloat16; record"
    ):
        auto(table(capability="10.0"))
    with pytest.raises(ValueError, match="float16, but this is"):
        auto(table(dtype="float16"))


@needs_triton
def test_tiles_come_from_the_table_then_from_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    from coterie_experts.grouped_swiglu import triton_tiles

    monkeypatch.setitem(triton_tiles._HOPPER_BY_CLASS, "narrow-small-few", {"up": {"band": 2}})
    sizes = {"interpreted": False, "d_model": 64, "d_hidden": 32, "num_rows": 128, "num_experts": 4}
    built_in = triton_tiles._HOPPER
    assert triton_tiles.choose_tiles(**sizes).up == replace(built_in.up, band=2)
    assert triton_tiles.choose_tiles(**{**sizes, "d_model": 4096, "d_hidden": 8192}) == built_in
    tuned = table(tiles={"narrow-small-few": {"down": {"flatten": False, "band": 16}}})
    chosen = triton_tiles.choose_tiles(**sizes, table=tuned)
    assert chosen == replace(built_in, down=replace(built_in.down, flatten=False, band=16))
    assert triton_tiles.choose_tiles(**sizes, table=table()).up.band == 2


@needs_triton
def test_the_record_of_the_package_is_sound() -> None:
    from coterie_experts.grouped_swiglu import triton_tiles

    assert table(tiles=triton_tiles._HOPPER_BY_CLASS).problems() == []
    for name, changes in triton_tiles._HOPPER_BY_CLASS.items():
        model, hidden, rows = name.split("-")
        assert model in ("narrow", "wide")
        assert hidden in ("small", "medium", "large")
        assert rows in ("few", "many")
        # The order of a sum is the depth of a step: the same for all, so that no choice of tiles changes a bit.
        chosen = triton_tiles._HOPPER.changed(changes)
        assert {getattr(chosen, kernel).depth for kernel in KERNELS} == {64}


def test_file_is_plain_json(tmp_path: Path) -> None:
    table(device="This GPU", tiles={"a": {"up": {"band": 2}}}).write(tmp_path / "t.json")
    assert json.loads((tmp_path / "t.json").read_text()) == {
        "capability": "9.0",
        "dtype": "bfloat16",
        "device": "This GPU",
        "backends": {},
        "tiles": {"a": {"up": {"band": 2}}},
    }
