"""Before anything starts: what a run would write must not be where something else is, and must have a place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlhf_suite.preflight.inspections.outputs import OUTPUTS, outputs_change_nothing
from rlhf_suite.run_folders.run_folder import RunFolder
from rlhf_suite.train.output import deliver

SFT = "task=sft actor.model_name_or_path={here}/base data.dataset={here}/data/rows.jsonl data.output_key=output"
MERGE = "task=merge_lora actor.model_name_or_path={here}/base lora.path={here}/adapter"
RUNS = {"sft": SFT, "merge_lora": MERGE, "ppo": "task=ppo", "rejection_sampling": "task=rejection_sampling"}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working folder with a base model, an adapter, data, notes, and a run folder."""
    work = tmp_path / "work"
    for name in ("work", "notes", "base", "adapter", "data", "run", "empty"):
        (tmp_path / name).mkdir()
    for name in ("notes/NOTES.md", "base/config.json", "adapter/adapter_config.json", "run/status.json", "file"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "data" / "rows.jsonl").write_text('{"input": "a", "output": "b"}\n')
    (tmp_path / "link").symlink_to(tmp_path / "notes")
    (tmp_path / "link_to_base").symlink_to(tmp_path / "base")
    monkeypatch.chdir(work)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def problems(checked, here):
    """What the inspections of outputs say of a command line."""

    def look(line, folder=None):
        found = checked(line.format(here=here))
        assert not found.problems, found.problems
        return [problem for look in OUTPUTS for problem in look(found.runs[0], folder or here / "run")]

    return look


@pytest.mark.parametrize("task", ["sft", "merge_lora", "rejection_sampling"])
@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("{here}/notes", "contains files that this run did not write (NOTES.md)"),
        ("{here}/link", "contains files that this run did not write (NOTES.md)"),
        ("{here}/file", "is a file"),
        (".", "is the current folder, or contains it"),
        ("{here}", "is the current folder, or contains it"),
        ("/", "is the current folder, or contains it"),
        ("{here}/run", "contains files that this run did not write"),
        ("{here}/file/model", "cannot be written: Not a directory"),
        ("/proc/model", "cannot be written: "),
        ("{here}/" + "x" * 300, "cannot be written: File name too long"),
        ("{here}/" + "x" * 250, "cannot be written: File name too long"),
    ],
)
def test_a_model_has_a_place_of_its_own_or_the_run_does_not_start(problems, here, task, output, words):
    before = sorted(here.rglob("*"))
    (problem,) = problems(f"{RUNS[task]} ckpt.output_dir={output}")
    assert problem.key == "ckpt.output_dir"
    assert words in problem.what
    assert problem.fix == "write ckpt.output_dir=<a folder that does not exist yet>"
    assert sorted(here.rglob("*")) == before


@pytest.mark.parametrize("output", ["{here}/new", "{here}/a/b/c", "{here}/empty", "{here}/run/model", "'\"née/模型\"'"])
@pytest.mark.parametrize("task", RUNS)
def test_a_place_where_nothing_is_will_do(problems, here, task, output):
    before = sorted(here.rglob("*"))
    assert problems(f"{RUNS[task]} ckpt.output_dir={output}") == []
    assert sorted(here.rglob("*")) == before


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (f"{SFT} ckpt.output_dir={{here}}/base/tuned", "is inside actor.model_name_or_path="),
        (f"{SFT} ckpt.output_dir={{here}}/link_to_base/tuned", "is inside actor.model_name_or_path="),
        (f"{MERGE} ckpt.output_dir={{here}}/adapter/merged", "is inside lora.path="),
        (f"{SFT} ckpt.path={{here}}/empty ckpt.output_dir={{here}}/empty", "is also ckpt.path, which this run reads"),
        (f"{SFT} ckpt.path={{here}}/new ckpt.output_dir={{here}}/new/model", "is inside ckpt.path="),
        (f"{SFT} ckpt.output_dir={{here}}/cache/rlhf_suite/encoded/model", "is inside the cache"),
        (f"{SFT} ckpt.output_dir={{here}}/cache", "contains the cache"),
    ],
)
def test_a_model_does_not_go_where_the_run_reads(problems, line, words):
    (problem,) = problems(line)
    assert problem.key == "ckpt.output_dir" and words in problem.what


@pytest.mark.notices(
    "checkpoints inside the folder of a model count as files of others",
    "preflight/inspections/outputs.py",
    "entry.name not in kept or any(files(entry, keep))",
    "True",
)
@pytest.mark.parametrize("inside", ["checkpoints", "a/b"])
def test_checkpoints_may_be_inside_the_folder_of_the_model(problems, here, inside):
    line = f"{SFT} ckpt.path={here}/new/{inside} ckpt.output_dir={here}/new"
    assert problems(line) == []
    (here / "new" / inside / "step_000001").mkdir(parents=True)
    (here / "new" / inside / "step_000001" / "state.json").write_text("{}")
    assert problems(line) == []
    other = here / "new" / "a" / "notes.md"
    other.parent.mkdir(exist_ok=True)
    other.touch()
    (problem,) = problems(line)
    assert problem.key == "ckpt.output_dir" and "contains files that this run did not write (a)" in problem.what


def test_a_model_does_not_hold_its_run_folder(problems, here):
    (problem,) = problems(f"{SFT} ckpt.output_dir={here}/new", here / "new" / "run")
    assert problem.what.endswith("is the run folder, or contains it")
    (problem,) = problems(f"{SFT} ckpt.output_dir={here}/new", here / "new")
    assert problem.what.endswith("is the run folder, or contains it")


