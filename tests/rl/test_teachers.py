"""Teachers of on-policy distillation: each row has its own, with its own prompt, in ranks or behind HTTP; what one
cannot say ends the run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hand_made_samples import trajectory

from given import prompt
from reward_server import RewardServer
from rlhf_suite.config.declarations.algo import AlgoConfig, DistillTermConfig
from rlhf_suite.config.declarations.reward import HttpConfig
from rlhf_suite.config.declarations.teacher import NamedTeacherConfig, TeacherConfig
from rlhf_suite.data.batch import Example, TokenBatch, collate
from rlhf_suite.data.trajectory import Trajectory, to_batch
from rlhf_suite.errors import RunError, UserError
from rlhf_suite.models.builtin import byte_tokenizer
from rlhf_suite.rl.credit import CreditAssigner
from rlhf_suite.rl.sharding import ForwardBatch
from rlhf_suite.rl.teacher_endpoint import PROBE, Endpoint
from rlhf_suite.rl.teachers import Teachers, check_teachers

pytestmark = pytest.mark.stack

FLAG = "teacher.remote_url"


class Says:
    """A teacher that says `-(place of the token in its sequence) * scale` of each token that it is asked about."""

    def __init__(self, scale: float) -> None:
        self.scale, self.read = scale, []

    def __call__(self, batch: ForwardBatch, temperature: float):
        self.read += [ids.tolist() for ids in batch.tokens.ids.split(batch.tokens.lengths.tolist())]
        places = torch.cat([torch.arange(n) for n in batch.tokens.lengths.tolist()])
        self.log_probs = -self.scale * places.float() * batch.tokens.mask
        return self

    def result(self) -> torch.Tensor:
        return self.log_probs


def two() -> TeacherConfig:
    a = NamedTeacherConfig(model_name_or_path="a", datasets=["a"])
    return TeacherConfig.of("ppo", sources={"a": a, "rest": NamedTeacherConfig(model_name_or_path="b")})


@pytest.mark.notices(
    "a teacher judges the rows of another",
    "rl/teachers.py",
    "batch.mask.bool() & is_own[of_tokens]",
    "batch.mask.bool()",
)
def test_each_row_has_the_teacher_of_its_dataset():
    rows = [
        trajectory(0, 0, own=3, source="b"),
        trajectory(1, 1, own=4, source="a"),
        trajectory(2, 2, own=2, source="c"),
    ]
    batch, asked = to_batch(rows), {"teacher.sources.a": Says(1.0), "teacher.sources.rest": Says(0.5)}
    taught = Teachers(asked, two()).ask(rows, batch, 1.0)
    found = taught.result().split(batch.lengths.tolist())
    for row, scale, own in zip(rows, (0.5, 1.0, 0.5), found, strict=True):
        places = np.arange(len(row.ids)) * row.model_mask
        assert own.tolist() == (-scale * places).tolist()
    assert [ids == row.ids.tolist() for ids, row in zip(asked["teacher.sources.rest"].read, rows[::2], strict=True)]
    old = torch.full_like(batch.mask, -3.0)
    metrics = taught.metrics(replace(batch, old_log_probs=old, teacher_log_probs=taught.result()))
    mask = rows[1].model_mask
    assert metrics["train/teacher_kl/a"] == pytest.approx(float((np.arange(len(mask))[mask] - 3).mean()))
    assert {*metrics} == {"train/teacher_kl/a", "train/teacher_kl/rest"}


@pytest.mark.notices(
    "a teacher reads the prompt of the policy",
    "rl/teachers.py",
    "np.array(given, ids.dtype), ids[len(own) :]",
    "np.array(own, ids.dtype), ids[len(own) :]",
)
def test_a_teacher_reads_its_own_prompt_and_the_same_response():
    """With a prompt of 5 tokens in place of 2, every token stands 3 places later; a row without one stays as it is."""
    rows = [Trajectory.start(prompt(0, teacher_ids=[9, 8, 7, 6, 5]), 0, 0), Trajectory.start(prompt(1), 1, 0)]
    for row in rows:
        row.append_model(np.array([40, 41]), np.array([-1.0, -2.0], np.float32), 0)
    batch, says = to_batch(rows), Says(1.0)
    config = TeacherConfig.of("ppo", kind="policy")
    taught = Teachers({"teacher": says}, config).ask(rows, batch, 1.0)
    assert says.read == [[9, 8, 7, 6, 5, 40, 41], [1, 2, 40, 41]]
    assert taught.result().tolist() == [0, 0, -5, -6, 0, 0, -2, -3]
    assert taught.metrics(batch) == {}


def test_the_term_is_added_to_the_advantages_of_rewards():
    """A_t = reward-to-go + c clamp(log p_teacher - log p_policy), computed here in float64."""
    rows = [trajectory(0, 0, sample) for sample in range(2)]
    batch, config = to_batch(rows), AlgoConfig.of("ppo", distill=DistillTermConfig(coef=0.25))
    config.advantage.estimator, config.kl.init_coef = "reinforce", 0.0
    generator = torch.Generator().manual_seed(0)
    old, theirs = (-5 * torch.rand(batch.num_tokens, generator=generator) for _ in range(2))
    batch = replace(batch, reward=torch.tensor([1.0, 0.0]), old_log_probs=old)
    without, _ = CreditAssigner(config).assign(batch)
    taught, metrics = CreditAssigner(config).assign(replace(batch, teacher_log_probs=theirs))
    mask, gap = batch.mask.bool(), (theirs.double() - old.double()).clamp(-10, 10)
    expected = (without.advantages.double() + 0.25 * gap)[mask]
    torch.testing.assert_close(taught.advantages.double()[mask], expected, rtol=0, atol=1e-6)
    assert metrics["train/teacher_kl"] == pytest.approx(-float(gap[mask].mean()), abs=1e-6)


def test_a_row_without_a_teacher_is_refused():
    config = TeacherConfig.of(
        "ppo", sources={"a": NamedTeacherConfig(datasets=["a"]), "b": NamedTeacherConfig(datasets=["b"])}
    )
    check_teachers(config, [("rows:1", "a"), ("rows:2", "b")])
    with pytest.raises(
        UserError, match=r"rows:3: its datasource 'c' has no teacher. teacher.sources teach a, b: add it"
    ):
        check_teachers(config, [("rows:3", "c")])
    check_teachers(two(), [("rows:3", "c")])


def batch() -> ForwardBatch:
    return ForwardBatch(collate([Example([1, 2, 3], [0, 1, 1]), Example([4, 5], [0, 1])], TokenBatch))


def scores(body):
    """As vLLM answers: a log-prob by id for each token but the first."""
    return {
        "choices": [
            {"prompt_logprobs": [None, *({str(id): {"logprob": -id / 10, "rank": 3}} for id in ids[1:])]}
            for ids in body["prompt"]
        ]
    }


def asked(answer, **http):
    server = RewardServer(answer)
    config = HttpConfig(**{"num_retries": 1, "timeout_s": 5.0, "batch_size": 1} | http)
    try:
        url = server.url.replace("/get_reward", "/v1")
        return Endpoint(FLAG, url, config).log_probs(batch(), 1.0).result(), server
    finally:
        server.close()


def test_a_server_is_asked_for_ids_and_answers_by_ids():
    found, server = asked(lambda body: (200, scores(body)))
    assert found.tolist() == pytest.approx([0, -0.2, -0.3, 0, -0.5])
    assert sorted(body["prompt"] for body in server.seen) == [[[1, 2, 3]], [[4, 5]]]
    assert all(body["prompt_logprobs"] == 0 and body["max_tokens"] == 1 for body in server.seen)


def test_a_failure_that_passes_costs_a_try(monkeypatch):
    monkeypatch.setattr("rlhf_suite.rl.teacher_endpoint.wait_s", lambda attempt: 0.0)
    replies = iter([(503, {}), (200, None)])

    def answer(body):
        status, _ = next(replies)
        return status, scores(body) if status == 200 else {}

    found, _ = asked(answer, batch_size=2)
    assert found.tolist() == pytest.approx([0, -0.2, -0.3, 0, -0.5])


@pytest.mark.notices(
    "a log-prob that the teacher did not give is taken for 0",
    "rl/teacher_endpoint.py",
    'value.get("logprob") if isinstance(value, dict) else None',
    'value.get("logprob") if isinstance(value, dict) else 0.0',
)
@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (
            (500, b"out of memory"),
            r"the teacher does not answer\. .*HTTP 500: out of memory \(after 2 tries\)\. Start it",
        ),
        ((400, b"too long"), r"HTTP 400: too long\. Start it again"),
        ((401, b""), "export the server's token as RLHF_SUITE_TEACHER_TOKEN"),
        ((200, {"choices": []}), "does not have one choice for each of the 2 prompts"),
        (
            (200, {"choices": [{"prompt_logprobs": None}] * 2}),
            r"no prompt_logprobs of each token .*rl_distillation\.md",
        ),
        (
            (200, {"choices": [{"prompt_logprobs": [None, {"7": {"logprob": -1}}, {"3": {"logprob": -1}}]}] * 2}),
            "no log-prob of token 2 at place 1 of a prompt .*student's vocabulary",
        ),
        (
            (200, b'{"choices": [{"prompt_logprobs": [null, {"2": {"logprob": NaN}}, {}]}, {}]}'),
            "no log-prob of token 2",
        ),
        ((200, b"<html>"), "not JSON"),
    ],
)
def test_what_a_teacher_cannot_say_ends_the_run(reply, said, monkeypatch):
    monkeypatch.setattr("rlhf_suite.rl.teacher_endpoint.wait_s", lambda attempt: 0.0)
    with pytest.raises(RunError, match=said) as failed:
        asked(lambda body: reply, batch_size=2)
    assert str(failed.value).startswith(FLAG)


@pytest.mark.notices(
    "the token of a teacher stands in errors",
    "foreign_text.py",
    "if is_secret(name, value):",
    "if False and is_secret(name, value):",
)
def test_a_server_that_quotes_the_token_gives_it_to_no_error(monkeypatch):
    monkeypatch.setenv("RLHF_SUITE_TEACHER_TOKEN", "s3cret")
    with pytest.raises(RunError, match=r"HTTP 400: Bearer <RLHF_SUITE_TEACHER_TOKEN> may not") as failed:
        asked(lambda body: (400, b"Bearer s3cret may not"), batch_size=2)
    assert "s3cret" not in str(failed.value)


def test_a_teacher_that_is_not_there_ends_the_run():
    endpoint = Endpoint(FLAG, "http://127.0.0.1:1/v1", HttpConfig(num_retries=0))
    with pytest.raises(RunError, match=r"the teacher does not answer\. http://127.0.0.1:1/v1/completions: .*\(after 1"):
        endpoint.log_probs(batch(), 1.0).result()


@pytest.mark.parametrize(
    ("tokens", "said"),
    [(None, None), ([1, 2, 3], "its vocabulary is not that of the student"), ("404", "not compared")],
)
def test_the_tokens_of_a_teacher_are_compared_with_those_of_the_student(tokens, said):
    student = byte_tokenizer()
    own = student.encode(PROBE, add_special_tokens=False) if tokens is None else tokens
    server = RewardServer(lambda body: (404, {}) if own == "404" else (200, {"tokens": own}))
    endpoint = Endpoint(FLAG, server.url.replace("/get_reward", "/v1"), HttpConfig(num_retries=0))
    try:
        if isinstance(own, list) and said is not None:
            with pytest.raises(UserError, match=said):
                list(endpoint.check(student))
        else:
            notices = list(endpoint.check(student))
            assert notices == [] if said is None else said in notices[0]
    finally:
        server.close()
