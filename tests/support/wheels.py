"""Check the built wheels and source archives: `python -m support.wheels DIST`; `nox -s wheels` builds and runs it.

With `--alone NAME --python PYTHON` it checks an environment into which the wheel NAME was installed: that no other
package of the workspace is there than those it needs, and that the import is clean.
"""

import argparse
import json
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from support.imports import import_faults

__all__ = ["archive_faults", "environment_faults", "main", "wheel_faults"]

ROOT = Path(__file__).resolve().parents[2]


def projects(root: Path = ROOT) -> dict[str, dict[str, Any]]:
    """Return the `[project]` tables of the workspace by distribution name, each with its folder under "folder"."""
    found = {}
    for file in sorted(root.glob("packages/*/pyproject.toml")):
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        found[project["name"]] = project | {"folder": file.parent}
    return found


def wheel_faults(wheel: Path, name: str, workspace: dict[str, dict[str, Any]]) -> list[str]:
    """Return what is wrong with the wheel of the distribution `name`."""
    project = workspace[name]
    module = name.replace("-", "_")
    information = f"{module}-{project['version']}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        files = archive.namelist()
        missing = [
            file
            for file in (f"{module}/__init__.py", f"{module}/py.typed", f"{information}/licenses/LICENSE")
            if file not in files
        ]
        faults = [f"{file} is missing" for file in missing]
        metadata = Parser().parsestr(archive.read(f"{information}/METADATA").decode())
        if project.get("scripts") and f"{information}/entry_points.txt" not in files:
            faults.append("its commands are missing")
    faults += [f"{file} does not belong in it" for file in files if file.split("/")[0] not in (module, information)]
    return faults + _metadata_faults(metadata, project, workspace)


def archive_faults(archive: Path, name: str, workspace: dict[str, dict[str, Any]]) -> list[str]:
    """Return what is missing in the source archive of the distribution `name`."""
    top = f"{name.replace('-', '_')}-{workspace[name]['version']}"
    with tarfile.open(archive) as opened:
        files = opened.getnames()
    wanted = ["LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml", f"src/{name.replace('-', '_')}/__init__.py"]
    return [f"{file} is missing" for file in wanted if f"{top}/{file}" not in files]


def environment_faults(python: str, name: str, workspace: dict[str, dict[str, Any]]) -> list[str]:
    """Return what is wrong with an environment that should hold the distribution `name` and what it needs."""
    probe = "import importlib.metadata as m, json; print(json.dumps([d.metadata['Name'] for d in m.distributions()]))"
    installed = json.loads(subprocess.run([python, "-c", probe], capture_output=True, check=True).stdout)
    ours = sorted(one for one in installed if one in workspace)
    wanted = sorted({name, *(need.name for need in _needs(workspace[name], workspace))})
    faults = [] if ours == wanted else [f"installed of this workspace: {ours}; expected: {wanted}"]
    return faults + import_faults(python, name.replace("-", "_"))


def main(arguments: list[str] | None = None) -> int:
    """Print every fault and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m support.wheels", description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", help="the folder with the built files")
    parser.add_argument("--alone", metavar="NAME", help="the distribution that was installed alone")
    parser.add_argument("--python", help="the interpreter of that environment")
    options = parser.parse_args(arguments)
    workspace = projects()
    if options.alone:
        faults = [f"{options.alone}: {one}" for one in environment_faults(options.python, options.alone, workspace)]
    else:
        faults = _built_faults(options.folder, workspace)
    for fault in faults:
        print(fault)
    print(f"{options.alone or 'wheels'}: {len(faults)} faults")
    return 1 if faults else 0


def _built_faults(folder: Path, workspace: dict[str, dict[str, Any]]) -> list[str]:
    faults = []
    for name, project in workspace.items():
        stem = f"{name.replace('-', '_')}-{project['version']}"
        wheel, archive = folder / f"{stem}-py3-none-any.whl", folder / f"{stem}.tar.gz"
        for file, check in ((wheel, wheel_faults), (archive, archive_faults)):
            found = check(file, name, workspace) if file.exists() else ["was not built"]
            faults += [f"{file.name}: {one}" for one in found]
    return faults


def _metadata_faults(metadata: Message, project: dict[str, Any], workspace: dict[str, dict[str, Any]]) -> list[str]:
    faults = []
    readme = (project["folder"] / "README.md").read_text(encoding="utf-8").strip()
    if readme not in metadata.get_payload():
        faults.append("the README is not its description")
    if metadata["License-Expression"] != "Apache-2.0":
        faults.append(f"License-Expression is {metadata['License-Expression']}, not Apache-2.0")
    extras = sorted(project.get("optional-dependencies", {}))
    if sorted(metadata.get_all("Provides-Extra", [])) != extras:
        faults.append(f"Provides-Extra is {metadata.get_all('Provides-Extra')}, not {extras}")
    stated = [Requirement(one) for one in metadata.get_all("Requires-Dist", [])]
    for need in _needs(project, workspace):
        # A workspace source does not reach the wheel: without a range there any version would do.
        ranges = [one.specifier for one in stated if one.name == need.name]
        if len(ranges) != 1:
            faults.append(f"Requires-Dist names {need.name} {len(ranges)} times")
            continue
        operators = {one.operator for one in ranges[0]}
        if not (operators & {">=", ">", "~="}) or not (operators & {"<", "<=", "~="}):
            faults.append(f"Requires-Dist {need.name}{ranges[0]} is no range with both ends")
        if not ranges[0].contains(workspace[need.name]["version"]):
            faults.append(f"Requires-Dist {need.name}{ranges[0]} excludes {workspace[need.name]['version']} built here")
    return faults


def _needs(project: dict[str, Any], workspace: dict[str, dict[str, Any]]) -> list[Requirement]:
    needs = [Requirement(one) for one in project["dependencies"]]
    return [need for need in needs if need.name in workspace]


if __name__ == "__main__":
    sys.exit(main())
