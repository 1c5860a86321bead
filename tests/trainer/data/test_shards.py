import hashlib
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from coterie_trainer.data.dataset import open_split
from coterie_trainer.data.shards import TokenWriter, merge_token_folders, read_index, smallest_dtype, verify

from trainer.data.cases import write_folder


def edit_index(folder: Path, **changes: object) -> None:
    path = folder / "index.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_files_are_raw_little_endian_and_cut_at_documents(tmp_path: Path) -> None:
    documents = [[1, 2, 9], [3, 9], [4, 9]]
    folder = write_folder(tmp_path / "tokens", documents, held_out=[[5, 9]], shard_bytes=8)
    assert (folder / "train/part-00000.npy").read_bytes() == bytes([1, 0, 2, 0, 9, 0, 3, 0, 9, 0])
    assert (folder / "train/part-00001.npy").read_bytes() == bytes([4, 0, 9, 0])
    assert (folder / "held_out/part-00000.npy").read_bytes() == bytes([5, 0, 9, 0])
    raw = json.loads((folder / "index.json").read_text())
    assert raw.pop("splits") == {
        "train": {
            "text_bytes": 21,
            "empty_documents": 0,
            "shards": [
                {
                    "file": "train/part-00000.npy",
                    "num_tokens": 5,
                    "num_bytes": 10,
                    "sha256": hashlib.sha256(bytes([1, 0, 2, 0, 9, 0, 3, 0, 9, 0])).hexdigest(),
                    "document_lengths": [3, 2],
                },
                {
                    "file": "train/part-00001.npy",
                    "num_tokens": 2,
                    "num_bytes": 4,
                    "sha256": hashlib.sha256(bytes([4, 0, 9, 0])).hexdigest(),
                    "document_lengths": [2],
                },
            ],
        },
        "held_out": {
            "text_bytes": 6,
            "empty_documents": 0,
            "shards": [
                {
                    "file": "held_out/part-00000.npy",
                    "num_tokens": 2,
                    "num_bytes": 4,
                    "sha256": hashlib.sha256(bytes([5, 0, 9, 0])).hexdigest(),
                    "document_lengths": [2],
                }
            ],
        },
    }
    assert raw == {
        "format": "coterie-tokens",
        "version": 1,
        "dtype": "uint16",
        "vocab_size": 10,
        "eos_id": 9,
        "tokenizer_sha256": None,
        "settings": {},
        "origin": "",
    }
    verify(folder)


def test_wide_vocabularies_get_four_bytes_a_token(tmp_path: Path) -> None:
    assert [smallest_dtype(size) for size in (65_536, 65_537, 2**32)] == ["uint16", "uint32", "uint32"]
    with pytest.raises(ValueError, match="4294967297"):
        smallest_dtype(2**32 + 1)
    folder = write_folder(tmp_path / "tokens", [[70_000, 9]], vocab_size=100_000)
    assert (folder / "train/part-00000.npy").read_bytes() == bytes([0x70, 0x11, 1, 0, 9, 0, 0, 0])
    assert open_split(folder, "train").get(0, 2).tokens_BS.tolist() == [[70_000, 9]]


@pytest.mark.parametrize(
    ("vocab_size", "token", "message"),
    [
        (65_536, 70_000, r"token id 70000 does not fit in uint16 \(0 to 65535\); use dtype 'uint32'"),
        (50_000, 50_000, r"token id 50000 is outside the vocabulary \(0 to 49999\)"),
        (50_000, -1, r"token id -1 is outside the vocabulary"),
    ],
)
def test_ids_that_do_not_fit_are_refused(tmp_path: Path, vocab_size: int, token: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        write_folder(tmp_path / "tokens", [[1, 9], [2, token, 9]], vocab_size=vocab_size, dtype="uint16")
    assert list(tmp_path.iterdir()) == []


def test_a_vocabulary_too_wide_for_the_type_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        TokenWriter(tmp_path / "tokens", vocab_size=100_000, eos_id=100_000, dtype="uint16")
    assert str(caught.value).splitlines() == [
        "vocab_size (100000) does not fit in uint16; use dtype 'uint32'",
        "eos_id (100000) must be from 0 to 99999, inside the vocabulary",
    ]
    with pytest.raises(ValueError, match="dtype 'int8' is unknown; known: uint16, uint32"):
        TokenWriter(tmp_path / "tokens", vocab_size=10, eos_id=0, dtype="int8")
    assert list(tmp_path.iterdir()) == []


def test_a_writer_never_touches_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("ten years of work")
    with pytest.raises(ValueError, match="mine exists already"):
        TokenWriter(tmp_path / "mine", vocab_size=10, eos_id=0)
    (tmp_path / "empty").mkdir()
    write_folder(tmp_path / "empty", [[1, 9]])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "mine"]
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "ten years of work"


