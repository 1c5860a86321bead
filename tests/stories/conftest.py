import sysconfig
from pathlib import Path

import pytest
from coterie_trainer.data.tokenize import tokenize_files

CONFIG = Path(__file__).parents[2] / "configs" / "demo.toml"


@pytest.fixture(scope="session")
def python_tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token files of a few modules of the standard library, with a small vocabulary."""
    library = Path(sysconfig.get_path("stdlib"))
    texts = tmp_path_factory.mktemp("texts")
    for name in ("argparse", "ast", "dataclasses", "difflib", "inspect", "pathlib", "tarfile", "typing"):
        (texts / f"{name}.txt").write_text((library / f"{name}.py").read_text(encoding="utf-8"), encoding="utf-8")
    folder = tmp_path_factory.mktemp("tokens") / "python"
    tokenize_files([texts], folder, vocab_size=512, held_out_fraction=0.2)
    return folder


@pytest.fixture(scope="session")
def small_demo(python_tokens: Path) -> list[str]:
    """The overrides that make configs/demo.toml a run of a few seconds; the model keeps its kind."""
    return [
        f"data.path={str(python_tokens)!r}",
        'data.source="files"',
        "data.sequence_length=64",
        "model.d_model=48",
        "model.dense_hidden=64",
        "model.expert_hidden=16",
        "optimizer.learning_rate=1e-3",
        "train.steps=20",
        "train.sequences_per_step=8",
        "train.sequences_per_micro_batch=2",
        "train.evaluate_every=10",
        "train.evaluate_sequences=8",
        "checkpoint.every=5",
        "log.tensorboard=false",
    ]
