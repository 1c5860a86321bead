import sys
from pathlib import Path

import pytest
from coterie_parallel import (
    Axis,
    DispatchOptions,
    ParallelConfig,
    dispatcher_class,
    known_dispatchers,
    make_dispatcher,
    make_plan,
)
from coterie_parallel.conformance import conformance_problems
from coterie_parallel.dispatch import registry
from coterie_parallel.dispatch.local import LocalDispatcher

_PAIR = Axis(name="expert", size=2, index=0, group=None, ranks=(0, 1))


def _install(folder: Path, entries: str, code: str = "") -> None:
    (folder / "someone_else.py").write_text(code)
    info = folder / "someone_else-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: someone-else\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[coterie_parallel.dispatchers]\n{entries}\n")


def test_the_built_in_names() -> None:
    assert known_dispatchers() == ["all_to_all", "deep_ep", "local", "rowwise"]


@pytest.mark.parametrize("name", ["row_wise", "deepep", "", "Local"])
def test_an_unknown_name_lists_the_known_ones(name: str) -> None:
    with pytest.raises(ValueError, match=rf"\('{name}'\) is unknown; known: all_to_all, deep_ep, local, rowwise"):
        make_dispatcher(name, num_experts=4, axis=Axis.single("expert"))


def test_local_is_refused_on_two_ranks_and_nothing_else_is_taken_instead() -> None:
    with pytest.raises(ValueError, match='"local" needs an expert degree of 1, got 2; use dispatcher "all_to_all"'):
        make_dispatcher("local", num_experts=4, axis=_PAIR)
    with pytest.raises(ValueError, match='"local" needs an expert degree of 1, got 2'):
        make_plan(ParallelConfig(expert=2, dispatcher="local"), 2, num_experts=4)


@pytest.mark.parametrize(
    ("num_experts", "alignment", "message"),
    [(3, 1, r"num_experts \(3\).*\(2\)"), (0, 1, r"num_experts \(0\)"), (4, 0, r"alignment \(0\).*1, 16 and 128")],
)
def test_sizes_that_can_not_be(num_experts: int, alignment: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_dispatcher("all_to_all", num_experts=num_experts, axis=_PAIR, alignment=alignment)


def test_a_package_registers_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install(
        tmp_path,
        "theirs = someone_else:Theirs\nfunction = someone_else:make",
        "from coterie_parallel.dispatch.local import LocalDispatcher\n"
        "class Theirs(LocalDispatcher):\n    pass\n"
        "def make():\n    pass\n",
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert known_dispatchers() == ["all_to_all", "deep_ep", "function", "local", "rowwise", "theirs"]
    assert ParallelConfig(dispatcher="theirs").problems() == []
    assert dispatcher_class("theirs").__module__ == "someone_else"
    assert conformance_problems("theirs", Axis.single("expert")) == []
    with pytest.raises(ValueError, match=r"'function'.*subclass of coterie_parallel.Dispatcher.*someone_else:make"):
        dispatcher_class("function")


def test_a_name_claimed_twice_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install(tmp_path, "local = someone_else:Mine")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"'local'.*more than once: coterie_parallel.*someone_else:Mine; uninstall"):
        make_dispatcher("local", num_experts=4, axis=Axis.single("expert"))


def test_a_module_that_can_not_be_imported_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install(tmp_path, "theirs = not_there_at_all:Theirs")
    monkeypatch.syspath_prepend(tmp_path)
    message = r"'theirs'.*by the package 'someone-else' as not_there_at_all:Theirs.*No module named 'not_there_at_all'"
    with pytest.raises(ImportError, match=message):
        dispatcher_class("theirs")


def test_a_class_that_is_not_there_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install(tmp_path, "theirs = someone_else:Theirs")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "someone_else", raising=False)
    with pytest.raises(ValueError, match=r"'theirs'.*'someone-else'.*must be a subclass of.*someone_else:Theirs"):
        dispatcher_class("theirs")


class _NoOptions(LocalDispatcher):
    def __init__(self, *, num_experts: int, axis: Axis, alignment: int = 1) -> None:
        super().__init__(num_experts=num_experts, axis=axis, alignment=alignment)


def test_options_for_a_class_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "dispatcher_class", lambda name: _NoOptions)
    single = Axis.single("expert")
    assert make_dispatcher("theirs", num_experts=2, axis=single, options=DispatchOptions()).num_experts == 2
    with pytest.raises(
        ValueError, match=r"dispatcher \('theirs'\) takes no options, got DispatchOptions\(.*leave them out"
    ):
        make_dispatcher("theirs", num_experts=2, axis=single, options=DispatchOptions(overlap=True))
