from collections.abc import Iterator
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
    """One pool of processes for all layouts, and one process's numbers for each variant and depth of the model."""

    def __init__(self, folder: Path, pool: RankPool) -> None:
        self.pool, self._folder = pool, folder
        write_vocabulary(folder / "tokens")
        self._expected: dict[tuple[str, int], Outcome] = {}

    def config(self, variant: str = "bias", text: str = WIDEST) -> Config:
        """Return the config that a layout splits: one as deep as the layout needs, but with the same steps."""
        config = small_config(self._folder, list(dict.fromkeys([WIDEST, text])), variant)
        assert config.train.sequences_per_step == 32, text
        return config

    def expected(self, variant: str = "bias", text: str = WIDEST) -> Outcome:
        config = self.config(variant, text)
        key = variant, config.model.num_layers
        if key not in self._expected:
            self._expected[key] = self.pool.run(run_layout, 1, reference_config(config))[0]
        return self._expected[key]

    def run(self, text: str, variant: str = "bias", function: object = run_layout) -> Outcome:
        layout, problems = parse_layout(text)
        assert layout is not None, problems
        return self.pool.run(function, layout.world, layout_config(layout, self.config(variant, text)))[0]

    def compare(self, text: str, variant: str = "bias", function: object = run_layout) -> Comparison:
        return compare(self.expected(variant, text), self.run(text, variant, function))


@pytest.fixture(scope="session")
def proof(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proof]:
    with RankPool(limit_s=120.0, preload=["coterie_trainer.verify.running", "torch.distributed.pipelining"]) as pool:
        yield Proof(tmp_path_factory.mktemp("layouts"), pool)
