"""What a reward sees is the same text, and a reward model's score the same number, on every way there is to ask:
beside the policy, from `generate`, by `score` on a file, over HTTP, by `check_reward`, in a .py file."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from reward_server import RewardServer
from rlhf_suite.cli import main
from rlhf_suite.composition.arguments import parse
from rlhf_suite.config.declarations.data import DataConfig
from rlhf_suite.config.declarations.ds import DeepSpeedConfig
from rlhf_suite.config.declarations.reward import RewardConfig
from rlhf_suite.config.plan.run_plan import ModelPlan
from rlhf_suite.data.ending import Ending
from rlhf_suite.data.generation import Generation
from rlhf_suite.data.row import Row
from rlhf_suite.data.text_encoders import PromptEncoder
from rlhf_suite.data.trajectory import Trajectory
from rlhf_suite.models.builtin import create_tiny
from rlhf_suite.offline.answers import Answerer, Work
from rlhf_suite.offline.scores import text_sample
from rlhf_suite.preflight.jobs import preflight
from rlhf_suite.rewards.base import Sample
from rlhf_suite.rewards.sources import Rewards
from rlhf_suite.rl.judge import TextJudge
from rlhf_suite.rl.scoring import Scorer
from small_runs import batch_run

pytestmark = pytest.mark.stack

COUNT, PER_PROMPT, SAME = 35, 5, 1e-6
RECORDING = """
import json
from pathlib import Path

