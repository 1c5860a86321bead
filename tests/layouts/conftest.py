from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import pytest
from coterie_parallel.local_ranks import RankPool
from coterie_trainer.config import Config
from coterie_trainer.verify.comparison import Comparison, compare
from coterie_trainer.verify.layout import layout_config, parse_layout, reference_config
from coterie_trainer.verify.running import Outcome, run_layout
from coterie_trainer.verify.scaling import write_vocabulary

from layouts.models import small_config

WIDEST = "data=8 accumulation=4"  # all degrees of the matrix divide these


class Proof:
    """One pool of processes for all layouts, and one process's numbers for each variant of the model."""

    def __init__(self, folder: Path, pool: RankPool) -> None:
        self.pool, self._folder = pool, folder
        write_vocabulary(folder / "tokens")
        self._expected = lru_cache(self._one_process)

    def config(self, variant: str = "bias") -> Config:
        return small_config(self._folder, [WIDEST], variant)

    def expected(self, variant: str = "bias") -> Outcome:
        return self._expected(variant)

    def _one_process(self, variant: str) -> Outcome:
        return self.pool.run(run_layout, 1, reference_config(self.config(variant)))[0]

    def run(self, text: str, variant: str = "bias", function: object = run_layout) -> Outcome:
        layout, problems = parse_layout(text)
        assert layout is not None, problems
        return self.pool.run(function, layout.world, layout_config(layout, self.config(variant)))[0]

    def compare(self, text: str, variant: str = "bias", function: object = run_layout) -> Comparison:
        return compare(self.expected(variant), self.run(text, variant, function))


@pytest.fixture(scope="session")
def proof(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proof]:
    with RankPool(limit_s=120.0, preload=["coterie_trainer.verify.running"]) as pool:
        yield Proof(tmp_path_factory.mktemp("layouts"), pool)
