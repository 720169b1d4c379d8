"""Judges: what is asked, what counts as a verdict, and what becomes of everything else."""

from __future__ import annotations

import json
import threading
from contextlib import closing
from dataclasses import replace

import pytest

from judge_server import RUBRIC, JudgeServer, completion, nonce_of, quoted, verdict
from rlhf_suite.config.declarations.reward import HttpConfig, JudgeConfig, NamedSourceConfig, RewardConfig
from rlhf_suite.errors import RunError
from rlhf_suite.rewards import retry
from rlhf_suite.rewards.base import RewardFailure, Sample, Scored
from rlhf_suite.rewards.judge import JudgeReward
from rlhf_suite.rewards.judge_calls import FILE, Call, JudgeCalls
from rlhf_suite.rewards.judge_model import JudgeServers, address_of
from rlhf_suite.rewards.questions import number_of
from rlhf_suite.rewards.sources import Rewards

FINE = {"correct": 10, "polite": 5}
FINE_SCORED = Scored(0.875, 0.875, {"correct": 1.0, "polite": 0.5})  # (3 x 1 + 1 x 0.5) / 4


def row(response: str = "r", prompt: str = "q", label: str = "") -> Sample:
    return Sample(query=prompt + response, prompt=prompt, response=response, label=label, datasource="default")


def fine(body):
    return verdict(body, **FINE)


@pytest.fixture
def serve(monkeypatch):
    """A maker of scripted judges; waits between tries are short."""
    monkeypatch.setattr(retry, "FIRST_WAIT_S", 0.01)
    made = []

    def start(answer, headers=None) -> JudgeServer:
        made.append(JudgeServer(answer, headers))
        return made[-1]

    yield start
    for server in made:
        server.close()


@pytest.fixture
def judge(tmp_path):
    """A maker of judges. Those of one test share a run folder, as those of a resumed run do."""

    def make(
        server: JudgeServer, rubric: str = RUBRIC, http: HttpConfig | None = None, *, drops: bool = False, **flags
    ) -> JudgeReward:
        file = tmp_path / "rubric.md"
        file.write_text(rubric)
        config = JudgeConfig(url=server.base, model="m", **flags)
        model = JudgeServers(config, http or HttpConfig(num_retries=2), drops=drops)
        return JudgeReward(file, config, model, JudgeCalls(tmp_path / "logs", config))

    return make


@pytest.mark.notices(
    "what a judge wrote is lost where its verdict is taken again",
    "rewards/judge.py",
    "reasons={REASON: reason}",
    "reasons={}",
)
def test_the_reward_is_the_weighted_mean_of_the_criteria_and_each_is_a_number(serve, judge):
    server = serve(fine)
    assert judge(server, body={"temperature": 0, "max_tokens": None}).score([row("Paris.", "Where?")]) == [FINE_SCORED]
    again = judge(server, body={"temperature": 0, "max_tokens": None})
    (scored,) = again.score([row("Paris.", "Where?")])  # a verdict of the run folder
    assert scored.reasons["reason"].splitlines()[-1].startswith("VERDICT ")
    (body,) = server.seen
    assert body.keys() == {"model", "messages", "temperature"} and body["model"] == "m"
    assert quoted(body) == ["Where?", "Paris."]
    assert '{"correct": <number>, "polite": <number>}' in body["messages"][0]["content"]


