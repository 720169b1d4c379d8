"""Whether models that read the tokens of the actor take them for the same words."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rlhf_suite.config.check.problems import Problem
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.declarations.task_groups import RL
from rlhf_suite.config.plan.run_plan import ACTOR, CRITIC, REFERENCE, TEACHER, judge_paths
from rlhf_suite.preflight.inspections.model_files import files_of
from rlhf_suite.preflight.inspections.model_uses import ModelUse, model_uses
from rlhf_suite.preflight.inspections.models import folder_of

TEXT_READER = (
    "give a reward model of the policy's family; one behind HTTP reads text (task=serve_rm, reward.remote_url)"
)


def reward_model_reads_the_policy(run: Run, folder: Path | None) -> Iterator[Problem]:
    """Yield a problem if a reward model of a policy, which scores its tokens, reads other words in them."""
    if run.task not in RL:
        return
    uses = {use.key.removesuffix(".model_name_or_path"): use for use in model_uses(run)}
    policy = folder_of(uses[ACTOR].path) if ACTOR in uses else None
    for name in judge_paths(run):
        reward = folder_of(uses[name].path) if name in uses else None
        if policy is not None and reward is not None:
            yield from other_words(
                uses[name], policy, reward, TEXT_READER, "it would score other words than were written"
            )


def others_have_embeddings(run: Run, folder: Path | None) -> Iterator[Problem]:
    """Yield a problem if a model that reads the tokens of the actor has no embedding of some of its words."""
    uses = {use.key.removesuffix(".model_name_or_path"): use for use in model_uses(run)}
    actor = folder_of(uses[ACTOR].path) if ACTOR in uses else None
    for use in (uses[name] for name in uses if name.split(".")[0] in (REFERENCE, TEACHER, CRITIC)):
        model_folder = folder_of(use.path)
        rows = None if model_folder is None else files_of(model_folder).setting("vocab_size")
        if actor is not None and files_of(actor).has_words_beyond(rows):
            problem = f"{use.path} has embeddings of {rows} tokens, and the tokenizer of the actor has more"
            yield Problem(use.key, problem, "give a model of the actor's family")


def teachers_read_the_student(run: Run, folder: Path | None) -> Iterator[Problem]:
    """Yield a problem of a teacher with another vocabulary than the student."""
    uses = {use.key.removesuffix(".model_name_or_path"): use for use in model_uses(run)}
    student = folder_of(uses[ACTOR].path) if ACTOR in uses else None
    for use in (uses[name] for name in uses if name.split(".")[0] == TEACHER):
        own = folder_of(use.path)
        if student is not None and own is not None and files_of(own).vocabulary:
            fix = "give a teacher of the student's family"
            yield from other_words(use, student, own, fix, "their probabilities cannot be compared")


def other_words(use: ModelUse, policy: Path, other_model: Path, fix: str, so: str) -> Iterator[Problem]:
    """Yield a problem if the folder of a model that reads the tokens of the policy has another vocabulary. `so`: what
    follows from that."""
    ours, theirs = files_of(policy).vocabulary, files_of(other_model).vocabulary
    other = next((token for token, number in ours.items() if theirs.get(token) != number), None) if theirs else None
    if other is not None:  # tokens that only the other model has do no harm: the policy cannot write them
        problem = (
            f"the vocabulary of {use.path} is not that of the policy ({len(theirs)} and {len(ours)} tokens; {other!r} "
            f"is {theirs.get(other)} and {ours[other]}), so {so}"
        )
        yield Problem(use.key, problem, fix)
    size, wanted = files_of(other_model).setting("vocab_size"), files_of(policy).setting("vocab_size")
    if not theirs and None not in (size, wanted) and size != wanted:
        yield Problem(use.key, f"{use.path} has a vocabulary of {size} tokens, but the policy has {wanted}", fix)