def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    def write_and_stop() -> None:
        with TokenWriter(tmp_path / "tokens", vocab_size=10, eos_id=9) as writer:
            writer.add("train", [1, 9])
            assert list(tmp_path.iterdir()) == [writer.folder]
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_and_stop()
    assert list(tmp_path.iterdir()) == []


def test_leftovers_of_killed_processes_are_removed_and_those_of_live_ones_kept(tmp_path: Path) -> None:
    with TokenWriter(tmp_path / "tokens", vocab_size=10, eos_id=9) as writer:
        prefix = writer.folder.name.removesuffix(str(os.getpid()))
        writer.add("train", [1, 9])
    shutil.rmtree(tmp_path / "tokens")
    dead, alive = tmp_path / f"{prefix}{2**22 + 1}", tmp_path / f"{prefix}{os.getppid()}"
    dead.mkdir()
    alive.mkdir()
    write_folder(tmp_path / "tokens", [[1, 9]])
    assert sorted(tmp_path.iterdir()) == sorted([alive, tmp_path / "tokens"])


@pytest.mark.parametrize("cut", [10, 1, -2, 40], ids=["10 bytes less", "1 byte less", "2 bytes more", "empty"])
def test_a_file_of_another_size_is_an_error_at_open(tmp_path: Path, cut: int) -> None:
    folder = write_folder(tmp_path / "tokens", [[1] * 19 + [9]])
    path = folder / "train/part-00000.npy"
    os.truncate(path, 40 - cut)
    with pytest.raises(ValueError, match=rf"part-00000.npy has {40 - cut} bytes, the index says 40"):
        open_split(folder, "train")


def test_every_missing_or_cut_file_is_named_at_once(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "tokens", [[1, 9], [2, 9], [3, 9]], shard_bytes=1)
    (folder / "train/part-00000.npy").unlink()
    os.truncate(folder / "train/part-00002.npy", 3)
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        open_split(folder, "train")
    assert str(caught.value).splitlines() == [
        f"{folder}/train/part-00000.npy is missing (4 bytes expected)",
        f"{folder}/train/part-00002.npy has 3 bytes, the index says 4",
    ]


def test_changed_content_and_foreign_ids_are_found(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "tokens", [[1, 2, 9], [3, 9]], shard_bytes=1)
    np.array([3, 12], "<u2").tofile(folder / "train/part-00001.npy")
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        verify(folder)
    assert str(caught.value).splitlines() == [
        f"{folder}/train/part-00001.npy has another checksum than the index says: its content has changed",
        f"{folder}/train/part-00001.npy holds id 12, outside vocab_size 10",
    ]
    sequences = open_split(folder, "train")
    assert sequences.get(0, 3).tokens_BS.tolist() == [[1, 2, 9]]
    with pytest.raises(ValueError, match=r"part-00001.npy: token 1 is 12, outside the vocabulary \(0 to 9\)"):
        sequences.get(1, 3)


def test_unusable_folders(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"it has no index\.json; make one with `coterie tokenize`"):
        open_split(tmp_path / "nowhere", "train")
    folder = write_folder(tmp_path / "tokens", [[1, 9]])
    with pytest.raises(ValueError, match="no tokens in split 'held_out'; splits with tokens: train"):
        open_split(folder, "held_out")
    for changes, message in [
        ({"version": 2}, "format 'coterie-tokens' version 2, known: 'coterie-tokens' version 1"),
        ({"dtype": "float64"}, "dtype 'float64' is unknown, known: uint16, uint32"),
        ({"dtype": "uint32"}, "part-00000.npy has 2 uint32 tokens in 4 bytes"),
        ({"splits": {"train": {}}}, "cannot be used: 'shards'"),
        ({"colour": "red"}, "cannot be used: .*colour"),
    ]:
        shutil.rmtree(folder)
        write_folder(folder, [[1, 9]])
        edit_index(folder, **changes)
        with pytest.raises(ValueError, match=message):
            open_split(folder, "train")
    (folder / "index.json").write_text('{"format": "coter')
    with pytest.raises(ValueError, match=r"index.json cannot be used: Unterminated string"):
        open_split(folder, "train")


