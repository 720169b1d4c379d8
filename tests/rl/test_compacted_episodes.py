"""Episodes with summaries, trained on: the gradient of their loss by hand, and whole runs."""

from __future__ import annotations

import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from plain_run import run, small
from test_forked_episodes import experience, gradient, ledger
from transformers import AutoModelForCausalLM

from rlhf_suite.config.declarations.ds import DeepSpeedConfig
from rlhf_suite.data.ending import Ending
from rlhf_suite.data.trajectory import MODEL, PROMPT, Trajectory
from rlhf_suite.models.builtin import create_tiny
from rlhf_suite.models.load import load_model
from rlhf_suite.tracking.metrics import read_rows

pytestmark = pytest.mark.stack

BEGIN, TURN, SUMMARY, NEXT = [40, 41], [60, 61, 62], [63, 64, 65, 66], [80, 81]


def compacted(sample: int) -> list[Trajectory]:
    """A turn and a summary; then a turn after the prompt and the summary, which was encoded to other tokens."""
    first = ledger(BEGIN, TURN, SUMMARY, sample=sample)
    first.ending = Ending.COMPACTED
    return [first, ledger([*BEGIN, 90, 91, 92], NEXT, sample=sample, fork=1)]


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_the_gradient_of_compacted_episodes_is_that_of_the_formula_in_float64(tmp_path, mode, record_property):
    """The loss without a clip, a policy that has not moved: - sum_t A_t log p_t w_t / U, each ledger read by itself.
    RLOO advantages of the rewards 2, 0 and 1; w_t / U is 1 / tokens, or 1 / (episodes x tokens of the episode)."""
    create_tiny(tmp_path / "model")
    ledgers = [*compacted(0), ledger(BEGIN, TURN, sample=1), *compacted(2)]
    numbers, rewards = [0, 0, 1, 2, 2], [2.0, 0.0, 1.0]
    batch = experience(ledgers, [rewards[number] for number in numbers], "rloo")
    suite = load_model(str(tmp_path / "model"), head="lm", ds=DeepSpeedConfig.of("sft", param_dtype="fp32"))
    found, _ = gradient(suite, [batch], mode)

    tokens = [sum(ledgers[row].response_length for row in range(5) if numbers[row] == number) for number in range(3)]
    assert tokens == [9, 3, 9], "the summary counts, once"
    exact, total = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float64), 0.0
    for one, number in zip(ledgers, numbers, strict=True):
        log_probs = exact(torch.tensor(one.ids)[None]).logits[0, :-1].log_softmax(-1)
        mask, entropy = torch.tensor(one.model_mask[1:]), -(log_probs.exp() * log_probs).sum(-1)
        chosen = log_probs.gather(1, torch.tensor(one.ids[1:])[:, None])[:, 0]
        advantage = rewards[number] - (sum(rewards) - rewards[number]) / 2
        weight = 1 / sum(tokens) if mode == "token-mean" else 1 / (3 * tokens[number])
        total = total - (advantage * weight * chosen + 0.01 / sum(tokens) * entropy)[mask].sum()
    total.backward()
    wanted = torch.cat([p.grad.flatten() for p in exact.parameters() if p.grad is not None])
    error = float((found.double() - wanted).norm() / wanted.norm())
    record_property("relative difference of gradients", error)
    assert error < 1e-5


CODE = """
from rlhf_suite.agents.base import Start, Step

class Environment:
    async def reset(self, task):
        self.turns = 0
        return Start()

    async def step(self, turn):
        self.turns += 1
        if self.turns == 5:
            return Step(reward=len(turn.ids) / 4, done=True)
        return Step.say("no", reward=0.25)

    async def close(self): ...
"""
FLAGS = {
    "agent__kind": "environment",
    "agent__max_turns": 6,
    "agent__max_feedback_tokens": 16,
    "agent__compact_at_tokens": 60,
    "agent__compact_prompt": "sum up",
    "agent__compact_max_tokens": 40,
    "data__apply_chat_template": True,
    "data__max_len": 300,
    "reward__rule": None,
    "reward__stop_properly_penalty_coef": None,
    "rollout__max_new_tokens": None,
    "algo__kl__init_coef": 0.0,
    "train__max_epochs": 2,
    "ckpt__save_steps": 1,
    "ckpt__load_enable": True,
}


