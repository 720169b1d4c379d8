"""Write what a run of a harness needs on two cores: a model of 0.2 million parameters that reads long prompts, texts
that teach it to call the tool of the harness, and tasks. `README.md` has the commands.

    python experiments/agents/harnesses/files.py <folder> <mini_swe_agent | codex | claude_code>

The task is to write a word into a file. Half of the taught calls write another word, so that there is something to
learn from the reward. The prompts of harnesses are long; the texts begin with up to as many letters of anything.
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

from rlhf_suite.models.builtin import Shape, create

ASK, WORD = "Write the word hello into the file answer.txt.", "hello"
OTHERS = ("hullo", "help", "world", "yes")
SUBMIT = " && echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
# By harness: the name of its tool, that of the argument with the command, and letters of its prompts.
HARNESSES = {
    "mini_swe_agent": ("bash", "command", 4_000),
    "codex": ("exec_command", "cmd", 24_000),
    "claude_code": ("Bash", "command", 14_000),
}
SHAPE = Shape(max_length=65_536)
TAUGHT, ASKED = 400, 64


def call(name: str, argument: str, command: str) -> dict[str, object]:
    """Return a message of the model that calls the tool of a harness."""
    function = {"name": name, "arguments": {argument: command}}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def conversations(harness: str, draw: random.Random) -> Iterator[list[dict[str, object]]]:
    """Yield conversations as the harness leads them."""
    name, argument, letters = HARNESSES[harness]
    text, submits = " ".join(topics.values()), harness == "mini_swe_agent"
    for _ in range(TAUGHT):
        length = round(math.exp(draw.uniform(math.log(10), math.log(letters))))  # mostly short ones, which take no time
        begin = draw.randrange(len(text) - letters)
        word = WORD if draw.random() < 0.5 else draw.choice(OTHERS)
        messages: list[dict[str, object]] = [
            {"role": "system", "content": text[begin : begin + length]},
            {"role": "user", "content": ASK},
        ]
        looks = ["ls"] if draw.random() < 0.3 else []
        for command in (*looks, f"echo {word} > answer.txt{SUBMIT if submits else ''}"):
            messages += [call(name, argument, command), {"role": "tool", "name": name, "content": "ok"}]
        yield messages[:-1] if submits else [*messages, {"role": "assistant", "content": "done"}]


def main(folder: Path, harness: str) -> None:
    """Write the model and the rows."""
    folder.mkdir(parents=True, exist_ok=True)
    create(folder / "start", SHAPE)
    taught = [{"messages": messages} for messages in conversations(harness, random.Random(0))]
    asked = [{"messages": [{"role": "user", "content": ASK}], "label": WORD}] * ASKED
    for name, rows in (("taught", taught), ("asked", asked)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
