"""Yes or No from a server: the score by the log-probabilities that it lists, and what becomes of other answers."""

from __future__ import annotations

import json
from math import log

import pytest

from judge_server import JudgeServer, completion
from rlhf_suite.config.declarations.reward import HttpConfig, JudgeConfig
from rlhf_suite.errors import RunError
from rlhf_suite.rewards.base import RewardFailure, Sample, Scored
from rlhf_suite.rewards.judge import JudgeReward
from rlhf_suite.rewards.judge_calls import JudgeCalls
from rlhf_suite.rewards.judge_model import JudgeServers

SAMPLES = [Sample("", "q", response, "", "default") for response in ("a", "b", "c")]


def answer_with(top, sampled: str = "Yes"):
    """Return an answer whose first token has this list of likely tokens."""
    answer = completion(sampled, tokens=10, ending="length")
    answer["choices"][0]["logprobs"] = {"content": [{"token": sampled, "logprob": -1.0, "top_logprobs": top}]}
    return answer


def listed(**chances: float):
    """Return a list of likely tokens."""
    return [{"token": token, "logprob": log(chance), "bytes": None} for token, chance in chances.items()]


FINE = answer_with(listed(Yes=0.6, No=0.2, Maybe=0.1))
BARE = completion("Yes", tokens=10, ending="length")


@pytest.fixture
def judge(tmp_path):
    """A maker of judges whose server gives these answers in turn, and the last one for ever. They share a run
    folder."""
    servers = []

    def make(*answers, drops: bool = False, **flags) -> JudgeReward:
        def answer(body):
            given = answers[min(len(server.seen), len(answers)) - 1]
            return given if isinstance(given, tuple) else (200, given)

        server = JudgeServer(answer)
        servers.append(server)
        (tmp_path / "rubric.md").write_text("Is it right?\n{prompt}\n{response}\n")
        config = JudgeConfig(url=server.base, model="m", mode="yes_no", **flags)
        model = JudgeServers(config, HttpConfig(num_retries=0, concurrency=1), drops=drops)
        reward = JudgeReward(tmp_path / "rubric.md", config, model, JudgeCalls(tmp_path / "logs", config))
        reward.server = server
        return reward

    yield make
    for server in servers:
        server.close()


def score(reward: JudgeReward):
    (outcome,) = reward.score(SAMPLES[:1])
    return outcome


@pytest.mark.notices(
    "the probability of No among the tokens of a server is taken for that of Yes",
    "rewards/yes_no.py",
    "return yes / (yes + no)",
    "return no / (yes + no)",
)
def test_the_score_is_the_probability_of_yes_among_both_words_and_one_token_is_asked_for(judge):
    reward = judge(FINE, body={"temperature": 0})
    outcome = score(reward)
    assert isinstance(outcome, Scored) and outcome.reward == pytest.approx(0.6 / (0.6 + 0.2), abs=1e-12)
    assert outcome.extra == {"score": outcome.reward} and outcome.reasons == {"reason": "Yes"}
    (body,) = reward.server.seen
    asked = {"model": "m", "max_tokens": 1, "logprobs": True, "top_logprobs": 20, "temperature": 0}
    assert {name: body[name] for name in body if name != "messages"} == asked


@pytest.mark.parametrize(
    ("top", "expected"),
    [
        # Other ways to write the words are other tokens, as on engines; two tokens may have one text.
        (listed(Yes=0.3, No=0.2) + listed(**{" Yes": 0.2, "yes": 0.1, "NO": 0.1}), 0.6),
        (listed(Yes=0.3, No=0.2) + listed(Yes=0.3), 0.75),
        # What is not listed has at most the probability of the least one listed, or what is left of 1.
        (listed(Yes=0.9, Maybe=0.09, Hm=0.009), 1.0),
        (listed(No=0.9, Maybe=0.09, Hm=0.009), 0.0),
        (listed(Yes=0.999), 1.0),
        ([{"token": "Yes", "logprob": 0}, {"token": "No", "logprob": -9999.0}], 1.0),
    ],
)
def test_the_words_are_exact_and_one_that_cannot_be_likely_counts_as_nothing(judge, top, expected):
    assert score(judge(answer_with(top))).reward == pytest.approx(expected, abs=1e-12)


