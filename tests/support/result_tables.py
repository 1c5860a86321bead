"""The speed tables of the READMEs, made from the JSON files that the measurements wrote.

A table stands between two comments, of which the first names a file, a regular expression for the names of its rows,
and the columns as `key=heading`; times end in `_us` and are shown in microseconds:

    <!-- results: tests/routing/results/rows-1xh200.json | ^permute | ours_us=ours, eager_us=torch -->
    <!-- end of results -->

`python tests/support/result_tables.py --update` writes all tables anew; a test holds them to the files.
"""

import json
import re
import sys
from pathlib import Path

__all__ = ["main", "with_tables"]

ROOT = Path(__file__).resolve().parents[2]
_BLOCK = re.compile(r"(<!-- results: (.*?) -->\n)(.*?)(<!-- end of results -->)", re.DOTALL)


def with_tables(text: str, root: Path = ROOT) -> str:
    """Return a page with each of its tables written anew from its file."""

    def block(match: re.Match[str]) -> str:
        path, pattern, columns = (part.strip() for part in match.group(2).split(" | "))
        return match.group(1) + _table(root / path, path, pattern, columns) + match.group(4)

    return _BLOCK.sub(block, text)


def _table(file: Path, path: str, pattern: str, columns: str) -> str:
    measured = json.loads(file.read_text(encoding="utf-8"))
    keys, headings = zip(*(column.strip().split("=", 1) for column in columns.split(",")), strict=True)
    rows = [row for row in measured["rows"] if re.search(pattern, row["name"])]
    if not rows:
        raise ValueError(f"{path} has no row that matches {pattern!r}")
    lines = [f"| | {' | '.join(headings)} |", "|---" * (len(keys) + 1) + "|"]
    lines += [f"| {row['name']} | {' | '.join(_cell(key, row.get(key)) for key in keys)} |" for row in rows]
    about = f"{measured['device']}, torch {measured['torch']}, triton {measured['triton']}, {measured['date']}"
    return "\n" + "\n".join(lines) + f"\n\n{about}; `{path}`.\n\n"


def _cell(key: str, value: float | str | None) -> str:
    if value is None or isinstance(value, str):
        return value or "-"
    if isinstance(value, int):
        return f"{value:,}"
    if key.endswith("_us"):
        return f"{value:,.0f} us"
    return f"{value:.2f}" if abs(value) < 100 else f"{value:,.0f}"


def main() -> int:
    """Check all pages, or write them with `--update`; return 1 if a checked page differs from its files."""
    pages = [
        page for page in [*ROOT.glob("*.md"), *ROOT.glob("packages/**/*.md")] if "<!-- results:" in page.read_text()
    ]
    wrong = []
    for page in pages:
        text = page.read_text(encoding="utf-8")
        new = with_tables(text)
        if new != text and "--update" in sys.argv:
            page.write_text(new, encoding="utf-8")
        elif new != text:
            wrong.append(str(page.relative_to(ROOT)))
    if wrong:
        print(f"tables differ from their files in {', '.join(wrong)}; run with --update")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
