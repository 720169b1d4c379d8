"""Where the models of a run go: in place of its own earlier ones, and of nothing else."""

from __future__ import annotations

import json
import os

import pytest

from rlhf_suite.disk import DiskError
from rlhf_suite.run_folders.run_folder import RunFolder
from rlhf_suite.train.output import MARK, deliver, final_folder, is_own


@pytest.fixture
def run(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.start("abc")
    return folder


def model(text="weights", *others):
    """Write a model of one file, and others beside it."""

    def write(place):
        for name in (place.name, *(place.name + other for other in others)):
            folder = place.with_name(name)
            folder.mkdir()
            (folder / "model").write_text(text)
            (folder / "model").chmod(0o600)

    return write


def names(folder):
    return sorted(each.name for each in folder.iterdir())


def test_a_model_and_what_is_beside_it_are_put_in_their_places_and_recorded(run, tmp_path):
    out = tmp_path / "out"
    assert deliver(model("new", "_ema"), out, run, "actor") == out
    assert names(tmp_path) == ["out", "out_ema", "run"]
    assert (out / "model").read_text() == (tmp_path / "out_ema" / "model").read_text() == "new"
    assert run.status()["outputs"] == {"actor": str(out), "actor_ema": str(tmp_path / "out_ema")}


def test_a_continued_run_replaces_its_own_model_and_another_run_does_not(run, tmp_path):
    out = tmp_path / "out"
    deliver(model("first"), out, run, "actor")
    run.start("abc")  # continued
    assert deliver(model("second"), out, run, "actor") == out
    assert (out / "model").read_text() == "second"
    other = RunFolder(tmp_path / "other")
    other.start("abc")
    assert deliver(model("third"), out, other, "actor") == tmp_path / "out-1"
    assert (out / "model").read_text() == "second"
    assert names(tmp_path) == ["other", "out", "out-1", "run"]


@pytest.mark.parametrize("change", ["add", "edit", "remove"])
def test_a_model_that_somebody_has_changed_is_no_longer_the_runs_own(run, tmp_path, change, capsys):
    out = tmp_path / "out"
    deliver(model("first"), out, run, "actor")
    assert is_own(out, [run.run_id])
    if change == "add":
        (out / "NOTES.md").write_text("precious")
    elif change == "edit":
        (out / "model").write_text("tuned further")
    else:
        (out / "model").unlink()
    before = names(out)
    assert deliver(model("second"), out, run, "actor") == tmp_path / "out-1"
    assert names(out) == before
    assert "was not written by this run, so it stays; the model is in" in capsys.readouterr().err


def test_an_edit_of_the_same_size_is_noticed(run, tmp_path):
    out = tmp_path / "out"
    deliver(model("first"), out, run, "actor")
    (out / "model").write_text("tsrif")
    os.utime(out / "model", (0, 0))
    assert not is_own(out, [run.run_id])


def test_a_mark_that_cannot_be_read_is_nobodys(run, tmp_path):
    out = tmp_path / "out"
    deliver(model(), out, run, "actor")
    for text in ("", "[]", json.dumps({"run": run.run_id, "files": {"model": 3}})):
        (out / MARK).write_text(text)
        assert not is_own(out, [run.run_id])
    assert not is_own(tmp_path / "nothing", [run.run_id])


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_what_has_appeared_meanwhile_stays_and_the_model_goes_beside_it(run, tmp_path, kind):
    out = tmp_path / "out"

    def write(place):
        model()(place)
        if kind == "folder":
            out.mkdir()
            (out / "NOTES.md").write_text("precious")
        elif kind == "file":
            out.write_text("precious")
        else:
            out.symlink_to(tmp_path / "run")

    assert deliver(write, out, run, "actor") == tmp_path / "out-1"
    assert (tmp_path / "out-1" / "model").read_text() == "weights"
    if kind == "folder":
        assert names(out) == ["NOTES.md"]
    else:
        assert out.is_symlink() if kind == "link" else out.read_text() == "precious"


def test_an_empty_folder_is_filled_and_a_link_is_followed(run, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    out = final_folder(str(tmp_path / "link"), run)
    assert deliver(model(), out, run, "actor") == tmp_path / "empty"
    assert (tmp_path / "link").is_symlink() and (tmp_path / "link" / "model").exists()


def test_a_model_that_can_no_longer_go_where_it_should_goes_to_the_run_folder(run, tmp_path, capsys):
    (tmp_path / "place").write_text("a file")
    assert deliver(model("w"), tmp_path / "place" / "out", run, "actor") == run.model
    assert (run.model / "model").read_text() == "w"
    assert "The model goes to" in capsys.readouterr().err
    with pytest.raises(DiskError, match="Not a directory"):
        run.model.parent.joinpath("model").rename(tmp_path / "elsewhere")
        deliver(model(), tmp_path / "place" / "out", RunFolder(tmp_path / "place"), "actor")


def test_a_killed_delivery_leaves_nothing_that_the_next_one_stumbles_over(run, tmp_path):
    out = tmp_path / "out"
    deliver(model("first"), out, run, "actor")
    begun = tmp_path / f".out.{run.run_id[:8]}.new"
    begun.mkdir()
    (begun / "half").write_text("")
    out.rename(tmp_path / f".out.{run.run_id[:8]}.old")  # killed between the two renames
    assert deliver(model("second"), out, run, "actor") == out
    assert (out / "model").read_text() == "second"
    assert names(tmp_path) == ["out", "run"]


def test_a_failed_export_leaves_what_was_there(run, tmp_path):
    out = tmp_path / "out"
    deliver(model("first"), out, run, "actor")

    def fail(place):
        place.mkdir()
        raise KeyError("x")

    with pytest.raises(KeyError):
        deliver(fail, out, run, "actor")
    assert (out / "model").read_text() == "first"
    assert names(tmp_path) == ["out", "run"]


def test_others_may_read_a_model_unless_the_umask_says_no(run, tmp_path):
    before = os.umask(0o022)
    try:
        deliver(model(), tmp_path / "out", run, "actor")
        os.umask(0o077)
        deliver(model(), tmp_path / "own", run, "actor")
    finally:
        os.umask(before)
    modes = [(tmp_path / name / "model").stat().st_mode & 0o777 for name in ("out", "own")]
    assert modes == [0o644, 0o600]
    assert (tmp_path / "own").stat().st_mode & 0o777 == 0o700


def holding(tmp_path, *others):
    """A folder for a model that holds a checkpoint, and other files."""
    keep = tmp_path / "out" / "ckpt" / "deep"
    keep.mkdir(parents=True)
    (keep / "state.json").write_text("step 3")
    for other in others:
        (tmp_path / "out" / other).parent.mkdir(exist_ok=True)
        (tmp_path / "out" / other).write_text("mine")
    return tmp_path / "out", keep


@pytest.mark.notices(
    "checkpoints inside the folder of a model send it elsewhere",
    "train/output.py",
    "if keep is not None and is_within(keep, path) and fill_folder(made, path, run, keep):",
    "if False:",
)
def test_checkpoints_inside_the_folder_of_a_model_stay_there(run, tmp_path):
    out, keep = holding(tmp_path)
    node = keep.stat().st_ino
    assert deliver(model("first"), out, run, "actor", keep) == out
    run.start("abc")  # continued
    assert deliver(model("second", "_ema"), out, run, "actor", keep) == out
    assert names(out) == sorted(["ckpt", "model", MARK]) and (out / "model").read_text() == "second"
    assert (keep / "state.json").read_text() == "step 3" and keep.stat().st_ino == node
    assert names(tmp_path) == ["out", "out_ema", "run"]


@pytest.mark.notices(
    "files of the user beside checkpoints are replaced by a model",
    "train/output.py",
    "if not has_room or (there and not is_own(path, [run], keep)):",
    "if not has_room:",
)
@pytest.mark.parametrize("other", ["NOTES.md", "ckpt/NOTES.md", "model"])
def test_what_is_beside_checkpoints_stays_and_the_model_goes_elsewhere(run, tmp_path, other):
    out, keep = holding(tmp_path, other)
    assert deliver(model("new"), out, run, "actor", keep) == tmp_path / "out-1"
    assert (out / other).read_text() == "mine" and (keep / "state.json").exists()


def test_a_model_with_a_file_called_as_the_folder_of_checkpoints_goes_elsewhere(run, tmp_path):
    keep = tmp_path / "out" / "model"
    keep.mkdir(parents=True)
    assert deliver(model("new"), tmp_path / "out", run, "actor", keep) == tmp_path / "out-1"
    assert names(tmp_path / "out") == ["model"]


def two_files(text):
    def write(place):
        place.mkdir()
        (place / "a").write_text(text)
        (place / "b").write_text(text)

    return write


@pytest.mark.notices(
    "a delivery that was killed between its files is foreign",
    "train/output.py",
    " or (keep is not None and was.keys() > there.keys())",
    "",
)
@pytest.mark.parametrize("left", [(), ("a",), ("b",)])
def test_a_delivery_that_was_killed_between_its_files_is_made_again(run, tmp_path, left):
    out, keep = holding(tmp_path)
    deliver(two_files("first"), out, run, "actor", keep)
    for name in {"a", "b"} - set(left):
        (out / name).unlink()
    assert is_own(out, [run.run_id], keep)
    assert deliver(two_files("second"), out, run, "actor", keep) == out
    assert [(out / name).read_text() for name in ("a", "b")] == ["second"] * 2
    other = RunFolder(tmp_path / "other")
    other.start("abc")
    assert deliver(two_files("third"), out, other, "actor", keep) == tmp_path / "out-1"
