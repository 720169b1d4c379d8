"""Samples that are strange or damaged: a page is made of them, or one sentence says what is wrong with their file."""

from __future__ import annotations

import json
import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from starlette.testclient import TestClient

from rlhf_suite.api.runs import choose_runs
from rlhf_suite.foreign_files import DamagedFile
from rlhf_suite.report.html import choose_runs as choose
from rlhf_suite.report.html import content_of, to_json
from rlhf_suite.report.sample_data import BINS, edges_of_bins
from rlhf_suite.report.sample_files import Reader
from rlhf_suite.report.summary import first_steps_of_a_stream, response_of
from rlhf_suite.report.watch import Site

PLAIN = {"prompt": ["p"], "response": ["r"], "reward": [1.0]}
TOKENS = {"owner": [[1, 1]], "mask": [[1.0, 1.0]], "ids": [[1, 2]], "weight_version": [[1, 1]]}
CALL = {"name": "a", "arguments": "{}", "problem": None, "answer": "b"}
TURN = {"end": 1, "sampling_s": 0.5, "answer_s": 0.1, "calls": [CALL]}
SHOWN = {
    "tokens": TOKENS,
    "negative ids": TOKENS | {"ids": [[-1, 2**40]]},
    "a list of texts": TOKENS | {"words": [["a", "b"]]},
    "a list with a null": TOKENS | {"others": [[1, None]]},
    "a list of another length": TOKENS | {"advantages": [[0.5]]},
    "no prompt": {"prompt": pa.array([None], pa.string()), "reward_query": ["q"]},
    "an empty prompt": {"prompt": [""], "reward_query": ["q"]},
    "no query": {"reward_query": pa.array([None], pa.string())},
    "turns": {"turns": [[TURN]]},
    "a turn without an end": {"turns": [[TURN | {"sampling_s": math.nan, "calls": []}, TURN, None]]},
    "no reward": {"reward": pa.array([None], pa.float64())},
    "an endless reward": {"reward": [math.inf]},
    "a number that is too large for single precision": {"number": [1e300]},
}
REFUSED = {
    "only owners": ({"owner": [[1, 1]]}, "no column weight_version"),
    "a short mask": (TOKENS | {"mask": [[1.0]]}, "its column mask does not have one number for each token"),
    "a null among ids": (TOKENS | {"ids": [[1, None]]}, "its column ids does not have"),
    "no tokens": ({name: pa.array([[]], pa.list_(pa.int32())) for name in TOKENS}, "a sample without tokens"),
    "turns of another kind": ({"turns": [[{"x": 1}]]}, "its column turns does not hold records of turns"),
    "calls of another kind": ({"turns": [[TURN | {"calls": [{"name": "a"}]}]]}, "does not hold records of turns"),
}
REWARDS = [[0.3, 0.1 + 0.2], [1.0, 1.0 + 2e-16], [1e16, 1e16 + 2], [5e-324, 0.0], [1e308, -1e308], [0.5, 0.5], []]


def made(folder, columns):
    """Return the folder of a run with one file of rollouts."""
    (folder / "rollouts").mkdir(parents=True)
    (folder / "status.json").write_text(json.dumps({"state": "done", "last_step": 1, "error": None, "metrics": {}}))
    (folder / "metrics.jsonl").write_text('{"step": 1, "time": 1.0, "train/reward": 0.5}\n')
    pq.write_table(pa.table(PLAIN | columns), folder / "rollouts" / "step_000001.parquet")
    return folder


def data_of(folder):
    """Return the data of the page of a run, as its browser reads them."""
    data, _ = content_of(choose([folder]), Reader())
    return json.loads(to_json(data))["runs"][0]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", SHOWN)
def test_strange_samples_are_shown(name, tmp_path):
    assert data_of(made(tmp_path / "run", SHOWN[name]))["samples"]["count"] == 1


@pytest.mark.parametrize("name", REFUSED)
def test_damaged_samples_are_named(name, tmp_path):
    columns, problem = REFUSED[name]
    with pytest.raises(DamagedFile, match=problem):
        data_of(made(tmp_path / "run", columns))


@pytest.mark.notices(
    "rewards that differ by the error of a sum have no histogram, and a run no page",
    "report/sample_data.py",
    "if high - low <= max(LEAST_WIDTH * size, float(np.finfo(np.float32).tiny)):",
    "if high == low:",
)
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("rewards", REWARDS, ids=str)
def test_each_reward_is_in_a_bin(rewards, tmp_path):
    edges = edges_of_bins(np.array(rewards))
    assert len(edges) == BINS + 1 and (np.diff(edges) > 0).all()
    if rewards:
        columns = {name: values * len(rewards) for name, values in PLAIN.items()} | {"reward": rewards}
        histogram = data_of(made(tmp_path / "run", columns))["samples"]["histogram"]
        assert sum(histogram["counts"][0]) == len(rewards)


def test_bins_of_usual_rewards_are_those_of_numpy():
    rewards = np.random.default_rng(0).normal(size=100)
    np.testing.assert_allclose(edges_of_bins(rewards), np.histogram_bin_edges(rewards, BINS))


def test_the_response_is_what_follows_the_prompt():
    assert response_of({"reward_query": "<p>ab</s>", "prompt": "<p>a", "response": "b"}) == "b</s>"
    assert response_of({"reward_query": "other", "prompt": "<p>a", "response": "b"}) == "b"
    assert response_of({"reward_query": "b</s>", "prompt": "", "response": "b"}) == "b</s>"


def test_a_stream_that_ends_in_empty_responses_has_no_usual_length():
    lengths = [(1, 1.0), (2, 5.0), (3, 0.0), (4, 0.0), (5, 0.0)]
    assert first_steps_of_a_stream({"train/response_length": lengths, "async/overtaken": [(1, 2.0)]}) == []


def test_pages_of_a_folder_that_is_gone_say_so(tmp_path):
    folder = made(tmp_path / "all" / "a", {})
    site = TestClient(Site(lambda: choose_runs([folder.parent]), "key").app(), raise_server_exceptions=False)
    assert site.get("/key/data").status_code == 200
    folder.parent.rename(tmp_path / "elsewhere")
    for address in ("/key/run/0123/", "/key/run/0123/data"):
        answer = site.get(address)
        assert answer.status_code == 503 and "is not the folder of a run" in answer.text