def test_document_lengths_must_add_up(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "tokens", [[1, 9], [2, 9]])
    splits = json.loads((folder / "index.json").read_text())["splits"]
    splits["train"]["shards"][0]["document_lengths"] = [2, 3]
    edit_index(folder, splits=splits)
    with pytest.raises(ValueError, match=r"part-00000\.npy has 4 tokens, its documents 5"):
        open_split(folder, "train")


@pytest.mark.parametrize("dtypes", [("uint16", "uint16"), ("uint16", "uint32")])
def test_merges_folders_of_three_and_two_documents(tmp_path: Path, dtypes: tuple[str, str]) -> None:
    three, two = [[1, 2, 9], [], [3, 9], [4, 5, 6, 9]], [[7, 9], [8, 8, 9]]
    first = write_folder(tmp_path / "a", three, held_out=[[1, 9]], dtype=dtypes[0], shard_bytes=1)
    second = write_folder(tmp_path / "b", two, held_out=[[2, 9]], dtype=dtypes[1])
    index = merge_token_folders([first, second], tmp_path / "c")
    assert index.dtype == dtypes[1]
    assert index.splits["train"].empty_documents == 1
    verify(tmp_path / "c")
    merged = open_split(tmp_path / "c", "train")
    assert (merged.num_documents, merged.num_tokens, merged.num_bytes) == (5, 14, 42)
    batch = merged.get(0, 14)
    assert batch.tokens_BS.tolist() == [[1, 2, 9, 3, 9, 4, 5, 6, 9, 7, 9, 8, 8, 9]]
    assert batch.document_ids_BS.tolist() == [[0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 3, 4, 4, 4]]
    assert batch.targets_BS.tolist() == [[2, 9, -1, 9, -1, 5, 6, 9, -1, 9, -1, 8, 9, -1]]
    assert open_split(tmp_path / "c", "held_out").get(0, 4).tokens_BS.tolist() == [[1, 9, 2, 9]]


def test_merging_what_does_not_belong_together_is_refused(tmp_path: Path) -> None:
    first = write_folder(tmp_path / "a", [[1, 9]])
    other = write_folder(tmp_path / "b", [[1, 8]], vocab_size=20, eos_id=8)
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        merge_token_folders([first, other], tmp_path / "c")
    assert str(caught.value).splitlines() == [
        f"{other} has vocab_size 20, but {first} has 10",
        f"{other} has eos_id 8, but {first} has 9",
    ]
    with pytest.raises(ValueError, match="no folder of token files to merge"):
        merge_token_folders([], tmp_path / "c")
    np.array([2, 9], "<u2").tofile(first / "train/part-00000.npy")
    with pytest.raises(ValueError, match="another checksum"):
        merge_token_folders([first, first], tmp_path / "c")
    assert not (tmp_path / "c").exists()
    assert read_index(first).origin == ""


def test_memory_stays_level_over_850_files_and_2000_reads(tmp_path: Path) -> None:
    status = Path("/proc/self/statm")
    if not status.exists():
        pytest.skip("needs /proc")
    # 850 files of 80 kB are 68 MB: if all stayed mapped, they alone could break the bound.
    tokens = 10_000
    folder = write_folder(tmp_path / "tokens", [np.full(4 * tokens, 9)] * 850, shard_bytes=1)
    sequences = open_split(folder, "train")
    assert len(read_index(folder).splits["train"].shards) == 850

    def resident_bytes() -> int:
        return int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    for number in range(20):
        sequences.get(number, tokens)
    before, files_before = resident_bytes(), len(os.listdir("/proc/self/fd"))
    for read in range(2000):
        sequences.get(read * 7 % 3400, tokens)
    assert resident_bytes() - before < 50e6
    assert len(os.listdir("/proc/self/fd")) - files_before <= 64
