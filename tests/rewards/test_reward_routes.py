"""Several sources of reward: who scores which row, how they add up, what is told of each."""

from __future__ import annotations

import textwrap
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from reward_server import RewardServer
from rlhf_suite.config.declarations.reward import HttpConfig, NamedSourceConfig, RewardConfig
from rlhf_suite.errors import UserError
from rlhf_suite.rewards.base import RewardFailure, Sample, Scored
from rlhf_suite.rewards.sources import Rewards, check_labels, check_routes

pytestmark = pytest.mark.stack
MATH = ("math/unreadable", "math/timed_out", "math/mean")


def row(label: str, response: str, datasource: str = "default") -> Sample:
    return Sample(query="q" + response, prompt="q", response=response, label=label, datasource=datasource)


@pytest.fixture
def rewards(tmp_path):
    """A maker of open sources from their configuration; they are closed in the end."""
    made = []

    def make(*only: RewardConfig, **sources: NamedSourceConfig) -> Rewards:
        config = only[0] if only else RewardConfig.of("generate", sources=sources, http=HttpConfig(num_retries=0))
        made.append(Rewards(config, tmp_path / "reward.log"))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def length_file(tmp_path):
    path = tmp_path / "length.py"
    code = """
    def reward_func(queries, prompts, labels):
        lengths = [len(query) - 1 for query in queries]
        if 13 in lengths:
            raise ValueError("unlucky")
        return {"rewards": [-n for n in lengths], "scores": [n / 10 for n in lengths], "extra_logs": {"n": lengths}}
    """
    path.write_text(textwrap.dedent(code))
    return str(path)


def test_one_source_is_as_it_was(rewards, length_file):
    one = rewards(RewardConfig.of("generate", remote_url=length_file))
    assert one.score([row("", "abc", "any")]) == ([Scored(-3, 0.3, {"n": 3})], {})


@pytest.mark.notices(
    "the weights of several sources are ignored",
    "rewards/sources.py",
    "(weight * outcome.reward, ",
    "(outcome.reward, ",
)
@pytest.mark.notices(
    "scores of several sources are added up, not averaged",
    "rewards/sources.py",
    "score / weights, extra, retries, steps)",
    "score, extra, retries, steps)",
)
def test_weights_add_rewards_up_and_scores_become_a_weighted_mean(rewards, length_file):
    both = rewards(
        right=NamedSourceConfig(rule="exact_match", weight=2.0),
        length=NamedSourceConfig(remote_url=length_file, weight=0.5),
    )
    outcomes, metrics = both.score([row("abcd", "abcd"), row("abcd", "ab")])
    assert outcomes == [
        Scored(2 * 1 - 0.5 * 4, (2 * 1 + 0.5 * 0.4) / 2.5, {"right/mean": 1, "length/n": 4, "length/mean": -4}),
        Scored(2 * 0 - 0.5 * 2, (2 * 0 + 0.5 * 0.2) / 2.5, {"right/mean": 0, "length/n": 2, "length/mean": -2}),
    ]
    assert metrics["reward/right/rows"] == 2 and metrics["reward/length/errors"] == 0
    assert metrics["reward/right/seconds"] > 0


@pytest.fixture
def parts_file(tmp_path):
    path = tmp_path / "parts.py"
    path.write_text(
        "def reward_func(queries, prompts, labels):\n    return [{'a': len(q), 'b': -1} for q in queries]\n"
    )
    return str(path)


def test_of_sources_that_share_a_name_the_best_counts(rewards, length_file):
    """As max(rule, judge) with a penalty beside it."""
    three = rewards(
        rule=NamedSourceConfig(rule="exact_match", weight=4.0, best_of="answer"),
        judge=NamedSourceConfig(rule="length", weight=2.0, best_of="answer"),
        penalty=NamedSourceConfig(remote_url=length_file, weight=0.5),
    )
    outcomes, _ = three.score([row("ab", "ab"), row("ab", "abcd")])
    assert outcomes[0] == Scored(
        4 * 1 + 0.5 * -2,
        (4 * 1 + 0.5 * 0.2) / 4.5,
        {"rule/mean": 1, "judge/mean": 1, "penalty/n": 2, "penalty/mean": -2},
    )
    assert (outcomes[1].reward, outcomes[1].score) == (2 * 1 + 0.5 * -4, (2 * 1 + 0.5 * 0.4) / 2.5)


def test_a_source_of_weight_0_is_never_the_best(rewards, parts_file):
    two = rewards(
        measured=NamedSourceConfig(rule="exact_match", weight=0.0, best_of="answer"),
        trained=NamedSourceConfig(rule="answer_tags", best_of="answer"),
    )
    assert two.score([row("ab", "ab")])[0][0].reward == -3


