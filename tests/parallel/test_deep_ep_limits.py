"""What the DeepEP adapter says where it can not run, its arithmetic, and the recorded signatures."""

import ast
import importlib.util
import inspect
import json
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from coterie_parallel import Axis, DispatchOptions, make_dispatcher
from coterie_parallel.dispatch.deep_ep import DeepEPDispatcher, DeepEPOptions
from coterie_parallel.dispatch.deep_ep.expand import expansion
from coterie_parallel.dispatch.deep_ep.limits import batch_problems
from coterie_parallel.dispatch.deep_ep.package import find_package
from coterie_parallel.dispatch.deep_ep.payload import from_fp8, to_fp8
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.fake_deep_ep import SNAPSHOT, SURFACES, make_fake, signatures

SIZES = {"num_experts": 8, "expert_degree": 2, "alignment": 1}
INSTALL = "Install it with `pip install sgl-deep-ep`"
NOT_THAT_ONE = "the package deep-ep 1.0.0 of the index can not be built by anybody"


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.delitem(sys.modules, "deep_ep", raising=False)
    return monkeypatch


def test_a_missing_package_is_named(absent: pytest.MonkeyPatch) -> None:
    absent.setitem(sys.modules, "deep_ep", None)
    reason = DeepEPDispatcher.supports(**SIZES)
    assert reason is not None
    for part in ("no module deep_ep is installed", INSTALL, NOT_THAT_ONE, '"all_to_all"'):
        assert part in reason
    with pytest.raises(ValueError, match="no module deep_ep is installed"):
        DeepEPDispatcher(num_experts=8, axis=Axis.single("expert"))


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        (
            "raise AssertionError('Invalid NCCL versions: a v.s. b')",
            "AssertionError: Invalid NCCL versions: a",
        ),
        (
            "raise ImportError('The NVIDIA driver does not expose a usable CUDA device')",
            "ImportError: The NVIDIA driver",
        ),
        ("raise OSError('undefined symbol: _ZN3c10')", "OSError: undefined symbol"),
        ("import deep_ep_needs_this", "ModuleNotFoundError: No module named 'deep_ep_needs_this'"),
    ],
)
def test_an_import_that_fails_in_any_way_is_explained(
    code: str, cause: str, tmp_path: Path, absent: pytest.MonkeyPatch
) -> None:
    (tmp_path / "deep_ep").mkdir()
    (tmp_path / "deep_ep/__init__.py").write_text(code, encoding="utf-8")
    absent.syspath_prepend(str(tmp_path))
    reason = find_package()
    assert isinstance(reason, str)
    assert f"can not be imported here: {cause}" in reason
    assert "must be built for the torch, the CUDA and the NCCL that load it" in reason
    assert INSTALL in reason


def test_a_module_without_any_known_class_is_refused(absent: pytest.MonkeyPatch) -> None:
    module = make_fake("2.1.0")
    for name in SURFACES[:2]:
        delattr(module, name)
    absent.setitem(sys.modules, "deep_ep", module)
    reason = find_package()
    assert isinstance(reason, str)
    assert "deep_ep 2.1.0 has none of EPBuffer, ElasticBuffer, Buffer" in reason


@pytest.mark.parametrize(
    ("version", "surface"),
    [("1.2.1", "Buffer"), ("2.0.0", "ElasticBuffer"), ("2.1.0", "ElasticBuffer"), ("2.5.0", "EPBuffer")],
)
def test_the_newest_class_is_taken(version: str, surface: str, absent: pytest.MonkeyPatch) -> None:
    absent.setitem(sys.modules, "deep_ep", make_fake(version))
    assert DeepEPDispatcher(num_experts=8, axis=_axis(2)).surface == surface
    wanted = "Buffer" if surface == "EPBuffer" else "EPBuffer"
    with pytest.raises(ValueError, match=rf"surface \('{wanted}'\) is not in the installed deep_ep {version}"):
        DeepEPDispatcher(num_experts=8, axis=_axis(2), options=DispatchOptions(deep_ep=DeepEPOptions(surface=wanted)))


