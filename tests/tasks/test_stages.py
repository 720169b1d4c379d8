"""Stages of a loop: done ones are left alone, a failure names its stage, changed flags and data are noticed."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.errors import RunError, UserError
from rlhf_suite.run_folders.record import fingerprint, load, save
from rlhf_suite.run_folders.run_folder import RunFolder
from rlhf_suite.tasks.stages import failure, stages

# Its own process refuses it at once: it has no data, and no column of answers.
RUN = Run.of("sft", actor=replace(Run.of("sft").actor, model_name_or_path="builtin:tiny"))


def begin(folder, run, done):
    record = RunFolder(folder)
    record.start(fingerprint(run))
    save(run, folder / "config.yaml")
    if done:
        record.mark_done({"x": 1.0})
    return record


def test_a_stage_that_is_done_is_not_run_again(tmp_path):
    begin(tmp_path / "iter_0/sft", RUN, done=True)
    before = (tmp_path / "iter_0/sft/status.json").read_bytes()
    with stages(tmp_path) as steps:
        assert steps.run("iter_0/sft", RUN).status()["metrics"] == {"x": 1.0}
    assert (tmp_path / "iter_0/sft/status.json").read_bytes() == before
    assert json.loads((tmp_path / "loop.json").read_text())["stages"] == {"iter_0/sft": "done"}


@pytest.mark.parametrize("done", [True, False])
def test_a_stage_of_another_configuration_is_refused_with_the_flags_that_differ(tmp_path, done):
    begin(tmp_path / "iter_0/sft", RUN, done)
    other = replace(RUN, data=replace(RUN.data, max_len=77))
    with (
        stages(tmp_path) as steps,
        pytest.raises(UserError, match=r"iter_0/sft.* other flags: data\.max_len: 2048 -> 77"),
    ):
        steps.run("iter_0/sft", other)


@pytest.mark.stack
def test_a_failed_stage_is_named_with_its_own_words_and_its_folder(tmp_path):
    with stages(tmp_path) as steps, pytest.raises(UserError) as error:
        steps.run("iter_0/sft", RUN)
    said = str(error.value)
    assert "stage iter_0/sft failed: UserError: data.output_key is not set" in said
    assert str(tmp_path / "iter_0/sft") in said
    assert json.loads((tmp_path / "loop.json").read_text())["stages"] == {"iter_0/sft": "running"}
    assert not load(tmp_path / "iter_0/sft/config.yaml").ckpt.load_enable


@pytest.mark.stack
def test_a_stage_that_has_begun_is_resumed(tmp_path):
    begin(tmp_path / "iter_0/sft", RUN, done=False)
    with stages(tmp_path) as steps, pytest.raises(UserError):
        steps.run("iter_0/sft", RUN)
    assert load(tmp_path / "iter_0/sft/config.yaml").ckpt.load_enable


def test_a_stage_that_was_killed_or_broke_says_where_to_look(tmp_path):
    record = begin(tmp_path / "iter_2/dpo", RUN, done=False)
    assert "it ended without an error message (SIGKILL, out of memory?)" in str(failure("iter_2/dpo", record, -9))
    record.mark_failed(KeyError("loss"))
    (record.path / "error.log").write_text("Traceback")
    record.logs.mkdir()
    error = failure("iter_2/dpo", record, 1)
    assert isinstance(error, RunError)
    assert "stage iter_2/dpo failed: KeyError: 'loss'" in str(error)
    assert f"{record.path / 'error.log'} and {record.logs}" in str(error)


def test_rows_are_written_once_and_others_are_refused(tmp_path):
    with stages(tmp_path) as steps:
        path = steps.write("iter_0/best.jsonl", [{"input": "é", "n": 1}, {"input": "b"}])
        assert path.read_text() == '{"input": "é", "n": 1}\n{"input": "b"}\n'
        assert steps.write("iter_0/best.jsonl", [{"input": "é", "n": 1}, {"input": "b"}]) == path
        with pytest.raises(UserError, match=r"best\.jsonl was made with other flags"):
            steps.write("iter_0/best.jsonl", [{"input": "b"}])
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_folder_has_one_loop_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr("rlhf_suite.tasks.stages.ORPHAN_S", 0)
    with stages(tmp_path), pytest.raises(RunError, match="another process works in"), stages(tmp_path):
        pass