@pytest.mark.notices(
    "a word that a server does not list is taken for impossible",
    "rewards/yes_no.py",
    "if not chances and share_of_yes(unseen, yes + no) > UNSEEN:",
    "if False:",
)
@pytest.mark.parametrize(
    ("top", "sampled", "reason"),
    [
        (
            listed(Maybe=0.6, Hm=0.1),
            "Maybe",
            'is among the 2 most likely first tokens: "Maybe", "Hm"',
        ),
        ([{"token": "Yes", "logprob": -9999.0}], "Yes", "neither Yes nor No"),
        ([{"token": "Yes", "logprob": -(10**310)}], "Yes", "neither Yes nor No"),
        (listed(Yes=0.4, Maybe=0.3), "Yes", "No is not among the 2 most likely first tokens, and may be likely"),
        (listed(No=0.01, Maybe=0.5, Hm=0.01), "No", "Yes is not among the 3"),
        # The sampled token is listed though it is unlikely, so it does not bound the others.
        (listed(Odd=0.0001, Yes=0.4, Maybe=0.3), "Odd", "No is not among the 3"),
        (listed(Yes=0.9, No=0.9), "Yes", "add up to 1.8"),
        ([{"token": "Yes", "logprob": 2}], "Yes", "not a token with its log-probability"),
        ([{"token": "Yes", "logprob": float("nan")}], "Yes", "not a token with its log-probability"),
        ([{"token": "Yes", "logprob": True}], "Yes", "not a token with its log-probability"),
        ([{"token": "Yes", "logprob": "-1"}], "Yes", "not a token with its log-probability"),
        ([{"token": 7, "logprob": -1}], "Yes", "not a token with its log-probability"),
        (["Yes"], "Yes", "not a token with its log-probability"),
        ({"Yes": -0.1}, "Yes", "not a token with its log-probability"),
    ],
)
def test_a_list_that_does_not_give_the_score_is_no_verdict_and_never_zero(judge, top, sampled, reason):
    outcome = score(judge(answer_with(top, sampled)))
    assert isinstance(outcome, RewardFailure) and outcome.reason.startswith("the judge gives no verdict: ")
    assert reason in outcome.reason


@pytest.mark.parametrize("log_probs", ["missing", None, {}, {"content": None}, {"content": []}, "empty"])
def test_a_server_without_log_probabilities_ends_the_run_at_its_first_answer(judge, log_probs):
    answer = json.loads(json.dumps(BARE))
    if log_probs == "empty":
        answer = answer_with([])
    elif log_probs != "missing":
        answer["choices"][0]["logprobs"] = log_probs
    reward = judge(answer, drops=True)
    remedy = r"no log-probabilities, and reward\.judge\.mode=yes_no reads them\. Write reward\.judge\.mode=verdict"
    with pytest.raises(RunError, match=remedy):
        reward.score(SAMPLES)
    (call,) = [json.loads(line) for line in reward.calls.path.read_text().splitlines()]
    assert len(reward.server.seen) == call["tries"] == 1
    assert (call["tokens"], call["parts"]) == (10, None) and "lists no log-probabilities" in call["problem"]


def test_a_server_that_refuses_to_list_them_ends_the_run_and_another_refusal_is_no_verdict(judge):
    with pytest.raises(RunError, match=r"HTTP 400: top_logprobs must be at most 5\. .*body=\{top_logprobs: 5\}"):
        score(judge((400, b"top_logprobs must be at most 5")))
    outcome = score(judge((400, b"too long")))
    assert isinstance(outcome, RewardFailure) and "HTTP 400: too long" in outcome.reason


def test_one_answer_without_them_from_a_server_that_gives_them_is_no_verdict(judge):
    first, second, third = judge(FINE, BARE, (400, b"no logprobs today")).score(SAMPLES)
    assert isinstance(first, Scored)
    assert isinstance(second, RewardFailure) and "the answer lists no log-probabilities" in second.reason
    assert isinstance(third, RewardFailure) and "no logprobs today" in third.reason


def test_an_answer_without_a_message_is_no_verdict_and_does_not_end_the_run(judge):
    outcome = score(judge({"choices": []}))
    assert isinstance(outcome, RewardFailure) and "the answer has no message" in outcome.reason


@pytest.mark.parametrize(("flags", "sent"), [({"max_calls": 2}, 2), ({"max_tokens": 11}, 2)])
def test_scores_are_kept_and_the_budget_counts_their_requests(judge, flags, sent):
    reward = judge(FINE, **flags)
    with pytest.raises(RunError, match="the budget of the judge is used up"):
        reward.score(SAMPLES)
    assert len(reward.server.seen) == sent
    again = judge(FINE)
    assert [outcome.reward for outcome in again.score(SAMPLES)] == pytest.approx([0.75] * 3)
    counts = again.counts.take()
    assert (counts["judge/cached"], counts["judge/calls"], counts["judge/tokens"]) == (sent, 3 - sent, 10 * (3 - sent))
    assert again.calls.calls == 3 and again.calls.tokens == 30


def test_servers_that_list_fewer_tokens_or_name_the_limit_otherwise_are_asked_so(judge):
    reward = judge(FINE, body={"top_logprobs": 5, "max_tokens": None, "max_completion_tokens": 1})
    score(reward)
    (body,) = reward.server.seen
    assert body["top_logprobs"] == 5 and body["max_completion_tokens"] == 1 and "max_tokens" not in body