def test_a_rubric_without_criteria_has_one_score_and_may_show_the_label(serve, judge):
    server = serve(lambda body: verdict(body, score=-1))
    rubric = "Is it as good as this?\n{label}\n{response}"
    assert judge(server, rubric, scale=[-1.0, 1.0]).score([row("a", label="b")]) == [Scored(0, 0, {"score": 0.0})]
    assert quoted(server.seen[0]) == ["b", "a"]


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ("", "the reply is empty"),
        ("It is good: 9 of 10.", "ends without a verdict: 'It is good: 9 of 10.'"),
        ('VERDICT {n} {"correct": 10, "polite": 5}\nThank you.', "ends without a verdict: 'Thank you.'"),
        ('VERDICT {n} {"correct": 1, "polite": 1}\nVERDICT {n} {"correct": 9, "polite": 9}', "has 2 verdicts"),
        ('VERDICT 0123456789ab {"correct": 10, "polite": 10}', "ends without a verdict"),
        ('{"correct": 10, "polite": 10}', "ends without a verdict"),
        ('VERDICT {n} {"correct": NaN, "polite": 5}', "NaN is not a number of the scale"),
        ('VERDICT {n} {"correct": 1e999, "polite": 5}', "correct is inf, outside of 0 to 10"),
        ('VERDICT {n} {"correct": 11, "polite": 5}', "correct is 11, outside of 0 to 10"),
        ('VERDICT {n} {"correct": -0.1, "polite": 5}', "correct is -0.1, outside of 0 to 10"),
        ('VERDICT {n} {"correct": "10", "polite": 5}', "correct is not a number"),
        ('VERDICT {n} {"correct": true, "polite": 5}', "correct is not a number"),
        ('VERDICT {n} {"correct": null, "polite": 5}', "correct is not a number"),
        ('VERDICT {n} {"correct": 10}', "the verdict is about [correct], and the criteria are [correct, polite]"),
        ('VERDICT {n} {"correct": 1, "polite": 5, "kind": 1}', "the verdict is about [correct, polite, kind]"),
        ('VERDICT {n} {"correct": 1, "correct": 9, "polite": 5}', "a criterion occurs twice"),
        ("VERDICT {n} 7", "the verdict is not an object: '7'"),
        ('VERDICT {n} {"correct": 10, "polite": 5} or so', "the verdict is not JSON"),
        ("VERDICT {n} " + "[" * 100_000, "the verdict is not JSON"),
        ('VERDICT {n} {"correct": 1' + "0" * 5000 + ', "polite": 5}', "the verdict is not JSON"),
    ],
)
@pytest.mark.notices(
    "a judge that says nothing of use gives the worst score",
    "rewards/judge.py",
    "replace(call, problem=failure.reason), Answer(failure, retries)",
    'call, Answer(dict.fromkeys(("correct", "polite"), 0.0), retries)',
)
def test_what_is_not_one_verdict_in_the_form_asked_for_is_no_verdict(serve, judge, reply, reason):
    server = serve(lambda body: (200, completion(reply.replace("{n}", nonce_of(body)))))
    (outcome,) = judge(server).score([row()])
    assert isinstance(outcome, RewardFailure) and outcome.kind == "error"
    assert outcome.reason.startswith("the judge gives no verdict: ") and reason in outcome.reason


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ({}, "the answer has no message: '{}'"),
        ({"choices": []}, "the answer has no message"),
        ([1], "the answer has no message: '[1]'"),
        (completion(None), "the answer has no message"),
        ({"choices": completion("a")["choices"] * 2}, "the answer has no message"),
        ({"choices": [{"message": "VERDICT"}]}, "the answer has no message"),
        (b"<html>", "is not JSON: '<html>'"),
        (b"", "is not JSON"),
    ],
)
def test_an_answer_without_a_message_is_no_verdict(serve, judge, answer, reason):
    (outcome,) = judge(serve(lambda body: (200, answer))).score([row()])
    assert isinstance(outcome, RewardFailure) and reason in outcome.reason


def test_a_reply_that_was_cut_off_is_no_verdict_even_if_it_ends_with_one(serve, judge):
    text = 'VERDICT {} {{"correct": 10, "polite": 10}}'
    server = serve(lambda body: (200, completion(text.format(nonce_of(body)), ending="length")))
    (outcome,) = judge(server).score([row()])
    assert isinstance(outcome, RewardFailure) and "cut off (reward.judge.max_new_tokens)" in outcome.reason


@pytest.mark.parametrize("fault", [(500, b"oh"), (503, b"busy"), (429, b"slowly"), (502, b"")])
def test_a_judge_that_fails_for_a_moment_is_asked_again(serve, judge, fault):
    answers = [fault]
    server = serve(lambda body: answers.pop() if answers else fine(body))
    reward = judge(server)
    assert reward.score([row()]) == [replace(FINE_SCORED, retries=1)]
    assert reward.calls.calls == len(server.seen) == 2
    assert reward.counts.take()["judge/calls"] == 2


