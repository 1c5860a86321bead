"""The import star holds, and the check that says so sees every way to break it."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.layers import ROOT, breaches_in_source, breaches_in_workspace, rules

RULES = rules()


def test_workspace_has_no_breach() -> None:
    assert breaches_in_workspace() == []


def test_the_star() -> None:
    leaves = {"coterie_routing", "coterie_experts", "coterie_parallel", "coterie_export"}
    assert set(RULES) == leaves | {"coterie_trainer"}
    for leaf in leaves:
        assert not any(library.startswith("coterie_") for library in RULES[leaf].libraries)
    assert leaves <= RULES["coterie_trainer"].libraries
    assert {name for name, rule in RULES.items() if rule.collectives} == {"coterie_parallel", "coterie_trainer"}


@pytest.mark.parametrize(
    ("package", "source", "module"),
    [
        ("coterie_routing", "import torch.distributed", "torch.distributed"),
        ("coterie_routing", "import torch.distributed as dist", "torch.distributed"),
        ("coterie_experts", "from torch import nn, distributed", "torch.distributed"),
        ("coterie_export", "from torch.distributed import all_reduce", "torch.distributed.all_reduce"),
        ("coterie_export", "from torch.distributed.tensor import DTensor", "torch.distributed.tensor.DTensor"),
        ("coterie_routing", "import torch\ndef f(x):\n    torch.distributed.all_reduce(x)", "torch.distributed"),
        ("coterie_routing", "def f():\n    import coterie_parallel", "coterie_parallel"),
        ("coterie_export", "if TYPE_CHECKING:\n    from coterie_experts.api import X", "coterie_experts.api.X"),
        ("coterie_parallel", "try:\n    import coterie_trainer\nexcept ImportError:\n    pass", "coterie_trainer"),
        ("coterie_parallel", "import importlib\nimportlib.import_module('coterie_export')", "coterie_export"),
        ("coterie_parallel", "__import__('coterie_export')", "coterie_export"),
        ("coterie_routing", "import transformers", "transformers"),
        ("coterie_trainer", "import pandas", "pandas"),
    ],
)
def test_breach_is_seen(package: str, source: str, module: str) -> None:
    found = breaches_in_source(source, RULES[package])
    assert [breach.split(": ")[1] for breach in found] == [f"{package} imports {module}"]


@pytest.mark.parametrize(
    ("package", "source"),
    [
        ("coterie_routing", "import torch\nimport dataclasses\nimport triton.language as tl\nfrom . import sums"),
        ("coterie_routing", "import coterie_routing.sums\nfrom coterie_routing import Router"),
        ("coterie_routing", "import torch.distributions"),
        ("coterie_experts", "import quack\nimport transformer_engine.pytorch"),
        ("coterie_parallel", "import torch.distributed as dist\nimport deep_ep"),
        ("coterie_export", "import safetensors.torch\nimport transformers"),
        ("coterie_trainer", "import coterie_routing, coterie_experts, coterie_parallel, coterie_export"),
        ("coterie_trainer", "import torch.distributed.checkpoint"),
    ],
)
def test_allowed_import_is_no_breach(package: str, source: str) -> None:
    assert breaches_in_source(source, RULES[package]) == []


def test_breach_in_a_file_fails_the_workspace(tmp_path: Path) -> None:
    for name in ("routing", "export"):
        package = tmp_path / "packages" / name
        (package / "src" / f"coterie_{name}").mkdir(parents=True)
        (package / "src" / f"coterie_{name}" / "__init__.py").write_text("import torch\n", encoding="utf-8")
        toml = f'[project]\nname = "coterie-{name}"\ndependencies = ["torch>=2.10"]\n'
        (package / "pyproject.toml").write_text(toml, encoding="utf-8")
        (tmp_path / "tests" / name).mkdir(parents=True)
    (tmp_path / "tests" / "support").mkdir()
    assert breaches_in_workspace(tmp_path) == []

    deep = tmp_path / "packages" / "routing" / "src" / "coterie_routing" / "inner" / "deep.py"
    deep.parent.mkdir()
    deep.write_text("import torch\n\nimport coterie_export\n", encoding="utf-8")
    (tmp_path / "tests" / "export" / "test_it.py").write_text("import coterie_routing\n", encoding="utf-8")
    (tmp_path / "tests" / "support" / "help.py").write_text("from coterie_export import x\n", encoding="utf-8")
    found = breaches_in_workspace(tmp_path)
    assert [breach.split(": ")[:2] for breach in found] == [
        ["packages/routing/src/coterie_routing/inner/deep.py", "line 3"],
        ["tests/export/test_it.py", "line 1"],
        ["tests/support/help.py", "line 1"],
    ]


def test_check_runs_as_a_script_without_the_packages() -> None:
    script = ROOT / "tests" / "support" / "layers.py"
    done = subprocess.run([sys.executable, "-I", str(script)], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "layers: 0 breaches in 5 packages\n", "")
