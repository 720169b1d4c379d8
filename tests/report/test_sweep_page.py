"""The page of a sweep: which runs belong together, and what its numbers are."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from pages import Page
from report import made_run
from rlhf_suite.cli import main
from rlhf_suite.config.declarations.logger import LoggerConfig
from rlhf_suite.report.sweep_data import read_sweep, statistics
from rlhf_suite.run_folders.sweep_folder import Job, Sweep
from rlhf_suite.tracking.metrics import MetricLogger

pytestmark = pytest.mark.stack
pytest.importorskip("plotly", reason="plotly is not installed here: pip install plotly")

PASSED = {("1e-3", "1"): 0.5, ("1e-3", "2"): 0.75, ("1e-4", "1"): 0.25, ("1e-4", "2"): 0.5}


@pytest.fixture(scope="module")
def sweep(tmp_path_factory) -> Path:
    """A sweep of two learning rates with two seeds each, and a job that has not begun."""
    place = tmp_path_factory.mktemp("sweep")
    jobs = []
    for number, ((rate, seed), passed) in enumerate(PASSED.items()):
        folder = made_run(place / str(number), steps=1, samples=8, tokens=3)
        logger = MetricLogger(LoggerConfig(), folder, 1)
        logger.log(1, {"eval/pass1": passed})
        logger.close()
        words = ["task=ppo", f"actor.adam.lr={rate}", f"train.seed={seed}"]
        jobs.append(Job(number, words, str(folder.path), [], "done"))
    jobs.append(Job(4, ["task=ppo", "actor.adam.lr=1e-5", "train.seed=1"], str(place / "4"), []))
    Sweep(place, jobs).save()
    assert main(["report", str(place)]) == 0
    return place


@pytest.mark.notices(
    "runs that differ in their seeds are rows of their own", "report/sweep_data.py", "if key not in SEEDS", "if key"
)
def test_runs_that_differ_in_their_seeds_are_one_row(sweep):
    shown = Page(sweep / "report.html").data
    assert [run["name"] for run in shown["runs"]] == [
        "0 lr=1e-3 seed=1", "1 lr=1e-3 seed=2", "2 lr=1e-4 seed=1", "3 lr=1e-4 seed=2"
    ]  # fmt: skip
    assert shown["sweep"]["flags"] == ["actor.adam.lr"]
    first, second = shown["sweep"]["groups"]
    assert (first["values"], first["runs"]) == (["1e-3"], [0, 1]) and (second["values"], second["runs"]) == (
        ["1e-4"],
        [2, 3],
    )
    passed = first["metrics"]["eval/pass1"]
    assert passed["values"] == [0.5, 0.75] and passed["mean"] == passed["iqm"] == 0.625
    assert passed["interval"] is passed["iqm_interval"] is None, "two runs say too little"
    assert second["metrics"]["eval/pass1"]["mean"] == 0.375


@pytest.mark.notices(
    "the interval of a share goes beyond 1",
    "report/sweep_data.py",
    "bounds is not None and is_share(name)",
    "bounds is not None and name is None",
)
@pytest.mark.parametrize(
    ("metric", "low", "high"),
    [("eval/pass1", 0.8289, 1.0), ("eval/hard/pass4", 0.8289, 1.0), ("eval/reward", 0.8289, 1.0511)],
)
def test_the_interval_of_a_share_ends_where_shares_end(metric, low, high):
    """Of 0.8, 0.9, 1, 1, 1: mean 0.94, deviation 0.08944, t = 2.7764 at four degrees of freedom: an error of 0.1111."""
    runs = [[{"name": metric, "last": value}] for value in (1.0, 0.8, 1.0, 0.9, 1.0)]
    assert statistics(runs)[metric]["interval"] == pytest.approx((low, high), abs=1e-4)
    assert statistics(runs[:4])[metric]["interval"] is None


def test_the_runs_of_a_sweep_share_the_room_of_one_page(sweep):
    assert (sweep / "report.html").stat().st_size < 8e6


def test_a_sweep_that_was_moved_is_found(sweep, tmp_path):
    moved = tmp_path / "elsewhere"
    sweep.rename(moved)
    try:
        assert main(["report", str(moved)]) == 0
    finally:
        moved.rename(sweep)


def test_a_sweep_of_which_no_run_has_begun_has_no_page(tmp_path, capsys):
    Sweep(tmp_path, [Job(0, ["task=ppo"], str(tmp_path / "0"), [])]).save()
    assert main(["report", str(tmp_path)]) == 2
    assert "no run has begun" in capsys.readouterr().err


def test_flags_with_the_same_last_word_have_their_whole_names():
    words = (["actor.adam.lr=1", "critic.adam.lr=2"], ["actor.adam.lr=2", "critic.adam.lr=1"])
    runs = read_sweep([(number, Path(), each) for number, each in enumerate(words)])
    assert runs[0].name == "0 actor.adam.lr=1 critic.adam.lr=2"


def test_a_flag_that_only_some_runs_set_varies():
    runs = read_sweep([(0, Path(), ["task=sft"]), (1, Path(), ["task=sft", "train.seed=2"])])
    assert [run.values for run in runs] == [{}, {"train.seed": "2"}]
    assert runs[0].combination == runs[1].combination == ()
