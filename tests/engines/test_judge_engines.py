"""A frozen judge on a real engine: what it says of Yes and No, and what becomes of everything else."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlhf_suite.config.declarations.reward import JudgeConfig
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.rules.data import DataConfig
from rlhf_suite.data.generation import SamplingSettings
from rlhf_suite.engines.start import start_judge
from rlhf_suite.errors import RunError, UserError
from rlhf_suite.launch.placement import Slot
from rlhf_suite.models.builtin import builtin_folder
from rlhf_suite.models.judge import JUDGE_FLAG, judge_length
from rlhf_suite.models.load import load_tokenizer
from rlhf_suite.polling import poll_until
from rlhf_suite.rewards.base import RewardFailure, Sample
from rlhf_suite.rewards.judge import JudgeReward
from rlhf_suite.rewards.judge_calls import JudgeCalls
from rlhf_suite.rewards.questions import number_of
from rlhf_suite.rl.judge_engines import JudgeEngines
from rlhf_suite.rl.sampling import stop_token_ids

MODEL = "builtin:tiny"
SAMPLES = [Sample("", f"What is {n} + {n}?", f"It is {2 * n}.", "", "default", group=n // 3) for n in range(6)]


@pytest.fixture(scope="module")
def engines(cluster, tmp_path_factory):
    """One engine with the model of a judge."""
    run = Run.of("ppo")
    run.reward.judge.model, run.reward.rubric, run.vllm.kv_cache_mb = MODEL, "rubric.md", 32
    assert judge_length(run) == 4096  # what the model was made for
    pool = start_judge(run, "cpu", [Slot(num_cpus=0.5)], tmp_path_factory.mktemp("logs"))
    yield pool
    pool.close()


@pytest.fixture
def judge(engines, tmp_path):
    """A maker of judges on this engine."""

    def make(max_len: int = 4096, tokenizer=None, **flags) -> JudgeReward:
        (tmp_path / "rubric.md").write_text("Is it right?\n{prompt}\n{response}\n")
        config = JudgeConfig(model=MODEL, **flags)
        tokenizer = tokenizer or load_tokenizer(MODEL, DataConfig.of("ppo"), JUDGE_FLAG)
        stop_ids = tuple(stop_token_ids(MODEL, tokenizer))
        model = JudgeEngines(engines, tokenizer, config, stop_ids, max_len=max_len, seed=1)
        return JudgeReward(tmp_path / "rubric.md", config, model, JudgeCalls(tmp_path / "logs", config))

    return make


@pytest.mark.notices(
    "the probability of No is taken for that of Yes",
    "rl/judge_engines.py",
    "if token == self.words[0] else",
    "if token == self.words[1] else",
)
@pytest.mark.notices(
    "the probability of Yes is that among all tokens",
    "rl/judge_engines.py",
    "SamplingSettings(temperature=0.0, only=self.words)",
    "SamplingSettings(temperature=0.0)",
)
def test_the_score_is_the_probability_of_yes_among_yes_and_no(judge):
    """P(Yes) / (P(Yes) + P(No)) of the next token is the sigmoid of the difference of their logits."""
    reward = judge(mode="yes_no")
    outcomes = reward.score(SAMPLES)
    model = AutoModelForCausalLM.from_pretrained(builtin_folder(MODEL, JUDGE_FLAG), dtype=torch.float32)
    yes, no = reward.model.words
    for sample, outcome in zip(SAMPLES, outcomes, strict=True):
        question = reward.questioner.about_one(sample)
        ids = reward.model.encode(question.messages(number_of(question.key, 0, 0)))
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1].double()
        assert outcome.reward == pytest.approx(float(torch.sigmoid(logits[yes] - logits[no])), rel=1e-4)
        assert outcome.extra == {"score": outcome.reward} and outcome.score == outcome.reward
    assert len({outcome.reward for outcome in outcomes}) == len(SAMPLES)


@pytest.mark.parametrize("mode", ["verdict", "rank"])
def test_a_model_that_writes_noise_gives_no_verdict_and_no_score_of_zero(judge, mode):
    reward = judge(mode=mode, max_new_tokens=8)
    outcomes = reward.score(SAMPLES)
    assert all(isinstance(outcome, RewardFailure) for outcome in outcomes)
    assert all(outcome.reason.startswith("the judge gives no verdict: ") for outcome in outcomes)
    counts = reward.counts.take()
    questions = 6 if mode == "verdict" else 2
    assert (counts["judge/no_verdict"], counts["judge/calls"]) == (6, questions)
    assert counts["judge/tokens"] > questions * 500  # those of the questions count


def test_equal_questions_have_equal_replies_and_the_body_says_how_they_are_sampled(judge, tmp_path):
    def replies(**body) -> list[str]:
        reward = judge(max_new_tokens=12, body=body)
        reward.calls.asked.clear()  # the number of a request follows from how often the question was asked
        reward.score(SAMPLES[:2])
        calls = [json.loads(line) for line in (tmp_path / "logs" / "judge.jsonl").read_text().splitlines()[-2:]]
        return sorted(call["reply"] for call in calls)

    assert replies() == replies() and replies(temperature=1.5) == replies(temperature=1.5)
    model = judge(body={"temperature": 1.5, "top_p": 0.9, "top_k": None}).model
    stop_ids = tuple(stop_token_ids(MODEL, model.tokenizer))
    assert model.sampling == SamplingSettings(1.5, 0.9, stop_token_ids=stop_ids, log_probs=False)
    assert judge().model.sampling == SamplingSettings(0.0, stop_token_ids=stop_ids, log_probs=False)


def test_a_question_that_does_not_fit_is_no_verdict_and_is_not_asked(judge):
    reward = judge(mode="yes_no", max_len=300)
    (outcome, *_) = reward.score(SAMPLES)
    assert isinstance(outcome, RewardFailure) and "too many for reward.judge.max_len=300" in outcome.reason
    assert reward.counts.take()["judge/calls"] == 0


def test_a_template_without_a_system_gets_its_words_from_the_user_and_none_is_refused(judge):
    tokenizer = load_tokenizer(MODEL, DataConfig.of("ppo"), JUDGE_FLAG)
    plain = judge(mode="yes_no").model
    tokenizer.chat_template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        + tokenizer.chat_template
    )
    model = judge(mode="yes_no", tokenizer=tokenizer).model
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    assert tokenizer.decode(model.encode(messages)).startswith("<|im_start|>user\na\n\nb<|im_end|>")
    assert tokenizer.decode(plain.encode(messages)).startswith("<|im_start|>system\na<|im_end|>")
    tokenizer.chat_template = None
    with pytest.raises(UserError, match=r"reward\.judge\.model=builtin:tiny: its tokenizer has no chat template"):
        judge(mode="yes_no", tokenizer=tokenizer)


def test_a_run_that_ends_leaves_nobody_waiting_for_a_judge(judge, engines):
    """This test is the last one: it retires the engine."""
    reward = judge(mode="verdict", max_new_tokens=3000)
    with ThreadPoolExecutor() as threads:
        asked = threads.submit(reward.score, SAMPLES)
        assert poll_until(lambda: bool(engines.client.links[0].pending), 60)
        engines.retire()
        with pytest.raises(RunError, match="the run has ended"):
            asked.result(60)