@pytest.mark.notices(
    "how long a server wants to be left alone is not heard",
    "rewards/remote.py",
    "await asyncio.sleep(wait_s(attempt, asked))",
    "await asyncio.sleep(wait_s(attempt))",
    limit_s=30,
)
def test_retry_after_is_how_long_a_client_waits(serve, judge, monkeypatch):
    monkeypatch.setattr(retry, "FIRST_WAIT_S", 3600.0)
    monkeypatch.setattr(retry, "LONGEST_WAIT_S", 3600.0)
    answers = [(429, b"slowly")]
    server = serve(lambda body: answers.pop() if answers else fine(body), {"Retry-After": "0"})
    assert judge(server).score([row()]) == [replace(FINE_SCORED, retries=1)]


def test_a_judge_that_is_too_slow_is_a_time_out_and_not_a_score(serve, judge):
    free = threading.Event()
    server = serve(lambda body: (free.wait(60), fine(body))[1])
    (outcome,) = judge(server, http=HttpConfig(timeout_s=0.5, num_retries=0)).score([row()])
    free.set()
    assert isinstance(outcome, RewardFailure) and outcome.kind == "timeout"


def test_a_judge_that_is_down_ends_the_run_and_keeps_what_it_said(serve, judge):
    said = []

    def answer(body):
        said.append(body)
        return fine(body) if len(said) <= 3 else (500, b"down")

    server = serve(answer)
    rows = [row(str(number)) for number in range(20)]
    with pytest.raises(
        RunError, match=r"no server of reward\.judge\.url answers\. .*HTTP 500: down.*reward\.judge\.url"
    ):
        judge(server, http=HttpConfig(num_retries=3, concurrency=1)).score(rows)
    assert len(server.seen) == 3 + 4  # the others are not asked
    back = serve(fine)
    assert judge(back).score(rows) == [FINE_SCORED] * 20
    assert len(back.seen) == 17  # three were known


@pytest.mark.notices(
    "a judge that is down ends a run that drops rows without a score",
    "rewards/sources.py",
    "JudgeServers(config.judge, config.http, drops=drops_rows(config))",
    "JudgeServers(config.judge, config.http)",
)
def test_a_judge_that_dies_costs_a_run_that_drops_rows_only_those_without_a_verdict(serve, tmp_path):
    (tmp_path / "rubric.md").write_text(RUBRIC)
    said = []

    def answer(body):
        said.append(body)
        return fine(body) if len(said) <= 3 else (500, b"down")

    server = serve(answer)
    flags = {"rubric": str(tmp_path / "rubric.md"), "judge": JudgeConfig(url=server.base, model="m")}
    config = RewardConfig.of("generate", on_error="drop", http=HttpConfig(num_retries=3, concurrency=1), **flags)
    with closing(Rewards(config, tmp_path / "logs" / "reward.log")) as rewards:
        outcomes, metrics = rewards.score([row(str(number)) for number in range(20)])
    assert outcomes[:3] == [FINE_SCORED] * 3
    reasons = [outcome.reason for outcome in outcomes[3:]]
    assert all(reason.startswith("no server of reward.judge.url answers. ") for reason in reasons)
    assert all("HTTP 500: down" in reason for reason in reasons)
    assert metrics["judge/no_verdict"] == 17 and metrics["judge/calls"] == len(server.seen)
    assert len(server.seen) == 3 + 4  # the others are not waited for


def test_a_judge_that_is_back_is_asked_again_by_the_next_batch(serve, judge):
    said = []

    def answer(body):
        said.append(body)
        return (500, b"down") if len(said) <= 4 else fine(body)

    reward = judge(serve(answer), http=HttpConfig(num_retries=3, concurrency=1), drops=True)
    (first,) = reward.score([row()])
    assert isinstance(first, RewardFailure) and reward.model.servers.are_out
    assert reward.score([row(str(number)) for number in range(4)]) == [FINE_SCORED] * 4


