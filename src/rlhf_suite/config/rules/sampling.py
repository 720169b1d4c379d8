"""Rules about what samples, scores or writes rows, and about loops and tools."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from rlhf_suite.config.check.engine_arguments import owned_problems, rounding_problems, speculation_problems
from rlhf_suite.config.check.formatting import number_of
from rlhf_suite.config.check.problems import Problem, rule
from rlhf_suite.config.declarations.generate import shard_of
from rlhf_suite.config.declarations.reward import has_source
from rlhf_suite.config.declarations.runs import (
    Run,
)
from rlhf_suite.config.declarations.task_groups import RL, SAMPLING
from rlhf_suite.config.plan.run_plan import makes_rollouts_ahead, round_size


@rule(tasks=SAMPLING)
def room_for_a_prompt(run: Run) -> Iterator[Problem]:
    new = run.rollout.max_new_tokens
    if new is not None and new >= run.data.max_len:
        problem = f"{new} leaves no room for a prompt in data.max_len={run.data.max_len}"
        yield Problem("rollout.max_new_tokens", problem, f"write less than {run.data.max_len}, or raise data.max_len")


@rule(tasks=RL)
def sampling_is_unchanged(run: Run) -> Iterator[Problem]:
    """Refuse sampling from another distribution than the one whose log-probs are trained."""
    rollout = run.rollout
    for name, value, neutral in (
        ("top_p", rollout.top_p, 1.0),
        ("top_k", rollout.top_k, -1),
        ("min_p", rollout.min_p, 0.0),
        ("repetition_penalty", rollout.repetition_penalty, 1.0),
    ):
        corrected = run.algo.advantage.is_correction_level != "off"
        if value != neutral and not (corrected and run.algo.mismatch_max is not None):
            key = f"rollout.{name}"
            problem = f"{value} changes the sampling distribution, so the trainer's log-probs would not fit the samples"
            fix = (
                f"write {key}={neutral}; or add correction=tis, and algo.mismatch_max=<nats> with the largest allowed "
                "difference"
            )
            yield Problem(key, problem, fix)


@rule(tasks=RL)
def rounds_fit(run: Run) -> Iterator[Problem]:
    """Check that a round of sampling without filters is as large as a step, and that no sample of it gets too old."""
    key, train = "rollout.vllm_generate_batch_size", run.train
    prompts, size, bound = round_size(run.rollout), run.rollout.batch_size, train.async_queue_size
    if run.algo.filters or prompts == size or run.replays:
        return
    if prompts < size:
        text = (
            f"a round of {prompts} prompts is smaller than a step of rollout.batch_size={size}, and there is no filter"
        )
        yield Problem(key, text, f"write {size} or more, or leave it out")
        return
    later = (size - gcd(prompts, size) + prompts - 1) // size  # steps after the first one that a round reaches
    ages = number_of(later, "step")
    if not makes_rollouts_ahead(train):
        if run.algo.advantage.is_correction_level == "off":
            problem = f"rollouts by weights that are up to {ages} old are trained on as if the policy had written them"
            yield Problem(key, problem, f"add correction=tis (or icepop), or leave {key} out")
    elif train.partial_rollout_enable and bound > 0:
        most = (bound - train.async_run_ahead + 1) * size
        if train.async_run_ahead <= bound and prompts > most:
            problem = (
                f"{prompts - size} groups more than train.async_run_ahead={train.async_run_ahead} batches of {size} "
            )
            problem += f"cannot be trained within train.async_queue_size={bound} steps"
            least = train.async_run_ahead - 1 - (-prompts // size)
            yield Problem(key, problem, f"write {most} or less, or train.async_queue_size={least}")
    elif later > bound:
        problem = f"the last of {prompts} prompts would be trained {ages} after the first ones, and may be "
        problem += f"train.async_queue_size={bound} old"
        yield Problem(key, problem, f"write train.async_queue_size={later} or more, or leave {key} out")


@rule(tasks=SAMPLING)
def engine_arguments_are_free(run: Run) -> Iterator[Problem]:
    """Refuse arguments of the engines that the suite decides, and weights that they do not quantise."""
    yield from owned_problems(run.vllm.engine_args, run.launch.device)
    sees = run.task in RL and run.data.image_key is not None
    replays = run.task in RL and run.actor.routing_replay
    others = {"rollout.min_p": run.rollout.min_p > 0, "data.image_key": sees, "actor.routing_replay": replays}
    yield from speculation_problems(run.vllm.speculative_config, others)
    if run.task in RL:
        is_corrected = run.algo.advantage.is_correction_level != "off" and run.algo.mismatch_max is not None
        yield from rounding_problems(run.vllm.quantization, run.vllm.engine_args, is_corrected)


@rule(tasks=("generate", "score"))
def shard_is_a_part(run: Run) -> Iterator[Problem]:
    key, output = f"{run.task}.shard", run.generate if run.has("generate") else run.score
    if shard_of(output.shard) is None:
        fix = f"write {key}=0/4 for the first of four parts, or remove it"
        yield Problem(key, f"{output.shard!r} is not i/n with i < n", fix)


@rule(tasks=("generate",))
def samples_are_scored(run: Run) -> Iterator[Problem]:
    if run.generate.best_of_n and not has_source(run.reward):
        fix = "add reward.rule=<rule> or reward.remote_url=<file.py or URL>"
        yield Problem("generate.best_of_n", "nothing scores the samples", fix)


@rule(tasks=("score",))
def scores_fit(run: Run) -> Iterator[Problem]:
    if run.reward.model_name_or_path is not None and run.score.max_tokens_per_gpu < run.data.max_len:
        problem = (
            f"{run.score.max_tokens_per_gpu} tokens are too few for one sequence of data.max_len={run.data.max_len}"
        )
        fix = f"write score.max_tokens_per_gpu={run.data.max_len} or more"
        yield Problem("score.max_tokens_per_gpu", problem, fix)


@rule(tasks=("rejection_sampling", "iterative_dpo"))
def there_is_a_choice(run: Run) -> Iterator[Problem]:
    if run.rollout.n_samples_per_prompt < 2:
        problem = "there is only one answer to each prompt, so there is nothing to choose from"
        yield Problem("rollout.n_samples_per_prompt", problem, "write rollout.n_samples_per_prompt=8")


@rule(tasks=("merge_lora",))
def adapter_is_named(run: Run) -> Iterator[Problem]:
    if run.lora.path is None:
        yield Problem("lora.path", "no adapter is named", "add lora.path=<folder of a LoRA adapter>")


@rule(tasks=("chat",))
def room_for_a_message(run: Run) -> Iterator[Problem]:
    if run.chat.max_len is not None and run.chat.max_len <= run.chat.max_new_tokens:
        problem = f"{run.chat.max_len} tokens leave no room for a message beside chat.max_new_tokens"
        fix = f"write chat.max_len={4 * run.chat.max_new_tokens}, or a smaller chat.max_new_tokens"
        yield Problem("chat.max_len", problem, fix)
