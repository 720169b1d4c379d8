"""Rankings: what a judge sees of a group, what counts as an order, and the scores that follow from it."""

from __future__ import annotations

import json
import re
from fractions import Fraction
from itertools import permutations

import pytest

from judge_server import JudgeServer, completion
from rlhf_suite.config.declarations.reward import HttpConfig, JudgeConfig
from rlhf_suite.rewards import retry
from rlhf_suite.rewards.base import RewardFailure, Sample, Scored
from rlhf_suite.rewards.judge import JudgeReward
from rlhf_suite.rewards.judge_calls import JudgeCalls
from rlhf_suite.rewards.judge_model import JudgeServers
from rlhf_suite.rewards.ranking import count_reversed, read_ranking, shuffle
from rlhf_suite.rewards.rubric import NoVerdict

RUBRIC = "Longer answers are better.\n{prompt}\n{response}\n"
NONCE = "0123456789abcdef"


def samples(*responses: str, prompt: str = "q", group: int | None = 0) -> list[Sample]:
    return [Sample(prompt + response, prompt, response, "", "default", group=group) for response in responses]


def number_of(body) -> str:
    """Return the number of a request, as an honest judge reads it."""
    return re.search(r"^RANKING (\w+) ", body["messages"][0]["content"], re.MULTILINE)[1]


def shown(body) -> list[str]:
    """Return the answers that a request shows, in order."""
    nonce, text = number_of(body), body["messages"][1]["content"]
    found = re.findall(rf"^BEGIN {nonce} (\d+)\n(.*?)\nEND {nonce} \1$", text, re.DOTALL | re.MULTILINE)
    assert [int(number) for number, _ in found] == [*range(1, len(found) + 1)]
    return [answer for _, answer in found]


def rank(body, order):
    return 200, completion(f"So be it.\nRANKING {number_of(body)} {json.dumps(order)}")


def by_length(body):
    """A judge to whom longer answers are better, and equally long ones equal."""
    answers = shown(body)
    lengths = sorted({len(answer) for answer in answers}, reverse=True)
    tiers = [[n for n, answer in enumerate(answers, 1) if len(answer) == length] for length in lengths]
    return rank(body, [tier[0] if len(tier) == 1 else tier for tier in tiers])


@pytest.fixture
def judge(monkeypatch, tmp_path):
    """A maker of judges that rank; those of one test share a run folder."""
    monkeypatch.setattr(retry, "FIRST_WAIT_S", 0.01)
    servers = []

    def make(answer, seed: int = 42, **flags) -> tuple[JudgeReward, JudgeServer]:
        servers.append(JudgeServer(answer))
        (tmp_path / "rubric.md").write_text(RUBRIC)
        config = JudgeConfig(url=servers[-1].base, model="m", mode="rank", **flags)
        model = JudgeServers(config, HttpConfig(num_retries=1))
        calls = JudgeCalls(tmp_path / "logs", config)
        return JudgeReward(tmp_path / "rubric.md", config, model, calls, seed=seed), servers[-1]

    yield make
    for server in servers:
        server.close()


def rewards(outcomes) -> list[float]:
    return [outcome.reward for outcome in outcomes]


def test_the_score_is_the_share_of_the_other_answers_that_are_worse(judge):
    reward, server = judge(by_length)
    outcomes = reward.score(samples("aaa", "a", "aaaa", "aa"))
    assert rewards(outcomes) == pytest.approx([2 / 3, 0, 1, 1 / 3])
    assert outcomes[2] == Scored(1.0, 1.0, {"score": 1.0})
    assert sorted(shown(server.seen[0])) == ["a", "aa", "aaa", "aaaa"]


@pytest.mark.parametrize("tiers", [[[1], [2], [3]], [[1, 2], [3]], [[3], [1, 2]], [[1, 2, 3]], [[4, 2], [1], [3, 5]]])
def test_a_score_counts_the_worse_answers_and_half_of_the_equal_ones(tiers):
    """(n - place) / (n - 1) with the mean place of equal answers is (worse + equal / 2) / (n - 1)."""
    count = sum(map(len, tiers))
    scores = read_ranking(f"RANKING {NONCE} {json.dumps(tiers)}", count, NONCE)
    for place, tier in enumerate(tiers):
        worse = sum(map(len, tiers[place + 1 :]))
        for number in tier:
            assert scores[str(number)] == pytest.approx(float(Fraction(2 * worse + len(tier) - 1, 2 * (count - 1))))
    assert sum(scores.values()) == pytest.approx(count / 2)


def test_equal_answers_are_shown_once_and_have_one_score(judge):
    reward, server = judge(by_length)
    assert rewards(reward.score(samples("a", "bb", "a", "cc", "ddd"))) == [0.0, 0.5, 0.0, 0.5, 1.0]
    assert sorted(shown(server.seen[0])) == ["a", "bb", "cc", "ddd"]


def test_an_answer_without_another_one_is_not_asked_about(judge):
    reward, server = judge(by_length)
    assert rewards(reward.score([*samples("a", "a"), *samples("b", group=1)])) == [0.5] * 3
    assert server.seen == []


