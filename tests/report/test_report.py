"""Curves and the before/after table of a run folder."""

import io
import json
import re
import shlex

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from rlhf_suite.composition.arguments import parse
from rlhf_suite.config.declarations.logger import LoggerConfig
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.declarations.task_groups import TRAINING
from rlhf_suite.errors import UserError
from rlhf_suite.preflight.jobs import preflight
from rlhf_suite.report.curves import ACCURACY, KL, LENGTH, REWARD, draw_calls, draw_curves, panels, running_mean, series
from rlhf_suite.report.samples import Sample, samples_table, shorten, show_samples, write_samples
from rlhf_suite.report.summary import (
    before_and_after,
    best_checkpoint,
    changes,
    describe_time,
    first_steps_of_a_stream,
    next_command,
    summarise,
)
from rlhf_suite.run_folders.run_folder import RunFolder
from rlhf_suite.tracking.metrics import MetricLogger

PNG = b"\x89PNG"
MODEL = "runs/a 1,2/model"
USES = {"rm": "serve_rm", "prm": "score"}


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


def write_rows(path, *rows) -> None:
    """Rows of (step, metrics) as a metrics.jsonl has them."""
    path.write_text("".join(json.dumps({"step": step, "time": 1.0, **metrics}) + "\n" for step, metrics in rows))


@pytest.mark.notices(
    "steps that were lost in a kill stay in the curves",
    "report/history.py",
    "        if again:\n",
    "        again = False\n        if again:\n",
)
@pytest.mark.notices(
    "the seconds of a step are those of its last row",
    "report/history.py",
    'is_part=name.startswith("timing/")',
    'is_part=name == "timing/"',
)
def test_a_step_that_was_run_again_is_there_once(tmp_path):
    """Also its evaluation, and not the steps after it that were not run again; the proof of weights may come late."""
    first = [(step, {"train/reward": step / 10, "timing/train": 4.0}) for step in (1, 2, 3, 4)]
    late = (1, {"sync/probe": 0.5})
    evaluated = (2, {"eval/pass1": 0.2, "timing/evaluation": 1.0, "timing/train": 1.0})
    again = [(2, {"train/reward": 0.7, "timing/train": 5.0}), (2, {"eval/pass1": 0.9, "timing/train": 1.0})]
    write_rows(tmp_path / "rows", *first[:2], late, evaluated, *first[2:], *again)
    assert series(tmp_path / "rows") == {
        "train/reward": [(1, 0.1), (2, 0.7)],
        "timing/train": [(1, 4.0), (2, 6.0)],
        "sync/probe": [(1, 0.5)],
        "eval/pass1": [(2, 0.9)],
    }


def test_the_seconds_of_a_step_are_those_of_all_its_rows(tmp_path):
    write_rows(tmp_path / "rows", (1, {"timing/step_total": 3.0}), (1, {"timing/step_total": 0.5, "eval/pass1": 0.1}))
    assert series(tmp_path / "rows")["timing/step_total"] == [(1, 3.5)]


@pytest.mark.notices(
    "an accuracy that is the reward is drawn twice",
    "report/curves.py",
    "select_points(REWARD, curves) == select_points(ACCURACY, curves)",
    "REWARD is ACCURACY",
)
def test_an_accuracy_that_is_the_reward_has_no_panel_of_its_own():
    points, others = [(1, 0.25), (2, 0.5)], [(1, 0.25), (2, 0.75)]
    equal = {"train/reward": points, "train/pass_rate": points, "eval/reward": others, "eval/pass1": others}
    (panel,) = panels(equal)
    assert panel.title == "reward = accuracy" and panel.train == REWARD.train
    assert panels(equal | {"train/pass_rate": others}) == [REWARD, ACCURACY]
    assert panels(equal | {"train/kl": points}) == [panel, KL]


@pytest.mark.notices(
    "a policy that learns to write more counts as the beginning of a stream",
    "report/summary.py",
    "left.get(step, 0) > 0 and length < SHORT * after",
    "left.get(step, 0) > 0",
)
@pytest.mark.parametrize(
    ("lengths", "left", "said"),
    [
        ([20, 50, 100, 90, 100], [9, 7, 3, 3, 3], "1 to 2, 0.20 to 0.50"),
        ([20, 100, 100, 90, 110], [9, 7, 3, 3, 3], "1, 0.20"),
        ([20, 20, 50, 100, 100], [9, 7, 3, 3, 3], None),  # the policy learns to write more
        ([20, 50, 100, 90, 100], [0, 0, 0, 0, 0], None),
        ([90, 100, 100, 90, 100], [9, 7, 3, 3, 3], None),
        ([20], [9], None),
    ],
)  # fmt: skip
def test_the_first_steps_of_a_stream_are_said_to_learn_from_short_responses(lengths, left, said):
    found = {"train/response_length": [*enumerate(map(float, lengths), 1)]}
    found["async/overtaken"] = [*enumerate(map(float, left), 1)]
    sentences = first_steps_of_a_stream(found)
    form = re.compile(r"Steps? ([\d to]+) learnt from .*, which had ([\d. to]+) of the usual length: 9 groups")
    assert [", ".join(form.match(each).groups()) for each in sentences] == ([] if said is None else [said])
    assert first_steps_of_a_stream({"train/response_length": found["train/response_length"]}) == []


