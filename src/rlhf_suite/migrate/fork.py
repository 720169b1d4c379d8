"""Flags of OpenRLHF's fork for asynchronous agents, beyond those of OpenRLHF, and what several of them make.

Its estimators and filters are functions in a file beside the suite, which docs/own_code.md describes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from rlhf_suite.migrate.command import Migrated, Old
from rlhf_suite.migrate.handlers import Handler, to

FILE = "experiments/own_code/async_fork.py"
ESTIMATORS = {
    "dpg": f"{FILE}:dpg",
    "reinforce_baseline_nomean": f"{FILE}:no_mean",
    "reinforce_global": "flash_reinforce",
}
SWITCHES = {
    "use_positive_gamma": f"{FILE}:positive_gamma",
    "use_exp_norm_by_length": f"{FILE}:whitened_by_length",
    "use_adv_shaping": f"{FILE}:entropy_shaped",
}


def estimator(new: Migrated, old: Old, values: Sequence[str]) -> None:
    """The estimators of the fork are functions in a file; some switches change the estimator."""
    name = values[0] if values else "gae"
    chosen = next((function for flag, function in SWITCHES.items() if old.has(flag)), ESTIMATORS.get(name, name))
    new.add("algo.advantage.estimator", chosen)
    if name == "reinforce_global":
        new.remark("reinforce_global whitens its advantages too; flash_reinforce does not")


def switch(flag: str) -> Handler:
    """A switch that changes the estimator, also where none is named."""

    def handler(new: Migrated, old: Old, values: Sequence[str]) -> None:
        new.add("algo.advantage.estimator", SWITCHES[flag])
        new.remark(f"--{flag} is an estimator of its own in {FILE}; there is one estimator per run")

    return handler


def filter_of_groups(function: str) -> Handler:
    """A filter of groups. There is one per run."""

    def handler(new: Migrated, old: Old, values: Sequence[str]) -> None:
        key = "algo.group_filter"
        if key in new.flags:
            new.lost.append(f"{FILE}:{function}: {key} is one function; write one that calls both")
        else:
            new.add(key, f"{FILE}:{function}")

    return handler


def advantage_clip(new: Migrated, old: Old, values: Sequence[str]) -> None:
    """The fork clips to [-1 - low, 1 + high], but not what gae says; here the bounds themselves are written."""
    try:
        low, high = (float(value) for value in values)
    except ValueError:
        given = " ".join(values)
        new.lost.append(f"--advantage_clip_low_high {given}: write algo.advantage.clip_range=[-1-low,1+high]")
        return
    new.add("algo.advantage.clip_range", f"[{-1 - low:g},{1 + high:g}]")


# Environment variables of the fork and of older versions of OpenRLHF: what does the same here.
VARIABLES = {
    "OPENRLHF_ASYNC_QUEUE_SIZE": "train.async_queue_size, which needs train.async_enable",
    "OPENRLHF_ASYNC_NUM_TASKS": "agent.max_concurrent, the episodes of the whole run and not of an engine",
    **dict.fromkeys(
        ("MAX_CONCURRENT", "TASK_MAX_CONCURRENT", "MAX_VLLM_BATCHSIZE"), "agent.max_concurrent, for the whole run"
    ),
    "ENV_ITER_NUM": "agent.max_turns, one more than the calls of the tool",
    **dict.fromkeys(("NGINX_IP_FILE", "COMPILE_SERVER", "COMPILE_SERVER_PORT"), "agent.python_url, or the jail here"),
    "MULTITURN_CODE_MERGE": "nothing: names of agent.kind=python last for the episode",
    "MAX_RETRIES": "agent.on_error: an episode that fails is not tried again",
    **dict.fromkeys(("GENERATE_METHOD", "ENV_GENERATE_CONFIG"), "agent.kind and agent.sources"),
    "TEMPLATE_NAME": "data.input_template, or a chat template",
    **dict.fromkeys(("STRUCTURED_REWARD", "USE_MODEL_REWARD"), "named parts of rewards (docs/rewards_sources.md)"),
}
SECRET = re.compile("KEY|TOKEN|SECRET|PASSW", re.IGNORECASE)


def environment(new: Migrated, old: Old, name: str, value: str) -> None:
    """A variable that steered OpenRLHF is a flag or a remark; others have to be exported as before."""
    is_async = new.flags.get("train.async_enable") == "true"
    if name == "OPENRLHF_ASYNC_QUEUE_SIZE" and is_async:
        new.add("train.async_queue_size", value)
    elif name == "OPENRLHF_ASYNC_NUM_TASKS" and "train.agent_func_path" in new.flags:
        new.add("agent.max_concurrent", value)
        new.remark(f"{name}={value} was for each engine; agent.max_concurrent is for the whole run")
    elif name in VARIABLES:
        new.remark(f"{name}={value}: here it is {VARIABLES[name]}")
    elif SECRET.search(name):
        new.remark(f"the environment has {name}: set it as before")
    else:
        new.remark(f"the environment has {name}={value}: set it as before if the run still needs it")


HANDLERS: dict[str, Handler] = {
    "advantage_estimator": estimator,
    "algo.advantage.estimator": estimator,
    **{flag: switch(flag) for flag in SWITCHES},
    "advantage_clip_low_high": advantage_clip,
    "use_outlier_mask": filter_of_groups("outliers"),
    "use_length_filter": filter_of_groups("too_long"),
    "use_mopps": to(("algo.prompt_filter", f"{FILE}:mopps")),
}
