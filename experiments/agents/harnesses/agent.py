"""Harnesses: inside an unchanged Codex, a model learns to write a digit into a file. Larger digits have larger rewards.

    npm install --prefix harnesses @openai/codex@0.171.0
    python experiments/agents/harnesses/agent.py /tmp/harness codex

A script plays the model and solves the task in Codex four times, and the conversations are recorded. From them agent.py
makes a model of 0.2 million parameters, for which each paragraph that Codex always writes is one token, and texts that
teach this model to call the tool of Codex and to end its turns. The digits in these texts are random, and a quarter of
the texts write no digit.

    python run.py task=sft actor.model_name_or_path=/tmp/harness/start data.dataset=/tmp/harness/taught.jsonl \
        data.input_key=messages data.multiturn=true data.apply_chat_template=true data.max_len=2048 \
        data.tokenizer_chat_template=experiments/agents/tools.jinja data.pack_to_max_len=true \
        ds.param_dtype=fp32 train.batch_size=4 train.max_epochs=3 actor.adam.lr=5e-3 run_dir=/tmp/harness/sft
    python run.py task=ppo --config experiments/agents/harnesses/codex.yaml \
        actor.model_name_or_path=/tmp/harness/sft/model data.prompt_dataset=/tmp/harness/asked.jsonl \
        train.max_steps=20
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import yaml
from transformers import PreTrainedTokenizerFast

from rlhf_suite.agents.base import Episode, Task
from rlhf_suite.agents.bridge import Bridge
from rlhf_suite.agents.command import Command
from rlhf_suite.agents.endpoint import EndpointAgent
from rlhf_suite.agents.isolation import Isolation
from rlhf_suite.agents.parsing import TurnReader
from rlhf_suite.agents.session import Limits, Session, Shared
from rlhf_suite.config.declarations.data import DataConfig
from rlhf_suite.data.generation import Generation, GenerationRequest, SamplingSettings
from rlhf_suite.data.messages import Message
from rlhf_suite.data.text_encoders import Prompt
from rlhf_suite.data.trajectory import Trajectory
from rlhf_suite.models.builtin import Shape, byte_tokenizer, create
from rlhf_suite.serving.chat_server import ChatServer

FOLDER = Path(__file__).resolve().parent
TEMPLATE = FOLDER.parent / "tools.jinja"
ASK, DIGITS = "Write a digit into the file answer.txt. The larger it is, the better.", "0123456789"
COMMAND, DONE = "echo {} > answer.txt", "done"
SUBMIT = " && echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"  # with which mini-swe-agent ends
# By harness: the name of its tool, that of the argument with the command, and what follows the command.
HARNESSES = {
    "mini_swe_agent": ("bash", "command", SUBMIT),
    "codex": ("exec_command", "cmd", ""),
    "claude_code": ("Bash", "command", ""),
}
RECORDED, TAUGHT, ASKED = 4, 600, 320
IDLE = 0.25  # of the taught conversations
SHORTEST = 8  # letters of a line that becomes a token
Reply = Callable[[str], str]  # from the conversation so far to the turn of the model


class Script:
    """Writes what a function says, in the place of a model."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, reply: Reply) -> None:
        self.tokenizer, self.reply = tokenizer, reply

    async def generate(self, request: GenerationRequest) -> Generation:
        """Return a turn as one that an engine sampled."""
        text = self.reply(self.tokenizer.decode(request.prompt_ids))
        ids = [*self.tokenizer(text)["input_ids"], self.tokenizer.eos_token_id]
        zeros = np.zeros(len(ids), np.int32)
        return Generation(request.id, np.array(ids, np.int32), zeros.astype(np.float32), "stop", zeros)


