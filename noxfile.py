"""The development sessions of Coterie; `nox -l` lists them. Packages and tool groups come from the pyproject files."""

import importlib.util
import json
import shutil
import sys
import tempfile
import tomllib
from pathlib import Path

import nox

if shutil.which("uv") is None and importlib.util.find_spec("uv") is None:
    sys.exit('These sessions need uv, which makes an environment with torch in seconds: pip install "nox[uv]"')

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "uv"
nox.options.sessions = ["lint", "layers", "types", "tests", "layouts"]
nox.options.error_on_external_run = True

ROOT = Path(__file__).parent
HUB = "trainer"
PACKAGES = sorted(file.parent.name for file in ROOT.glob("packages/*/pyproject.toml"))
PROJECTS = {
    name: tomllib.loads((ROOT / "packages" / name / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for name in PACKAGES
}
# Tests that need all packages run in the hub's environment, and so do the tests that need transformers.
HUB_FOLDERS = [HUB, "export", "support", "conformance", "stories", "packaging"]
# The machine's own settings must not leak into a test: byte code is kept (an import of torch takes half the time),
# and each of several processes uses one thread.
TEST_ENVIRONMENT = {"PYTHONDONTWRITEBYTECODE": None, "PYTHONPATH": str(ROOT / "tests"), "OMP_NUM_THREADS": "1"}
# Memory that nobody wrote holds 0x7f in every byte (with glibc), as a float 3.4e38, instead of zeros by luck.
SEEN_IF_UNWRITTEN = {"MALLOC_PERTURB_": "128"}
# Each process keeps the tests of a file together, with what they share, until it has none left and takes over others'.
IN_PROCESSES = ["-n", "auto", "--maxprocesses", "4", "--dist", "worksteal"]
SHORT = ["export"]  # a second process must import torch before it helps

per_package = nox.parametrize("package", [nox.param(name, id=name) for name in PACKAGES])


@nox.session(reuse_venv=True)
def lint(session: nox.Session) -> None:
    """Style: ruff check and ruff format; `nox -s lint -- --fix` repairs what it can."""
    session.install("--group", "lint")
    session.run("ruff", "check", *session.posargs, ".")
    session.run("ruff", "format", *([] if "--fix" in session.posargs else ["--check"]), ".")


@nox.session(venv_backend="none")
def layers(session: nox.Session) -> None:
    """The import star: leaves never import one another, only parallel and trainer communicate."""
    session.run(sys.executable, "tests/support/layers.py", external=True)


@nox.session(reuse_venv=True)
def types(session: nox.Session) -> None:
    """Types: mypy --strict on the sources of each package."""
    session.install(*editable(*PACKAGES), "--group", "types")
    for name in PACKAGES:
        session.run("mypy", "--strict", *session.posargs, f"packages/{name}/src")


@nox.session(reuse_venv=True)
@per_package
def tests(session: nox.Session, package: str) -> None:
    """Tests of one package with that package alone; the trainer has all five and transformers, and runs the rest."""
    install_for_tests(session, package)
    run_tests(session, package, session.posargs)


@nox.session(reuse_venv=True)
def layouts(session: nox.Session) -> None:
    """Layout invariance: steps of small models in many layouts, on up to 8 processes, against one process."""
    session.install(*editable(*PACKAGES), "--group", "test")
    session.run("pytest", "tests/layouts", *session.posargs, env=TEST_ENVIRONMENT | SEEN_IF_UNWRITTEN)


@nox.session(reuse_venv=True, default=False)
@per_package
def bench(session: nox.Session, package: str) -> None:
    """Speed of one package against its references and floors; `-- --only TEXT --budget SECONDS`."""
    install_for_tests(session, package)
    run_benchmarks(session, package, session.posargs)


@nox.session(reuse_venv=True, default=False)
@per_package
def gate(session: nox.Session, package: str) -> None:
    """Tests, then speed, of one package; a red test stops it before anything is timed."""
    install_for_tests(session, package)
    run_tests(session, package, [])
    run_benchmarks(session, package, session.posargs)


@nox.session(reuse_venv=True, default=False)
def wheels(session: nox.Session) -> None:
    """Build five wheels and source archives, install each wheel alone in a clean environment and import it."""
    built = Path(session.create_tmp()).resolve() / "dist"
    shutil.rmtree(built, ignore_errors=True)
    session.run("uv", "build", "--quiet", "--all-packages", "--out-dir", str(built), external=True)
    session.install("packaging")
    session.run("python", "-m", "support.wheels", str(built), env=TEST_ENVIRONMENT)
    for name in PACKAGES:
        import_alone(session, name, built)


@nox.session(reuse_venv=True, default=False)
@per_package
def minimums(session: nox.Session, package: str) -> None:
    """Tests of one package with the lowest versions that its pyproject allows (downloads another torch)."""
    # From a folder outside, so that the exact versions of the workspace do not apply; the test tools come second and
    # leave what is there.
    with tempfile.TemporaryDirectory() as outside, session.chdir(outside):
        session.install("--resolution=lowest-direct", *editable(*local_packages(package)))
        session.install("--group", f"{ROOT}/pyproject.toml:test")
    session.run("pytest", f"tests/{package}", *session.posargs, env=TEST_ENVIRONMENT | SEEN_IF_UNWRITTEN)


@nox.session(reuse_venv=True, default=False)
def demo(session: nox.Session) -> None:
    """Train the default model on 2 processes, export it, check it with transformers and print generated text."""
    session.install(*editable(*PACKAGES, extras={"export": "transformers"}))
    session.run("coterie", "train", "configs/demo.toml", *session.posargs)
    report_fall(session, ROOT / "runs" / "demo" / "metrics.jsonl")
    shutil.rmtree("runs/demo-export", ignore_errors=True)
    session.run("coterie", "export", "runs/demo", "runs/demo-export", "--family", "qwen3_moe", "--check")
    session.run(
        "coterie", "generate", "runs/demo-export", "--prompt", "class Reader:\n    def ", "--temperature", "0.7"
    )


def report_fall(session: nox.Session, metrics: Path) -> None:
    """Say by how much training lowered the held-out bits per byte, and fail below the promised 40 % of a whole run."""
    records = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    bits = [record["bits_per_byte"] for record in records if record["kind"] == "evaluation"]
    fall = 1.0 - bits[-1] / bits[0]
    session.log(f"held-out bits per byte fell by {100 * fall:.0f} %")
    if fall < 0.4 and not session.posargs:
        session.error(f"expected a fall of at least 40 %, to {0.6 * bits[0]:.3f} or less; got {bits[-1]:.3f}")


def local_packages(package: str) -> list[str]:
    """Return the packages of this workspace that `package` needs, itself included."""
    by_distribution = {project["name"]: name for name, project in PROJECTS.items()}
    needed = [name for need in PROJECTS[package]["dependencies"] for d, name in by_distribution.items() if d in need]
    return sorted({package, *needed})


def editable(*packages: str, extras: dict[str, str] | None = None) -> list[str]:
    """Return the arguments that install these packages from their sources, with an extra where one is named."""
    arguments = []
    for name in packages:
        extra = f"[{extras[name]}]" if extras and name in extras else ""
        arguments += ["-e", f"{ROOT}/packages/{name}{extra}"]
    return arguments


def install_for_tests(session: nox.Session, package: str) -> None:
    """Install the package, what it needs of the workspace, and the test tools; for the hub transformers as well."""
    extras = {"export": "transformers"} if package == HUB else None
    session.install(*editable(*local_packages(package), extras=extras), "--group", "test")


def run_tests(session: nox.Session, package: str, arguments: list[str]) -> None:
    """Run pytest on the folder of a package, or on all the folders that need the hub."""
    folders = HUB_FOLDERS if package == HUB else [package]
    present = [f"tests/{folder}" for folder in folders if (ROOT / "tests" / folder).is_dir()]
    processes = [] if package in SHORT else IN_PROCESSES
    session.run("pytest", *processes, *present, *arguments, env=TEST_ENVIRONMENT | SEEN_IF_UNWRITTEN)


def run_benchmarks(session: nox.Session, package: str, arguments: list[str]) -> None:
    """Measure one package in this environment."""
    session.run("python", "-m", "support.run_bench", f"tests/{package}", *arguments, env=TEST_ENVIRONMENT)


def import_alone(session: nox.Session, name: str, built: Path) -> None:
    """Install the wheel of one package in a clean environment and import it under a time limit, in silence."""
    clean = Path(session.create_tmp()).resolve() / "clean"
    session.run("uv", "venv", "--quiet", "--clear", "--python", sys.executable, str(clean), external=True)
    python = str(clean / ("Scripts" if sys.platform == "win32" else "bin") / "python")
    # Our own names resolve to the files built here, whatever an index may hold under them.
    ours = Path(session.create_tmp()) / "built.txt"
    wheels_here = {PROJECTS[one]["name"]: next(built.glob(f"coterie_{one}-*.whl")) for one in PACKAGES}
    ours.write_text("".join(f"{one} @ {wheel.as_uri()}\n" for one, wheel in wheels_here.items()), encoding="utf-8")
    alone = PROJECTS[name]["name"]
    into = ["--quiet", "--python", python, "--constraints", str(ours)]
    session.run("uv", "pip", "install", *into, str(wheels_here[alone]), external=True)
    check = ["python", "-m", "support.wheels", "--alone", alone, "--python", python]
    session.run(*check, env=TEST_ENVIRONMENT)
    shutil.rmtree(clean)
