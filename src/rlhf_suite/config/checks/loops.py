"""Rules of the loops: their own, and those of every stage, which are checked before the first one starts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from rlhf_suite.config.checks.reward import one_reward
from rlhf_suite.config.loop_stages import Share, dpo_run, evaluate_run, generate_run, score_run, sft_run
from rlhf_suite.config.problems import Problem
from rlhf_suite.config.runs import ConditionalSFTRun, IterativeDPORun, LoopRun, Run

ROWS = "builtin:reverse_pairs"  # stands for the rows that a loop will write
FIXED = {"ref.model_name_or_path": "loop.fixed_reference_enable"}
HELD_OUT = {"data.prompt_dataset": "eval.dataset", "data.prompt_split": "eval.split"}


@dataclass(frozen=True)
class Planned:
    """A stage as far as it is known before the loop starts. `names`: its flags that the loop calls otherwise."""

    run: Run
    names: dict[str, str] = field(default_factory=dict)


def planned(run: LoopRun) -> Iterator[Planned]:
    """One of each kind of stage."""
    model = run.actor.model_name_or_path or "builtin:tiny"
    yield Planned(generate_run(run, model, 0, Share(run.data.skip_samples, 1)))
    if run.reward.model_name_or_path is not None:
        yield Planned(score_run(run, ROWS))
    if isinstance(run, IterativeDPORun):
        is_fixed = run.loop.fixed_reference_enable
        reference = model if is_fixed else run.ref.model_name_or_path
        yield Planned(dpo_run(run, (model, reference), ROWS, None), FIXED if is_fixed else {})
    else:
        yield Planned(sft_run(run, model, ROWS, None))
    if run.eval.dataset is not None:
        own = {f"data.{name}": f"eval.{name}" for name in ("input_key", "label_key") if getattr(run.eval, name)}
        yield Planned(evaluate_run(run, model), HELD_OUT | own)


def stage_problems(run: LoopRun, check: Callable[[Run], Iterable[Problem]], known: set[str]) -> Iterator[Problem]:
    """What is wrong with any stage, in the names of the loop's flags; `known` are those. The rest is the loop's own."""
    for stage in planned(run):
        for problem in check(stage.run):
            key = stage.names.get(problem.key, problem.key)
            if key in known:
                yield replace(problem, key=key, what=renamed(problem.what, stage), fix=renamed(problem.fix, stage))


def renamed(text: str, stage: Planned) -> str:
    for theirs, ours in stage.names.items():
        text = text.replace(theirs, ours)
    return text


def there_is_a_choice(run: LoopRun) -> Iterator[Problem]:
    if run.rollout.n_samples_per_prompt < 2 and not isinstance(run, ConditionalSFTRun):
        what = "there is one answer to each prompt, so none is better"
        yield Problem("rollout.n_samples_per_prompt", what, "write rollout.n_samples_per_prompt=8")


def there_is_one_reference(run: LoopRun) -> Iterator[Problem]:
    if isinstance(run, IterativeDPORun) and run.loop.fixed_reference_enable and run.ref.model_name_or_path is not None:
        what = f"the reference is named already: ref.model_name_or_path={run.ref.model_name_or_path}"
        yield Problem("loop.fixed_reference_enable", what, "leave one of the two away")


RULES: tuple[Callable[[LoopRun], Iterable[Problem]], ...] = (
    one_reward,
    there_is_a_choice,
    there_is_one_reference,
)
