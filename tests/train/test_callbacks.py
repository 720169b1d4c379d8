"""Callbacks: what they may ask for, and what is said where they cannot be called."""

from __future__ import annotations

import csv
import sqlite3
from pathlib import Path

import pyarrow as pa
import pytest

from rlhf_suite.composition.arguments import parse
from rlhf_suite.errors import RunError
from rlhf_suite.preflight import trial
from rlhf_suite.preflight.jobs import preflight
from rlhf_suite.python_source import SourceError
from rlhf_suite.train.callbacks import Callbacks, Evaluate, Save, Stop

pytestmark = pytest.mark.quick
EXAMPLES = Path(__file__).resolve().parents[2] / "experiments" / "callbacks"
OWN = """
import rlhf_suite as rs

class Asks:
    def on_step(self, step, metrics, samples):
        return {answer}
    def state(self):
        return {state}
    def load(self, state):
        self.loaded = state

def function(step, metrics, samples):
    metrics["x"] = 1.0
"""


@pytest.fixture
def own(tmp_path):
    def write(answer="None", state="1", text=OWN):
        file = tmp_path / f"own_{abs(hash((answer, state, text)))}.py"
        file.write_text(text.format(answer=answer, state=state))
        return f"{file}:Asks"

    return write


def asked(name):
    callbacks = Callbacks([name])
    callbacks.step(1, {}, lambda: None)
    return taken(callbacks)


def taken(callbacks):
    return tuple(callbacks.take(kind) for kind in (Stop, Save, Evaluate))


def test_a_callback_asks_for_what_happens_behind_the_step(own):
    assert asked(own("[rs.Stop('why'), rs.Save(), rs.Evaluate()]")) == (Stop("why"), Save(), Evaluate())
    assert asked(own("[rs.Stop('why'), rs.Stop('later')]")) == (Stop("why"), None, None)
    assert asked(own()) == (None, None, None)
    assert Save() != Evaluate()


def test_what_one_asks_for_is_taken_once(own):
    callbacks = Callbacks([own("rs.Save()")])
    callbacks.step(1, {}, lambda: None)
    assert callbacks.take(Save) == Save() and callbacks.take(Save) is None


@pytest.mark.parametrize(
    ("answer", "message"),
    [("1 / 0", r"own_\d+\.py:6: ZeroDivisionError"), ("'stop'", "on_step returned str; return None, rs.Stop")],
)
def test_an_error_ends_the_run_with_its_line(own, answer, message):
    with pytest.raises(RunError, match=message):
        asked(own(answer))


def test_metrics_cannot_be_changed(own):
    callbacks = Callbacks([own().replace("Asks", "function")])
    with pytest.raises(RunError, match="does not support item assignment"):
        callbacks.step(1, {}, lambda: None)


def test_the_state_travels_by_the_name_of_the_flag(own):
    name = own(state="{{'seen': 3}}".replace("{{", "{").replace("}}", "}"))
    state = Callbacks([name]).state_dict()
    assert state == {name: {"seen": 3}}
    other = Callbacks([name])
    other.load_state_dict(state)
    assert other.made[0].loaded == {"seen": 3}
    with pytest.raises(RunError, match=r"state failed: .*not JSON serializable"):
        Callbacks([own(state="object()")]).state_dict()


def test_an_error_at_the_end_does_not_hide_why_a_run_has_failed(own, capsys):
    text = "class Asks:\n    def on_end(self, status):\n        raise ValueError(status)\n"
    callbacks = Callbacks([own(text=text)])
    callbacks.end("failed")
    assert capsys.readouterr().err == "", "a run that has not begun does not end for them"
    callbacks.start(Path(), 0, 1)
    callbacks.end("failed")
    assert "ValueError: failed" in capsys.readouterr().err
    with pytest.raises(RunError, match="ValueError: done"):
        callbacks.end("done")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("def on_steps(self): pass", "has a method on_steps, which nobody calls; name it on_start, on_step"),
        ("def other(self): pass", "has no method that a run calls"),
        ("def on_step(self, step): pass", r"on_step is called with \(step, metrics, samples\)"),
        ("def __init__(self, path): pass\n    def on_end(self, status): pass", "made without arguments, and missing a"),
    ],
)
def test_what_cannot_be_called_is_found_by_the_trial(own, body, message):
    with pytest.raises(SourceError, match=message):
        trial.algorithm("callback", own(text=f"class Asks:\n    {body}\n"))


