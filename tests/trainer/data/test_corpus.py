import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from coterie_trainer.data.corpus import Source, find_sources, is_held_out, read_documents, stdlib_sources

TEXTS = ["first\nlines\r\n", "", "zweite Zeile: größer", "日本語 \U0001f40d"]


def source_of(path: Path) -> Source:
    return Source(path=path, name=path.name)


def texts_of(path: Path, field: str = "text") -> list[str]:
    return [document.text for document in read_documents(source_of(path), field)]


def json_lines(texts: list[str], field: str = "text") -> bytes:
    return "".join(json.dumps({"id": 1, field: text}) + "\n" for text in texts).encode()


def write_parquet(path: Path, column: pa.Array, row_group_size: int = 2) -> Path:
    pq.write_table(pa.table({"id": list(range(len(column))), "content": column}), path, row_group_size=row_group_size)
    return path


def test_reads_each_format(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(TEXTS[0].encode())
    assert texts_of(tmp_path / "a.txt") == [TEXTS[0]]
    (tmp_path / "a.jsonl").write_bytes(json_lines(TEXTS) + b"\n  \n" + json_lines(["last"]))
    assert texts_of(tmp_path / "a.jsonl") == [*TEXTS, "last"]
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(json_lines(TEXTS, "content")))
    assert texts_of(tmp_path / "a.jsonl.gz", "content") == TEXTS
    for name, kind in [("a.parquet", pa.string()), ("large.parquet", pa.large_string())]:
        path = write_parquet(tmp_path / name, pa.array([*TEXTS, None], kind))
        assert pq.ParquetFile(path).num_row_groups == 3
        assert texts_of(path, "content") == [*TEXTS, ""]
    names = [document.name for document in read_documents(source_of(tmp_path / "a.jsonl"))]
    assert names == ["a.jsonl#1", "a.jsonl#2", "a.jsonl#3", "a.jsonl#4", "a.jsonl#7"]


def cut_gzip(path: Path) -> None:
    path.write_bytes(gzip.compress(json_lines(TEXTS * 50))[:-20])


FAULTS: list[tuple[str, Callable[[Path], object], str]] = [
    ("a.txt", lambda path: path.write_bytes(b"abc\xff"), r"a\.txt: not UTF-8 text, byte 0xff at 3"),
    ("a.jsonl", lambda path: path.write_bytes(json_lines(["x"]) + b'{"text": '), r"a\.jsonl, line 2: no valid JSON"),
    ("a.jsonl", lambda path: path.write_bytes(b'{"text": "\xff"}'), r"a\.jsonl, line 1: no valid JSON"),
    (
        "a.jsonl",
        lambda path: path.write_bytes(json_lines(["x"]) + b'\n{"body": "y", "id": 2}'),
        r"a\.jsonl, line 3: no field 'text'; it has: body, id",
    ),
    (
        "a.jsonl",
        lambda path: path.write_bytes(b"[1]\n"),
        r"a\.jsonl, line 1: no field 'text'; it has: a list, not an obj",
    ),
    ("a.jsonl", lambda path: path.write_bytes(b'{"text": 5}'), r"a\.jsonl, line 1: 'text' is int, expected text"),
    (
        "a.jsonl",
        lambda path: path.write_bytes(b'{"text": "a\\ud800"}'),
        "line 1: 'text' holds half of a surrogate pair",
    ),
    ("a.jsonl.gz", cut_gzip, r"a\.jsonl\.gz: the gzip data ends early, the file has been cut short"),
    ("a.jsonl.gz", lambda path: path.write_bytes(b"plain text"), r"a\.jsonl\.gz: damaged gzip data"),
    ("a.parquet", lambda path: write_parquet(path, pa.array(["x"])), r"no column 'text'; it has: id, content"),
    ("a.parquet", lambda path: path.write_bytes(b"PAR1 and no more"), r"a\.parquet: damaged Parquet file"),
]


@pytest.mark.parametrize(("name", "write", "message"), FAULTS, ids=[message for _, _, message in FAULTS])
def test_faults_name_the_file_and_the_place(
    tmp_path: Path, name: str, write: Callable[[Path], object], message: str
) -> None:
    write(tmp_path / name)
    with pytest.raises(ValueError, match=message):
        texts_of(tmp_path / name)


def test_a_parquet_column_of_numbers_is_refused(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", pa.array([1, 2]))
    with pytest.raises(ValueError, match=r"a\.parquet, row 1: 'content' is int, expected text"):
        texts_of(path, "content")


def test_a_path_that_exists_is_taken_literally(tmp_path: Path) -> None:
    folder = tmp_path / "my texts [v1] *"
    folder.mkdir()
    (folder / "part [0] a.txt").write_text("brackets")
    (folder / "part 0 a.txt").write_text("none")
    (found,) = find_sources([folder / "part [0] a.txt"])
    assert found == Source(path=folder / "part [0] a.txt", name="part [0] a.txt")
    assert [source.name for source in find_sources([folder])] == ["part 0 a.txt", "part [0] a.txt"]
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "part 0 a.txt").write_text("pattern")
    assert find_sources([str(tmp_path / "plain" / "part [0] a.txt")])[0].path.read_text() == "pattern"


def test_folders_and_patterns_are_sorted_and_names_do_not_hold_the_place(tmp_path: Path) -> None:
    for name in ("b/x.txt", "a/y.jsonl", "a/deep/z.parquet", "a/readme.md", "c.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    assert [source.name for source in find_sources([tmp_path])] == ["a/deep/z.parquet", "a/y.jsonl", "b/x.txt", "c.txt"]
    patterns = [str(tmp_path / "**" / "*.txt"), str(tmp_path / "a" / "*.jsonl")]
    assert [source.name for source in find_sources(patterns)] == ["b/x.txt", "c.txt", "y.jsonl"]


def test_inputs_that_lead_to_nothing_are_all_named(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        find_sources([f"{tmp_path}/no.txt", f"{tmp_path}/*.jsonl", f"{tmp_path}/a.md", f"{tmp_path}/empty"])
    known = "known: .txt, .jsonl, .jsonl.gz, .parquet"
    assert str(caught.value).splitlines() == [
        f"{tmp_path}/no.txt: no such file or folder",
        f"{tmp_path}/*.jsonl: no such file or folder, and no match",
        f"{tmp_path}/a.md: unknown suffix; {known}",
        f"{tmp_path}/empty: no file with a known suffix in this folder; {known}",
    ]
    with pytest.raises(ValueError, match="no input given"):
        find_sources([])


def test_the_held_out_part_is_chosen_by_name_alone() -> None:
    # sha256("abc.py") starts with c4e9f202, that is 0.7692 of the range.
    assert [is_held_out("abc.py", fraction) for fraction in (0.0, 0.769, 0.77, 1.0)] == [False, False, True, True]
    chosen = sum(is_held_out(f"file{number}.py", 0.05) for number in range(10_000))
    assert 390 < chosen < 610  # 500 expected, standard deviation 22


def test_standard_library_files_come_sorted_without_packages_and_foreign_encodings(tmp_path: Path) -> None:
    for name in ("b.py", "a/c.py", "a.py", "site-packages/no.py", "x/dist-packages/no.py", "notes.txt", "É.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("pass\n")
    (tmp_path / "latin.py").write_bytes(b"# caf\xe9\n")
    sources, skipped = stdlib_sources(tmp_path)
    assert [source.name for source in sources] == ["a.py", "a/c.py", "b.py", "É.py"]
    assert skipped == 1
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match="without its standard library's text"):
        stdlib_sources(tmp_path / "none")