def test_one_source_or_one_of_its_named_numbers_may_be_what_is_trained_on(rewards, parts_file):
    def score(**config) -> Scored:
        sources = {
            "right": NamedSourceConfig(rule="exact_match", weight=2.0, datasets=config.pop("datasets", None)),
            "parts": NamedSourceConfig(remote_url=parts_file, weight=0.5),
        }
        (outcome,) = rewards(RewardConfig.of("generate", sources=sources, **config)).score([row("ab", "ab")])[0]
        return outcome

    logged = {"right/mean": 1, "parts/a": 3, "parts/b": -1, "parts/mean": 2}
    assert score() == Scored(2 + 0.5 * 2, (2 * 1 + 0.5 * 2) / 2.5, logged)
    assert score(combine="max").reward == 2 + 0.5 * 3
    assert score(reward_key="right").reward == 1
    assert score(reward_key="parts").reward == 2
    assert score(reward_key="parts/b").reward == -1 and score(reward_key="parts/b").extra["parts/a"] == 3
    assert "reward.reward_key=c" in score(reward_key="parts/c").reason
    assert "right of reward.reward_key" in score(reward_key="right", datasets=["other"]).reason


def test_a_source_of_weight_0_is_measured_but_changes_nothing(rewards, length_file):
    both = rewards(
        right=NamedSourceConfig(rule="exact_match"), length=NamedSourceConfig(remote_url=length_file, weight=0.0)
    )
    outcomes, _ = both.score([row("ab", "ab")])
    assert outcomes == [Scored(1, 1, {"right/mean": 1, "length/n": 2, "length/mean": -2})]


@pytest.mark.notices(
    "rows go to the sources of the other data sources",
    "rewards/sources.py",
    "datasource in self.config.datasets",
    "datasource not in self.config.datasets",
)
@pytest.mark.notices(
    "what a source says of its rows goes to the first rows",
    "rewards/sources.py",
    "dict(zip(chosen, results, strict=True))",
    "dict(enumerate(results))",
)
def test_rows_go_to_the_sources_of_their_datasource(rewards):
    seen = []

    def answer(body):
        seen.extend(body["labels"])
        return 200, {"rewards": [7.0] * len(body["labels"])}

    server = RewardServer(answer)
    both = rewards(
        math=NamedSourceConfig(rule="math", datasets=["gsm8k"]),
        judge=NamedSourceConfig(remote_url=server.url, datasets=["chat", "poems"]),
    )
    rows = [row("1/2", "0.5", "gsm8k"), row("a", "x", "chat"), row("2", "3", "gsm8k"), row("b", "y", "poems")]
    outcomes, metrics = both.score(rows)
    server.close()
    assert [(outcome.reward, *outcome.extra) for outcome in outcomes] == [
            (1, *MATH), (7, "judge/mean"), (0, *MATH), (7, "judge/mean"),
    ]  # fmt: skip
    assert seen == ["a", "b"]
    assert metrics["reward/math/rows"] == metrics["reward/judge/rows"] == 2
    outcomes, metrics = both.score(rows[:1])
    assert outcomes[0].reward == 1 and "reward/judge/rows" not in metrics


def test_a_row_fails_with_the_name_of_the_source_that_failed_for_it(rewards, length_file):
    both = rewards(right=NamedSourceConfig(rule="exact_match"), length=NamedSourceConfig(remote_url=length_file))
    outcomes, metrics = both.score([row("a", "a"), row("a", "a" * 13)])
    assert outcomes[0] == Scored(0, 0.55, {"right/mean": 1, "length/n": 1, "length/mean": -1})
    assert isinstance(outcomes[1], RewardFailure)
    assert outcomes[1].reason == "source length: length.py:5: ValueError: unlucky"
    assert metrics["reward/length/errors"] == 1 and metrics["reward/right/errors"] == 0


class Numbers:
    """In place of a reward model: the score of a sample is the sum of its tokens, and each token is a step."""

    closed = False

    def score(self, samples):
        return [Scored(float(sum(s.ids)), 0.5, steps=[float(each) for each in s.ids]) for s in samples]

    def close(self):
        self.closed = True


@pytest.mark.notices(
    "the steps of a solution are lost where sources are added up",
    "rewards/sources.py",
    "steps += outcome.steps",
    "steps += []",
)
def test_a_model_beside_the_policy_is_a_source_like_any_other(tmp_path):
    """It gets the samples that are its own, with their tokens; its score goes back to their places."""
    sources = {
        "right": NamedSourceConfig(rule="exact_match", datasets=["a"]),
        "model": NamedSourceConfig(model_name_or_path="some/model", datasets=["b"], weight=2.0),
    }
    model = Numbers()
    mixed = Rewards(
        RewardConfig.of("generate", sources=sources), tmp_path / "reward.log", {"reward.sources.model": model}
    )
    samples = [replace(row("x", "x", source), ids=ids) for source, ids in (("b", [1, 2]), ("a", []), ("b", [4]))]
    outcomes, _ = mixed.score(samples)
    mixed.close()
    assert [outcome.reward for outcome in outcomes] == [6, 1, 8]
    assert [outcome.score for outcome in outcomes] == [0.5, 1, 0.5]
    assert [outcome.steps for outcome in outcomes] == [[1, 2], [], [4]]
    assert model.closed