@pytest.mark.notices(
    "the trial of a callback makes one", "preflight/trial.py", "callbacks.load(name)", "callbacks.make(name)"
)
def test_the_run_alone_makes_a_callback(own):
    text = "class Asks:\n    def __init__(self):\n        1 / 0\n    def on_end(self, status): pass\n"
    trial.algorithm("callback", name := own(text=text))
    with pytest.raises(SourceError, match=r"Asks\(\) failed: own_\d+\.py:3: ZeroDivisionError"):
        Callbacks([name])


@pytest.mark.parametrize("task", ["sft", "ppo", "rejection_sampling"])
def test_a_callback_that_is_listed_twice_is_refused(own, task):
    one, other = own(), own("rs.Save()")

    def problems(*names):
        return preflight(parse([f"task={task}", f"demo={task}", f"train.callbacks=[{','.join(names)}]"])).problems

    assert problems(one, other) == []
    (problem,) = problems(one, other, one)
    assert (problem.key, problem.what) == ("train.callbacks", f"{one} is listed 2 times")


def example(name):
    return Callbacks([f"{EXAMPLES / name}"])


def test_the_example_stops_at_a_reward():
    callbacks, asked_for = example("stop_at_reward.py:StopAtReward"), []
    for step, reward in enumerate((0.5, 0.9, 0.95, 0.97), 1):
        callbacks.step(step, {"train/reward": reward}, lambda: None)
        asked_for.append(taken(callbacks))
    assert [save is not None for _, save, _ in asked_for] == [True, True, True, False]
    assert [stop is None for stop, _, _ in asked_for] == [True, True, True, False]


def test_the_example_writes_samples_once_also_in_a_continued_run(tmp_path):
    table = pa.table({"prompt": ["a", "b"], "response": ["c", "d"], "reward": [0.0, 1.0]})
    for start, steps in ((0, (1, 2, 3)), (1, (2, 3))):
        callbacks = example("samples_to_csv.py:SamplesToCsv")
        callbacks.start(tmp_path, start, 3)
        for step in steps:
            callbacks.step(step, {}, lambda: table)
    with (tmp_path / "samples.csv").open() as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["step", "prompt", "response", "reward"]
    assert [row[0] for row in rows[1:]] == ["1", "1", "2", "2", "3", "3"] and rows[1][1:] == ["a", "c", "0.0"]


def test_the_example_sends_metrics_to_one_run_of_mlflow_also_of_a_continued_run(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    state = {}
    for start, status in ((0, "stopped"), (1, "done")):
        callbacks = example("metrics_to_mlflow.py:MetricsToMlflow")
        callbacks.load_state_dict(state)
        callbacks.start(tmp_path / "run", start, 2)
        callbacks.step(start + 1, {"train/loss": float(start)}, lambda: None)
        callbacks.evaluation(start + 1, {"eval/loss": 2.0})
        state = callbacks.state_dict()
        callbacks.end(status)
    client = mlflow.MlflowClient()
    (run,) = client.search_runs(["0"])
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(metric.step, metric.value) for metric in history] == [(1, 0.0), (2, 1.0)]


def test_the_example_sends_metrics_to_a_table(tmp_path):
    for start in (0, 1):
        callbacks = example("metrics_to_sqlite.py:MetricsToSqlite")
        callbacks.start(tmp_path / "run", start, 2)
        for step in range(start + 1, 3):
            callbacks.step(step, {"train/loss": float(step)}, lambda: None)
        callbacks.end("done")
    rows = sqlite3.connect(tmp_path / "metrics.sqlite").execute("SELECT * FROM metrics ORDER BY step").fetchall()
    assert rows == [("run", 1, "train/loss", 1.0), ("run", 2, "train/loss", 2.0)]
