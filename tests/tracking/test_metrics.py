"""Metric sinks: rows, resume, values that are not finite, TensorBoard, W&B offline; and the console."""

import io
import json
import math
import time
import urllib.error
import urllib.request
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlhf_suite.config.declarations.logger import LoggerConfig, WandbConfig
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.errors import UserError
from rlhf_suite.polling import poll_until
from rlhf_suite.run_folders.record import save
from rlhf_suite.run_folders.run_folder import RunFolder, samples_file
from rlhf_suite.tracking import console as console_module
from rlhf_suite.tracking import journal as journal_module
from rlhf_suite.tracking.console import PhaseProgress, Progress, headline, results
from rlhf_suite.tracking.journal import Journal
from rlhf_suite.tracking.metrics import MetricLogger, read_rows


def rows(folder: RunFolder) -> list[dict]:
    return [
        {k: v for k, v in json.loads(line).items() if k != "time"} for line in folder.metrics.read_text().splitlines()
    ]


def log_steps(folder: RunFolder, start: int, stop: int, value: float, config: LoggerConfig | None = None) -> None:
    folder.path.mkdir(parents=True, exist_ok=True)
    save(Run.of("sft", actor=replace(Run.of("sft").actor, model_name_or_path="some/model")), folder.config)
    logger = MetricLogger(config or LoggerConfig(), folder, start)
    for step in range(start + 1, stop + 1):
        logger.log(step, {"train/loss": value + step})
        logger.log_samples(step)
    logger.close()


def evaluate(folder: RunFolder) -> None:
    """The samples of an evaluation after step 2: two of one prompt."""
    rows = [
        {"prompt": "2 | 1 =", "response": response, "label": "1", "reward": 0.5, "sample": n, "prompt_index": 7}
        for n, response in enumerate(("3\nno, 1", "2"))
    ]
    folder.evaluations.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows), samples_file(folder.evaluations, 2))


def test_each_call_writes_a_row_at_once(tmp_path):
    folder = RunFolder(tmp_path)
    logger = MetricLogger(LoggerConfig(), folder, 0)
    logger.log(1, {"train/loss": 0.5})
    logger.log(1, {"eval/loss": 0.25})
    assert rows(folder) == [{"step": 1, "train/loss": 0.5}, {"step": 1, "eval/loss": 0.25}]
    logger.close()


@pytest.mark.notices(
    "a resume makes the last step's metrics disappear",
    "tracking/metrics.py",
    'row["step"] <= start',
    'row["step"] < start',
)
def test_a_resumed_run_has_each_step_once(tmp_path):
    folder = RunFolder(tmp_path)
    log_steps(folder, 0, 5, 100)
    log_steps(folder, 3, 6, 200)
    assert [(row["step"], row["train/loss"]) for row in rows(folder)] == [
        (1, 101), (2, 102), (3, 103), (4, 204), (5, 205), (6, 206)
    ]  # fmt: skip


def test_a_fresh_start_in_an_old_folder_begins_with_no_rows(tmp_path):
    folder = RunFolder(tmp_path)
    log_steps(folder, 0, 2, 100)
    log_steps(folder, 0, 1, 200)
    assert [(row["step"], row["train/loss"]) for row in rows(folder)] == [(1, 201)]


def test_a_line_torn_by_a_kill_is_dropped(tmp_path):
    folder = RunFolder(tmp_path)
    log_steps(folder, 0, 2, 100)
    with folder.metrics.open("a") as file:
        file.write('{"step": 3, "train/lo')
    assert [row["step"] for row in read_rows(folder.metrics)] == [1, 2]
    log_steps(folder, 2, 3, 100)
    assert [row["step"] for row in rows(folder)] == [1, 2, 3]


def test_values_that_are_not_finite_are_null_and_named(tmp_path):
    folder = RunFolder(tmp_path)
    logger = MetricLogger(LoggerConfig(), folder, 0)
    logger.log(1, {"b": float("nan"), "a": float("inf"), "c": 1.0})
    logger.close()
    assert rows(folder) == [{"step": 1, "b": None, "a": None, "c": 1.0, "nonfinite": ["a", "b"]}]


def test_tensorboard_gets_the_same_numbers(tmp_path):
    folder = RunFolder(tmp_path / "my-run")
    evaluate(folder)
    log_steps(folder, 0, 3, 0.5, LoggerConfig(tensorboard_dir=str(tmp_path / "tb")))
    events = EventAccumulator(str(tmp_path / "tb" / "my-run")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 1.5), (2, 2.5), (3, 3.5)]
    assert "model_name_or_path: some/model" in text(events, "configuration")[0]
    assert text(events, "eval/samples") == {
        2: "| prompt | response | label | reward |\n| --- | --- | --- | --- |\n| 2 \\| 1 = | 3 no, 1 | 1 | 0.5 |"
    }