def test_the_number_of_a_request_follows_from_the_question_and_changes_when_it_is_asked_again(serve, judge):
    server = serve(lambda body: (200, completion("no verdict")))
    for _ in range(2):
        judge(server).score([row("a"), row("b")])
    numbers = [nonce_of(body) for body in server.seen]
    assert len({*numbers}) == 4
    key = judge(server).questioner.about_one(row("a")).key
    assert {number_of(key, 0, 0), number_of(key, 1, 0)} < {*numbers}


def test_a_question_is_asked_once_also_by_a_resumed_run_and_only_if_nothing_changed(serve, judge, tmp_path):
    server = serve(fine)
    first = judge(server)
    assert first.score([row("a"), row("b"), row("a")]) == [FINE_SCORED] * 3
    assert len(server.seen) == 2
    counts = first.counts.take()
    seconds = counts.pop("judge/seconds")
    expected = {"answers": 3, "cached": 1, "no_verdict": 0, "calls": 2, "tokens": 200}
    assert seconds > 0 and counts == {f"judge/{name}": value for name, value in expected.items()}
    with (tmp_path / "logs" / "judge.jsonl").open("a") as file:
        file.write('{"key": "the run was killed he')
    again = judge(server)
    assert again.score([row("b"), row("c")]) == [FINE_SCORED] * 2
    assert len(server.seen) == 3 and again.calls.tokens == 300
    assert judge(server).score([row("c")]) == [FINE_SCORED]
    assert len(server.seen) == 3  # the line after the torn one was read
    for changed in ({"rubric": RUBRIC + "x"}, {"body": {"temperature": 1}}, {"scale": [0.0, 20.0]}, {"max_chars": 100}):
        judge(server, **changed).score([row("a")])
    assert len(server.seen) == 7
    judge(server).score([row("a", label="other"), row("a", prompt="other")])
    assert len(server.seen) == 9


def test_what_has_no_verdict_is_asked_again(serve, judge):
    server = serve(lambda body: (200, completion("no")))
    assert isinstance(judge(server).score([row()])[0], RewardFailure)
    assert judge(serve(fine)).score([row()]) == [FINE_SCORED]


@pytest.mark.parametrize("flags", [{"max_calls": 3}, {"max_tokens": 201}])
def test_the_budget_ends_the_run_before_it_is_exceeded_and_holds_for_a_resumed_run(serve, judge, flags):
    server, rows = serve(fine), [row(str(number)) for number in range(5)]
    one_by_one = HttpConfig(concurrency=1)
    for _ in range(2):
        with pytest.raises(RunError, match=r"budget of the judge is used up: .*write a larger number or null, and res"):
            judge(server, http=one_by_one, **flags).score(rows)
        assert len(server.seen) == 3
    assert judge(server).score(rows) == [FINE_SCORED] * 5
    assert len(server.seen) == 5


def test_requests_that_are_under_way_when_the_budget_ends_are_kept(serve, judge):
    both = threading.Barrier(2)

    def together(body):
        both.wait(60)
        return fine(body)

    rows = [row(str(number)) for number in range(4)]
    with pytest.raises(RunError, match="used up: 2 calls"):
        judge(serve(together), http=HttpConfig(concurrency=4), max_calls=2).score(rows)
    server = serve(fine)
    judge(server).score(rows)
    assert len(server.seen) == 2


def test_a_judge_without_usage_costs_an_estimate(serve, judge):
    def answer(body):
        status, reply = fine(body)[:2]
        return status, {"choices": reply["choices"]}

    server = serve(answer)
    reward = judge(server)
    reward.score([row()])
    asked = sum(len(message["content"]) for message in server.seen[0]["messages"])
    reply = json.loads((reward.calls.path).read_text())["reply"]
    assert reward.calls.tokens == (asked + len(reply)) // 4


