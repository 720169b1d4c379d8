"""Every token that an engine samples for a program is in exactly one ledger, and is trained on exactly once.

What the engine samples is noted in its process, at the core of vLLM, and what is trained on in that of the policy, at
its loss (tests/recording/sampled_tokens.py). Between the two are the endpoint, the ledgers and the batches.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections import Counter
from itertools import groupby
from pathlib import Path

import jobs
import numpy as np
import pytest
import yaml
from transformers import AutoTokenizer

from rlhf_suite.data.trajectory import MODEL

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "experiments"))

from examples import commands_of  # noqa: E402

pytestmark = pytest.mark.proof
NOTES = ROOT / "tests" / "recording"
STEPS, PROMPTS, SAMPLES = 3, 4, 2
HARNESS_S = 6 * jobs.DEADLINE_S
HARNESSES = {
    "mini_swe_agent": "harnesses/mini/bin/mini",
    "codex": "harnesses/node_modules/.bin/codex",
    "claude_code": "harnesses/node_modules/.bin/claude",
}
RECIPES = ROOT / "experiments" / "agents" / "harnesses"
# What follows the command of a recipe in the same folder: a harness goes on, sums its conversation up, goes on from the
# summary, and starts a sub-agent, because its user says so. Each is how the command changes, and what stands in a
# ledger then.
CONTINUED = {
    "codex": {
        "git init -q . && echo new > new.txt": (),
        "exec resume --last Go-on": ("CONTEXT CHECKPOINT COMPACTION", "produced by the other language model"),
        "exec review --uncommitted": ("Review the current code changes",),
    },
}
Turn = tuple[int, ...]


def words(model: Path | str, rows: Path) -> list[str]:
    """A step of 4 prompts with two samples each."""
    small = [word for word in jobs.SMALL if not word.startswith(("eval.", "data.", "rollout.", "train.", "launch."))]
    return [
        *small,
        *(f"actor.model_name_or_path={model}", "algo.advantage.estimator=reinforce_baseline", "algo.kl.init_coef=0"),
        *(f"data.prompt_dataset={rows}", "data.label_key=label", "data.input_key=messages", "reward.rule=null"),
        *("data.apply_chat_template=true", f"data.tokenizer_chat_template={ROOT}/experiments/agents/tools.jinja"),
        *(f"rollout.batch_size={PROMPTS}", f"rollout.n_samples_per_prompt={SAMPLES}", f"train.max_steps={STEPS}"),
        *("rollout.micro_batch_size=4", f"train.batch_size={PROMPTS * SAMPLES}", "train.micro_batch_size=4"),
        *("agent.kind=endpoint", "eval.dataset=null", "eval.steps=-1", "launch.timeout_s=600"),
    ]


def turns_of(ids: list[int], mask: list[bool]) -> list[Turn]:
    """Return the runs of tokens where a mask is true."""
    runs = groupby(zip(ids, mask, strict=True), key=lambda pair: bool(pair[1]))
    return [tuple(token for token, _ in run) for is_own, run in runs if is_own]


class Books:
    """What was sampled, kept and trained on in a run: each turn with the number of times that it occurs."""

    def __init__(self, notes: Path, folder: Path, steps: int) -> None:
        pieces: dict[tuple[str, str], list[int]] = {}
        for file in sorted(notes.glob("engine-*.jsonl")):
            for line in file.read_text().splitlines():
                request, ids = json.loads(line)
                pieces.setdefault((file.name, request), []).extend(ids)
        self.sampled = Counter(tuple(ids) for ids in pieces.values())
        self.trained, self.mask = Counter[Turn](), 0.0
        for file in notes.glob("policy-*.jsonl"):
            for line in file.read_text().splitlines():
                ids, mask = json.loads(line)
                self.trained.update(turns_of(ids, mask))
                self.mask += sum(mask)
        self.rows, self.episodes, self.kept = list[dict](), list[dict](), Counter[Turn]()
        for step in range(1, steps + 1):
            rows = jobs.rollout(folder, step)
            last = {(row["group"], row["sample"]): row for row in rows}  # numbers of an episode are in its last ledger
            self.rows, self.episodes = [*self.rows, *rows], [*self.episodes, *last.values()]
        for row in self.rows:
            self.kept.update(turns_of(row["ids"], np.array(row["owner"]) == MODEL))

    def sum(self, metric: str) -> float:
        """Return the sum of a number over all episodes."""
        return sum(episode.get(metric) or 0.0 for episode in self.episodes)

    def check(self, record_property) -> None:
        """Check that nothing was lost or trained twice. Turns that were sampled and are in no ledger are those of equal
        requests of which the program went on with another, which the suite counts as orphans."""
        orphans = self.sum("agent/orphans")
        assert self.sampled and not self.kept - self.sampled, "a ledger has what no engine sampled"
        lost = self.sampled - self.kept
        assert sum(lost.values()) == orphans, f"{sum(lost.values())} turns are in no ledger, {orphans:g} are orphans"
        assert self.trained == self.kept
        tokens = sum(len(turn) * count for turn, count in self.sampled.items())
        of_orphans = sum(len(turn) * count for turn, count in lost.items())
        assert self.mask == tokens - of_orphans == sum(sum(np.array(row["owner"]) == MODEL) for row in self.rows)
        record_property("tokens that the engine sampled", tokens)
        record_property("tokens of orphans", of_orphans)
        record_property("sum of the loss masks", self.mask)
        record_property("ledgers", len(self.rows))


def run_noted(runs: Path, name: str, more: list[str], monkeypatch: pytest.MonkeyPatch) -> tuple[Books, Path]:
    """Run a job whose engine and policy note what they do."""
    folder, notes = runs / name, runs / f"{name}-notes"
    notes.mkdir(parents=True)
    path = [str(NOTES), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
    monkeypatch.setenv("RLHF_SUITE_SAMPLED", str(notes))
    jobs.run(folder, more, deadline_s=HARNESS_S)
    return Books(notes, folder, len(jobs.train_rows(folder))), folder


def test_every_sampled_token_is_trained_on_once_whatever_a_program_does_to_its_history(
    runs, warm, monkeypatch, record_property
):
    rows = runs / "rewritten.jsonl"
    lines = [{"messages": [{"role": "user", "content": f"reverse {n} ="}], "label": str(n)} for n in range(321, 333)]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    program = ROOT / "tests" / "e2e" / "rewriting_program.py"
    more = [f"train.agent_func_path={program}", "agent.max_turns=40", "data.max_len=1024", "rollout.max_new_tokens=900"]
    books, folder = run_noted(runs, "rewritten", [*words(warm, rows), *more], monkeypatch)
    books.check(record_property)
    steps = jobs.train_rows(folder)
    assert len(steps) == STEPS and all(np.isfinite(row["train/policy_loss"]) for row in steps)
    episodes = STEPS * PROMPTS * SAMPLES
    assert len(books.episodes) == episodes
    for name in ("timeout", "cut", "twice"):
        assert books.sum(f"reward/did/{name}") == episodes, name
    for api in ("chat/completions", "messages", "responses"):
        assert books.sum(f"reward/did/{api}") > 2 * episodes, api
    assert books.sum("agent/orphans") == episodes and books.sum("agent/retries") >= 2 * episodes
    record_property("episodes", episodes)
    record_property("turns", books.sum("agent/turns"))


def teach(name: str, home: Path) -> Path:
    """Return a model that calls the tool of a harness and ends its turns, taught as the page of the recipes says."""
    subprocess.run([sys.executable, RECIPES / "agent.py", home, name], cwd=ROOT, check=True)
    return learn(home)


def learn(home: Path, *more: str) -> Path:
    """Return the model of a folder that was taught its texts by the command of the page, with `more` words."""
    (line,) = [command for command in commands_of(RECIPES / "agent.py") if "task=sft" in command]
    words = shlex.split(line.replace("/tmp/harness", str(home)).replace(f"run_dir={home}/sft", "launch.timeout_s=600"))
    jobs.run(home / "sft", [*words[2:], *more], deadline_s=HARNESS_S)
    return home / "sft" / "model"


@pytest.mark.parametrize("name", HARNESSES)
def test_every_token_that_is_sampled_for_a_harness_is_trained_on_once(name, runs, monkeypatch, record_property):
    if not (ROOT / HARNESSES[name]).exists():
        pytest.skip(f"there is no {HARNESSES[name]}; {RECIPES.name}/README.md says how it is installed")
    home = runs / name
    home.mkdir()
    model = teach(name, home)
    more = [f"actor.model_name_or_path={model}", f"data.prompt_dataset={home}/asked.jsonl", "train.max_steps=1"]
    few = [
        "rollout.batch_size=2",
        "rollout.n_samples_per_prompt=2",
        "train.batch_size=4",
        "train.micro_batch_size=2",
        "rollout.max_new_tokens=400",
    ]
    line = ["--config", str(RECIPES / f"{name}.yaml"), *more, *few, "launch.timeout_s=600"]
    books, folder = run_noted(runs, f"{name}_run", line, monkeypatch)
    books.check(record_property)
    steps = jobs.train_rows(folder)
    assert len(steps) == 1 and all(np.isfinite(row["train/policy_loss"]) for row in steps)
    assert len(books.episodes) == 4 and books.sum("agent/turns") >= 4
    record_property("turns", books.sum("agent/turns"))
    record_property("mean reward", float(np.mean([episode["reward"] for episode in books.episodes])))


def continued(name: str, command: str) -> str:
    """Return the command of a recipe and those that go on after it."""
    lines = [command]
    for words in CONTINUED[name]:
        limited = f"{words} -c model_auto_compact_token_limit=300 "
        again = command.replace("exec ", limited, 1).replace('"$AGENT_PROMPT"', "")
        lines.append(again if words.startswith("exec") else words)
    return "\n".join(lines)


@pytest.mark.parametrize("name", CONTINUED)
def test_summaries_and_sub_agents_of_a_harness_are_trained_on_once(name, runs, monkeypatch, record_property):
    """The harness is told to sum up and to start a sub-agent; what the model writes does not matter."""
    if not (ROOT / HARNESSES[name]).exists():
        pytest.skip(f"there is no {HARNESSES[name]}; {RECIPES.name}/README.md says how it is installed")
    home = runs / f"{name}_continued"
    home.mkdir()
    model = teach(name, home)
    recipe = yaml.safe_load((RECIPES / f"{name}.yaml").read_text())
    recipe["agent"] |= {"command": continued(name, recipe["agent"]["command"]), "max_turns": 60}
    (home / "run.yaml").write_text(yaml.safe_dump(recipe))
    more = [f"actor.model_name_or_path={model}", f"data.prompt_dataset={home}/asked.jsonl", "train.max_steps=1"]
    few = [
        "rollout.batch_size=2",
        "rollout.n_samples_per_prompt=2",
        "train.batch_size=4",
        "train.micro_batch_size=2",
        "rollout.max_new_tokens=60",
    ]
    line = ["--config", str(home / "run.yaml"), *more, *few, "data.max_len=16384", "launch.timeout_s=600"]
    books, _ = run_noted(runs, f"{name}_continued_run", line, monkeypatch)
    books.check(record_property)
    texts = Counter[str]()
    tokenizer = AutoTokenizer.from_pretrained(model)
    for row in books.rows:
        said = tokenizer.decode(row["ids"])
        texts.update(mark for marks in CONTINUED[name].values() for mark in marks if mark in said)
    assert {mark for marks in CONTINUED[name].values() for mark in marks} == set(texts)
    for mark, count in texts.items():
        record_property(f"ledgers with {mark!r}", count)
    record_property("turns", books.sum("agent/turns"))
