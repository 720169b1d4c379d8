"""Whether the routers of a model are known, where they are frozen or take the routes of the engines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rlhf_suite.config.check.problems import Problem
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.declarations.task_groups import RL, TRAINED
from rlhf_suite.engines.spec import caches_prefixes
from rlhf_suite.launch.environment import device_kind
from rlhf_suite.models.families import bytes_of_routes, num_experts
from rlhf_suite.preflight.inspections.model_files import ModelFiles, files_of
from rlhf_suite.preflight.inspections.model_uses import ModelUse, model_uses
from rlhf_suite.preflight.inspections.models import family, folder_of

REPLAY, CACHE = "actor.routing_replay", "vllm.enable_prefix_caching"


def routers_are_known(run: Run, folder: Path | None) -> Iterator[Problem]:
    """Yield a problem of a model without routers that are known, and of engines that lose routes."""
    if run.task not in TRAINED:
        return
    asked = [f"{name}.freeze_router" for name in ("actor", "critic") if has_frozen_router(run, name)]
    if run.task in RL and run.actor.routing_replay:
        asked.append(REPLAY)
        yield from routes_are_kept(run)
    uses = {use.key.partition(".")[0]: use for use in model_uses(run)}
    for key in asked:
        use = uses.get(key.partition(".")[0])
        model_folder = None if use is None else folder_of(use.path)
        if use is not None and model_folder is not None:
            yield from without_routers(key, use, files_of(model_folder))


def route_bytes(run: Run) -> int:
    """Return the bytes that the routes of a token take; 0 for a run that replays none, or before its model is here."""
    if run.task not in RL or not run.actor.routing_replay:
        return 0
    folder = None if run.actor.model_name_or_path is None else folder_of(run.actor.model_name_or_path)
    return 0 if folder is None else bytes_of_routes(files_of(folder).setting)


def hint_of_routes(run: Run) -> Iterator[str]:
    """Yield what would bring engine and trainer together where a mixture of experts chooses its own routes twice."""
    if run.task not in RL or run.actor.routing_replay or run.replays:
        return
    path = run.actor.model_name_or_path
    folder = None if path is None else folder_of(path)
    if folder is None or num_experts(files_of(folder).setting) is None or not family(files_of(folder)).router:
        return
    yield (
        f"{path} is a mixture of experts, and engine and trainer may send a token to different ones. With "
        f"{REPLAY}=true the trainer takes the engine's (docs/rl_correction.md)."
    )


def has_frozen_router(run: Run, name: str) -> bool:
    """Return whether a model of the run is to keep its routers."""
    section = getattr(run, name, None)
    return section is not None and section.freeze_router


def without_routers(key: str, use: ModelUse, files: ModelFiles) -> Iterator[Problem]:
    """Yield a problem if a model is not a mixture of experts, or is of a family whose routers are not known."""
    own = family(files)
    if num_experts(files.setting) is None:
        yield Problem(key, f"{use.path} is not a mixture of experts", f"write {key}=false")
    elif not own.router:
        yield Problem(
            key, f"the routers of {own.title} are not known here ({use.key}={use.path})", f"write {key}=false"
        )


def routes_are_kept(run: Run) -> Iterator[Problem]:
    """Yield a problem of a prefix cache for whose tokens an engine has no routes, or without which it keeps none."""
    device = device_kind(run.launch)
    caches = caches_prefixes(run.vllm, device)
    if device == "cpu" and caches and not run.replays:
        problem = f"an engine on the CPU has no routes for tokens from its prefix cache ({REPLAY}=true)"
        yield Problem(CACHE, problem, f"write {CACHE}=false")
    if device == "cuda" and not caches and not run.replays:
        yield Problem(CACHE, f"vLLM keeps routes beside its prefix cache ({REPLAY}=true)", f"write {CACHE}=true")