def test_the_key_is_sent_and_stands_nowhere(serve, judge, monkeypatch, tmp_path):
    monkeypatch.setenv("MY_JUDGE_KEY", "s3cret-key")
    replies = [(400, b"your key s3cret-key is odd"), (401, b"s3cret-key")]
    server = serve(lambda body: replies.pop(0) if replies else fine(body))
    reward = judge(server, key_env="MY_JUDGE_KEY")
    (outcome,) = reward.score([row()])
    assert "<MY_JUDGE_KEY>" in outcome.reason and "s3cret" not in outcome.reason
    with pytest.raises(RunError, match=r"HTTP 401.*MY_JUDGE_KEY") as raised:
        reward.score([row()])
    assert "s3cret" not in str(raised.value)
    assert server.tokens == ["Bearer s3cret-key"] * 2
    assert "s3cret" not in reward.calls.path.read_text()


def test_no_more_requests_are_under_way_than_allowed(serve, judge):
    server = serve(fine)
    judge(server, http=HttpConfig(concurrency=2)).score([row(str(number)) for number in range(12)])
    assert server.most_under_way <= 2


def test_a_server_that_moved_is_not_followed_and_its_new_address_is_named(serve, judge):
    """The texts go nowhere but to the address that was named."""
    other = serve(fine)
    server = serve(lambda body: (307, b"<html>moved</html>"), headers={"Location": other.base})
    (outcome,) = judge(server).score([row("a")])
    assert isinstance(outcome, RewardFailure) and not other.seen and len(server.seen) == 1
    assert f"HTTP 307: it moved to {other.base}. Write that in reward.judge.url" in outcome.reason


@pytest.mark.parametrize("url", ["http://h:1/v1", "http://h:1/v1/", "http://h:1/v1/chat/completions"])
@pytest.mark.parametrize("query", ["", "?api-version=3"])
def test_a_query_stays_behind_the_path_of_chat_completions(url, query):
    assert address_of(url + query) == f"http://h:1/v1/chat/completions{query}"


def test_judges_are_sources_beside_others_and_an_evaluation_shares_their_verdicts(serve, tmp_path):
    server = serve(fine)
    (tmp_path / "rubric.md").write_text(RUBRIC)
    sources = {
        "judge": NamedSourceConfig(rubric=str(tmp_path / "rubric.md"), weight=2.0),
        "length": NamedSourceConfig(rule="length"),
    }
    config = RewardConfig.of("generate", sources=sources, judge=JudgeConfig(url=server.base, model="m"))
    with closing(Rewards(config, tmp_path / "logs" / "reward.log")) as rewards:
        (outcome,), metrics = rewards.score([row()])
        assert isinstance(outcome, Scored) and outcome.reward == 2 * 0.875 + 1
        assert outcome.extra["judge/polite"] == 0.5
        assert (metrics["judge/calls"], metrics["reward/judge/rows"]) == (1, 1)
        assert rewards.beside().score([row()])[0] == [outcome]
    assert len(server.seen) == 1


def test_reward_key_names_a_criterion(serve, tmp_path):
    server = serve(fine)
    (tmp_path / "rubric.md").write_text(RUBRIC)
    flags = {"rubric": str(tmp_path / "rubric.md"), "judge": JudgeConfig(url=server.base, model="m")}
    with closing(Rewards(RewardConfig.of("generate", reward_key="polite", **flags), tmp_path / "log")) as rewards:
        assert rewards.score([row()])[0] == [Scored(0.5, 0.875, {"correct": 1.0, "polite": 0.5})]
    with closing(Rewards(RewardConfig.of("generate", reward_key="kind", **flags), tmp_path / "log")) as rewards:
        (outcome,), _ = rewards.score([row()])
        assert isinstance(outcome, RewardFailure) and "correct, polite" in outcome.reason


@pytest.mark.notices(
    "a disk that is full of verdicts is a traceback",
    "rewards/judge_calls.py",
    "with self.lock, name_disk_errors(self.path):",
    "with self.lock:",
)
def test_verdicts_that_cannot_be_kept_end_the_run_with_the_file_and_the_reason(tmp_path):
    (tmp_path / FILE).symlink_to("/dev/full")
    calls = JudgeCalls(tmp_path, JudgeConfig())
    with pytest.raises(RunError, match=rf"{FILE} cannot be written: the disk is full"):
        calls.end(Call("a question"))