@pytest.mark.parametrize(
    ("version", "arguments", "message"),
    [
        ("1.2.1", {"size": 3, "num_experts": 9}, r"expert degree \(3\) must be one of 2, 4, 8, 16"),
        ("1.2.1", {"size": 16, "num_experts": 32}, r'over 16 ranks, more than 8: set overflow to "exact"'),
        ("1.2.1", {"size": 2, "num_experts": 512}, r"\(512 / 2 = 256\) must be at most 128 .* degree of 4 or more"),
        ("2.1.0", {"size": 4, "num_experts": 4096}, r"num_experts \(4096\) must be at most 2048"),
        ("2.1.0", {"size": 4, "num_experts": 2048}, r"\(2048 / 4 = 512\) must be at most 256 .* degree of 8 or more"),
        ("2.1.0", {"size": 1, "group": None}, 'needs a process group.*use dispatcher "local"'),
        ("2.1.0", {"alignment": 0}, r"alignment \(0\) must be at least 1"),
        ("2.1.0", {"num_experts": 7}, r"num_experts \(7\) must be a positive multiple of the expert degree \(2\)"),
        ("2.1.0", {"options": DispatchOptions(overflow="drop")}, r'overflow \("drop"\) does not exist'),
        ("2.1.0", {"options": DispatchOptions(saved_rows="fetch")}, r"saved_rows \('fetch'\) does nothing"),
        ("2.1.0", {"options": DispatchOptions(capacity_factor=3.0)}, r"capacity_factor \(3.0\) does nothing"),
        (
            "2.1.0",
            {"options": DispatchOptions(deep_ep=DeepEPOptions(max_tokens=0))},
            r"max_tokens \(0\) must be at least 1",
        ),
        (
            "2.1.0",
            {"options": DispatchOptions(deep_ep=DeepEPOptions(num_sms=5))},
            r"num_sms \(5\) must be even and at least 0; nearest: 4 or 6",
        ),
        (
            "2.1.0",
            {"options": DispatchOptions(deep_ep=DeepEPOptions(payload="int8"))},
            r"payload \('int8'\) must be 'bf16' or 'fp8'",
        ),
        (
            "2.1.0",
            {"options": DispatchOptions(deep_ep=DeepEPOptions(surface="V3"))},
            r"surface \('V3'\) must be one of auto, EPBuffer",
        ),
        (
            "2.0.0",
            {"options": DispatchOptions(deep_ep=DeepEPOptions(deterministic=True))},
            "deterministic .* needs DeepEP 2.1 or newer",
        ),
        (
            "1.2.1",
            {"options": DispatchOptions(deep_ep=DeepEPOptions(deterministic=True))},
            "deterministic .* does not exist with Buffer",
        ),
        (
            "1.2.1",
            {"options": DispatchOptions(deep_ep=DeepEPOptions(num_sms=4))},
            r"num_sms \(4\) is no argument of Buffer",
        ),
    ],
)
def test_what_can_not_run_is_said_before_anything_is_made(
    version: str, arguments: dict[str, Any], message: str, absent: pytest.MonkeyPatch
) -> None:
    module = make_fake(version)
    absent.setitem(sys.modules, "deep_ep", module)
    given = {"num_experts": 8, **arguments}
    axis = _axis(given.pop("size", 2), given.pop("group", "a group"))
    with pytest.raises(ValueError, match=message):
        DeepEPDispatcher(axis=axis, **given)
    assert module.calls == []


@pytest.mark.parametrize("name", ["local", "all_to_all", "rowwise"])
def test_another_dispatcher_refuses_the_settings(name: str) -> None:
    options = DispatchOptions(deep_ep=DeepEPOptions())
    with pytest.raises(ValueError, match='deep_ep belongs to dispatcher "deep_ep" and does nothing with another'):
        make_dispatcher(name, num_experts=8, axis=Axis.single("expert"), options=options)


def test_supports_knows_the_limits_of_the_newest_class(absent: pytest.MonkeyPatch) -> None:
    absent.setitem(sys.modules, "deep_ep", make_fake("2.5.0"))
    assert DeepEPDispatcher.supports(num_experts=256, expert_degree=3, alignment=128) is None
    reason = DeepEPDispatcher.supports(num_experts=1024, expert_degree=2, alignment=1)
    assert reason is not None
    assert "(1024 / 2 = 512) must be at most 256" in reason
    absent.setitem(sys.modules, "deep_ep", make_fake("1.2.1"))
    assert DeepEPDispatcher.supports(num_experts=64, expert_degree=16, alignment=1) is None


