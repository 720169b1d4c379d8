"""Rules between the flags of the tasks that write rows: generate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from rlhf_suite.config.checks import reward as rewards
from rlhf_suite.config.checks import rl
from rlhf_suite.config.checks.supervised import reward_template_problems
from rlhf_suite.config.generate import OUTPUT_SUFFIXES, OutputConfig, output_file, shard_of
from rlhf_suite.config.problems import Problem
from rlhf_suite.config.reward import has_source, reward_model
from rlhf_suite.config.runs import GenerateRun
from rlhf_suite.config.sources import source_problems


def has_prompts(run: GenerateRun) -> Iterator[Problem]:
    yield from source_problems("data.prompt_dataset", run.data.prompt_dataset, rl.prompt_columns(run.data))


def output_is_writable(run: GenerateRun) -> Iterator[Problem]:
    yield from output_problems("generate", run.generate, run.ckpt.load_enable)


def output_problems(section: str, output: OutputConfig, resumes: bool) -> Iterator[Problem]:
    """What is wrong with the flags of an output."""
    key = f"{section}.output_path"
    if shard_of(output.shard) is None:
        fix = f"write {section}.shard=0/4 for the first of four parts, or leave it away"
        yield Problem(f"{section}.shard", f"{output.shard!r} is not i/n with i < n", fix)
    elif output.output_path is not None:
        path = output_file(output.output_path, output.shard, Path())
        if path.is_dir():
            yield Problem(key, f"{output.output_path} is a folder", f"write {key}={path / 'rows.jsonl'}")
        elif path.suffix not in OUTPUT_SUFFIXES:
            fix = f"write {key}={path.with_suffix('.jsonl')} (or .parquet)"
            yield Problem(key, f"{output.output_path} is neither a .jsonl nor a .parquet file", fix)
        elif path.exists() and not resumes:
            yield Problem(key, f"{path} is there already", "choose another file, or remove that one")


def best_has_a_score(run: GenerateRun) -> Iterator[Problem]:
    if not run.generate.best_of_n:
        return
    key = "generate.best_of_n"
    if not has_source(run.reward):
        fix = "add reward.rule=<rule> or reward.remote_url=<file.py or URL>"
        yield Problem(key, "nothing scores the samples", fix)
    if run.rollout.n_samples_per_prompt < 2:
        fix = "write rollout.n_samples_per_prompt=8, or generate.best_of_n=false"
        yield Problem(key, "there is one sample of each prompt", fix)


def target_has_its_place(run: GenerateRun) -> Iterator[Problem]:
    if run.data.target_reward is not None:
        yield from reward_template_problems(run.data)


def samples_differ(run: GenerateRun) -> Iterator[Problem]:
    if run.rollout.temperature == 0 and run.rollout.n_samples_per_prompt > 1:
        what = f"{run.rollout.n_samples_per_prompt} samples at rollout.temperature=0 would all be the same"
        fix = "write rollout.temperature=1, or rollout.n_samples_per_prompt=1"
        yield Problem("rollout.n_samples_per_prompt", what, fix)


def reward_is_a_rule(run: GenerateRun) -> Iterator[Problem]:
    if reward_model(run.reward) is not None:
        what = "samples are scored by rules, files and servers only"
        fix = "add reward.rule=<rule> or reward.remote_url=<file.py or URL>"
        yield Problem("reward.model_name_or_path", what, fix)
    elif has_source(run.reward):
        yield from rewards.one_reward(run)


RULES: tuple[Callable[[GenerateRun], Iterable[Problem]], ...] = (
    has_prompts,
    output_is_writable,
    best_has_a_score,
    samples_differ,
    target_has_its_place,
    reward_is_a_rule,
    rewards.remote_url_is_usable,
    rewards.rule_has_labels,
    rewards.constants_have_a_model,
    rewards.model_stays,
    rl.room_for_a_prompt,
    rl.engines_are_whole,
)
