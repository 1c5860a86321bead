import dataclasses
from pathlib import Path

import pytest
from coterie_trainer.run_folder import check_same_run, locked, read_spec, write_run

from trainer.specs import SPECS
from trainer.tiny import tiny_config, write_tokens


def test_a_second_run_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    with (
        locked(tmp_path / "run"),
        pytest.raises(ValueError, match=r"run is in use by a run that has not ended"),
        locked(tmp_path / "run"),
    ):
        pass
    with locked(tmp_path / "run"):
        pass


def test_a_run_goes_on_with_its_own_settings_only(tmp_path: Path) -> None:
    tokens = write_tokens(tmp_path / "tokens")
    config = tiny_config(tmp_path / "run", tokens)
    check_same_run(config)
    write_run(config, SPECS["qk_norm_head"])
    assert read_spec(tmp_path / "run") == SPECS["qk_norm_head"]
    check_same_run(tiny_config(tmp_path / "run", tokens, train__steps=9, model__expert_backend="reference"))
    other = tiny_config(tmp_path / "run", tokens, model__num_experts=4, train__z_coefficient=0.5)
    with pytest.raises(ValueError, match=r"model.num_experts was 8 and is now 4; train.z_coefficient was 0.001 and is"):
        check_same_run(dataclasses.replace(other, seed=1))
    moved = tiny_config(tmp_path / "run", write_tokens(tmp_path / "others", seed=7))
    with pytest.raises(ValueError, match=r"tokens was '\w{16}' and is now"):
        check_same_run(moved)


@pytest.mark.parametrize("text", ["{}", "[]", "{", ""])
def test_a_damaged_record_is_named(tmp_path: Path, text: str) -> None:
    config = tiny_config(tmp_path / "run", write_tokens(tmp_path / "tokens"))
    write_run(config, SPECS["qk_norm_head"])
    (tmp_path / "run" / "run.json").write_text(text)
    with pytest.raises(ValueError, match=r"run\.json is damaged"):
        check_same_run(config)
    with pytest.raises(ValueError, match=r"run\.json is damaged"):
        read_spec(tmp_path / "run")


def test_missing_tokens_say_how_to_make_them(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"it has no index.json; make one with `coterie tokenize`"):
        check_same_run(tiny_config(tmp_path / "run", tmp_path / "nowhere"))
