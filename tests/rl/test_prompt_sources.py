"""Several sources of prompts: each with its own columns and limit, and told apart in the metrics."""

from __future__ import annotations

import json

import numpy as np
import pytest

from given import prompt
from rlhf_suite.config.declarations.data import DataConfig
from rlhf_suite.config.declarations.eval import EvalConfig
from rlhf_suite.config.declarations.logger import LoggerConfig
from rlhf_suite.data.trajectory import Trajectory
from rlhf_suite.models.builtin import byte_tokenizer
from rlhf_suite.rl.evaluation import Evaluator
from rlhf_suite.rl.prompts import load_prompts
from rlhf_suite.rl.rollout_file import SampleFiles
from rlhf_suite.rl.sample_metrics import sample_metrics
from rlhf_suite.rl.samples import ScoredTrajectories
from rlhf_suite.rl.scoring import ScoredGroup, Scores
from rlhf_suite.run_folders.run_folder import RunFolder
from rlhf_suite.tracking.journal import Journal


@pytest.fixture
def files(tmp_path):
    """Four arithmetic questions in `sums.jsonl`, three in `words.jsonl` under other column names."""
    sums = [{"input": f"1+{n}=", "label": str(1 + n)} for n in range(4)]
    words = [{"question": f"spell {n}", "answer": "x" * n} for n in range(3)]
    for name, rows in (("sums", sums), ("words", words)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"{tmp_path}/sums.jsonl,{tmp_path}/words.jsonl"


def prompts_of(files: str, **flags):
    data = DataConfig.of("ppo", prompt_dataset=files.partition(",")[0], label_key="label", cache_enable=False)
    columns = {"input_key": ["input", "question"], "label_key": ["label", "answer"]}
    return load_prompts(data, EvalConfig.of("ppo", dataset=files, **columns, **flags), 42, byte_tokenizer())


def test_evaluation_sets_have_their_own_columns(files):
    prompts = prompts_of(files)
    assert [(p.text, p.label) for p in prompts.held_out[4:]] == [("spell 0", ""), ("spell 1", "x"), ("spell 2", "xx")]
    assert [p.source for p in prompts.held_out] == ["sums"] * 4 + ["words"] * 3


def test_the_limit_of_samples_holds_for_each_set(files):
    prompts = prompts_of(files, max_samples=2)
    assert [p.text for p in prompts.held_out] == ["1+0=", "1+1=", "spell 0", "spell 1"]


def test_the_sources_of_a_mixture_of_prompts_are_known(files, tmp_path):
    (tmp_path / "words.jsonl").write_text("".join(json.dumps({"input": f"spell {n}"}) + "\n" for n in range(3)))
    data = DataConfig.of("ppo", prompt_dataset=files, prompt_probs=[0.5, 0.5], cache_enable=False)
    prompts = load_prompts(data, EvalConfig.of("ppo"), 42, byte_tokenizer())
    expected = ["words" if prompt.text.startswith("spell") else "sums" for prompt in prompts.train]
    assert [prompt.source for prompt in prompts.train] == expected and set(expected) == {"sums", "words"}
    assert [prompt.index for prompt in prompts.train] == [*range(len(expected))]


def scored(sources: list[str], scores: list[float]) -> ScoredTrajectories:
    """One sample of each prompt."""
    trajectories = []
    for index, source in enumerate(sources):
        trajectory = Trajectory.start(prompt(index, source=source), index, 0)
        trajectory.append_model(np.array([3, 4]), np.zeros(2, np.float32), 0)
        trajectories.append(trajectory)
    values, texts = np.array(scores, np.float32), [""] * len(sources)
    return ScoredTrajectories(trajectories, values, values, texts, texts, [{}] * 4)


def test_training_metrics_tell_prompt_files_apart():
    metrics = sample_metrics(scored(["sums", "sums", "words", "words"], [1, 0, 1, 1]))
    assert (metrics["train/sums/reward"], metrics["train/words/reward"]) == (0.5, 1.0)
    assert "train/sums/reward" not in sample_metrics(scored([""] * 4, [1, 0, 1, 1]))


def test_every_evaluation_set_has_its_own_pass_rate(tmp_path):
    class Samples:
        """In place of engines and reward."""

        def __init__(self, *sources: str) -> None:
            self.sources = sources

        journal = Journal(LoggerConfig(progress=False), RunFolder(tmp_path), "ppo")

        def settings(self, temperature):
            return temperature

        reads_text_alone = False

        def score(self, _):
            samples = scored(self.sources, [1, 0, 1, 1])
            return Scores({0: ScoredGroup(0, samples, episodes=4, failures=0)}, {})

        def check(self, groups): ...

    config, two = EvalConfig.of("ppo", n_samples_per_prompt=1), Samples("sums", "sums", "words", "words")
    several = Evaluator(config, [], two, two, tmp_path, SampleFiles()).evaluate(0)
    assert [several[f"eval/{name}pass1"] for name in ("", "sums/", "words/")] == [0.75, 0.5, 1.0]
    one = Evaluator(config, [], Samples(*[""] * 4), Samples(*[""] * 4), tmp_path, SampleFiles()).evaluate(0)
    assert one["eval/pass1"] == 0.75 and not any(name.startswith("eval/sums") for name in one)
