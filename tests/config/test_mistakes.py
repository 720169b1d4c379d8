"""Mistakes on the command line: each is found, names its flag, and says what to write."""

from __future__ import annotations

import pytest
from command_lines import CHAT, FOUR_BITS, PPO, SERVE, SFT, sources
from mistakes_between_flags import BETWEEN_FLAGS
from mistakes_of_tasks import OF_TASKS
from mistakes_of_words import OF_WORDS
from more_mistakes_between_flags import MORE_BETWEEN_FLAGS
from remedies import advised, applied

from rlhf_suite.composition.presets import group_names

MISTAKES = [*OF_WORDS, *BETWEEN_FLAGS, *MORE_BETWEEN_FLAGS, *OF_TASKS]

# The flags whose remedy leads to a second mistake, which only the user can correct: two tokens are needed, or a
# correction for rollouts by older weights, or what the flag in the remedy needs itself.
SECOND_MISTAKE = (
    *("algo.reward_tokens", "train.async_queue_size", "train.partial_rollout_enable", "algo.advantage"),
    *("algo.dynamic_filtering_min_std", "algo.advantage.pass_k", "reward.process.aggregate", "actor.muon.lr"),
)


each_mistake = pytest.mark.parametrize(
    ("line", "key", "words"), MISTAKES, ids=[f"{i}-{row[1]}" for i, row in enumerate(MISTAKES)]
)


@pytest.mark.notices(
    "a bound that is excluded is allowed",
    "config/check/formatting.py",
    "value > bound",
    "value >= bound",
    cases="algo.beta",
)
@pytest.mark.notices(
    "the name least like a misspelt one is offered",
    "config/check/formatting.py",
    "key=lambda pair: -pair[0])",
    "key=lambda pair: pair[0])",
)
@pytest.mark.notices(
    "the next multiple is the one before",
    "config/check/formatting.py",
    "-(-number // factor) * factor",
    "number // factor * factor",
    cases="batch_size",
)
@pytest.mark.notices(
    "the CPU is taken to compile graphs",
    "config/declarations/conditions.py",
    'is_one_of("launch.device", "auto", "cuda", remedy="")',
    'is_one_of("launch.device", "auto", "cpu", remedy="")',
    cases="deepcompile",
)
@pytest.mark.notices(
    "problems that are reported twice stay twice",
    "config/check/problems.py",
    "return list(dict.fromkeys(problems))",
    "return list(problems)",
)
@each_mistake
def test_a_mistake_is_one_problem(checked, line, key, words):
    (problem,) = checked(line).problems
    assert problem.key == key
    assert words in f"{problem.what} {problem.fix}"


@pytest.mark.stack
@each_mistake
def test_the_remedy_of_a_mistake_is_accepted_and_removes_it(checked, line, key, words):
    """What a concrete remedy says to write."""
    (problem,) = checked(line).problems
    word = advised(problem.fix)
    after = checked(applied(line, problem, word)).problems if word else []
    assert problem not in after, word
    if word and key not in (*SECOND_MISTAKE, *group_names()):
        assert word.partition("=")[0] not in {each.key for each in after}, (word, after)


def test_a_package_that_is_not_there_is_named(checked, monkeypatch):
    monkeypatch.setattr("rlhf_suite.config.check.lacking.find_spec", lambda _: None)
    for line, key, extra in (
        (SFT + FOUR_BITS + "ds.lora.rank=8", "ds.load_in_4bit", "qlora"),
        (CHAT + FOUR_BITS, "ds.load_in_4bit", "qlora"),
        (SERVE + FOUR_BITS, "ds.load_in_4bit", "qlora"),
        (SFT + "ds.use_liger_kernel=true", "ds.use_liger_kernel", "gpu"),
    ):
        (problem,) = checked(line).problems
        assert problem.key == key and f"pip install 'rlhf-suite[{extra}]'" in problem.fix


def test_a_missing_package_of_a_source_and_of_its_rule_is_named_with_its_flag(checked, monkeypatch):
    monkeypatch.setattr("rlhf_suite.config.check.lacking.find_spec", lambda _: None)
    for line, key in (
        (SFT + "data.dataset=reasoning_gym:chain_sum", "data.dataset"),
        (PPO + "data.prompt_dataset=reasoning_gym:chain_sum", "data.prompt_dataset"),
        (PPO + "reward.rule=reasoning_gym", "reward.rule"),
        (sources("{sums: {rule: reasoning_gym}}"), "reward.sources.sums.rule"),
    ):
        (problem,) = checked(line).problems
        assert problem.key == key and "pip install 'rlhf-suite[gym]'" in problem.fix


def test_all_mistakes_are_told_at_once(checked):
    line = PPO + "algo.advantage.lambda=1 actor.num_nodes=x algo.kl.estimator=k9 rollout.top_p=0.9 pretrain=y +a.b=1"
    found = {each.key for each in checked(line).problems}
    assert found == {
        "algo.advantage.lambda",
        "actor.num_nodes",
        "algo.kl.estimator",
        "rollout.top_p",
        "pretrain",
        "a.b",
    }


def test_a_misspelt_flag_is_not_told_again_as_missing(checked):
    problems = checked("task=sft actor.model_name_or_pth=builtin:tiny data.datasett=builtin:reverse").problems
    assert [each.key for each in problems] == ["actor.model_name_or_pth", "data.datasett"]


def test_a_key_is_never_shown(checked):
    for word in (
        "logger.wandb.key=s3cret",
        "use_wandb=s3cret",
        "logger.wandb.key=s3=cret",
        "--logger.wandb.key s3cret",
    ):
        assert "s3" not in "".join(map(str, checked(f"task=sft {word}").problems)), word