def test_running_mean_by_hand():
    assert running_mean([(1, 2.0), (2, 4.0), (3, 9.0), (4, 1.0)], 1) == [(1, 3.0), (2, 5.0), (3, 14 / 3), (4, 5.0)]


@pytest.mark.parametrize("metric", ["train/reward", "train/gpt_loss"])
def test_a_curve_is_drawn_for_rl_and_for_supervised_runs(tmp_path, metric):
    folder = RunFolder(tmp_path)
    record(folder, [(step, {metric: step / 30, "eval/pass1": 0.5}) for step in range(1, 31)])
    assert draw_curves(folder) == tmp_path / "curves.png"
    assert (tmp_path / "curves.png").read_bytes().startswith(PNG)


def test_pass_rates_by_allowed_calls_are_drawn_where_they_were_measured(tmp_path):
    folder = RunFolder(tmp_path)
    record(folder, [(1, {"eval/pass1": 0.1})])
    assert draw_calls(folder) is None
    rates = {f"eval/calls_{calls}/pass{k}": 0.1 * calls for calls in (0, 4, 16) for k in (1, 2)}
    record(folder, [(step, rates) for step in (2, 3)])
    assert draw_calls(folder) == tmp_path / "calls.png"
    assert (tmp_path / "calls.png").read_bytes().startswith(PNG)


def test_a_folder_without_a_curve_is_an_error_that_names_it(tmp_path):
    record(RunFolder(tmp_path), [(1, {"train/lr": 0.1})])
    with pytest.raises(UserError, match=r"metrics\.jsonl has none of train/reward"):
        draw_curves(RunFolder(tmp_path))


def test_samples_are_a_table_whatever_the_text(tmp_path):
    write_samples(RunFolder(tmp_path), [Sample("a|b", "line\nbreak", "`code`", "", (0.0, 0.5))])
    lines = (tmp_path / "samples.md").read_text().splitlines()
    assert lines[-1] == "| `a\\|b` | `line⏎break` | 0 | `'code'` | 0.5 |  |"


def test_text_of_a_model_acts_neither_on_the_console_nor_in_the_report(tmp_path, capsys):
    samples = [Sample("\x1b[2J[/red]", "\x9b31m\r", "\ud800\u202e", "[bold]\x07", (0.0, 1.0))]
    write_samples(RunFolder(tmp_path), samples)
    show_samples(samples)
    for text in ((tmp_path / "samples.md").read_text(), capsys.readouterr().out):
        assert text.replace("\n", "").isprintable()
        for shown in (r"\x1b[2J[/red]", r"\x9b31m", r"\ud800\u202e", r"[bold]\x07"):
            assert shown in "".join(text.split()).replace("│", ""), shown


def test_a_curve_of_a_data_source_with_a_strange_name_is_drawn(tmp_path):
    record(RunFolder(tmp_path), [(1, {"train/reward": 0.1, "eval/a$\\frac$\x1b/reward": 0.2})])
    assert draw_curves(RunFolder(tmp_path)).exists()


def test_the_summary_has_the_change_of_each_headline_metric(tmp_path):
    rows = [(0, {"eval/pass1": 0.1, "eval/pass1_stderr": 0.05, "eval/loss": 2.0}), (1, {"train/reward": 0.3})]
    rows.append((2, {"eval/pass1": 0.6, "eval/pass1_stderr": 0.06, "eval/loss": 1.0}))
    rows.append((4, {"eval/pass1": 0.5, "eval/pass1_stderr": 0.07, "eval/loss": 1.5, "train/lr": 0.1}))
    record(RunFolder(tmp_path), rows)
    assert changes(series(RunFolder(tmp_path).metrics)) == [
        "eval/loss     2 -> 1.5, best 1 at step 2",
        "eval/pass1    0.1 -> 0.5 (standard error 0.07), best 0.6 at step 2",
        "train/reward  0.3",
    ]


def test_the_summary_has_the_time_of_each_phase():
    found = {"timing/train": [(1, 2.0), (2, 4.0)], "timing/save": [(2, 2.0)], "timing/step_total": [(1, 2.0), (2, 6.0)]}
    assert describe_time(found) == ["Time in steps: 8.0 s (train 75%, save 25%)"]


