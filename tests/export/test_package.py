"""The package as a newcomer meets it: a light import, a clear word about the extra, a README that runs."""

import re
import subprocess
import sys
from pathlib import Path

import coterie_export
import pytest
import torch
from coterie_export import compare_logits

README = Path(__file__).parents[2] / "packages" / "export" / "README.md"


def test_import_is_silent_and_light() -> None:
    code = "import sys, coterie_export; assert not {'transformers', 'torch.distributed.elastic'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_public_names_exist() -> None:
    assert len(set(coterie_export.__all__)) == len(coterie_export.__all__)
    assert all(hasattr(coterie_export, name) for name in coterie_export.__all__)


def test_missing_transformers_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r'pip install "coterie-export\[transformers\]"'):
        compare_logits(tmp_path, torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 1, 1))


def test_readme_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    examples = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(examples) == 1
    exec(compile(examples[0], str(README), "exec"), {})
    assert (tmp_path / "my-model" / "model.safetensors").exists()