@pytest.mark.parametrize(
    ("words", "taken"),
    [
        ("critic.save_value_network=true algo.advantage.estimator=gae", "_critic"),
        ("train.enable_ema=true", "_ema"),
        ("ds.lora.rank=4 ckpt.save_adapter=true", "_adapter"),
    ],
)
def test_the_models_beside_the_first_one_need_places_too(problems, here, words, taken):
    (here / f"out{taken}").mkdir()
    (here / f"out{taken}" / "mine").touch()
    (problem,) = problems(f"task=ppo {words} ckpt.output_dir={here}/out")
    assert f"out{taken} contains files that this run did not write (mine)" in problem.what


def write(place):
    place.mkdir()
    (place / "weights").write_text("w")


def test_a_continued_run_may_replace_its_own_model_and_a_repeated_one_may_not(problems, here):
    out, mine, other = here / "out", RunFolder(here / "mine"), RunFolder(here / "other")
    mine.start("a")
    other.start("a")
    deliver(write, out, mine, "actor")
    line = f"{SFT} ckpt.output_dir={out}"
    assert problems(f"{line} ckpt.load_enable=true", mine.path) == []
    (problem,) = problems(line, other.path)
    assert "contains files that this run did not write (rlhf_suite.json, weights)" in problem.what
    (out / "NOTES.md").write_text("mine")
    assert len(problems(f"{line} ckpt.load_enable=true", mine.path)) == 1


def test_who_continues_from_checkpoints_is_the_run_that_wrote_them(problems, here):
    out, mine = here / "out", RunFolder(here / "mine")
    mine.start("a")
    deliver(write, out, mine, "actor")
    state = here / "shared" / "step_000002" / "state.json"
    state.parent.mkdir(parents=True)
    state.write_text(json.dumps({"run": mine.run_id}))
    line = f"{SFT} ckpt.output_dir={out} ckpt.path={here}/shared"
    assert problems(f"{line} ckpt.load_enable=true", here / "new") == []
    assert [each.key for each in problems(line, here / "new")] == ["ckpt.output_dir"]


def test_a_loop_may_replace_the_model_that_its_stage_wrote(problems, here):
    out, stage = here / "out", RunFolder(here / "loop" / "iter_1" / "sft")
    stage.start("a")
    deliver(write, out, stage, "actor")
    assert problems(f"task=rejection_sampling ckpt.output_dir={out} ckpt.load_enable=true", here / "loop") == []


ROWS = "task=generate generate.output_path={here}/"
READS_BASE = "actor.model_name_or_path={here}/base data.prompt_dataset=builtin:reverse data.label_key=label"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (ROWS + "data/rows.jsonl ckpt.load_enable=true", "exists already"),
        (ROWS + "file/rows.jsonl", "cannot be written: Not a directory"),
        (ROWS + "x" * 240 + ".jsonl", "cannot be written: File name too long"),
        ("task=score score.output_path=/proc/rows.jsonl", "cannot be written"),
        (f"{ROWS}base/rows.jsonl {READS_BASE}", "is inside actor.model_name_or_path"),
    ],
)
def test_a_file_of_rows_needs_a_place_too(problems, line, words):
    (problem,) = problems(line)
    assert problem.key.endswith(".output_path") and words in problem.what


def test_a_continued_run_may_put_its_rows_in_place(problems, here):
    (here / "run" / "progress.json").write_text("{}")
    (here / "rows.jsonl").touch()
    assert problems(ROWS + "rows.jsonl ckpt.load_enable=true") == []


def test_old_checkpoints_are_found_before_anything_starts(problems, here):
    (here / "shared" / "step_000003").mkdir(parents=True)
    (here / "shared" / "step_000003" / "manifest.json").write_text("{}")
    (problem,) = problems(f"{SFT} ckpt.path={here}/shared")
    assert (problem.key, "step_000003" in problem.what) == ("ckpt.path", True)
    assert "ckpt.load_enable=true" in problem.fix
    assert problems(f"{SFT} ckpt.path={here}/shared ckpt.load_enable=true") == []
    (problem,) = problems(f"{SFT} ckpt.path={here}/file")
    assert "cannot be written: Not a directory" in problem.what


@pytest.mark.parametrize("cache", ["/proc/x", "{here}/file"])
def test_a_cache_that_cannot_be_written_is_named_with_the_variable(problems, here, monkeypatch, cache):
    monkeypatch.setenv("XDG_CACHE_HOME", cache.format(here=here))
    (problem,) = problems("task=sft")
    assert problem.key == "XDG_CACHE_HOME" and "cannot be written" in problem.what
    assert problems(MERGE) == [], "this run needs no cache"


def test_without_a_folder_what_may_be_the_runs_own_is_left_to_the_second_look(checked, here):
    mine = RunFolder(here / "mine")
    mine.start("a")
    deliver(write, here / "out", mine, "actor")
    (run,) = checked(f"task=sft ckpt.output_dir={here}/out").runs
    assert list(outputs_change_nothing(run, None)) == []
    (here / "out" / "rlhf_suite.json").unlink()
    assert len(list(outputs_change_nothing(run, None))) == 1


def test_a_disk_that_can_only_be_read_is_refused(problems, here):
    root = Path("/sys/kernel")
    if not root.is_dir():
        pytest.skip("there is no /sys here")
    (problem,) = problems(f"{SFT} ckpt.output_dir={root}/model")
    assert "cannot be written" in problem.what
