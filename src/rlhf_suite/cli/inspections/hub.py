"""Names of the Hugging Face hub: in the local cache, or to be fetched over a network that is there."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from rlhf_suite.cli.inspections.model_uses import model_uses
from rlhf_suite.cli.inspections.network import first_hop, unreachable
from rlhf_suite.config.problems import Problem
from rlhf_suite.config.resolve import flat
from rlhf_suite.config.runs import Run
from rlhf_suite.config.sources import hub_names
from rlhf_suite.launch.slurm import allocation

# As huggingface_hub reads them. Importing it here would fix its settings before the run has made its own.
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
HF_HOME = Path(os.environ.get("HF_HOME") or CACHE / "huggingface").expanduser()
HF_HUB_CACHE = Path(os.environ.get("HF_HUB_CACHE") or HF_HOME / "hub").expanduser()
HF_HUB_OFFLINE = os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}
ENDPOINT = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?(:[\w.-]+)?(@.*)?")
DATA = ("data.dataset", "data.prompt_dataset", "eval.dataset")
CONNECT_S = 3.0


def hub_names_exist(run: Run, folder: Path | None) -> Iterator[Problem]:
    """Each name that is neither here nor in the cache can be fetched. The network is asked only where the run runs."""
    absent = [(key, name) for key, name in wanted(run) if not is_cached(key, name)]
    for key, name in absent:
        if not NAME.fullmatch(name):
            yield Problem(key, f"{name} is not a file or folder here, nor a name of the hub", "check the spelling")
    named = [(key, name) for key, name in absent if NAME.fullmatch(name)]
    here = allocation() if folder is not None else None
    if folder is None or not named or (here is not None and here.rank > 0):
        return
    reason = hub_problem()
    for key, name in named if reason else ():
        what = f"{name} is not a folder here and not in the cache ({HF_HUB_CACHE}), and {reason}"
        kind = " --repo-type dataset" if key in DATA else ""
        fix = f"give a folder, or fill the cache where there is a network: hf download {name}{kind}"
        yield Problem(key, what, fix)


def wanted(run: Run) -> Iterator[tuple[str, str]]:
    """Flags and the names in them that are not files or folders."""
    for use in model_uses(run):
        if not Path(use.path).is_dir():
            yield use.key, use.path
    values = flat(asdict(run))
    for key in DATA:
        yield from ((key, name) for name in hub_names(values.get(key)))


def is_cached(key: str, name: str) -> bool:
    """Whether the hub's cache holds a model, or a data set as it is or as `datasets` has prepared it."""
    if key not in DATA:
        return cached_model(name) is not None
    prepared = Path(os.environ.get("HF_DATASETS_CACHE") or Path(HF_HOME) / "datasets")
    base = name.partition("@")[0].partition(":")[0]
    return (prepared / base.replace("/", "___")).is_dir() or cached(f"datasets--{base.replace('/', '--')}") is not None


def cached_model(name: str) -> Path | None:
    """The folder of a model in the hub's cache, if its configuration is there."""
    folder = cached(f"models--{name.replace('/', '--')}")
    return folder if folder is not None and (folder / "config.json").is_file() else None


def cached(name: str) -> Path | None:
    """The newest snapshot that the hub's cache holds of a repository."""
    reference = Path(HF_HUB_CACHE) / name / "refs" / "main"
    if not reference.is_file():
        return None
    snapshot = Path(HF_HUB_CACHE) / name / "snapshots" / reference.read_text().strip()
    return snapshot if snapshot.is_dir() else None


def hub_problem() -> str | None:
    """Why nothing can be fetched from the hub; None when it can be connected to, directly or through a proxy."""
    if HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE forbids to fetch it"
    server = first_hop(ENDPOINT)
    reason = unreachable([server], CONNECT_S).get(server)
    return reason and f"{ENDPOINT} cannot be reached ({server[0]}:{server[1]}: {reason})"
