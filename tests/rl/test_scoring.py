"""Rewards reach the samples that they are of, whatever fails beside them."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from scored_ledgers import score_ledgers

from given import prompt
from rlhf_suite.config.declarations.agent import AgentConfig
from rlhf_suite.config.declarations.data import DataConfig
from rlhf_suite.config.declarations.logger import LoggerConfig
from rlhf_suite.config.declarations.reward import NamedSourceConfig, RewardConfig
from rlhf_suite.data.trajectory import Trajectory
from rlhf_suite.errors import RunError
from rlhf_suite.models.load import load_tokenizer
from rlhf_suite.rewards.sources import Rewards
from rlhf_suite.rl.scoring import FAILURES, Scorer
from rlhf_suite.run_folders.run_folder import RunFolder
from rlhf_suite.tracking.journal import Journal

# The reward of a response is its digits as a number, its score a tenth of that; an x has none.
REWARD = """
def reward_func(queries, prompts, labels):
    answers = [query[len(prompt):] for query, prompt in zip(queries, prompts)]
    rewards = [None if "x" in answer else float(answer.strip("<|im_end|>")) for answer in answers]
    scores = [None if reward is None else reward / 10 for reward in rewards]
    logs = {"label": [float(label) for label in labels]}
    return {"rewards": rewards, "scores": scores, "extra_logs": logs}