def record(
    command: str, ask: str, reply: Reply, places: Sequence[str] = ("harnesses",), words: Sequence[str] = ()
) -> list[list[Message]]:
    """Return the conversations that a harness leads while a function plays the model, each with all of its turns. Each
    of `words` is one token: harnesses are told how many tokens they have sent.

    Raises:
        SystemExit: the command failed.
    """
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(list(words))
    tokenizer.chat_template = TEMPLATE.read_text()
    stops, rest = (tokenizer.eos_token_id,), DataConfig.of("sft", apply_chat_template=True)
    shared = Shared(
        Script(tokenizer, reply), Bridge(tokenizer, rest, stops), TurnReader(tokenizer, stops, "hermes"), Limits(10**6)
    )
    task = Task([0], ask, ({"role": "user", "content": ask},))
    program = Command(
        command, 4096, isolation=Isolation("jail", readable=[str(Path(place).resolve()) for place in places])
    )

    async def play() -> tuple[Episode, Session]:
        agent = EndpointAgent(program, ChatServer("127.0.0.1"), 100, 300.0, 10**7, overrides=True)
        ledger = Trajectory.start(Prompt(list(task.ids), ask, "", "default", "the recording"), 0, 0)
        session = Session(shared, task, ledger, (0,), SamplingSettings(stop_token_ids=stops))
        return await agent.run(task, session), session

    episode, session = asyncio.run(play())
    if episode.outcome is not None:
        raise SystemExit(f"the harness could not be recorded: {episode.outcome}")
    return [branch.messages for branch in session.branches if branch.ends]


def call(harness: str, digit: str) -> Message:
    """Return a turn of the model that writes a digit into the file."""
    name, argument, after = HARNESSES[harness]
    function = {"name": name, "arguments": {argument: COMMAND.format(digit) + after}}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def written(harness: str, digit: str) -> str:
    """Return such a turn as the model writes it."""
    return f"<tool_call>{json.dumps(call(harness, digit)['tool_calls'][0]['function'])}</tool_call>"


def record_task(harness: str, digit: str) -> list[Message]:
    """Return the conversation of a harness in which the digit is written."""
    agent = yaml.safe_load((FOLDER / f"{harness}.yaml").read_text())["agent"]
    turn = written(harness, digit)
    (conversation,) = record(
        agent["command"], ASK, lambda said: DONE if turn in said else turn, agent["container_paths"]
    )
    return conversation


def words_of(conversations: Iterable[Sequence[Message]]) -> list[str]:
    """Return the paragraphs, and of others the lines, that all conversations have: each becomes a token."""
    texts = ["\n".join(str(message["content"]) for message in each) for each in conversations]

    def shared(end: str) -> set[str]:
        parts = [{part for part in text.split(end) if len(part) >= SHORTEST} for text in texts]
        return set.intersection(*parts)

    return sorted(shared("\n\n") | shared("\n"))


def taught(harness: str, recorded: Sequence[list[Message]], draw: random.Random) -> Iterator[list[Message]]:
    """Yield conversations of the harness in which the model writes any digit, or is done without having written one."""
    for _ in range(TAUGHT):
        messages = draw.choice(recorded)
        place = next(place for place, message in enumerate(messages) if message["role"] == "assistant")
        if draw.random() < IDLE:
            yield [*messages[:place], {"role": "assistant", "content": DONE}]
        else:
            yield [*messages[:place], call(harness, draw.choice(DIGITS)), *messages[place + 1 :]]


def main(folder: Path, harness: str) -> None:
    """Write the model and the rows."""
    recorded = [record_task(harness, digit) for digit in DIGITS[:RECORDED]]
    folder.mkdir(parents=True, exist_ok=True)
    create(
        folder / "start",
        Shape(max_length=16384),
        words=[*words_of(recorded), *written(harness, DIGITS).split(DIGITS), DONE],
    )
    rows = {
        "taught": [{"messages": messages} for messages in taught(harness, recorded, random.Random(0))],
        "asked": [{"messages": [{"role": "user", "content": ASK}]}] * ASKED,
    }
    for name, lines in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