def reward_func(queries, prompts, labels, columns):
    with Path(__file__).with_suffix(".asked").open("a") as file:
        file.writelines(json.dumps(query) + "\\n" for query in queries)
    return [float(len(query)) for query in queries]
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A reward model in fp32 whose head says something."""
    folder = tmp_path_factory.mktemp("rm") / "model"
    create_tiny(folder)
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1).save_pretrained(folder)
    return folder


class Answered:
    """35 answers of a policy: most are finished, some cut off, one empty, one with a special token in its middle."""

    def __init__(self, model):
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        (self.config,) = preflight(
            parse(
                f"task=generate actor.model_name_or_path={model} data.prompt_dataset=builtin:reverse data.input_key=q "
                f"data.apply_chat_template=true rollout.n_samples_per_prompt={PER_PROMPT}".split()
            )
        ).runs
        data = replace(self.config.data, reward_columns=["level"])
        encoder, draw = PromptEncoder(self.tokenizer, data), random.Random(0)
        self.rows = [Row({"q": f"say {n}", "level": {"n": [n]}}, "q.jsonl", n + 1) for n in range(COUNT // PER_PROMPT)]
        self.prompts = [encoder.encode(row) for row in self.rows]
        self.answers = []
        for number in range(COUNT):
            text = {3: "", 4: "7<|im_start|>8"}.get(number, f"{draw.random():.8f}"[: 2 + number % 9])
            finished = number % 4 != 0 or number == 4
            ids = [*self.tokenizer(text)["input_ids"], *[self.tokenizer.eos_token_id] * finished]
            reason = "stop" if finished else "length"
            self.answers.append(
                Generation(number, np.array(ids, np.int64), np.zeros(len(ids)), reason, np.zeros(len(ids)))
            )
        self.trajectories = [self.trajectory(number) for number in range(COUNT)]

    def trajectory(self, number):
        answer, prompt = self.answers[number], number // PER_PROMPT
        result = Trajectory.start(self.prompts[prompt], prompt, number % PER_PROMPT)
        result.append_model(answer.ids, answer.log_probs, 0)
        result.ending = Ending.of_response(answer.finish_reason)
        return result

    def rollout_rows(self) -> list[Sample]:
        """What rewards are asked in task=ppo."""
        return Scorer(RewardConfig.of("generate"), self.tokenizer, None, None).samples(self.trajectories)

    def generated(self, folder, scorer=None):
        """The file that task=generate writes of these answers, and of their scores."""
        work = Work(
            range(len(self.rows)),
            [(n, row, prompt) for n, (row, prompt) in enumerate(zip(self.rows, self.prompts, strict=True))],
            {n: self.trajectories[n * PER_PROMPT : (n + 1) * PER_PROMPT] for n in range(len(self.rows))},
        )
        if scorer is not None:
            work.scores.update(scorer.score([*work.groups.values()]).groups)
        sampler = SimpleNamespace(engines=SimpleNamespace(loop=None))
        made = Answerer(self.config, self.tokenizer, sampler, scorer, limit=1).finish(work).rows
        path = folder / "generated.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in made))
        return path


@pytest.fixture(scope="module")
def answered(model):
    return Answered(model)


@pytest.fixture(scope="module")
def wanted(model, answered):
    """The score of each trajectory as transformers gives it."""
    plain = AutoModelForSequenceClassification.from_pretrained(model)
    with torch.no_grad():
        return [float(plain(input_ids=torch.tensor([t.ids])).logits[0, 0]) for t in answered.trajectories]


@pytest.fixture(scope="module")
def served(model):
    """The model of task=serve_rm behind HTTP."""
    plan = ModelPlan("reward", str(model), "value")
    judge = TextJudge(plan, DeepSpeedConfig.of("serve_rm", packing_samples=True), "cpu", None, 64)
    server = RewardServer(lambda body: (200, {"rewards": judge.scores([judge.encode(t) for t in body["query"]])}))
    yield server
    server.close()


def scores(path):
    return [json.loads(line)["score"] for line in path.read_text().splitlines()]


def rewards_of(config, folder, rows):
    rewards = Rewards(config, folder / "reward.log")
    found = rewards.score(rows)[0]
    rewards.close()
    return [outcome.reward for outcome in found]


def test_a_reward_model_gives_every_answer_the_same_score_on_every_way(
    ranks, model, answered, wanted, served, tmp_path
):
    path, found = answered.generated(tmp_path), {}
    found["ppo, generate by HTTP"] = rewards_of(
        RewardConfig.of("generate", remote_url=served.url), tmp_path, answered.rollout_rows()
    )
    line = f"task=score data.dataset={path} score.output_path={tmp_path}"
    local = f"reward.model_name_or_path={model}"
    ranks(1).call(batch_run, tmp_path / "a", f"{line}/local.jsonl {local}")
    batch_run(None, tmp_path / "b", f"{line}/http.jsonl reward.remote_url={served.url}")
    found["score, local"], found["score, HTTP"] = scores(tmp_path / "local.jsonl"), scores(tmp_path / "http.jsonl")
    # without the column of the whole text, by the column that says what is finished
    bare = tmp_path / "bare.jsonl"
    rows = [json.loads(text) for text in path.read_text().splitlines()]
    bare.write_text("".join(json.dumps({k: v for k, v in r.items() if k != "reward_query"}) + "\n" for r in rows))
    line = f"task=score data.dataset={bare} score.output_path={tmp_path}"
    ranks(1).call(batch_run, tmp_path / "c", f"{line}/bare_local.jsonl {local}")
    end = "'data.response_end=\"<|im_end|>\"'"
    batch_run(None, tmp_path / "d", f"{line}/bare_http.jsonl reward.remote_url={served.url} {end}")
    for name in ("bare_local", "bare_http"):
        found[name] = scores(tmp_path / f"{name}.jsonl")
        found[name][4] = wanted[4]  # its special token is in the column that is not there
    before = len(served.seen)
    folder = f"hydra.run.dir={tmp_path}/check"
    checking = ["task=check_reward", f"data.dataset={path}", "data.output_key=response", "data.max_samples=35", folder]
    assert main([*checking, f"reward.remote_url={served.url}"]) == 0
    alone = [body["query"][0] for body in served.seen[before : before + COUNT]]
    assert alone == [row.query for row in answered.rollout_rows()]
    worst = {name: np.abs(np.array(values) - wanted).max() for name, values in found.items()}
    assert {name: error for name, error in worst.items() if error > SAME} == {}, worst
    assert np.std(wanted) > 1e-3


def test_a_file_is_asked_the_same_text_on_every_way(answered, tmp_path):
    """With the end-of-sequence token where the answer is finished, and without it where it was cut off."""
    path, file = answered.generated(tmp_path), tmp_path / "recording.py"
    file.write_text(RECORDING)
    asked = file.with_suffix(".asked")

    def seen():
        texts = [json.loads(line) for line in asked.read_text().splitlines()]
        asked.unlink()
        return texts

    wanted = [answered.tokenizer.decode(t.ids, skip_special_tokens=False) for t in answered.trajectories]
    rewards_of(RewardConfig.of("generate", remote_url=str(file)), tmp_path, answered.rollout_rows())
    assert seen() == wanted
    batch_run(None, tmp_path / "a", f"task=score data.dataset={path} reward.remote_url={file}")
    assert seen() == wanted
    checking = f"task=check_reward data.dataset={path} data.output_key=response data.max_samples=35"
    batch_run(None, tmp_path / "b", f"{checking} reward.remote_url={file}")
    assert seen() == wanted * 2  # each alone, then all as a batch
    ends = [text.endswith("<|im_end|>") for text in wanted]
    assert ends == [answer.finish_reason == "stop" for answer in answered.answers]


def test_the_column_of_scores_means_the_same_on_every_way(answered, tmp_path):
    """What an evaluation counts, where a reward says it apart from what is learned from; best of n are ranked by it."""
    file = tmp_path / "two.py"
    file.write_text(
        "def reward_func(queries, prompts, labels, columns):\n"
        "    return {'rewards': [-float(len(q)) for q in queries], 'scores': [len(q) % 7 / 7 for q in queries]}\n"
    )
    rewards = Rewards(RewardConfig.of("generate", remote_url=str(file)), tmp_path / "reward.log")
    scorer = Scorer(RewardConfig.of("generate"), answered.tokenizer, rewards, None)
    path = answered.generated(tmp_path, scorer)
    rewards.close()
    line = f"task=score data.dataset={path} reward.remote_url={file} score.output_path={tmp_path}"
    batch_run(None, tmp_path / "a", f"{line}/scored.jsonl")
    assert scores(tmp_path / "scored.jsonl") == pytest.approx(scores(path), abs=SAME)
    batch_run(None, tmp_path / "b", f"{line}/best.jsonl score.best_of_n=true")
    groups = [scores(path)[i : i + PER_PROMPT] for i in range(0, COUNT, PER_PROMPT)]
    assert scores(tmp_path / "best.jsonl") == pytest.approx([max(group) for group in groups], abs=SAME)


def test_rows_with_an_empty_response_are_kept(ranks, model, served, tmp_path):
    """In files of others, too: with and without a chat template, finished and cut off."""
    source = tmp_path / "rows.jsonl"
    rows = [("", "stop"), ("", "length"), ("5", "stop"), ("5", "length"), ("5", None)]
    source.write_text("".join(json.dumps({"prompt": "p", "response": r, "finish_reason": f}) + "\n" for r, f in rows))
    plain = AutoModelForSequenceClassification.from_pretrained(model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    for template in ("false", "true"):
        line = (
            f"task=score data.dataset={source} reward.model_name_or_path={model} "
            f"data.apply_chat_template={template} score.output_path={tmp_path}/{template}.jsonl"
        )
        ranks(1).call(batch_run, tmp_path / template, line)
        prompt = "<|im_start|>user\np<|im_end|>\n<|im_start|>assistant\n" if template == "true" else "p"
        for (response, reason), score in zip(rows, scores(tmp_path / f"{template}.jsonl"), strict=True):
            ids = tokenizer(prompt + response + "<|im_end|>" * (reason != "length"))["input_ids"]
            with torch.no_grad():
                expected = float(plain(input_ids=torch.tensor([ids])).logits[0, 0])
            assert score == pytest.approx(expected, abs=SAME), (template, response, reason)


def test_a_column_that_cannot_say_what_is_finished_is_a_bad_row(tmp_path, capsys):
    source = tmp_path / "rows.jsonl"
    rows = [{"prompt": "p", "response": "r", "finish_reason": reason} for reason in (7, "stop")]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    metrics = batch_run(None, tmp_path / "run", f"task=score data.dataset={source} reward.rule=length")
    assert metrics["skipped"] == 1
    assert "column 'finish_reason' is of type int; it must be text" in capsys.readouterr().out


def test_servers_that_are_sent_responses_without_an_end_are_warned_of(served, tmp_path, capsys):
    source = tmp_path / "rows.jsonl"
    source.write_text(json.dumps({"prompt": "p", "response": "r"}) + "\n")
    rows = f"data.dataset={source} reward.remote_url={served.url}"
    batch_run(None, tmp_path / "a", f"task=score {rows}")
    assert "1 x sent to a reward server without the end-of-sequence token" in capsys.readouterr().out
    end = "'data.response_end=\"<|im_end|>\"'"
    batch_run(None, tmp_path / "b", f"task=score {rows} {end}")
    batch_run(None, tmp_path / "c", f"task=check_reward data.output_key=response {rows}")
    batch_run(None, tmp_path / "d", f"task=check_reward data.output_key=response {rows} {end}")
    shown = " ".join(capsys.readouterr().out.split())
    assert "without the end-of-sequence" not in shown
    assert shown.count("no response has an end-of-sequence token") == 1


def test_further_columns_reach_the_reward_alike_in_a_run_and_from_a_file(answered, tmp_path):
    asked = [row.columns for row in answered.rollout_rows()]
    assert asked == [{"level": {"n": [number // PER_PROMPT]}} for number in range(COUNT)]
    data, lines = (
        DataConfig.of("score", reward_columns=["level"]),
        answered.generated(tmp_path).read_text().splitlines(),
    )
    assert [text_sample(Row(json.loads(line), "f", 1), data, "response").columns for line in lines] == asked