def test_tokens_that_it_can_not_send_are_named() -> None:
    usual: dict[str, Any] = {"width": 4096, "num_choices": 8, "dtype": torch.bfloat16, "device": "cuda"}

    def problems(surface: str, **given: Any) -> list[str]:
        return batch_problems(surface, needed_device="cuda", **{**usual, **given})

    assert problems("ElasticBuffer") == []
    assert problems("ElasticBuffer", width=2880, num_choices=33, dtype=torch.float32, device="cpu") == [
        'x_TD is on cpu, and DeepEP moves rows between GPUs only: use dispatcher "all_to_all" on cpu',
        "dtype of x_TD (torch.float32) must be torch.bfloat16 with DeepEP; cast the tokens",
        "width of x_TD (2880) must be a multiple of 256 with DeepEP; nearest: 2816 or 3072",
        "choices of a token (33) must be from 1 to 32 with DeepEP",
    ]
    assert problems("Buffer", width=8192) == ["width of x_TD (8192) must be at most 7936 with Buffer of DeepEP V1"]
    assert problems("ElasticBuffer", width=8192) == []


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_expansion_equals_a_loop(data: st.DataObject) -> None:
    num_local = data.draw(st.integers(1, 5))
    num_choices = data.draw(st.integers(1, 4))
    alignment = data.draw(st.sampled_from([1, 2, 16]))
    one = st.lists(st.integers(-1, num_local - 1), min_size=num_choices, max_size=num_choices).filter(
        lambda row: len([x for x in row if x >= 0]) == len({x for x in row if x >= 0})
    )
    ids = data.draw(st.lists(one, max_size=6))
    ids_nK = torch.tensor(ids, dtype=torch.int64).view(-1, num_choices)
    places = expansion(ids_nK, num_local=num_local, alignment=alignment)

    pairs: list[int] = []
    ends = []
    for expert in range(num_local):
        pairs += [number for number, chosen in enumerate(chain(*ids)) if chosen == expert]
        pairs += [-1] * (-len(pairs) % alignment)
        ends.append(len(pairs))
    assert places.offsets_e.tolist() == ends
    assert places.pair_R.shape[0] >= len(pairs)
    assert places.pair_R.tolist() == pairs + [-1] * (places.pair_R.shape[0] - len(pairs))
    rows = {pair: row for row, pair in enumerate(pairs) if pair >= 0}
    assert places.row_nK.flatten().tolist() == [rows.get(number, -1) for number in range(len(ids) * num_choices)]


def test_fp8_blocks_have_their_own_scales() -> None:
    x_TD = torch.tensor([[1.0] * 128 + [1000.0] * 128, [0.0] * 128 + [3e-9] * 127 + [6e-9]]).bfloat16()
    values, scales = to_fp8(x_TD)
    assert (values.dtype, values.shape) == (torch.float8_e4m3fn, (2, 256))
    assert (scales.dtype, scales.shape, scales.is_contiguous()) == (torch.float32, (2, 2), True)
    assert values.float()[0].tolist() == [448.0] * 256
    back_TD = from_fp8(values, scales, torch.bfloat16)
    assert back_TD.dtype == torch.bfloat16
    assert bool(((back_TD - x_TD).abs() <= x_TD.abs() * 2**-4).all())
    assert back_TD[1, :128].tolist() == [0.0] * 128


def test_the_stand_in_refuses_what_the_package_does_not_have() -> None:
    buffer = make_fake("2.5.0").EPBuffer
    with pytest.raises(TypeError, match="previous_event_before_epilogue"):
        buffer.dispatch(None, None, previous_event_before_epilogue=None)
    assert list(inspect.signature(buffer.combine).parameters)[:3] == ["self", "x", "handle"]
    assert signatures("2.1.0")["Buffer"]["__init__"].parameters["num_nvl_bytes"].default == 0


def test_the_recorded_signatures_are_those_of_the_installed_package() -> None:
    spec = importlib.util.find_spec("deep_ep") if "deep_ep" not in sys.modules else None
    if spec is None or spec.origin is None:
        pytest.skip("no deep_ep is installed; the snapshot is compared where one is")
    # Read, not imported: that needs a GPU.
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in Path(spec.origin).parent.rglob("*.py")]
    versions = {
        ast.literal_eval(node.value)
        for tree in trees
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__"
    }
    recorded = json.loads(SNAPSHOT.read_text(encoding="utf-8"))
    (version,) = versions & set(recorded)
    for name, methods in recorded[version].items():
        if name != "source":
            assert {method: _parameters(trees, name, method) for method in methods} == methods


def _parameters(trees: list[ast.Module], class_name: str, method: str) -> list[str]:
    (found,) = [
        item
        for tree in trees
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == class_name
        for item in node.body
        if isinstance(item, ast.FunctionDef) and item.name == method
    ]
    names = [argument.arg for argument in found.args.args]
    defaults = [None] * (len(names) - len(found.args.defaults)) + [ast.unparse(one) for one in found.args.defaults]
    return [name if value is None else f"{name}={value}" for name, value in zip(names, defaults, strict=True)]


def _axis(size: int, group: Any = "a group") -> Axis:
    return Axis(name="expert", size=size, index=0, group=group, ranks=tuple(range(size)))