def test_each_of_several_models_scores_by_its_own_name_and_weight(tmp_path):
    sources = {
        "tokens": NamedSourceConfig(model_name_or_path="some/model"),
        "length": NamedSourceConfig(model_name_or_path="other/model", weight=10.0),
    }

    class Length(Numbers):
        def score(self, samples):
            return [Scored(float(len(s.ids)), 1.0) for s in samples]

    models = {"reward.sources.length": Length(), "reward.sources.tokens": Numbers()}
    both = Rewards(RewardConfig.of("generate", sources=sources), tmp_path / "reward.log", models)
    (outcome,), metrics = both.score([replace(row("x", "x"), ids=[4, 2])])
    both.close()
    assert outcome.reward == 6 + 10 * 2 and outcome.score == pytest.approx((0.5 + 10 * 1) / 11)
    assert (outcome.extra["tokens/mean"], outcome.extra["length/mean"]) == (6, 2)
    assert metrics["reward/tokens/rows"] == metrics["reward/length/rows"] == 1
    assert all(model.closed for model in models.values())


@pytest.mark.notices(
    "a source of weight 0 is one that trains",
    "rewards/sources.py",
    "if source.weight > 0 and",
    "if source.weight >= 0 and",
)
def test_a_row_that_nobody_scores_is_refused_before_training():
    config = RewardConfig.of(
        "generate",
        sources={
            "a": NamedSourceConfig(rule="math", datasets=["gsm8k"]),
            "b": NamedSourceConfig(rule="math", datasets=["chat"], weight=0.0),
        },
    )
    check_routes(config, [("x.jsonl:1", "gsm8k")])
    for datasource in ("chat", "other"):
        with pytest.raises(UserError, match=rf"x.jsonl:2: no source .* datasource '{datasource}'.*gsm8k"):
            check_routes(config, [("x.jsonl:1", "gsm8k"), ("x.jsonl:2", datasource)])
    check_routes(RewardConfig.of("generate", rule="math"), [("x.jsonl:1", "anything")])


TESTED = '{"asserts": ["assert add(1, 2) == 3"]}'
LENT = '{"asserts": ["assert is_close(add(1, 2), 3)"]}'


@pytest.mark.notices(
    "labels that cannot judge a program are found when it is scored",
    "rewards/sources.py",
    'if bad and (config.on_error == "stop" or len(bad) > config.max_error_rate * judged):',
    "if False:",
)
def test_labels_that_cannot_judge_a_program_are_refused_before_anything_starts():
    config = RewardConfig.of("generate", rule="code")
    check_labels(config, [("x.jsonl:1", "default", TESTED)])
    said = r"^x.jsonl:2: reward.rule=code: .* they use is_close, which they do not define: .*\(1 of the first 2 labels"
    with pytest.raises(UserError, match=said):
        check_labels(config, [("x.jsonl:1", "default", TESTED), ("x.jsonl:2", "default", LENT)])
    with pytest.raises(UserError, match=r"^x.jsonl:1: reward.rule=code: the label holds no tests"):
        check_labels(config, [("x.jsonl:1", "default", "42")])
    check_labels(RewardConfig.of("generate", rule="exact_match"), [("x.jsonl:1", "default", LENT)])


@pytest.mark.notices(
    "one bad label ends a run that drops what has no score",
    "rewards/sources.py",
    'if bad and (config.on_error == "stop" or len(bad) > config.max_error_rate * judged):',
    "if bad:",
)
def test_only_labels_that_the_rule_code_reads_are_looked_at_and_only_as_many_as_may_be_bad():
    code = NamedSourceConfig(rule="code", datasets=["programs"])
    config = RewardConfig.of("generate", sources={"a": NamedSourceConfig(rule="exact_match"), "b": code})
    check_labels(config, [("x.jsonl:1", "words", LENT), ("x.jsonl:2", "programs", TESTED)])
    with pytest.raises(UserError, match=r"^x.jsonl:3: reward.sources.b.rule=code: "):
        check_labels(config, [("x.jsonl:3", "programs", LENT)])
    config.on_error, config.max_error_rate = "drop", 0.5
    rows = [("x.jsonl:1", "programs", TESTED), ("x.jsonl:2", "programs", LENT)]
    check_labels(config, rows)
    with pytest.raises(UserError, match="2 of the first 3 labels"):
        check_labels(config, [*rows, ("x.jsonl:3", "programs", LENT)])


def test_sources_that_are_open_are_closed_when_the_next_cannot_be_used(tmp_path):
    """No process is left behind."""
    with pytest.raises(UserError, match="no such file"):
        Rewards(
            RewardConfig.of(
                "generate",
                sources={"a": NamedSourceConfig(rule="exact_match"), "b": NamedSourceConfig(remote_url="/none.py")},
            ),
            tmp_path / "reward.log",
        )


def test_calls_of_two_threads_get_the_outcomes_of_their_own_rows(rewards):
    """An evaluation is scored while rollouts are made ahead of training."""
    one = rewards(RewardConfig.of("generate", rule="exact_match"))
    rows = [[row("a", response) for _ in range(300)] for response in ("a", "b")]
    with ThreadPoolExecutor(2) as pool:
        right, wrong = pool.map(lambda part: one.score(part)[0], rows)
    assert {outcome.score for outcome in right} == {1.0} and {outcome.score for outcome in wrong} == {0.0}
