"""Mistakes in flags: their bounds, the rules between them, what they are for, and which run is which."""

from __future__ import annotations

from mutation import Mutation

BORDERS = ("tests/config/test_borders.py",)
FOLDERS = ("tests/config/test_folders.py",)
MISTAKES = ("tests/config/test_mistakes.py",)
EXPLAIN = ("tests/config/test_explain.py",)
RESOLVE = ("tests/config/test_record.py",)
STAGES = ("tests/config/test_loop_stages.py",)
GROUPS = ("tests/config/test_groups.py",)

CONFIG = [
    Mutation(
        "a bound that is excluded is allowed",
        "config/formatting.py",
        "value > bound",
        "value >= bound",
        ("tests/config/test_mistakes.py", "-k", "temperature"),
    ),
    Mutation(
        "a bound that is included is refused",
        "config/formatting.py",
        "value >= bound",
        "value > bound",
        ("tests/config/test_flags.py",),
    ),
    Mutation(
        "the name least like a misspelt one is offered",
        "config/formatting.py",
        "key=lambda pair: -pair[0])",
        "key=lambda pair: pair[0])",
        MISTAKES,
    ),
    Mutation(
        "a flag that is switched off is reported as without effect",
        "config/check.py",
        " and values.get(key) not in OFF",
        "",
        BORDERS,
    ),
    Mutation(
        "a flag that one of two others needs is reported as without effect",
        "config/flags.py",
        " or any(each.holds(values) for each in self.alternatives)",
        "",
        BORDERS,
    ),
    Mutation(
        "a flag of one of several sources is reported as without effect",
        "config/flags.py",
        "for key in (flag, *named)]",
        "for key in (flag,)]",
        BORDERS,
    ),
    Mutation(
        "a run with another learning rate is the same run",
        "config/record.py",
        "resume_of(key, run.task) != FREE",
        "resume_of(key, run.task) == FIXED",
        RESOLVE,
    ),
    Mutation(
        "a run with another logger is another run",
        "config/record.py",
        "return flags[key].meta.resume",
        "return NAMED",
        RESOLVE,
    ),
    Mutation(
        "the oldest run is continued",
        "preflight/folders.py",
        "key=lambda path: path.stat().st_mtime, reverse=True)",
        "key=lambda path: path.stat().st_mtime)",
        FOLDERS,
    ),
    Mutation(
        "a batch need not be a multiple of the ranks",
        "config/rules/training.py",
        "size % (ranks * micro)",
        "size % micro",
        BORDERS,
    ),
    Mutation(
        "the next multiple is the one before",
        "config/formatting.py",
        "-(-number // factor) * factor",
        "number // factor * factor",
        ("tests/config/test_mistakes.py", "-k", "batch_size"),
    ),
    Mutation(
        "a budget of exactly one sequence is refused",
        "config/rules/training.py",
        "run.train.max_tokens_per_gpu * size < least",
        "run.train.max_tokens_per_gpu * size <= least",
        BORDERS,
    ),
    Mutation(
        "a pair may be longer than the budget",
        "config/rules/training.py",
        "least = count * run.data.max_len",
        "least = run.data.max_len",
        BORDERS,
    ),
    Mutation(
        "responses may fill data.max_len",
        "config/rules/sampling.py",
        "new >= run.data.max_len",
        "new > run.data.max_len",
        BORDERS,
    ),
    Mutation(
        "an empty range is a range",
        "config/rules/rewards.py",
        "given[0] >= given[1]",
        "given[0] > given[1]",
        BORDERS,
    ),
    Mutation(
        "the horizon of the KL controller may be as short as makes the coefficient 0",
        "config/rules/algorithms.py",
        "kl.horizon <= 0.2 * samples",
        "kl.horizon < 0.2 * samples",
        BORDERS,
    ),
    Mutation(
        "an engine on several devices shares as if it had one",
        "config/rules/training.py",
        "engines = run.vllm.num_engines * run.vllm.devices",
        "engines = run.vllm.num_engines",
        BORDERS,
    ),
    Mutation(
        "the whole run may be the critic's warm-up",
        "config/rules/algorithms.py",
        "frozen >= steps",
        "frozen > steps",
        BORDERS,
    ),
    Mutation(
        "the penalty may be of every response",
        "config/rules/rewards.py",
        "buffer >= longest",
        "buffer > longest",
        BORDERS,
    ),
    Mutation(
        "a part of n may have the number n",
        "config/generate.py",
        "if part < parts else None",
        "if part <= parts else None",
        BORDERS,
    ),
    Mutation(
        "each iteration of a loop draws the same answers",
        "config/loop_stages.py",
        "seed=run.rollout.seed + iteration",
        "seed=run.rollout.seed",
        STAGES,
    ),
    Mutation(
        "a loop evaluates with the temperature of its training",
        "config/loop_stages.py",
        "n_samples_per_prompt=1, temperature=0.0)",
        "n_samples_per_prompt=1)",
        STAGES,
    ),
    Mutation(
        "a loop evaluates on as many rows as it trains on",
        "config/loop_stages.py",
        "max_samples=held_out.max_samples",
        "max_samples=run.data.max_samples",
        STAGES,
    ),
    Mutation(
        "a loop evaluates behind the rows that training skips",
        "config/loop_stages.py",
        "skip_samples=0,",
        "",
        STAGES,
    ),
    Mutation(
        "explain counts one epoch of optimiser steps",
        "config/plan.py",
        "-(-samples // run.train.batch_size) * run.train.max_epochs",
        "-(-samples // run.train.batch_size)",
        EXPLAIN,
    ),
    Mutation(
        "an experiment wins over a preset of the command line",
        "composition/presets.py",
        "if group in chosen and group not in BEFORE_EXPERIMENT]",
        "if group in BEFORE_EXPERIMENT]",
        GROUPS,
    ),
    Mutation(
        "a file of flags wins over a preset of the command line",
        "composition/config_file.py",
        ".union(*presets_keys(line))",
        "",
        GROUPS,
    ),
]