@pytest.mark.notices(
    "two groups of one prompt are ranked as one",
    "rewards/questions.py",
    '("", sample.prompt) if sample.group is None else sample.group',
    '("", sample.prompt)',
)
def test_a_group_is_its_number_and_without_one_the_prompt(judge):
    reward, server = judge(by_length)
    rows = [*samples("a", "bb"), *samples("cccc", "ddd", group=1)]
    assert rewards(reward.score([rows[0], rows[2], rows[1], rows[3]])) == [0, 1, 1, 0]
    assert len(server.seen) == 2
    rows = [*samples("e", "ff", group=None), *samples("g", "hh", prompt="r", group=None)]
    assert rewards(reward.score([rows[0], rows[2], rows[1], rows[3]])) == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("order", "reason"),
    [
        ("[1, 2]", "the ranking lacks 3"),
        ("[1, 2, 2]", "names an answer twice"),
        ("[1, 2, 3, 4]", "names 4, and the answers are 1 to 3"),
        ("[0, 1, 2]", "names 0,"),
        ("[1, 2, true]", "names True"),
        ("[1, 2, 3.0]", "names 3.0"),
        ('[1, 2, "3"]', "names 3, and"),
        ("[1, 2, [[3]]]", "names [3]"),
        ('{"1": 2}', "is not a list"),
        ("1, 2, 3", "is not JSON"),
        ("[1, 2, 3] as I said", "is not JSON"),
        ("[]", "the ranking lacks 1, 2, 3"),
        ("", "is not JSON"),
    ],
)
@pytest.mark.notices(
    "a ranking may leave answers out",
    "rewards/ranking.py",
    "if missing := sorted({*range(1, count + 1)} - {*named}):",
    "if missing := []:",
)
def test_what_is_not_an_order_of_all_answers_gives_no_answer_of_the_group_a_score(judge, order, reason):
    def answer(body):
        return (200, completion(f"RANKING {number_of(body)} {order}")) if "b" in shown(body) else by_length(body)

    reward, _ = judge(answer)
    outcomes = reward.score([*samples("a", "b", "cc"), *samples("d", "ee", group=1)])
    assert all(isinstance(outcome, RewardFailure) for outcome in outcomes[:3]) and rewards(outcomes[3:]) == [0, 1]
    assert outcomes[0].reason.startswith("the judge gives no verdict: ") and reason in outcomes[0].reason
    counts = reward.counts.take()
    assert (counts["judge/answers"], counts["judge/no_verdict"]) == (5, 3)


@pytest.mark.notices(
    "the order of answers is that of their samples",
    "rewards/ranking.py",
    "return sorted(answers, key=lambda answer: digest(drawn, answer))",
    "return [sample.response for sample in samples]",
)
def test_the_order_follows_from_seed_prompt_and_answers_alone_and_no_place_is_preferred():
    answers = ["a", "b", "c"]
    for order in permutations(answers):
        assert shuffle(samples(*order), 1) == shuffle(samples(*answers), 1)
    places = {answer: [0, 0, 0] for answer in answers}
    for prompt in range(900):
        for place, answer in enumerate(shuffle(samples(*answers, prompt=str(prompt)), 1)):
            places[answer][place] += 1
    # 300 are expected; the standard deviation is sqrt(900 x 1/3 x 2/3) = 14.1
    assert all(abs(count - 300) < 5 * 14.2 for counts in places.values() for count in counts)
    orders = [shuffle(samples(*answers), seed) for seed in range(30)]
    assert any(order != orders[0] for order in orders)


def test_a_resumed_run_asks_for_no_order_twice_and_another_seed_does(judge):
    group = samples(*"abcdefgh")
    reward, server = judge(lambda body: rank(body, [*range(1, 9)]))
    first = reward.score(group)
    resumed, second = judge(lambda body: rank(body, [*range(1, 9)]))
    assert resumed.score([*reversed(group)]) == [*reversed(first)] and second.seen == []
    other, third = judge(lambda body: rank(body, [*range(1, 9)]), seed=43)
    other.score(group)
    assert len(third.seen) == 1 and shown(third.seen[0]) != shown(server.seen[0])


@pytest.mark.notices(
    "the second order is the first one",
    "rewards/questions.py",
    "[shown, shown[::-1]] if self.config.both_orders",
    "[shown, shown] if self.config.both_orders",
)
def test_a_judge_that_prefers_a_place_is_found_and_has_no_effect_with_both_orders(judge):
    reward, server = judge(lambda body: rank(body, [1, 2, 3, 4]), both_orders=True)
    assert rewards(reward.score(samples("a", "b", "c", "d"))) == pytest.approx([0.5] * 4)
    assert shown(server.seen[0]) == shown(server.seen[1])[::-1]
    counts = reward.counts.take()
    assert (counts["judge/pairs"], counts["judge/pairs_reversed"]) == (6, 6)
    honest, _ = judge(by_length, both_orders=True)
    assert rewards(honest.score(samples("a", "bb", "cc", "ddd"))) == [0, 0.5, 0.5, 1]
    counts = honest.counts.take()
    assert (counts["judge/pairs"], counts["judge/pairs_reversed"]) == (6, 0)


def test_without_a_verdict_in_one_of_both_orders_no_answer_has_a_score(judge):
    def answer(body):
        return by_length(body) if shown(body)[0] == first else rank(body, [1])

    (first, _) = shuffle(samples("a", "bb"), 42)
    reward, server = judge(answer, both_orders=True)
    assert all(isinstance(outcome, RewardFailure) for outcome in reward.score(samples("a", "bb")))
    assert len(server.seen) == 2


def test_pairs_that_are_ordered_otherwise_are_counted_by_hand():
    # answers a, b, c: first a > b = c, shown as 1, 2, 3; then b > a > c, shown as c, b, a
    first = read_ranking(f"RANKING {NONCE} [1, [2, 3]]", 3, NONCE)
    second = read_ranking(f"RANKING {NONCE} [2, 3, 1]", 3, NONCE)
    assert count_reversed(first, second) == (3, 2)  # a > b becomes b > a, and b = c becomes b > c; a > c stays


def test_a_ranking_needs_the_number_of_its_request():
    with pytest.raises(NoVerdict, match="ends without a verdict"):
        read_ranking("RANKING 0000000000000000 [1, 2]", 2, NONCE)
