"""Runs that several modules look at, made once: a warm-started model, and a whole run each with and without critic."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import jobs
import pytest
import torch
from transformers import AutoConfig, AutoTokenizer, Qwen3ForSequenceClassification

from rlhf_suite.launch.processes import exclusive_lock
from rlhf_suite.models.builtin import create_tiny
from rlhf_suite.models.reward_model import reward_stats

# `reinforce_baseline`: reference and policy; 2 epochs of 2 optimiser steps each, with a learning rate that moves.
BASELINE = [
    *jobs.SMALL,
    "algo.advantage.estimator=reinforce_baseline",
    "train.max_epochs=2",
    "train.max_steps=3",
    "actor.lr_scheduler=cosine_with_min_lr",
    "actor.lr_warmup_ratio=0.25",
    "eval.steps=3",
]


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the runs of this session are; all processes of pytest-xdist share it."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "runs"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session", autouse=True)
def own_cache(runs: Path) -> Iterator[None]:
    """A cache that is not the user's. All processes of pytest-xdist share it: vLLM inspects each class of model in a
    process of its own, which takes as long as the start of an engine, and keeps the result there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(runs / "cache"))
        yield


def made_once(folder: Path, make: Callable[[], object]) -> Path:
    """Make a run that several files look at, unless another process of this session has made it."""
    done = folder.with_name(f"{folder.name}.done")
    with exclusive_lock(folder.with_name(f"{folder.name}.lock"), 2 * jobs.DEADLINE_S):
        if not done.exists():
            make()
            done.touch()
    return folder


@pytest.fixture(scope="session")
def warm(runs: Path) -> Path:
    """A tiny model that reverses strings right at times, made by the suite's own SFT."""
    folder = runs / "warm"
    words = ["task=sft", "demo=warm_start", f"ckpt.output_dir={folder}"]
    return made_once(folder, lambda: jobs.run(runs / "warm_start", words))


@pytest.fixture(scope="session")
def baseline_words(warm: Path) -> list[str]:
    return [*BASELINE, f"actor.model_name_or_path={warm}"]


@pytest.fixture(scope="session")
def actor_critic_words(warm: Path) -> list[str]:
    return [*jobs.ACTOR_CRITIC, f"actor.model_name_or_path={warm}"]


@pytest.fixture(scope="session")
def baseline(runs: Path, baseline_words: list[str]) -> Path:
    """A whole run without a critic."""
    return made_once(runs / "baseline", lambda: jobs.run(runs / "baseline", baseline_words, recorded=True))


@pytest.fixture(scope="session")
def actor_critic(runs: Path, actor_critic_words: list[str]) -> Path:
    """A whole run with a critic, never interrupted."""
    return made_once(runs / "actor_critic", lambda: jobs.run(runs / "actor_critic", actor_critic_words, recorded=True))


@pytest.fixture(scope="session")
def random_words(runs: Path) -> list[str]:
    """The words of an asynchronous run of a model with random weights."""
    start = made_once(runs / "random", lambda: create_tiny(runs / "random", seed=0))
    return [*jobs.ASYNC, f"actor.model_name_or_path={start}"]


@pytest.fixture(scope="session")
def asynchronous_ahead(runs: Path, random_words: list[str]) -> Path:
    """A whole run whose rollouts are made ahead of their steps."""
    return made_once(runs / "ahead", lambda: jobs.run(runs / "ahead", random_words))


@pytest.fixture(scope="session")
def asynchronous_stream(runs: Path, random_words: list[str]) -> Path:
    """A whole run whose rollouts are a stream of groups."""
    return made_once(runs / "stream", lambda: jobs.run(runs / "stream", [*random_words, *jobs.STREAM]))


@pytest.fixture(scope="session")
def reward_model(runs: Path, warm: Path) -> Path:
    """A reward model with random weights that shares the policy's tokenizer; its config has the two constants."""
    folder = runs / "reward_model"
    return made_once(folder, lambda: create_reward_model(folder, warm, seed=1))


@pytest.fixture(scope="session")
def other_reward_model(runs: Path, warm: Path) -> Path:
    """Another one, which scores otherwise."""
    folder = runs / "other_reward_model"
    return made_once(folder, lambda: create_reward_model(folder, warm, seed=2))


def create_reward_model(folder: Path, policy: Path, seed: int) -> None:
    """Write a reward model with random weights and with constants in its config."""
    config = AutoConfig.from_pretrained(policy, num_labels=1)
    config.reward_mean, config.reward_std = jobs.REWARD_MEAN, jobs.REWARD_STD
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForSequenceClassification(config)
        torch.nn.init.normal_(model.score.weight, std=0.3)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(policy).save_pretrained(folder)
    assert reward_stats(AutoConfig.from_pretrained(folder)) == (jobs.REWARD_MEAN, jobs.REWARD_STD)


@pytest.fixture(scope="session")
def judge(runs: Path) -> Path:
    """A process reward model."""
    words = ["task=prm", "train.max_steps=40", "eval.max_samples=8"]
    return made_once(runs / "judge", lambda: jobs.run(runs / "judge", words)) / "model"