def test_a_models_text_is_not_markup_in_the_table():
    out = io.StringIO()
    sample = Sample("[red]2+2[/red]", "[/x]", "4", "4", (0.0, 1.0))
    Console(file=out, width=160).print(samples_table([sample], 160))
    assert "[red]2+2[/red]" in out.getvalue()
    assert "[/x]" in out.getvalue()
    assert "0 → 1" in out.getvalue()


def test_long_responses_take_few_lines_of_the_console():
    out = io.StringIO()
    samples = [Sample("prompt " * 200, "before " * 500, "after " * 500, "label " * 100, (0.0, 1.0))] * 8
    Console(file=out, width=80).print(samples_table(samples, 80))
    assert len(out.getvalue().splitlines()) <= 45


def test_a_shortened_text_keeps_its_beginning_and_its_end():
    assert shorten("0123456789abcdef", 11) == "0123 … cdef"
    assert shorten("line\nbreak", 11) == "line⏎break"


@pytest.mark.parametrize(
    ("metric", "panel"),
    [
        ("eval/acc", ACCURACY),
        ("eval/easy/pass1", ACCURACY),
        ("train/kl", KL),
        ("train/response_length", LENGTH),
        ("eval/response_length_mean", LENGTH),
    ],
)
def test_accuracy_kl_and_length_have_panels_of_their_own(metric, panel):
    assert panels({"train/reward": [(1, 0.5)], metric: [(1, 0.5)]}) == [REWARD, panel]


def test_a_run_with_a_reward_and_a_loss_shows_the_reward():
    assert panels({"train/loss": [(1, 0.5)], "train/reward": [(1, 0.5)]}) == [REWARD]


def test_samples_before_and_after_are_of_the_same_prompts_where_an_evaluation_lacks_some(tmp_path):
    """What an evaluation's reward fails for is not in it; neither evaluation here is part of the other."""
    for step, prompts in ((0, [0, 1, 3]), (2, [0, 2, 3])):
        rows = [
            {
                "prompt_index": n, "sample": 0, "label": "", "reward": 0.5,
                "prompt": f"p{n}", "response": f"r{n * step}",
                "reward_query": f"<|begin|>p{n}r{n * step}<|im_end|>",
            }
            for n in prompts
        ]  # fmt: skip
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"step_{step:06d}.parquet")
    found = [(each.prompt, each.before, each.after) for each in before_and_after(tmp_path)]
    end = "<|im_end|>"  # answers are shown as rewards saw them
    assert found == [("p3", f"r0{end}", f"r6{end}"), ("p0", f"r0{end}", f"r0{end}")]


@pytest.mark.parametrize("task", TRAINING)
def test_the_next_command_is_one_that_the_preflight_accepts(task, tmp_path):
    """Whatever the texts around a prompt and the length that the model was trained with."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1 + 1 =", "response": "2"}\n')
    run = Run.of(task)
    if hasattr(run.data, "input_template"):
        run.data.max_len, run.data.input_template = 64, 'Q="{}"\nA: '
    words = shlex.split(next_command(run, MODEL).replace("<file>", str(rows)))
    found = preflight(parse(words[2:]))
    assert found.problems == []
    assert found.runs[0].task == USES.get(task, "chat")
    if task not in USES:
        chat = found.runs[0]
        assert (chat.actor.model_name_or_path, chat.chat.max_len) == (MODEL, run.data.max_len)
        assert chat.data.input_template == run.data.input_template


def test_the_best_checkpoint_is_named_with_its_metric(tmp_path):
    assert best_checkpoint(RunFolder(tmp_path), Run.of("ppo")) == []
    best = tmp_path / "checkpoints" / "best_000004"
    best.mkdir(parents=True)
    written = {"metric.json": {"best": {"metric": "eval/pass1", "best_so_far": 0.75}}, "state.json": {}}
    for name, content in written.items():
        (best / name).write_text(json.dumps(content))
    files = {name: {"bytes": (best / name).stat().st_size, "sha256": "0"} for name in written}
    (best / "manifest.json").write_text(json.dumps({"step": 4, "files": files}))
    assert best_checkpoint(RunFolder(tmp_path), Run.of("ppo")) == [
        f"Best checkpoint: {best} (eval/pass1 0.75 at step 4)"
    ]


def test_a_run_without_a_reward_or_a_loss_ends_with_its_summary(tmp_path):
    """As training that clients ask for: a policy loss alone says nothing, and a gradient norm has no panel."""
    write_rows(tmp_path / "metrics.jsonl", (1, {"train/policy_loss": 0.5, "timing/step_total": 2.0}))
    folder = RunFolder(tmp_path)
    folder.start("")
    said = summarise(folder, Run.of("serve_train"))
    assert said[-1] == f"Run folder: {tmp_path}" and any("Time in steps: 2.0 s" in line for line in said)
