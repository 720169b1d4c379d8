"""A function of the user's own that returns something of another type or shape is named, with its file and line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from rlhf_suite.agents.parsing import TurnReader
from rlhf_suite.algo.advantage import CreditInput, assign_credit
from rlhf_suite.algo.kl import estimate_kl
from rlhf_suite.algo.scores import aggregate
from rlhf_suite.config.declarations.algo import AdvantageConfig, AlgoConfig
from rlhf_suite.config.declarations.models import ActorConfig, TrainedModelConfig
from rlhf_suite.data.generation import Generation
from rlhf_suite.errors import UserError
from rlhf_suite.losses.distillation import distances
from rlhf_suite.losses.policy import PolicyTokens, policy_term
from rlhf_suite.losses.preference import Answers, preference_term, reward_term
from rlhf_suite.losses.reduce import num_units
from rlhf_suite.preflight.trial_calls import CALLS as TRIAL_CALLS
from rlhf_suite.preflight.trial_calls import ask_teacher
from rlhf_suite.registry import KINDS, teacher
from rlhf_suite.train.schedules import learning_rate_factor
from tokenizer_kinds import tokenizer_of

ONES, PAIRS = torch.ones(3), torch.ones(2)
SEGMENTS = torch.zeros(3, dtype=torch.long)
CREDIT = CreditInput(torch.ones(1), ONES, torch.tensor([3]), torch.zeros(1, dtype=torch.long))
TOKENS = PolicyTokens(ONES, ONES, ONES, ONES, SEGMENTS, 1)
ANSWERS = Answers(PAIRS, PAIRS, PAIRS)
SPOKEN = Generation(0, np.array([1], np.int32), np.zeros(1, np.float32), "stop", np.zeros(1, np.int32))


def read_turn(own: str) -> object:
    return TurnReader(tokenizer_of("bytes"), [], own).turn(SPOKEN, [1], [])


CALLS: dict[str, tuple[str, Callable[[str], object]]] = {
    "setup": ("a function of a batch and a temperature", ask_teacher),
    "inputs, config": (
        "Credit(advantages, returns), each one number for each of the 3 tokens",
        lambda own: assign_credit(CREDIT, AdvantageConfig(estimator=own)),
    ),
    "tokens, config": (
        "TokenLosses with the loss of each of the 3 tokens",
        lambda own: policy_term(TOKENS, ActorConfig.of("ppo", policy_loss_type=own), ONES, ONES.sum()),
    ),
    "mask, segments, num_sequences, horizon": (
        "Weights(tokens [3], units: a scalar)",
        lambda own: num_units(ONES, SEGMENTS, 1, own),
    ),
    "chosen, rejected, config": (
        "the loss of each of the 2 pairs",
        lambda own: preference_term(ANSWERS, ANSWERS, PAIRS, AlgoConfig.of("dpo", loss=own)),
    ),
    "chosen, rejected, margin": (
        "the loss of each of the 2 pairs",
        lambda own: reward_term(PAIRS, PAIRS, PAIRS, PAIRS, own),
    ),
    "teacher, student": (
        "the divergence at each of the 3 tokens",
        lambda own: distances(own, torch.zeros(3, 1), torch.zeros(3, 1)),
    ),
    "log_ratio": ("a tensor with the shape of log_ratio, [3]", lambda own: estimate_kl(ONES, ONES, own)),
    "scores": ("a number", lambda own: aggregate([0.5], own)),
    "moment, config": (
        "a number",
        lambda own: learning_rate_factor(9, 10, TrainedModelConfig.of("ppo", lr_scheduler=own)),
    ),
    "written, tools": ("Parsed(content, calls, reasoning)", read_turn),
}


@pytest.mark.notices(
    "what an own estimator returns is used whatever it is",
    "algo/advantage.py",
    "    if not all(is_like(values, inputs.kl_penalty) for values in numbers):\n",
    "    if False:\n",
)
@pytest.mark.notices(
    "a loss of another shape is broadcast",
    "losses/preference.py",
    "    if not is_like(losses, counted):\n        raise preference_loss",
    "    if False:\n        raise preference_loss",
)
@pytest.mark.parametrize("arguments", CALLS)
@pytest.mark.parametrize(
    ("returns", "shown"),
    [("None", "NoneType"), ("'a text'", "str"), ("torch.ones(3, 4)", "Tensor of shape [3, 4]")],
)
def test_what_an_own_function_returned_is_named_with_its_file_and_line(tmp_path, arguments, returns, shown):
    if arguments in ("scores", "moment, config") and "torch" in returns:
        returns, shown = "[1.0]", "list"  # a tensor may be a number
    file = tmp_path / "mine.py"
    file.write_text(f"import torch\n\ndef mine({arguments}):\n    return {returns}\n")
    wanted, call = CALLS[arguments]
    with pytest.raises(UserError) as refused:
        call(f"{file}:mine")
    said = str(refused.value)
    assert said.startswith(f"{file}:3: mine returned {shown}, as ") and f"; return {wanted} (docs/own_code.md)" in said


def test_shapes_within_what_was_returned_are_shown(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from rlhf_suite.algo.advantage import Credit\n"
        "def mine(inputs, config):\n    return Credit(inputs.rewards, inputs.kl_penalty)\n"
    )
    with pytest.raises(UserError, match=r"returned Credit \(advantages: Tensor of shape \[1\], returns: Tens"):
        assign_credit(CREDIT, AdvantageConfig(estimator=f"{file}:mine"))


@pytest.mark.parametrize("kind", TRIAL_CALLS)
def test_the_numbers_of_a_trial_are_such_that_every_function_of_the_suite_takes_them(kind):
    for name in KINDS[kind].names():
        if not (kind == "teacher" and teacher.needs(name, "server")):
            TRIAL_CALLS[kind](name)


@pytest.mark.notices(
    "what a teacher of the user's says of fewer tokens is taken for all",
    "rl/teachers.py",
    "values.shape == (num_tokens,)",
    "len(values)",
)
@pytest.mark.parametrize("answer", ["batch.tokens.mask[:3]", "batch.tokens.ids", "None"])
def test_a_teacher_says_a_number_of_every_token(tmp_path, answer):
    file = tmp_path / "mine.py"
    file.write_text(f"def mine(setup):\n    return lambda batch, temperature: {answer}\n")
    with pytest.raises(UserError, match=r"mine returned .*; return from its function an object whose result\(\) is"):
        ask_teacher(f"{file}:mine")


def test_a_teacher_of_the_users_own_may_mix_others(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "own_code_inputs.md").read_text()
    (example,) = (block for block in page.split("```python\n")[1:] if "class Mixed" in block)
    (tmp_path / "mine.py").write_text(example.partition("```")[0])
    assert ask_teacher(f"{tmp_path / 'mine.py'}:mixed").tolist() == pytest.approx([np.log(0.5)] * 5)
