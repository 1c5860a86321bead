import json
from pathlib import Path

import pytest
from support.result_tables import ROOT, with_tables

PAGES = [page for page in [*ROOT.glob("*.md"), *ROOT.glob("packages/**/*.md")] if "<!-- results:" in page.read_text()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_tables_of_a_page_are_those_of_the_measurements(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert with_tables(text) == text, "run python tests/support/result_tables.py --update"


def test_a_table_is_written_from_its_file(tmp_path: Path) -> None:
    rows = [{"name": "copy a", "ours_us": 12.34, "share": 0.875}, {"name": "read", "ours_us": 1.0}]
    about = {"device": "X", "torch": "2.0", "triton": "3.0", "date": "2026-01-01"}
    (tmp_path / "r.json").write_text(json.dumps({**about, "rows": rows}), encoding="utf-8")
    start = "a\n<!-- results: r.json | ^copy | ours_us=time, share=of copy, none_us=other -->\n"
    page = start + "old\n<!-- end of results -->b"
    assert with_tables(page, tmp_path) == start + (
        "\n| | time | of copy | other |\n|---|---|---|---|\n| copy a | 12 us | 0.88 | - |\n\n"
        "X, torch 2.0, triton 3.0, 2026-01-01; `r.json`.\n\n<!-- end of results -->b"
    )
    with pytest.raises(ValueError, match="has no row that matches"):
        with_tables(page.replace("^copy", "^paste"), tmp_path)
