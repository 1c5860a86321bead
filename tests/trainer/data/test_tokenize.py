import json
import os
from pathlib import Path

import pytest
from coterie_trainer.data import tokenize
from coterie_trainer.data.corpus import is_held_out, stdlib_sources
from coterie_trainer.data.dataset import open_split
from coterie_trainer.data.shards import read_index, verify
from coterie_trainer.data.tokenize import TokenizeSummary, prepare_stdlib, tokenize_files
from coterie_trainer.data.tokenizer import encode_batch, load_tokenizer, save_tokenizer, train_tokenizer


def write_lines(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def texts_in(folder: Path, split: str) -> list[str]:
    """Decode the documents of a split, in order."""
    sequences = open_split(folder, split)
    tokens = sequences.get(0, sequences.num_tokens).tokens_BS[0].tolist()
    ids = sequences.get(0, sequences.num_tokens).document_ids_BS[0].tolist()
    documents: list[list[int]] = [[] for _ in range(ids[-1] + 1)]
    for token, number in zip(tokens, ids, strict=True):
        documents[number].append(token)
    assert all(document[-1] == sequences.eos_id for document in documents)
    tokenizer = load_tokenizer(folder)
    return [tokenizer.decode(document[:-1], skip_special_tokens=False) for document in documents]


def everything_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


TEXTS = [f"document number {number} of größer words\n" * (number % 4) for number in range(60)]


def test_tokenizes_and_splits_by_name(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", TEXTS)
    lines: list[str] = []
    summary = tokenize_files([path], tmp_path / "out", vocab_size=300, held_out_fraction=0.2, progress=lines.append)
    held_out = [is_held_out(f"a.jsonl#{number}", 0.2) for number in range(1, 61)]
    expected = {
        "train": [text for text, held in zip(TEXTS, held_out, strict=True) if text and not held],
        "held_out": [text for text, held in zip(TEXTS, held_out, strict=True) if text and held],
    }
    assert {split: texts_in(tmp_path / "out", split) for split in expected} == expected
    assert summary == TokenizeSummary(
        output=tmp_path / "out",
        reused=False,
        vocab_size=300,
        dtype="uint16",
        documents={split: len(texts) for split, texts in expected.items()},
        tokens={split: open_split(tmp_path / "out", split).num_tokens for split in expected},
        text_bytes={split: len("".join(texts).encode()) for split, texts in expected.items()},
        empty_documents=15,
        skipped_files=0,
    )
    assert [line for line in lines if "empty" in line] == ["empty documents left out: 15"]
    verify(tmp_path / "out")


def test_the_result_does_not_depend_on_where_and_when(tmp_path: Path) -> None:
    folders = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write_lines(tmp_path / name / "a.jsonl", TEXTS)
        os.utime(tmp_path / name / "a.jsonl", (1e9, 1e9))
        tokenize_files([tmp_path / name / "a.jsonl"], tmp_path / name / "out", vocab_size=300)
        folders.append(everything_in(tmp_path / name / "out"))
        folders[-1]["index.json"] = folders[-1]["index.json"].replace(name.encode(), b"")
    assert folders[0] == folders[1]


def test_a_tokenizer_that_is_given_is_used_and_copied(tmp_path: Path) -> None:
    (tmp_path / "tokenizer").mkdir()
    save_tokenizer(train_tokenizer(["some other text " * 9], 270), tmp_path / "tokenizer")
    (tmp_path / "a.txt").write_text("some text")
    summary = tokenize_files(
        [tmp_path / "a.txt"], tmp_path / "out", tokenizer=tmp_path / "tokenizer", held_out_fraction=0.0, dtype="uint32"
    )
    assert (summary.vocab_size, summary.dtype) == (270, "uint32")
    ids = encode_batch(load_tokenizer(tmp_path / "tokenizer"), ["some text"], 0)[0].tolist()
    assert open_split(tmp_path / "out", "train").get(0, len(ids)).tokens_BS.tolist() == [ids]
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "tokenizer" / name).read_bytes()


@pytest.mark.parametrize("text", ["line one\n" * 100, "x" * 1000], ids=["lines", "one line"])
def test_a_single_text_file_gives_its_end_to_the_held_out_part(tmp_path: Path, text: str) -> None:
    (tmp_path / "book.txt").write_text(text)
    tokenize_files([tmp_path / "book.txt"], tmp_path / "out", vocab_size=260, held_out_fraction=0.1)
    (head,), (tail,) = texts_in(tmp_path / "out", "train"), texts_in(tmp_path / "out", "held_out")
    assert head + tail == text
    assert len(tail) == (90 if "\n" in text else 100)


def test_a_second_call_reuses_a_complete_folder(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", TEXTS)
    first = tokenize_files([path], tmp_path / "out", vocab_size=300)
    stamp = (tmp_path / "out" / "index.json").stat().st_mtime_ns
    second = tokenize_files([path], tmp_path / "out", vocab_size=300)
    assert second.reused
    assert (second.tokens, second.documents, second.text_bytes) == (first.tokens, first.documents, first.text_bytes)
    assert (tmp_path / "out" / "index.json").stat().st_mtime_ns == stamp


def test_other_settings_are_refused_and_named(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", TEXTS)
    tokenize_files([path], tmp_path / "out", vocab_size=300)
    before = everything_in(tmp_path / "out")
    with pytest.raises(
        ValueError, match=r"held_out_fraction is 0.05 there, 0.2 .*; vocab_size is 300 there, 400 is asked"
    ):
        tokenize_files([path], tmp_path / "out", vocab_size=400, held_out_fraction=0.2)
    write_lines(path, TEXTS[:-1])
    with pytest.raises(ValueError, match="input_files is '1 files, sha256"):
        tokenize_files([path], tmp_path / "out", vocab_size=300)
    assert everything_in(tmp_path / "out") == before


@pytest.mark.parametrize("damage", ["cut", "no tokenizer"])
def test_a_damaged_folder_is_replaced(tmp_path: Path, damage: str) -> None:
    path = write_lines(tmp_path / "a.jsonl", TEXTS)
    tokenize_files([path], tmp_path / "out", vocab_size=300)
    before = everything_in(tmp_path / "out")
    if damage == "cut":
        os.truncate(tmp_path / "out" / "train" / "part-00000.npy", 7)
    else:
        (tmp_path / "out" / "tokenizer.json").unlink()
    assert not tokenize_files([path], tmp_path / "out", vocab_size=300).reused
    assert everything_in(tmp_path / "out") == before


def test_other_peoples_files_are_never_removed(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", TEXTS)
    with pytest.raises(ValueError, match=r"holds other things \(a.jsonl\); choose another folder"):
        tokenize_files([path], tmp_path, vocab_size=300)
    with pytest.raises(ValueError, match=r"holds other things \(a.jsonl\)"):
        tokenize_files([path], path, vocab_size=300)
    assert path.exists()
    own = tmp_path / "own" / "train"
    own.mkdir(parents=True)
    (own / "notes.md").write_text("precious")
    (tmp_path / "own" / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"holds other things \(tokenizer.json, train\)"):
        tokenize_files([path], tmp_path / "own", vocab_size=300)
    assert (own / "notes.md").read_text() == "precious"
    tokenize_files([path], tmp_path / "out", vocab_size=300)
    (tmp_path / "out" / "train" / "notes.md").write_text("precious")
    os.truncate(tmp_path / "out" / "train" / "part-00000.npy", 7)
    with pytest.raises(ValueError, match=r"must be made again, but holds other things \(train/notes.md\)"):
        tokenize_files([path], tmp_path / "out", vocab_size=300)
    assert (tmp_path / "out" / "train" / "notes.md").read_text() == "precious"


def test_an_interrupt_leaves_nothing_under_the_final_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_lines(tmp_path / "a.jsonl", TEXTS)
    calls = []

    def encode_then_interrupt(*args: object) -> object:
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return encode_batch(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(tokenize, "_BATCH_DOCUMENTS", 10)
    monkeypatch.setattr(tokenize, "encode_batch", encode_then_interrupt)
    with pytest.raises(KeyboardInterrupt):
        tokenize_files([path], tmp_path / "out", vocab_size=300)
    assert len(calls) == 2
    assert list(tmp_path.iterdir()) == [path]


def test_input_without_any_text_for_training_is_refused(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", ["", ""])
    with pytest.raises(ValueError, match=r"no training text in .*a\.jsonl: all documents are empty or held out"):
        tokenize_files([path], tmp_path / "out", vocab_size=300)
    with pytest.raises(ValueError, match=r"held_out_fraction \(1.0\) must be at least 0 and below 1"):
        tokenize_files([path], tmp_path / "out", held_out_fraction=1.0)
    assert list(tmp_path.iterdir()) == [path]


def test_a_held_out_part_without_documents_is_said(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", ["some text"])
    lines: list[str] = []
    tokenize_files([path], tmp_path / "out", vocab_size=300, held_out_fraction=0.001, progress=lines.append)
    assert lines[-1] == "no document fell into the held-out part; raise the held-out fraction to evaluate"


def test_the_tokenizer_is_trained_on_a_spread_of_training_text_only(tmp_path: Path) -> None:
    for number in range(10):
        (tmp_path / f"{number}.txt").write_text(f"{number}" * 100)
    corpus = tokenize._Corpus(sources=tokenize.find_sources([tmp_path]), text_field="", held_out_fraction=0.3)
    held_out = {str(number) for number in range(10) if is_held_out(f"{number}.txt", 0.3)}
    assert 0 < len(held_out) < 6
    sample = list(corpus.sample(50))
    assert [len(text) for text in sample] == [5] * (10 - len(held_out))
    assert {text[0] for text in sample} == set("0123456789") - held_out
    assert sum(map(len, corpus.sample(10_000))) == 100 * (10 - len(held_out))


def test_the_built_in_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources, skipped = stdlib_sources()
    assert len(sources) > 500
    some = [*sources[:40], *[source for source in sources[40:] if is_held_out(source.name, 0.05)][:3]]
    monkeypatch.setattr(tokenize, "stdlib_sources", lambda: (some, skipped))
    lines: list[str] = []
    summary = prepare_stdlib(tmp_path / "out", 600, lines.append)
    assert summary.skipped_files == skipped
    assert summary.vocab_size == 600
    held_out = {source.name for source in some if is_held_out(source.name, 0.05)}
    assert len(held_out) >= 3
    texts = {split: texts_in(tmp_path / "out", split) for split in ("train", "held_out")}
    for split, names in (("held_out", held_out), ("train", {source.name for source in some} - held_out)):
        expected = [source.path.read_bytes().decode() for source in some if source.name in names]
        assert texts[split] == [text for text in expected if text]
    assert read_index(tmp_path / "out").origin.startswith("standard library of Python 3.")
    # The second call must not even look at the files.
    monkeypatch.setattr(tokenize, "stdlib_sources", None)
    assert prepare_stdlib(tmp_path / "out", 600).reused
    with pytest.raises(ValueError, match="vocab_size is 600 there, 700 is asked for"):
        prepare_stdlib(tmp_path / "out", 700)
