"""The runs that a loop consists of, made of the loop's own sections, and the problems that they would have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_suite.config.check.problems import Problem
from rlhf_suite.config.declarations.ckpt import CheckpointConfig
from rlhf_suite.config.declarations.data import DataConfig
from rlhf_suite.config.declarations.generate import ScoreConfig
from rlhf_suite.config.declarations.loop import held_out_rule
from rlhf_suite.config.declarations.models import ActorConfig
from rlhf_suite.config.declarations.reward import RewardConfig
from rlhf_suite.config.declarations.runs import (
    Run,
)

# The columns of the rows that a loop writes for its training stage.
INPUT, OUTPUT, CHOSEN, REJECTED, SCORE = "input", "output", "chosen", "rejected", "score"


@dataclass(frozen=True)
class Share:
    """The prompts of an iteration: `count` rows after the first `start`."""

    start: int
    count: int


def generate_run(run: Run, model: str, iteration: int, share: Share, target: float | None = None) -> Run:
    """Return the run that answers each prompt of an iteration's share several times and scores the answers.

    `target` is the reward that the prompts ask for. Prompts that come again get different answers.
    """
    data = run.data.as_of("generate", skip_samples=share.start, max_samples=share.count, target_reward=target)
    return _answers(run, model, data=data, rollout=run.rollout.as_of("generate", seed=run.rollout.seed + iteration))


def evaluate_run(run: Run, model: str, target: float | None = None) -> Run:
    """Return the run that answers the held-out prompts as `eval` says, and scores the answers."""
    held_out = run.eval
    data = run.data.as_of(
        "generate",
        target_reward=target,
        prompt_dataset=held_out.dataset,
        prompt_split=held_out.split,
        skip_samples=0,
        max_samples=held_out.max_samples,
        input_key=held_out.input_key or run.data.input_key,
        label_key=held_out.label_key or run.data.label_key,
    )
    rollout = run.rollout.as_of(
        "generate", n_samples_per_prompt=held_out.n_samples_per_prompt, temperature=held_out.temperature
    )
    return _answers(run, model, data=data, rollout=rollout)


def sft_run(run: Run, model: str, rows: Path | str, output: str | None) -> Run:
    """Return the run that tunes `model` on rows with INPUT and OUTPUT, and SCORE where prompts state it.

    `output` is the folder of the trained model; None: in the folder of the run.
    """
    data = run.data.as_of(
        "sft", dataset=str(rows), max_samples=None, input_key=INPUT, output_key=OUTPUT,
        reward_key=SCORE if run.task == "conditional_sft" else None,
    )  # fmt: skip
    return Run.of("sft", **_build_training(run, "sft", model, output), data=data)


def dpo_run(run: Run, models: tuple[str, str | None], rows: Path | str, output: str | None) -> Run:
    """Return the run that optimises preferences of the first of `models` on rows with INPUT, CHOSEN and REJECTED.

    The second model is the reference; None: the first one is.
    """
    model, reference = models
    data = run.data.as_of(
        "dpo", dataset=str(rows), max_samples=None,
        prompt_key=INPUT, chosen_key=CHOSEN, rejected_key=REJECTED,
    )  # fmt: skip
    ref, algo = run.ref.as_of("dpo", model_name_or_path=reference), run.algo.as_of("dpo")
    return Run.of("dpo", **_build_training(run, "dpo", model, output), data=data, algo=algo, ref=ref)


def score_run(run: Run, answers: Path | str) -> Run:
    """Return the run in which a reward model scores an output of `generate_run`."""
    data = DataConfig.of("score", dataset=str(answers), max_len=run.data.max_len, on_bad_row=run.data.on_bad_row)
    score = ScoreConfig()
    score.max_tokens_per_gpu = max(score.max_tokens_per_gpu, run.data.max_len)
    reward = run.reward.as_of("score", rule=None, remote_url=None, rubric=None)
    return Run.of(
        "score", ds=run.ds.as_of("score"), data=data, reward=reward, score=score, launch=run.launch.as_of("score")
    )


def judge_run(run: Run, answers: Path | str) -> Run:
    """Return the run in which eval.rule scores an output of `evaluate_run`, whatever the reward says of it."""
    data = DataConfig.of("score", dataset=str(answers), label_key="label", on_bad_row=run.data.on_bad_row)
    given = run.reward
    settings = {name: getattr(given, name) for name in ("rules", "timeout_s", "num_processes", "num_retries")}
    reward = RewardConfig.of("score", rule=held_out_rule(run.eval), **settings)
    return Run.of("score", data=data, reward=reward, launch=run.launch.as_of("score"))


def _answers(run: Run, model: str, **sections: Any) -> Run:
    # A model scores in a stage of its own.
    by_model = run.reward.model_name_or_path is not None
    reward = RewardConfig.of("generate") if by_model else run.reward.as_of("generate")
    shared: dict[str, Any] = {
        "reward": reward,
        "vllm": run.vllm.as_of("generate"),
        "launch": run.launch.as_of("generate"),
    }
    return Run.of(
        "generate",
        actor=ActorConfig.of("generate", model_name_or_path=model),
        ds=run.ds.as_of("generate"),
        **shared,
        **sections,
    )


def _build_training(run: Run, task: str, model: str, output: str | None) -> dict[str, Any]:
    """Return the sections of every training stage. One checkpoint is enough to continue from."""
    return {
        "actor": run.actor.as_of(task, model_name_or_path=model),
        "ckpt": CheckpointConfig.of(task, output_dir=output, save_steps=run.ckpt.save_steps, max_num=1),
        "train": run.train.as_of(task),
        "ds": run.ds.as_of(task),
        "logger": run.logger,
        "launch": run.launch.as_of(task),
    }


ROWS = "builtin:reverse_pairs"  # stands for the rows that a loop will write
HELD_OUT: tuple[str, ...] = ("data.prompt_dataset", "data.prompt_split", "data.input_key", "data.label_key")
HELD_OUT += ("rollout.n_samples_per_prompt", "rollout.temperature")


@dataclass(frozen=True)
class Planned:
    """A stage as far as it is known before the loop starts. `renamed`: the flags whose values come from flags of the
    loop that have other names, which rules and conditions of the loop itself check."""

    run: Run
    renamed: tuple[str, ...] = ()


def plan_stages(run: Run) -> Iterator[Planned]:
    """Yield one stage of each kind."""
    model = run.actor.model_name_or_path or "builtin:tiny"
    yield Planned(generate_run(run, model, 0, Share(run.data.skip_samples, 1)))
    if run.reward.model_name_or_path is not None:
        yield Planned(score_run(run, ROWS))
    if run.task == "iterative_dpo":
        is_fixed = run.loop.fixed_reference_enable
        reference = model if is_fixed else run.ref.model_name_or_path
        yield Planned(dpo_run(run, (model, reference), ROWS, None), ("ref.model_name_or_path",) if is_fixed else ())
    else:
        yield Planned(sft_run(run, model, ROWS, None))
    if run.eval.dataset is not None:
        yield Planned(evaluate_run(run, model), HELD_OUT)


def stage_problems(run: Run, check: Callable[[Run], Iterable[Problem]], known: set[str]) -> Iterator[Problem]:
    """Yield what is wrong with any stage that can be said in the names of the loop's flags, which are `known`."""
    for stage in plan_stages(run):
        yield from (problem for problem in check(stage.run) if problem.key in known - {*stage.renamed})
