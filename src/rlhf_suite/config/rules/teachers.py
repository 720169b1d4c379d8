"""Rules about teachers of on-policy distillation: whose weights they have, and which rows each of them teaches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from rlhf_suite.config.check.problems import Problem, rule
from rlhf_suite.config.declarations.reward import is_http, urls
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.declarations.task_groups import RL
from rlhf_suite.config.declarations.teacher import NAMED, TOKEN, TeacherSourceConfig, list_teachers
from rlhf_suite.config.rules.rewards import password_problems
from rlhf_suite.foreign_text import printable
from rlhf_suite.registry import teacher

PROMPT, SOURCES = "data.teacher_prompt_key", NAMED.removesuffix(".")


@rule(tasks=RL)
def teachers_are_named(run: Run) -> Iterator[Problem]:
    for key, source in list_teachers(run.teacher).items() if run.algo.distill.coef > 0 else ():
        yield from weights_are_named(key, source)
        yield from teacher_has_what_it_needs(run, key, source)


def weights_are_named(key: str, source: TeacherSourceConfig) -> Iterator[Problem]:
    """Yield what is missing or too much in the section of a teacher."""
    needs_model, needs_server = teacher.needs(source.kind, "model"), teacher.needs(source.kind, "server")
    model, server = f"{key}.model_name_or_path", f"{key}.remote_url"
    if needs_model and source.model_name_or_path is None:
        yield Problem(
            model, "algo.distill needs a teacher, but no teacher is set", f"add {model}=<HF folder or hub name>"
        )
    given = urls(source.remote_url)
    if needs_server and not (given and all(map(is_http, given))):
        said = printable(source.remote_url or "")
        problem = f"{said} is not the address of a server" if given else "no server is named"
        yield Problem(server, problem, f"write {server}=http://<host>:8000/v1")
    elif needs_server:
        for url in given:
            yield from password_problems(server, url, f"remove it, and export {TOKEN}")
    if key.startswith(NAMED):
        for flag, value, is_read in (
            (model, source.model_name_or_path, needs_model),
            (server, source.remote_url, needs_server),
        ):
            if value is not None and not is_read:
                yield Problem(flag, f"is not read by {key}.kind={source.kind}", "remove it, or choose another kind")


def teacher_has_what_it_needs(run: Run, key: str, source: TeacherSourceConfig) -> Iterator[Problem]:
    """Yield what the kind of a teacher needs of the rest of the run."""
    if teacher.needs(source.kind, "prompt") and run.data.teacher_prompt_key is None:
        problem = f"{key}.kind={source.kind} has the probabilities of the policy, unless it reads another prompt"
        yield Problem(PROMPT, problem, f"add {PROMPT}=<column>, or choose another kind")
    if teacher.needs(source.kind, "average") and not run.train.enable_ema:
        problem = f"the run keeps no average of the policy's weights for {key}.kind={source.kind}"
        yield Problem("train.enable_ema", problem, "write train.enable_ema=true")
    if teacher.needs(source.kind, "temperature") and run.rollout.temperature != 1:
        problem = f"{run.rollout.temperature:g}: {key}.kind={source.kind} gives log-probs at temperature 1"
        yield Problem("rollout.temperature", problem, "write rollout.temperature=1")


@rule(tasks=RL)
def teachers_share_rows(run: Run) -> Iterator[Problem]:
    """Find rows of several teachers, and a teacher beside those of teacher.sources."""
    sources, own = run.teacher.sources, run.teacher
    if not sources or run.algo.distill.coef == 0:
        return
    for name in ("model_name_or_path", "remote_url"):
        if getattr(own, name) is not None:
            problem = f"would be the only teachers, but there is teacher.{name}={getattr(own, name)} too"
            yield Problem(SOURCES, problem, f"set it to null, or remove {SOURCES}")
    others = [name for name, source in sources.items() if source.datasets is None]
    if len(others) > 1:
        problem = f"{' and '.join(others)} would both have the rows of no other teacher"
        yield Problem(f"{NAMED}{others[1]}.datasets", problem, "name the datasets of all teachers but one")
    counts = Counter(dataset for source in sources.values() for dataset in source.datasets or ())
    for dataset in (dataset for dataset, count in counts.items() if count > 1):
        problem = f"{dataset} would have {counts[dataset]} teachers, but a row has only one"
        yield Problem(SOURCES, problem, f"keep {dataset} in the datasets of one of them")


@rule(tasks=RL)
def teachers_read_other_prompts(run: Run) -> Iterator[Problem]:
    if run.data.teacher_prompt_key is None or run.algo.distill.coef == 0:
        return
    if run.agent.has_turns:
        problem = "an episode of several turns has no single prompt that a teacher prompt could replace"
        yield Problem(PROMPT, problem, f"write {PROMPT}=null, or agent.kind=single_turn")
