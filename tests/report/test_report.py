"""Curves and the before/after table of a run folder."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlhf_suite.config.logger import LoggerConfig
from rlhf_suite.errors import UserError
from rlhf_suite.report.curves import draw_curves, running_mean, series
from rlhf_suite.report.samples import write_samples
from rlhf_suite.report.summary import accuracy, before_and_after
from rlhf_suite.train.console import Sample
from rlhf_suite.train.metrics import MetricLogger
from rlhf_suite.train.run_folder import RunFolder

PNG = b"\x89PNG"


def record(folder: RunFolder, rows: list[tuple[int, dict[str, float]]]) -> None:
    logger = MetricLogger(LoggerConfig(), folder, 0)
    for step, metrics in rows:
        logger.log(step, metrics)
    logger.close()


def test_series_are_points_in_order_without_nulls(tmp_path):
    folder = RunFolder(tmp_path)
    record(folder, [(0, {"eval/pass1": 0.1}), (1, {"train/reward": 0.2}), (2, {"train/reward": float("nan")}),
                    (3, {"train/reward": 0.4, "eval/pass1": 0.5})])  # fmt: skip
    assert series(folder.metrics) == {"eval/pass1": [(0, 0.1), (3, 0.5)], "train/reward": [(1, 0.2), (3, 0.4)]}


def test_running_mean_by_hand():
    assert running_mean([(1, 2.0), (2, 4.0), (3, 9.0), (4, 1.0)], 1) == [(1, 3.0), (2, 5.0), (3, 14 / 3), (4, 5.0)]


@pytest.mark.parametrize("metric", ["train/reward", "train/gpt_loss"])
def test_a_curve_is_drawn_for_rl_and_for_supervised_runs(tmp_path, metric):
    folder = RunFolder(tmp_path)
    record(folder, [(step, {metric: step / 30, "eval/pass1": 0.5}) for step in range(1, 31)])
    assert draw_curves(folder) == tmp_path / "curves.png"
    assert (tmp_path / "curves.png").read_bytes().startswith(PNG)


def test_a_folder_without_a_curve_is_an_error_that_names_it(tmp_path):
    record(RunFolder(tmp_path), [(1, {"train/lr": 0.1})])
    with pytest.raises(UserError, match=r"metrics\.jsonl has none of train/reward"):
        draw_curves(RunFolder(tmp_path))


def test_samples_are_a_table_whatever_the_text(tmp_path):
    write_samples(RunFolder(tmp_path), [Sample("a|b", "line\nbreak", "`code`", "", (0.0, 0.5))])
    lines = (tmp_path / "samples.md").read_text().splitlines()
    assert lines[-1] == "| `a\\|b` | `line⏎break` | 0 | `'code'` | 0.5 |  |"


def test_accuracy_is_told_with_its_standard_error(tmp_path):
    rows = [(0, {"eval/pass1": 0.1, "eval/pass1_stderr": 0.05, "eval/pass4": 0.2}), (1, {"train/pass_rate": 0.3})]
    record(RunFolder(tmp_path), [*rows, (2, {"eval/pass1": 0.5, "eval/pass1_stderr": 0.07, "eval/pass4": 0.6})])
    wanted = ["eval/pass1: 0.100 -> 0.500 (standard error 0.070)", "eval/pass4: 0.200 -> 0.600"]
    assert accuracy(RunFolder(tmp_path)) == wanted


def test_samples_before_and_after_are_of_the_same_prompts_where_an_evaluation_lacks_some(tmp_path):
    """What an evaluation's reward fails for is not in it; neither evaluation here is part of the other."""
    for step, prompts in ((0, [0, 1, 3]), (2, [0, 2, 3])):
        rows = [
            {"prompt_index": n, "sample": 0, "prompt": f"p{n}", "response": f"r{n * step}", "label": "", "reward": 0.5}
            for n in prompts
        ]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"step_{step:06d}.parquet")
    found = [(each.prompt, each.before, each.after) for each in before_and_after(tmp_path)]
    assert found == [("p3", "r0", "r6"), ("p0", "r0", "r0")]
