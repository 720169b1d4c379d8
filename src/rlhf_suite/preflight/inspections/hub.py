"""Inspect names of the Hugging Face hub: each must be in the local cache, or the hub must be reachable."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from rlhf_suite.config.check.problems import Problem
from rlhf_suite.config.check.sources import hub_names
from rlhf_suite.config.declarations.flags import all_values
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.disk import resolve_home
from rlhf_suite.launch.slurm import is_first_node
from rlhf_suite.preflight.inspections.model_uses import model_uses
from rlhf_suite.preflight.inspections.network import first_hop, is_silent, unreachable

# Read as huggingface_hub reads them. An import of it here would fix its settings before the run can set its own.
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
HF_HOME = resolve_home(os.environ.get("HF_HOME") or CACHE / "huggingface")
HF_HUB_CACHE = resolve_home(os.environ.get("HF_HUB_CACHE") or HF_HOME / "hub")
HF_HUB_OFFLINE = os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}
ENDPOINT = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?(:[\w.-]+)?(@.*)?")
DATA = ("data.dataset", "data.prompt_dataset", "data.pretrain_dataset", "eval.dataset")
CONNECT_S, ANSWER_S = 3.0, 10.0


def hub_names_exist(run: Run, folder: Path | None) -> Iterator[Problem]:
    """Yield a problem for each name that cannot be fetched. The network is used only where the run itself will run."""
    values = all_values(run)
    of_data = ((key, name) for key in DATA for name in hub_names(values.get(key)))
    yield from find_absent([*list_hub_models(run), *of_data], folder is not None and is_first_node())


def hub_models_exist(run: Run) -> Iterator[Problem]:
    """Yield a problem for each model that cannot be fetched: for a plan, which reads no data."""
    yield from find_absent([*list_hub_models(run)], uses_network=True)


def list_hub_models(run: Run) -> Iterator[tuple[str, str]]:
    """Yield the names of models that are not folders here, each with its flag."""
    yield from ((use.key, use.path) for use in model_uses(run) if not Path(use.path).is_dir())


def find_absent(names: Iterable[tuple[str, str]], uses_network: bool) -> Iterator[Problem]:
    """Yield a problem for each flag whose name is neither in the cache nor, where the network is used, at the hub."""
    absent = [(key, name) for key, name in names if not is_cached(key, name)]
    for key, name in absent:
        if not NAME.fullmatch(name):
            fix = "write owner/name, or download it" if "://" in name else "check the spelling"
            yield Problem(key, f"{name} is neither a file or folder here nor a name of the hub", fix)
    named = [(key, name) for key, name in absent if NAME.fullmatch(name)]
    reason = hub_problem() if named and uses_network else None
    for key, name in named if reason else ():
        problem = f"{name} is neither a folder here nor in the cache ({HF_HUB_CACHE}), and {reason}"
        kind = " --repo-type dataset" if key in DATA else ""
        fix = f"give a folder, or fill the cache on a machine with a network: hf download {name}{kind}"
        yield Problem(key, problem, fix)


def is_cached(key: str, name: str) -> bool:
    """Return whether the cache holds a model or a data set, the latter also as prepared by `datasets`."""
    if key not in DATA:
        return find_cached_model(name) is not None
    prepared = Path(os.environ.get("HF_DATASETS_CACHE") or Path(HF_HOME) / "datasets")
    base = name.partition("@")[0].partition(":")[0]
    return (prepared / base.replace("/", "___")).is_dir() or find_cached(
        f"datasets--{base.replace('/', '--')}"
    ) is not None


def find_cached_model(name: str) -> Path | None:
    """Return the folder of a model in the hub's cache, or None if its configuration is not there."""
    folder = find_cached(f"models--{name.replace('/', '--')}")
    return folder if folder is not None and (folder / "config.json").is_file() else None


def find_cached(name: str) -> Path | None:
    """Return the newest snapshot of a repository in the hub's cache, or None if there is none."""
    reference = Path(HF_HUB_CACHE) / name / "refs" / "main"
    if not reference.is_file():
        return None
    snapshot = Path(HF_HUB_CACHE) / name / "snapshots" / reference.read_text(encoding="utf-8").strip()
    return snapshot if snapshot.is_dir() else None


def hub_problem() -> str | None:
    """Return why the hub cannot be reached, directly or through a proxy, or None if it can."""
    if HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE forbids downloads"
    server = first_hop(ENDPOINT)
    reason = unreachable([server], CONNECT_S).get(server)
    if reason:
        return f"{ENDPOINT} cannot be reached ({server[0]}:{server[1]}: {reason})"
    silent = f"{ENDPOINT} takes connections, and has not answered within {ANSWER_S:g} s"
    return silent if is_silent(ENDPOINT, ANSWER_S) else None