"""
PROMPTS = [prompt(number, [], f"prompt {number}", f"source {number}", label=str(number)) for number in range(4)]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("builtin:tiny", DataConfig.of("ppo"))


@pytest.fixture(scope="module")
def rewards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reward")
    (folder / "digits.py").write_text(REWARD)
    config = RewardConfig.of("generate", remote_url=str(folder / "digits.py"))
    with closing(Rewards(config, folder / "log")) as sources:
        yield sources


@pytest.fixture
def score(tokenizer, rewards, tmp_path):
    """Score answers to prompts 3, 1 and 2, two to each."""

    def scored(*answers: str, **config):
        journal = Journal(LoggerConfig(progress=False), RunFolder(tmp_path), "ppo")
        scorer = Scorer(RewardConfig.of("generate", **config), tokenizer, rewards, journal)
        return score_ledgers(scorer, [sample(tokenizer, i, text) for i, text in enumerate(answers)])

    return scored


def sample(tokenizer, number: int, answer: str) -> Trajectory:
    group = number // 2
    place = (3, 1, 2)[group]
    one = Trajectory.start(PROMPTS[place], group, number % 2, tokenizer(PROMPTS[place].text)["input_ids"])
    ids = np.array(tokenizer(f"{answer}<|im_end|>")["input_ids"])
    one.append_model(ids, np.zeros(len(ids), np.float32), 0)
    return one


@pytest.mark.notices(
    "labels are those of the prompts at the start of the data",
    "rl/scoring.py",
    "prompts, queries = [t.prompt.plain or t.prompt for t",
    "prompts, queries = [trajectories[0].prompt for t",
)
@pytest.mark.notices(
    "evaluations are of rewards, not of scores",
    "rl/scoring.py",
    "np.array([s.score for s in chosen]",
    "np.array([s.reward for s in chosen]",
)
def test_every_sample_has_its_own_reward_score_label_and_text(score):
    samples, metrics = score("1", "2", "3", "4", "5", "6")
    assert samples.rewards.tolist() == [1, 2, 3, 4, 5, 6]
    assert samples.scores.tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    assert samples.responses == ["1", "2", "3", "4", "5", "6"]
    assert samples.labels == ["3", "3", "1", "1", "2", "2"]
    assert samples.datasources == [f"source {n}" for n in (3, 3, 1, 1, 2, 2)]
    assert [extra["label"] for extra in samples.extra] == [3, 3, 1, 1, 2, 2]
    assert metrics["rollout/dropped_groups"] == metrics["reward/errors"] == 0


def test_rewards_read_turns_of_the_model_and_never_what_a_tool_printed(tokenizer, tmp_path):
    """The tool prints the right answer, over and over."""
    journal = Journal(LoggerConfig(progress=False), RunFolder(tmp_path), "ppo")
    one = sample(tokenizer, 0, "first")
    one.append_environment(tokenizer("3 3 3 3 3 3 ")["input_ids"])
    ids = np.array(tokenizer("4<|im_end|>")["input_ids"])
    one.append_model(ids, np.zeros(len(ids), np.float32), 0)
    rules = {name: NamedSourceConfig(rule=name) for name in ("exact_match", "math", "repetition")}
    config = RewardConfig.of("generate", sources=rules)
    with closing(Rewards(config, tmp_path / "log")) as rewards:
        scorer = Scorer(config, tokenizer, rewards, journal)
        scored, _ = score_ledgers(scorer, [one, sample(tokenizer, 1, "3")])
    assert scored.extra[0] == {
        "exact_match/mean": 0,
        "math/mean": 0,
        "math/timed_out": 0,
        "math/unreadable": 0,
        "repetition/mean": 0,
    }
    assert scored.extra[1] == {
        "exact_match/mean": 1,
        "math/mean": 1,
        "math/timed_out": 0,
        "math/unreadable": 0,
        "repetition/mean": 0,
    }
    scorer = Scorer(config, tokenizer, None, journal)
    (seen,) = scorer.samples([one])
    assert (seen.response, seen.label) == ("4", "3") and "3 3 3" in seen.query
    assert scorer.turns([one]) == ["first", "4"]
    assert scorer.turns([sample(tokenizer, 0, "3"), replace(sample(tokenizer, 0, "5"), fork=1)]) == ["3", "5"]


@pytest.mark.notices(
    "the rewards of reward sources stand in for those of the environment",
    "rl/scoring.py",
    "replace(outcome, reward=given.reward + outcome.reward)",
    "replace(outcome, reward=outcome.reward)",
)
@pytest.mark.parametrize(("adds", "wanted"), [(False, [7.5, 2, 0.5, 4]), (True, [8.5, 2, 3.5, 4])])
def test_rewards_of_environments_stand_alone_or_have_those_of_the_sources_added(
    tokenizer, tmp_path, rewards, adds, wanted
):
    journal = Journal(LoggerConfig(progress=False), RunFolder(tmp_path), "ppo")
    scorer = Scorer(RewardConfig.of("generate"), tokenizer, rewards, journal, AgentConfig(add_reward=adds))
    samples = [sample(tokenizer, number, str(number + 1)) for number in range(4)]
    samples[0].reward, samples[0].score = 7.0, 1.0
    samples[0].reward_turn(0.5)
    samples[2].reward, samples[2].score = 0.5, 0.25
    scored, _ = score_ledgers(scorer, samples)
    assert scored.rewards.tolist() == wanted
    assert scored.scores.tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4] if adds else [1, 0.2, 0.25, 0.4])
    assert scorer.has_told == (not adds), "that the sources do not score all"


def failed(tokenizer, number: int) -> Trajectory:
    """A sample whose environment failed after a turn that had a reward."""
    one = replace(sample(tokenizer, number, "7"), failure="broken")
    one.reward_turn(0.5)
    return one


@pytest.mark.notices(
    "a failed environment is said to be the reward's fault",
    "rl/scoring.py",
    '"agent.on_error" if any(failed) else "reward.on_error"',
    '"reward.on_error"',
)
def test_a_failed_episode_may_drop_its_group_get_0_or_end_the_run(tokenizer, rewards, tmp_path):
    journal = Journal(LoggerConfig(progress=False), RunFolder(tmp_path), "ppo")

    def score(of_agent: str | None, samples, **config):
        agent = AgentConfig(on_error=of_agent)
        return score_ledgers(Scorer(RewardConfig.of("generate", **config), tokenizer, rewards, journal, agent), samples)

    def samples():
        return [sample(tokenizer, 0, "1"), failed(tokenizer, 1), *(sample(tokenizer, i, "4") for i in (2, 3))]

    zeros, metrics = score("zero", samples())
    assert zeros.rewards.tolist() == [1, 0, 4, 4] and zeros.scores.tolist() == pytest.approx([0.1, 0, 0.4, 0.4])
    assert not any(t.turn_rewards.any() for t in zeros.trajectories)
    assert metrics["reward/errors"] == 1 and metrics["rollout/dropped_groups"] == 0
    dropped, metrics = score("drop", samples())
    assert dropped.rewards.tolist() == [4, 4] and metrics["rollout/dropped_groups"] == 1
    with pytest.raises(RunError, match=r"1 of 4 samples .*broken.*agent\.on_error=drop"):
        score("stop", samples(), on_error="drop")
    with pytest.raises(RunError, match=r"1 of 4 .*repair the agent, or drop such groups with agent\.on_error=drop"):
        score(None, samples())
    with pytest.raises(RunError, match=r"1 of 2 .*reward\.max_error_rate=0\.25"):
        score("zero", samples()[:2], max_error_rate=0.25)
    broken = [sample(tokenizer, 0, "x"), failed(tokenizer, 1)]
    with pytest.raises(RunError, match=r"1 of 2 .*reward\.on_error=drop"):
        score("zero", broken)
    with pytest.raises(RunError, match=r"1 of 1 .*repair the reward, or drop such groups with reward\.on_error=drop"):
        score(None, broken[:1])


def test_failures_of_the_parts_of_a_step_are_counted_together(tokenizer, rewards, tmp_path):
    journal = Journal(LoggerConfig(progress=False), RunFolder(tmp_path), "ppo")
    scorer = Scorer(RewardConfig.of("generate", on_error="drop", max_error_rate=0.5), tokenizer, rewards, journal)
    groups = [[sample(tokenizer, i, text) for i, text in enumerate("12x456") if i // 2 == group] for group in range(3)]
    parts = [scorer.score(groups[2:]), scorer.score([groups[1], groups[0]])]
    errors = [part.counts["reward/errors"] for part in parts]
    assert errors == [0, 1] and [part.counts["rollout/dropped_groups"] for part in parts] == [0, 1]
    found = [group for part in parts for group in part.groups.values()]
    assert [(group.number, group.episodes, group.failures) for group in found] == [(2, 2, 0), (1, 2, 1), (0, 2, 0)]
    assert [group.samples is None for group in found] == [False, True, False]
    scorer.check(found)
    with pytest.raises(RunError, match=r"none of 2 samples .* no group is left"):
        scorer.check(found[1:2])
    with pytest.raises(RunError, match=r"1 of 1 samples have no reward.*max_error_rate=0\.5"):
        scorer.check_error_rate(sum(errors), 1)
    with pytest.raises(RunError, match=r"none of 2 samples .* no group is left"):
        scorer.check_error_rate(0, 2, has_rewards=False)


@pytest.mark.notices(
    "a failed sample is dropped without its group",
    "rl/scoring.py",
    "kept = [i for i, t in enumerate(trajectories) if t.group not in failed]",
    "kept = [i for i, outcome in enumerate(outcomes) if isinstance(outcome, Scored)]",
)
@pytest.mark.notices(
    "rewards move up where a group was dropped",
    "rl/scoring.py",
    "[outcome for i in kept if isinstance(outcome := outcomes[i], Scored)]",
    "[outcome for outcome in outcomes if isinstance(outcome, Scored)][: len(kept)]",
)
def test_a_failed_sample_takes_its_group_along_and_the_others_keep_their_rewards(score, tmp_path):
    samples, metrics = score("1", "2", "3", "x", "5", "6", on_error="drop")
    assert samples.rewards.tolist() == [1, 2, 5, 6]
    assert samples.responses == ["1", "2", "5", "6"]
    assert [t.group for t in samples.trajectories] == [0, 0, 2, 2]
    assert (metrics["rollout/dropped_groups"], metrics["reward/errors"]) == (1, 1)
    (failure,) = [json.loads(line) for line in (tmp_path / "logs" / FAILURES).read_text().splitlines()]
    assert (failure["response"], failure["label"]) == ("x", "1")


@pytest.mark.notices(
    "as many failures as are allowed end the run",
    "rl/scoring.py",
    "failures > self.config.max_error_rate",
    "failures >= self.config.max_error_rate",
)
def test_a_run_goes_on_with_as_many_failures_as_it_may_have_and_ends_with_more(score):
    limit = {"on_error": "drop", "max_error_rate": 0.5}
    samples, _ = score("1", "2", "x", "x", "x", "6", **limit)
    assert samples.rewards.tolist() == [1, 2]
    with pytest.raises(RunError, match=r"4 of 6 samples have no reward.*reward\.max_error_rate=0\.5"):
        score("1", "2", "x", "x", "x", "x", **limit)
    with pytest.raises(RunError, match=r"none of 6 .*the newest is error: .*no group is left. Repair the reward"):
        score("x", "x", "x", "x", "x", "x", on_error="drop", max_error_rate=1.0)


def test_a_failure_ends_the_run_unless_it_is_told_otherwise(score):
    with pytest.raises(RunError, match=r"1 of 6 samples have no reward.*reward\.on_error=drop"):
        score("1", "2", "3", "x", "5", "6")
