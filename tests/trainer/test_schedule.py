import pytest
from coterie_trainer.schedule import learning_rate

BASE = dict(steps=10, peak=2.0, warmup_steps=2, decay_steps=4, final_fraction=0.1)


@pytest.mark.parametrize(
    ("schedule", "step", "expected"),
    [
        ("cosine", 0, 1.0),
        ("cosine", 1, 2.0),
        ("cosine", 5, 2.0 * (0.1 + 0.9 * 0.5)),  # half of the eight steps after the warm-up are done
        ("cosine", 9, 0.2),
        ("wsd", 0, 1.0),
        ("wsd", 1, 2.0),
        ("wsd", 5, 2.0),
        ("wsd", 6, 2.0 * (1.0 - 0.9 / 4)),
        ("wsd", 9, 0.2),
    ],
)
def test_rate_of_a_step(schedule: str, step: int, expected: float) -> None:
    assert learning_rate(step, schedule=schedule, **BASE) == pytest.approx(expected, rel=1e-12)


def test_no_warmup_starts_below_the_peak_of_a_cosine() -> None:
    rate = learning_rate(0, schedule="cosine", **BASE | dict(warmup_steps=0))
    assert 1.9 < rate < 2.0


def test_steps_beyond_the_end_keep_the_last_rate() -> None:
    for schedule in ("cosine", "wsd"):
        assert learning_rate(12, schedule=schedule, **BASE) == pytest.approx(0.2)
