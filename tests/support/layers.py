"""Hold the imports to the star: four leaves that never import one another, and one hub. `nox -s layers` runs this file.

Reads the sources and imports nothing, so it needs neither torch nor the packages. Every import counts: at the top,
inside a function, under `TYPE_CHECKING`, by `importlib.import_module("name")`, and a use of `torch.distributed` through
`import torch`.
"""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["HUB", "ROOT", "Rule", "breaches_in_source", "breaches_in_workspace", "imports", "main", "rules"]

ROOT = Path(__file__).resolve().parents[2]

HUB = "coterie_trainer"
COLLECTIVES = "torch.distributed"
MAY_COMMUNICATE = {"coterie_parallel", HUB}
# Distributions whose import name is not their own name with underscores; torch brings triton.
IMPORT_NAMES = {"quack-kernels": ["quack"], "sgl-deep-ep": ["deep_ep"], "torch": ["torch", "triton"]}


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What the sources of one package may import: its own name, its declared libraries, and the standard library."""

    name: str
    libraries: frozenset[str]
    collectives: bool

    def reason_against(self, module: str) -> str | None:
        """Return why `module` must not be imported, or None."""
        top = module.split(".")[0]
        if top.startswith("coterie_") and top != self.name and top not in self.libraries:
            return "leaves never import one another, and only the trainer imports them"
        if not self.collectives and (module == COLLECTIVES or module.startswith(COLLECTIVES + ".")):
            return f"only {' and '.join(sorted(MAY_COMMUNICATE))} may use {COLLECTIVES}"
        if top != self.name and top not in self.libraries and top not in sys.stdlib_module_names:
            return "not among the dependencies in its pyproject.toml"
        return None


def rules(root: Path = ROOT) -> dict[str, Rule]:
    """Return the rule of each package of the workspace by import name, from its pyproject.toml."""
    projects = [
        tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        for file in sorted(root.glob("packages/*/pyproject.toml"))
    ]
    found = {}
    for project in projects:
        extras = project.get("optional-dependencies", {}).values()
        requirements = [*project["dependencies"], *(one for extra in extras for one in extra)]
        name = project["name"].replace("-", "_")
        libraries = frozenset(top for one in requirements for top in _import_names(one))
        if name != HUB:
            libraries = frozenset(top for top in libraries if not top.startswith("coterie_"))
        found[name] = Rule(name=name, libraries=libraries, collectives=name in MAY_COMMUNICATE)
    return found


def imports(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the full name of everything that `source` imports; relative imports stay inside a package."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == COLLECTIVES:
            yield node.lineno, COLLECTIVES
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            for argument in node.args[:1]:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield node.lineno, argument.value


def breaches_in_source(source: str, rule: Rule) -> list[str]:
    """Return one sentence for each import in `source` that `rule` forbids, in the order of the lines."""
    found = {(line, module): rule.reason_against(module) for line, module in imports(source)}
    return [
        f"line {line}: {rule.name} imports {module}: {reason}"
        for (line, module), reason in sorted(found.items())
        if reason is not None
    ]


def breaches_in_workspace(root: Path = ROOT) -> list[str]:
    """Return the breaches of all package sources, and of the tests that must run with one package alone."""
    found = []
    by_name = rules(root)
    for name, rule in by_name.items():
        folder = root / "packages" / name.removeprefix("coterie_") / "src"
        files = sorted(folder.rglob("*.py"))
        if not files:
            found.append(f"{folder.relative_to(root)}: no sources")
        for file in files:
            for breach in breaches_in_source(file.read_text(encoding="utf-8"), rule):
                found.append(f"{file.relative_to(root)}: {breach}")
    for name in by_name:
        if name != HUB:
            found += _foreign_imports(root, root / "tests" / name.removeprefix("coterie_"), name, set(by_name))
    return found + _foreign_imports(root, root / "tests" / "support", "", set(by_name))


def main() -> int:
    """Print every breach and return the exit code."""
    found = breaches_in_workspace()
    for breach in found:
        print(breach)
    print(f"layers: {len(found)} breaches in {len(rules())} packages")
    return 1 if found else 0


def _foreign_imports(root: Path, folder: Path, own: str, packages: set[str]) -> list[str]:
    return [
        f"{file.relative_to(root)}: line {line}: imports {module}: these tests run with {own or 'no package'} alone"
        for file in sorted(folder.rglob("*.py"))
        for line, module in imports(file.read_text(encoding="utf-8"))
        if module.split(".")[0] in packages - {own}
    ]


def _import_names(requirement: str) -> list[str]:
    matched = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert matched is not None, requirement
    name = matched.group().lower()
    return IMPORT_NAMES.get(name, [name.replace("-", "_")])


if __name__ == "__main__":
    sys.exit(main())
