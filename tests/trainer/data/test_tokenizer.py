import os
import subprocess
import sys
from pathlib import Path

import pytest
from coterie_trainer.data.tokenizer import (
    END_OF_TEXT,
    copy_tokenizer,
    encode_batch,
    find_eos_id,
    load_tokenizer,
    save_tokenizer,
    train_tokenizer,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

TEXTS = ["the cat sat on the mat\n", "the dog sat on the log\n", "a hat on the cat\n"] * 3


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(TEXTS, 270)


def test_training_is_deterministic_and_has_the_size_asked_for(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == 270
    assert train_tokenizer(TEXTS, 270).to_str() == tokenizer.to_str()
    assert tokenizer.token_to_id(END_OF_TEXT) == 0
    assert train_tokenizer([], 257).get_vocab_size() == 257
    assert train_tokenizer(["ab", "abc"], 5000).get_vocab_size() == 259  # "ab" and "abc" are all there is to merge
    with pytest.raises(ValueError, match=r"vocab_size \(256\) must be at least 257"):
        train_tokenizer(TEXTS, 256)


def test_encodes_by_hand() -> None:
    # Most frequent pair first: "a" and "b" (3 times), then "ab" and "c" (2).
    small = train_tokenizer(["ab", "abc", "abc"], 259)
    assert [small.id_to_token(number) for number in (257, 258)] == ["ab", "abc"]
    byte = {character: small.token_to_id(character) for character in "abcĠ"}
    ids = encode_batch(small, ["abc ab", "", "cab"], 0)
    assert [row.tolist() for row in ids] == [[258, byte["Ġ"], 257, 0], [], [byte["c"], 257, 0]]


@settings(max_examples=60, deadline=None)
@given(text=st.text(min_size=1))
def test_any_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    (ids,) = encode_batch(tokenizer, [text], 0)
    assert ids[-1] == 0
    assert 0 not in ids[:-1]
    assert tokenizer.decode(ids[:-1].tolist(), skip_special_tokens=False) == text


def test_end_of_text_written_in_a_text_is_only_text(tokenizer: Tokenizer) -> None:
    text = f"one{END_OF_TEXT}two"
    (ids,) = encode_batch(tokenizer, [text], 0)
    assert ids.tolist().count(0) == 1
    assert tokenizer.decode(ids[:-1].tolist()) == text


def test_saved_tokenizer_loads_and_copies(tokenizer: Tokenizer, tmp_path: Path) -> None:
    save_tokenizer(tokenizer, tmp_path)
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        assert load_tokenizer(path).to_str() == tokenizer.to_str()
        assert find_eos_id(load_tokenizer(path), path) == 0
    (tmp_path / "copy").mkdir()
    copy_tokenizer(tmp_path / "tokenizer.json", tmp_path / "copy", END_OF_TEXT)
    (tmp_path / "bare").mkdir()
    (tmp_path / "tokenizer_config.json").rename(tmp_path / "config.bak")
    copy_tokenizer(tmp_path, tmp_path / "bare", END_OF_TEXT)
    for name in ("copy", "bare"):
        assert (tmp_path / name / "tokenizer.json").read_bytes() == (tmp_path / "tokenizer.json").read_bytes()
        assert (tmp_path / name / "tokenizer_config.json").read_bytes() == (tmp_path / "config.bak").read_bytes()


def test_end_of_text_of_other_tokenizers(tokenizer: Tokenizer, tmp_path: Path) -> None:
    save_tokenizer(tokenizer, tmp_path)
    config = tmp_path / "tokenizer_config.json"
    config.write_text('{"eos_token": {"content": "a", "lstrip": false}}')
    assert find_eos_id(tokenizer, tmp_path) == tokenizer.token_to_id("a")
    config.write_text('{"eos_token": "</s>"}')
    with pytest.raises(ValueError, match="the tokenizer has no '</s>'; set eos_token"):
        find_eos_id(tokenizer, tmp_path)


def test_what_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no tokenizer\.json here"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"colour": "red"}')
    with pytest.raises(ValueError, match="is no tokenizer of the Hugging Face"):
        load_tokenizer(tmp_path)


def test_transformers_loads_the_folder(tokenizer: Tokenizer, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    save_tokenizer(tokenizer, tmp_path)
    loaded = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    assert (loaded.eos_token, loaded.eos_token_id) == (END_OF_TEXT, 0)
    text = "the cat  sat , on größer mats don't\n"
    ids = encode_batch(tokenizer, [text], 0)[0][:-1].tolist()
    assert loaded(text)["input_ids"] == ids
    assert loaded.decode(ids) == text


PROGRAM = """
import os, subprocess, sys
before = dict(os.environ)
from coterie_trainer.data.tokenizer import encode_batch, train_tokenizer
tokenizer = train_tokenizer(["some text"] * 100, 260)
encode_batch(tokenizer, ["some text"] * 100, 0)
subprocess.run([sys.executable, "-c", ""], check=True)
assert dict(os.environ) == before
"""


def test_leaves_the_environment_alone_and_a_later_process_start_prints_nothing() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TOKENIZERS_PARALLELISM"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM], env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