def text(events: EventAccumulator, name: str) -> dict[int, str]:
    """The texts of a name by their steps."""
    found = events.Tensors(f"{name}/text_summary")
    return {event.step: event.tensor_proto.string_val[0].decode() for event in found}


@pytest.mark.notices(
    "TensorBoard hides the step that a resume begins after",
    "tracking/metrics.py",
    "purge_step=start + 1",
    "purge_step=start",
)
def test_tensorboard_keeps_the_step_that_a_resume_begins_after_and_hides_those_behind_it(tmp_path):
    folder, config = RunFolder(tmp_path / "my-run"), LoggerConfig(tensorboard_dir=str(tmp_path / "tb"))
    log_steps(folder, 0, 3, 0.5, config)
    log_steps(folder, 2, 4, 0.25, config)
    events = EventAccumulator(str(tmp_path / "tb" / "my-run")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [
        (1, 1.5), (2, 2.5), (3, 3.25), (4, 4.25)
    ]  # fmt: skip


@pytest.mark.stack
def test_wandb_without_a_key_is_stored_offline(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    folder = RunFolder(tmp_path / "my-run")
    evaluate(folder)
    log_steps(folder, 0, 2, 0.5, LoggerConfig(wandb=WandbConfig(enable=True, project="demo")))
    (record,) = (folder.path / "wandb").glob("offline-run-*/run-*.wandb")
    assert poll_until(lambda: b"train/loss" in record.read_bytes(), 60), "a process of W&B's own writes the file"
    assert b"my-run" in record.read_bytes()
    assert b"some/model" in record.read_bytes()  # the configuration goes with the run
    (table,) = (folder.path / "wandb").rglob("samples_*.table.json")
    assert json.loads(table.read_text()) == {
        "columns": ["prompt", "response", "label", "reward"],
        "data": [["2 | 1 =", "3\nno, 1", "1", "0.5"]],
    }


@pytest.mark.stack
@pytest.mark.notices(
    "a run on a node without a network asks the servers of W&B although the user says offline",
    "tracking/metrics.py",
    'os.environ.get("WANDB_MODE") or',
    "None or",
    cases="offline",
)
@pytest.mark.parametrize(
    ("key", "mode", "stored"),
    [("k" * 40, "offline", True), ("", "", True), ("k" * 40, "disabled", False)],
    ids=["offline", "empty key", "disabled"],
)
def test_wandb_is_used_as_its_environment_says(tmp_path, monkeypatch, key, mode, stored):
    monkeypatch.setenv("WANDB_API_KEY", key)
    monkeypatch.setenv("WANDB_MODE", mode)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # where nobody answers
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "5")
    folder = RunFolder(tmp_path / "run")
    log_steps(folder, 0, 1, 0.5, LoggerConfig(wandb=WandbConfig(enable=True)))
    assert bool([*folder.path.glob("wandb/offline-run-*")]) == stored


@pytest.mark.stack
@pytest.mark.parametrize(("key", "mode"), [("short", ""), ("", "online"), ("", "sometimes")])
def test_wandb_that_cannot_be_used_is_one_sentence(tmp_path, monkeypatch, key, mode):
    monkeypatch.setenv("WANDB_API_KEY", key)
    monkeypatch.setenv("WANDB_MODE", mode)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("HOME", str(tmp_path))  # without the key of `wandb login`
    with pytest.raises(
        UserError, match=r"^logger\.wandb\.enable: Weights & Biases cannot be used: .*WANDB_MODE=offline"
    ):
        log_steps(RunFolder(tmp_path / "run"), 0, 1, 0.5, LoggerConfig(wandb=WandbConfig(enable=True)))


def test_runs_of_two_sweeps_share_no_folder_of_tensorboard(tmp_path):
    for sweep in ("first", "second"):
        wandb = WandbConfig(group=sweep, run_name="0 actor.freeze=[a/b]")
        log_steps(
            RunFolder(tmp_path / sweep / "0"),
            0,
            1,
            0.5,
            LoggerConfig(tensorboard_dir=str(tmp_path / "tb"), wandb=wandb),
        )
    names = sorted(str(path.parent.relative_to(tmp_path / "tb")) for path in (tmp_path / "tb").rglob("events.*"))
    assert names == ["first/0 actor.freeze=[a_b]", "second/0 actor.freeze=[a_b]"]


def progress(**kwargs) -> tuple[Progress, io.StringIO]:
    out = io.StringIO()
    config = LoggerConfig(progress=kwargs.pop("enabled", True))
    return Progress(config, "ppo", total=40, start=0, console=Console(file=out, width=200), **kwargs), out


def test_without_a_terminal_there_is_a_line_now_and_then():
    shown, out = progress()
    for step in range(1, 41):
        shown.show_step(step, {"train/reward": step / 40, "train/kl": 0.5})
    shown.close()
    lines = out.getvalue().splitlines()
    assert len(lines) == 21  # the first step, and each twentieth of the run
    assert lines[0].startswith("ppo 1/40  reward 0.025  kl 0.5")
    assert lines[-1].startswith("ppo 40/40  reward 1  kl 0.5")


def test_the_flag_and_other_ranks_are_silent():
    for options in ({"enabled": False}, {"visible": False}):
        shown, out = progress(**options)
        shown.show_step(1, {"train/reward": 1.0})
        shown.close()
        assert out.getvalue() == ""


def test_a_terminal_has_a_bar_with_the_phase_and_the_numbers():
    out = io.StringIO()
    shown = Progress(LoggerConfig(), "ppo", 4, 0, console=Console(file=out, force_terminal=True, width=200))
    shown.phase("generate")
    shown.show_step(1, {"train/reward": 0.25})
    shown.close()
    assert "1/4" in out.getvalue()
    assert "generate" in out.getvalue()
    assert "reward 0.25" in out.getvalue()


def test_the_headline_names_evaluation():
    assert headline({"eval/pass1": 0.5, "train/reward": 0.25, "train/other": 3.0}) == "reward 0.25  eval pass1 0.5"


def test_every_evaluation_is_printed_with_and_without_a_terminal():
    results = {"eval/pass1": 0.8926, "eval/pass1_stderr": 0.019, "eval/pass4": 0.98, "eval/num_samples": 512.0}
    for terminal in (False, True):
        out = io.StringIO()
        console = Console(file=out, force_terminal=terminal, width=200)
        shown = Progress(LoggerConfig(), "ppo", total=40, start=0, console=console)
        shown.show_step(7, {"train/reward": 0.5})
        shown.print_evaluation(7, results)
        shown.close()
        assert "ppo 7/40  evaluation: pass1 0.8926 ± 0.019  pass4 0.98" in out.getvalue()
        assert "512" not in out.getvalue()


DAMAGED = [b"{\n", b"[]\n", b"\xff\xfe\x00\n", b'{"loss": 1.0}\n', b'{"step": "1"}\n', b"\n"]


@pytest.mark.parametrize("line", DAMAGED)
def test_a_damaged_line_is_named_and_ignored_and_the_others_stay(tmp_path, capsys, line):
    folder = RunFolder(tmp_path)
    sound = [b'{"step": 1, "train/loss": 3.0}\n', b'{"step": 2, "train/loss": 2.0}\n']
    folder.metrics.write_bytes(sound[0] + line + sound[1] + b'{"step": 3, "tra')
    assert [row["step"] for row in read_rows(folder.metrics)] == [1, 2]
    journal = Journal(LoggerConfig(progress=False), folder, "sft")
    journal.open(2, 5)
    journal.close()
    said = capsys.readouterr().err.replace("\n", "")
    assert said == f"{folder.metrics}:2 is damaged, so it is ignored: it is not a row of metrics", (
        "and no word of the torn line"
    )
    assert folder.metrics.read_bytes() == b"".join(sound)


def test_the_only_evaluation_set_is_not_shown_twice():
    assert results({"eval/a/b.jsonl/acc": 0.5, "eval/acc": 0.5, "eval/reward_p05": 0.1}) == "acc 0.5"
    two = {"eval/a/acc": 0.25, "eval/b/acc": 0.75, "eval/acc": 0.5}
    assert results(two) == "a/acc 0.25  b/acc 0.75  acc 0.5"


def test_a_long_phase_shows_how_far_it_is_and_how_long_it_takes():
    """Without a terminal now and then, and never of its last part, with which it ends."""
    shown, out = progress()
    began = time.monotonic() - 60
    for done in (30, 31, 120):
        shown.part("evaluated prompts", done, 120, began)
    shown.close()
    assert out.getvalue() == "ppo: evaluated prompts 30/120  3:00 left\n"
    out = io.StringIO()
    shown = Progress(LoggerConfig(), "ppo", 4, 0, console=Console(file=out, force_terminal=True, width=200))
    shown.part("prompts", 1, 2, time.monotonic() - 65)
    shown.close()
    assert "prompts 1/2, 1:05 left" in out.getvalue()


def test_a_journal_counts_what_comes_and_passes_it_on(tmp_path):
    journal, out = Journal(LoggerConfig(), RunFolder(tmp_path), "ppo"), io.StringIO()
    assert list(journal.track(iter("ab"), 2, "letters")) == ["a", "b"], "before the run begins"
    journal.progress = Progress(LoggerConfig(), "ppo", 1, 0, console=Console(file=out, force_terminal=True, width=200))
    assert list(journal.track(iter("ab"), 2, "letters")) == ["a", "b"]
    journal.progress.close()
    assert "letters 2/2, 0:00 left" in out.getvalue()


def test_a_phase_before_the_first_step_has_the_bar_for_itself():
    out = io.StringIO()
    shown = PhaseProgress(LoggerConfig(), "sft", 200, Console(file=out, force_terminal=True, width=200))
    shown.part("rows of a.jsonl", 150, 200, time.monotonic() - 60)
    shown.close()
    assert "rows of a.jsonl 150/200, 0:20 left" in out.getvalue()
    assert out.getvalue().count("150/200") == 2 * out.getvalue().count("0:20 left")


def test_of_a_phase_whose_end_nobody_knows_a_line_says_how_far_it_is():
    for terminal in (False, True):
        out = io.StringIO()
        shown = PhaseProgress(LoggerConfig(), "sft", None, Console(file=out, force_terminal=terminal, width=200))
        shown.part("rows of a.json", 150, None, time.monotonic() - 60)
        shown.close()
        assert out.getvalue() == "sft: rows of a.json 150\n"


@pytest.mark.parametrize(("short", "said"), [(0.0, "sft: rows 1/3  0:00 left\nsft: rows 2/3  0:00 left\n"), (1e9, "")])
def test_a_phase_before_the_first_step_is_shown_if_it_lasts(tmp_path, monkeypatch, capsys, short, said):
    monkeypatch.setattr(journal_module, "SHORT_S", short)
    monkeypatch.setattr(journal_module, "TICK_S", 0.0)
    monkeypatch.setattr(console_module, "PART_S", 0.0)
    journal = Journal(LoggerConfig(), RunFolder(tmp_path), "sft")
    assert list(journal.track(iter("abc"), 3, "rows")) == ["a", "b", "c"]
    assert capsys.readouterr().out == said
    silent = Journal(LoggerConfig(progress=False), RunFolder(tmp_path), "sft")
    assert list(silent.track(iter("abc"), 3, "rows")) == ["a", "b", "c"]
    assert capsys.readouterr().out == ""


def read_prometheus(url: str) -> dict[str, float]:
    """Return the values that Prometheus would read, by the text before them."""
    with urllib.request.urlopen(url) as answer:
        lines = answer.read().decode().splitlines()
    return {text: float(value) for text, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


@pytest.mark.notices(
    "Prometheus reads the first value of a metric for ever",
    "tracking/metrics.py",
    "self._values.labels(self._run, name).set(value)",
    "self._values.labels(self._run, name).inc(value)",
)
def test_prometheus_reads_the_newest_values_until_the_run_ends(tmp_path, capsys):
    pytest.importorskip("prometheus_client")
    folder = RunFolder(tmp_path / "it")
    folder.path.mkdir()
    logger = MetricLogger(LoggerConfig(prometheus_port=0), folder, 0)
    url = capsys.readouterr().err.split()[-1]
    assert url.startswith("http://127.0.0.1:")
    for step, loss in ((1, 2.0), (2, 0.5)):
        logger.log(step, {"train/loss": loss})
    logger.log(2, {"eval/pass1": math.nan})
    values = read_prometheus(url)
    assert values['rlhf_suite_metric{metric="train/loss",run="it"}'] == 0.5
    assert math.isnan(values['rlhf_suite_metric{metric="eval/pass1",run="it"}'])
    assert values['rlhf_suite_step{run="it"}'] == 2
    port = int(url.split(":")[2].split("/")[0])
    with pytest.raises(UserError, match=f"logger.prometheus_port={port}: .* Choose another port"):
        MetricLogger(LoggerConfig(prometheus_port=port), RunFolder(tmp_path / "it"), 0)
    logger.close()
    with pytest.raises(urllib.error.URLError):
        read_prometheus(url)