def create_brief(folder: Path) -> None:
    """Write a tiny model that ends every turn after some tokens: half of its probability is at the end of a turn."""
    create_tiny(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        ids = torch.randint(20, 80, (8, 64), generator=generator)
        log_probs = model(ids).logits.log_softmax(-1)
        ends = log_probs[..., model.config.eos_token_id]
        optimizer.zero_grad()
        (-0.5 * ends.mean() - 0.5 * log_probs[..., 20:80].mean()).backward()
        optimizer.step()
    model.save_pretrained(folder)


@pytest.fixture(scope="module")
def whole(ranks, tmp_path_factory):
    """The folder of a run of two steps whose episodes have summaries."""
    folder = tmp_path_factory.mktemp("compacted")
    create_brief(folder / "start")
    (folder / "environment.py").write_text(CODE)
    ranks(1).call(run, folder / "run", of(folder))
    return folder / "run"


def of(folder: Path, **more):
    files = {"train__agent_func_path": f"{folder}/environment.py", "actor__model_name_or_path": f"{folder}/start"}
    return small(**files | FLAGS | more)


@pytest.fixture(scope="module")
def episodes(whole) -> list[list[dict]]:
    """The ledgers of each episode, as the files of rollouts have them."""
    found: dict[tuple[int, ...], list[dict]] = {}
    for step, file in enumerate(sorted((whole / "rollouts").glob("*.parquet"))):
        for row in pq.read_table(file).to_pylist():
            found.setdefault((step, row["group"], row["sample"]), []).append(row)
    return list(found.values())


def test_all_ledgers_of_an_episode_have_its_reward_and_its_advantage(episodes):
    assert any(len(ledgers) > 2 for ledgers in episodes), "or this test looks at nothing"
    for ledgers in episodes:
        assert len({row["reward"] for row in ledgers}) == 1
        advantages = {
            a for row in ledgers for a, owner in zip(row["advantages"], row["owner"], strict=True) if owner == MODEL
        }
        assert len(advantages) == 1
        *before, last = ledgers
        assert {row["ending"] for row in before} <= {"compacted"} and last["ending"] != "compacted"
        assert len(before) == last["agent/compactions"] - (last["ending"] in ("cut", "full"))


def test_the_next_ledger_begins_with_the_prompt_and_the_summary(episodes):
    for ledgers in episodes:
        for before, after in pairwise(ledgers):
            prompt = np.array(after["ids"])[np.array(after["owner"]) == PROMPT]
            assert not (np.array(after["advantages"])[: len(prompt)]).any(), "a summary is trained on once"
            first = np.array(before["ids"])[np.array(before["owner"]) == PROMPT]
            shared = len(first) - 4  # up to the end of the user's message: <|im_end|> \\n <|im_start|>assistant\\n
            assert prompt[: shared - 1].tolist() == first[: shared - 1].tolist()


def test_log_probs_of_engine_and_trainer_agree_in_all_ledgers(episodes, record_property):
    differences = [
        abs(a - b)
        for ledgers in episodes
        for row in ledgers
        for a, b, owner in zip(row["engine_log_probs"], row["old_log_probs"], row["owner"], strict=True)
        if owner == MODEL
    ]
    record_property("mean difference of log-probs", float(np.mean(differences)))
    assert len(differences) > 50 and np.mean(differences) < 1e-6


def test_metrics_count_summaries_and_their_tokens(whole, episodes):
    rows = [row for row in read_rows(whole / "metrics.jsonl") if "train/reward" in row]
    assert all(row["agent/compactions"] > 0 and row["agent/summary_tokens"] > 0 for row in rows)
    assert "agent/ended/compacted" not in rows[0]
    mean = np.mean([ledgers[-1]["agent/compactions"] for ledgers in episodes])
    assert np.mean([row["agent/compactions"] for row in rows]) == pytest.approx(mean)


def test_a_replay_of_summaries_ends_in_the_same_weights(ranks, whole, tmp_path):
    flags = {"rollout__replay": str(whole), "ckpt__save_steps": -1, "ckpt__load_enable": False}
    ranks(1).call(run, tmp_path, of(whole.parent, **flags))
    mine, theirs = ((folder / "model/model.safetensors").read_bytes() for folder in (tmp_path, whole))
    assert mine == theirs


def test_a_run_with_summaries_that_was_stopped_goes_on_as_if_it_had_not_been(ranks, whole, tmp_path):
    again = tmp_path / "again"
    shutil.copytree(whole, again)
    for later in (again / "checkpoints" / "step_000002", again / "model"):
        shutil.rmtree(later)
    ranks(1).call(run, again, of(whole.parent))
    mine, theirs = ((folder / "model/model.safetensors").read_bytes() for folder in (again, whole))
    assert mine == theirs
    tables = [pq.read_table(folder / "rollouts" / "step_000002.parquet").to_pylist() for folder in (again, whole)]
    for row in [*tables[0], *tables[1]]:
        row["turns"] = [turn | {"sampling_s": 0.0, "answer_s": 0.0} for turn in row["turns"]]  # times are no two alike
    assert tables[0] == tables[1]
