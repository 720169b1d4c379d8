"""Writing whole or not at all, never over something else, and what a disk's refusal is called."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time

import pytest

from full_disk import fill
from rlhf_suite import disk
from rlhf_suite.disk import (
    DiskError,
    file_aside,
    free_bytes,
    name_disk_errors,
    put,
    sweep_abandoned,
    unwritable,
    write_aside,
    write_json,
)
from rlhf_suite.errors import UserError


def test_a_file_is_replaced_as_a_whole_with_the_rights_that_the_umask_gives(tmp_path):
    path = tmp_path / "a" / "x.json"
    write_json(path, {"n": 1})
    with pytest.raises(KeyError), file_aside(path) as aside:
        aside.write_text("half")
        raise KeyError
    assert path.read_text() == '{\n "n": 1\n}\n'
    with file_aside(path) as aside:
        aside.unlink()
        os.close(os.open(aside, os.O_CREAT | os.O_WRONLY, 0o600))  # as some libraries do
    mask = os.umask(0)
    os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~mask
    assert [each.name for each in path.parent.iterdir()] == ["x.json"]


def test_a_folder_that_is_there_is_kept(tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "mine").touch()
    with pytest.raises(DiskError, match="Directory not empty"), write_aside(tmp_path / "x") as aside:
        (aside / "new").touch()
    with write_aside(tmp_path / "x", keep=True) as aside:
        (aside / "new").touch()
    assert [each.name for each in (tmp_path / "x").iterdir()] == ["mine"]
    assert [each.name for each in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize("links", [True, False])
def test_a_file_never_takes_anothers_place(tmp_path, monkeypatch, links):
    def refuse(*_):
        raise OSError(errno.EPERM, "no links here")

    if not links:
        monkeypatch.setattr(disk.os, "link", refuse)
    places = []
    for number in range(3):
        (tmp_path / "new").write_text(str(number))
        places.append(put(tmp_path / "new", tmp_path / "out.v1.jsonl"))
    assert [place.name for place in places] == ["out.v1.jsonl", "out.v1-1.jsonl", "out.v1-2.jsonl"]
    assert [place.read_text() for place in places] == ["0", "1", "2"]


def test_a_folder_beside_another_keeps_its_whole_name(tmp_path):
    (tmp_path / "qwen2.5-7b").write_text("a file")
    (tmp_path / "new").mkdir()
    assert put(tmp_path / "new", tmp_path / "qwen2.5-7b").name == "qwen2.5-7b-1"


def test_a_full_disk_is_named_with_the_path_and_what_is_free(small):
    fill(small)
    assert free_bytes(small) == 0
    message = rf"{small}/x cannot be written: the disk is full \(0.0 MB are free there\)"
    with pytest.raises(DiskError, match=message), name_disk_errors(small / "x"):
        (small / "x").write_bytes(bytes(9000))
    with pytest.raises(DiskError, match="the disk is full"), name_disk_errors(small / "x"):
        raise RuntimeError("unexpected pos 64 vs 0")  # PyTorch on a full disk
    with pytest.raises(DiskError, match="the disk is full"):
        write_json(small / "y", {})
    assert unwritable(small / "new" / "run") is not None
    assert sorted(each.name for each in small.iterdir()) == ["filler", "x"]


def test_other_errors_are_not_taken_for_the_disks(tmp_path):
    for error in (KeyError("x"), UserError("x"), FileNotFoundError(errno.ENOENT, "no", "/data/rows.jsonl")):
        with pytest.raises(type(error)), name_disk_errors(tmp_path / "x"):
            raise error


@pytest.mark.parametrize(
    ("name", "reason"),
    [("x" * 250, "File name too long"), ("a/" * 2100, "File name too long"), ("file/x", "directory")],
)
def test_a_folder_that_cannot_be_made_is_known_before(tmp_path, name, reason):
    (tmp_path / "file").touch()
    assert reason in unwritable(tmp_path / name)
    assert unwritable(tmp_path / "x" / "y") is None
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_a_user_without_a_home_is_told_what_to_set():
    code = "from rlhf_suite.disk import cache_root; cache_root()"
    if os.geteuid():
        pytest.skip("only root can become a user without a home")
    words = ["setpriv", "--reuid=54321", "--clear-groups", sys.executable, "-c", code]
    environment = {key: value for key, value in os.environ.items() if key not in ("HOME", "XDG_CACHE_HOME")}
    done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
    if "Permission denied" in done.stderr and "cache_root" not in done.stderr:
        pytest.skip("Python is not readable for other users here")
    assert "set XDG_CACHE_HOME=<a folder>" in done.stderr


def test_what_killed_runs_have_begun_is_removed_a_day_later(tmp_path):
    for name, age in (("old", 2 * disk.ABANDONED_S), ("new", 60)):
        (tmp_path / f".{name}.new.1").write_text("half")
        (tmp_path / f".{name}-folder.new.1").mkdir()
        (tmp_path / f".{name}-folder.new.1" / "link").symlink_to("nowhere")
        for path in (f".{name}.new.1", f".{name}-folder.new.1/link", f".{name}-folder.new.1"):
            os.utime(tmp_path / path, (time.time() - age,) * 2, follow_symlinks=False)
    (tmp_path / "kept").write_text("whole")
    sweep_abandoned(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".new-folder.new.1", ".new.new.1", "kept"]
