"""Rules of the models that are only read: reference, teacher, reward model."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_suite.config.problems import Problem
from rlhf_suite.config.runs import PPORun, SupervisedRun


def offloads_fit(run: SupervisedRun | PPORun) -> Iterator[Problem]:
    for name in ("ref", "teacher", "reward"):
        section = getattr(run, name, None)
        if section is None or not section.offload:
            continue
        key = f"{name}.offload"
        own = isinstance(run, SupervisedRun) and run.ds.lora.rank > 0
        if run.launch.device == "cpu":
            what = "there is no GPU that weights could be brought to (launch.device=cpu)"
        elif own and section.model_name_or_path in (None, run.actor.model_name_or_path):
            what = "with LoRA this model is the actor without its adapters, and no copy is held"
        elif name == "ref" and run.ds.load_in_4bit:
            what = "weights in 4 bits (ds.load_in_4bit=true) stay on the GPU"
        else:
            continue
        yield Problem(key, what, f"write {key}=false")
