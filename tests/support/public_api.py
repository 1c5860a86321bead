"""The public names of each package, pinned in tests/packaging/public_api/<package>.txt.

After a wanted change: `python tests/support/public_api.py --update`, and an entry in the package's CHANGELOG.md. Reads
the sources and imports nothing.
"""

import ast
import sys
from pathlib import Path

__all__ = ["differences", "exported", "main", "modules_without_all", "pinned_file"]

ROOT = Path(__file__).resolve().parents[2]


def exported(source: str) -> list[str] | None:
    """Return the sorted `__all__` of a module, or None where it has none; it must be a plain list of strings."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"]:
            return sorted(ast.literal_eval(node.value))
    return None


def modules_without_all(sources: Path) -> list[str]:
    """Return the modules under `sources` that define public names at their top and have no `__all__`."""
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    found = []
    for file in sorted(sources.rglob("*.py")):
        source = file.read_text(encoding="utf-8")
        hidden = any(part.startswith("_") for part in file.relative_to(sources).with_suffix("").parts[:-1])
        hidden = hidden or (file.stem.startswith("_") and file.stem != "__init__")
        names = [node.name for node in ast.parse(source).body if isinstance(node, definitions)]
        if not hidden and any(not name.startswith("_") for name in names) and exported(source) is None:
            found.append(str(file.relative_to(sources)))
    return found


def pinned_file(package: str, root: Path = ROOT) -> Path:
    """Return the file that pins the names of `packages/<package>`."""
    return root / "tests" / "packaging" / "public_api" / f"coterie_{package}.txt"


def differences(package: str, root: Path = ROOT) -> list[str]:
    """Return a line for each name that was added to, or is gone from, the pinned names of a package."""
    names = set(_names(package, root))
    file = pinned_file(package, root)
    pinned = set(file.read_text(encoding="utf-8").split()) if file.exists() else set()
    return [f"+ {name}" for name in sorted(names - pinned)] + [f"- {name}" for name in sorted(pinned - names)]


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    """Print the differences, or write the files with `--update`; return the exit code."""
    update = "--update" in (sys.argv[1:] if arguments is None else arguments)
    changed = False
    for package in sorted(file.parent.name for file in root.glob("packages/*/pyproject.toml")):
        for line in differences(package, root):
            print(f"coterie_{package}: {line}")
            changed = True
        if update:
            file = pinned_file(package, root)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("".join(f"{name}\n" for name in _names(package, root)), encoding="utf-8")
    return 1 if changed and not update else 0


def _names(package: str, root: Path) -> list[str]:
    module = root / "packages" / package / "src" / f"coterie_{package}" / "__init__.py"
    return exported(module.read_text(encoding="utf-8")) or []


if __name__ == "__main__":
    sys.exit(main())
