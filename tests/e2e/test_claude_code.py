"""Claude Code with an engine, across a sub-agent and a summary of its own: each sampled token is in one ledger and is
trained on once.

A script leads it through its task and is recorded; a tiny model is taught to do the same, so that its turns end and
call what the script called.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter

import pytest
import yaml
from test_ledgers_of_harnesses import HARNESSES, RECIPES, ROOT, learn, run_noted
from transformers import AutoTokenizer

from rlhf_suite.models.builtin import Shape, create

sys.path.insert(0, str(RECIPES))

import agent

pytestmark = pytest.mark.proof
# It sums up at PCT % of what is left of WINDOW tokens, the smallest that it takes, without those of an answer.
SUMS_UP = "CLAUDE_CODE_AUTO_COMPACT_WINDOW=100000 CLAUDE_AUTOCOMPACT_PCT_OVERRIDE=3"
SUMMARY, DONE = "<summary>A part is done.</summary>", agent.DONE
TIMES = 40  # that each recorded conversation is taught
MARKS = {
    "a sub-agent": "cc_is_subagent=true",
    "a request for a summary": "Your task is to create a detailed summary",
    "what goes on from a summary": "This session is being continued",
}


def written(name: str, **arguments: str) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


STARTS = written("Agent", description="write", prompt="Write a digit.", subagent_type="general-purpose")
WRITES, COUNTS = written("Bash", command="echo 5 > answer.txt"), written("Bash", command="seq 400")


def reply(said: str) -> str:
    """Return the turn of the script after a conversation: a sub-agent writes the digit, and its parent prints numbers
    until it sums up."""
    *_, before, last = re.split(r"<\|im_start\|>", said)[:-1]
    if any(message.startswith("user\nCRITICAL") for message in (before, last)):
        return SUMMARY
    if MARKS["a sub-agent"] in said:
        return DONE if "im_start|>tool" in said else WRITES
    if "A part is done." in said:
        return DONE
    return COUNTS if "im_start|>tool" in said else STARTS


def test_a_sub_agent_and_a_summary_of_claude_code_are_trained_on_once(runs, monkeypatch, record_property):
    if not (ROOT / HARNESSES["claude_code"]).exists():
        pytest.skip(f"there is no {HARNESSES['claude_code']}; {RECIPES.name}/README.md says how it is installed")
    monkeypatch.chdir(ROOT)
    home = runs / "claude_code_sums_up"
    recipe = yaml.safe_load((RECIPES / "claude_code.yaml").read_text())
    recipe["agent"] |= {"command": f"{SUMS_UP} {recipe['agent']['command']}", "max_turns": 40}
    command = recipe["agent"]["command"]
    plain = [agent.record(command, agent.ASK, reply) for _ in range(2)]
    words = {word for alike in zip(*plain, strict=True) for word in agent.words_of(alike)}
    calls = {part for turn in (STARTS, WRITES, COUNTS, DONE) for part in turn.partition('"arguments": ') if part}
    conversations = agent.record(command, agent.ASK, reply, words=sorted(words | calls))
    create(home / "start", Shape(max_length=16384), words=sorted(words | calls))
    (home / "taught.jsonl").write_text("".join(json.dumps({"messages": each}) + "\n" for each in conversations) * TIMES)
    (home / "asked.jsonl").write_text((json.dumps({"messages": [{"role": "user", "content": agent.ASK}]}) + "\n") * 8)
    (home / "run.yaml").write_text(yaml.safe_dump(recipe))
    model = learn(home, "data.max_len=4096", "train.batch_size=2", "train.max_epochs=2")
    line = ["--config", str(home / "run.yaml"), f"actor.model_name_or_path={model}", "train.max_steps=1"]
    few = [
        "rollout.batch_size=2",
        "rollout.n_samples_per_prompt=2",
        "train.batch_size=4",
        "train.micro_batch_size=2",
        "rollout.max_new_tokens=4000",
    ]
    more = [f"data.prompt_dataset={home}/asked.jsonl", "data.max_len=8192", "launch.timeout_s=600"]
    books, _ = run_noted(runs, "claude_code_sums_up_run", [*line, *few, *more], monkeypatch)
    books.check(record_property)
    tokenizer, found = AutoTokenizer.from_pretrained(model), Counter[str]()
    for row in books.rows:
        said = tokenizer.decode(row["ids"])
        found.update(what for what, mark in MARKS.items() if mark in said)
    assert set(found) == set(MARKS)
    for what, count in found.items():
        record_property(f"ledgers with {what}", count)
    record_property("turns", books.sum("agent/turns"))
