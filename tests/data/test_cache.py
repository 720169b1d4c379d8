"""The bound of the cache of encoded rows: the least recently used entries are removed, and open entries stay."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from test_loading import SFT, Counting, load, write

from rlhf_suite.data.cache import evict, open_locked
from rlhf_suite.data.store import SUMMARY
from rlhf_suite.data.text_encoders import ConversationEncoder

HOLDS = """
import sys
from pathlib import Path
from rlhf_suite.data.cache import open_locked
held = open_locked(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "rlhf_suite" / "encoded"


@pytest.fixture
def sets(tmp_path):
    """Three sets of 1000 bytes each, used last at the times 1, 2 and 3; one that is being written."""
    for age, name in enumerate(("old", "middle", "new"), start=1):
        folder = tmp_path / "sets" / name
        folder.mkdir(parents=True)
        (folder / "rows.arrow").write_bytes(bytes(900))
        (folder / SUMMARY).write_bytes(bytes(100))
        os.utime(folder / SUMMARY, (age, age))
    (tmp_path / "sets" / ".next.new.1").mkdir()
    (tmp_path / "sets" / ".next.new.1" / SUMMARY).write_bytes(bytes(5000))
    return tmp_path / "sets"


def names(folders):
    return [folder.name for folder in folders]


def left(sets):
    return sorted(folder.name for folder in sets.glob("[!.]*"))


@pytest.mark.notices(
    "the cache removes what was used last",
    "data/cache.py",
    "key=lambda entry: modified_at(entry / mark))",
    "key=lambda entry: -modified_at(entry / mark))",
)
def test_the_least_recently_used_entries_are_removed_until_the_rest_fits(sets):
    assert evict(sets, SUMMARY, 3000) == []
    assert names(evict(sets, SUMMARY, 2999)) == ["old"]
    open_locked(sets / "middle" / SUMMARY).close()
    assert names(evict(sets, SUMMARY, 1000)) == ["new"]
    assert left(sets) == ["middle"] and list(sets.glob(".*")) == [sets / ".next.new.1"]


@pytest.mark.notices(
    "a run that makes room in the cache ends when another run does so at the same moment",
    "data/cache.py",
    "with contextlib.suppress(OSError):  # another process is removing it",
    "with contextlib.suppress(PermissionError):",
)
def test_an_entry_that_another_process_is_removing_is_passed_over(tmp_path):
    for name in ("gone", "whole"):
        (tmp_path / name).mkdir()
        (tmp_path / name / SUMMARY).write_text("{}")
    (tmp_path / "gone" / "rows.arrow").symlink_to(tmp_path / "removed")  # it is listed, and not there
    assert evict(tmp_path, SUMMARY, 0) == [tmp_path / "whole"]


def test_open_entries_stay_even_beyond_the_bound(sets):
    with open_locked(sets / "old" / SUMMARY):
        os.utime(sets / "old" / SUMMARY, (1, 1))
        assert names(evict(sets, SUMMARY, 10)) == ["middle", "new"]
    assert names(evict(sets, SUMMARY, 10)) == ["old"]


def test_a_reader_in_another_process_protects_an_entry_until_it_ends(sets):
    reader = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(sets / "old" / SUMMARY)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert reader.stdout.readline() == b"held\n"
    evict(sets, SUMMARY, 10)
    assert left(sets) == ["old"]
    reader.kill()
    reader.communicate()
    evict(sets, SUMMARY, 10)
    assert left(sets) == []


def test_an_entry_that_is_removed_while_it_is_opened_is_not_found(sets, monkeypatch):
    """Between opening its file and locking it the set is removed, and another takes its place."""
    place = sets / "old"

    def removed_meanwhile(file, operation):
        monkeypatch.undo()
        evict(sets, SUMMARY, 10)
        place.mkdir()
        (place / SUMMARY).write_text("another")

    monkeypatch.setattr("rlhf_suite.data.cache.fcntl.flock", removed_meanwhile)
    with pytest.raises(FileNotFoundError):
        open_locked(place / SUMMARY)


def test_without_locks_entries_are_read_and_none_is_removed(sets, monkeypatch):
    def no_locks(file, operation):
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr("rlhf_suite.data.cache.fcntl.flock", no_locks)
    open_locked(sets / "old" / SUMMARY).close()
    assert evict(sets, SUMMARY, 10) == [] and left(sets) == ["middle", "new", "old"]


def test_a_run_keeps_its_own_entries_and_reads_them_after_the_others_are_removed(tokenizer, tmp_path, cache):
    encoder, tiny = Counting(ConversationEncoder(tokenizer, SFT)), replace(SFT, cache_max_gb=1e-9)
    first, second = write(tmp_path / "a.jsonl"), write(tmp_path / "b.jsonl", chosen="another answer")
    mine = load(encoder, first)
    whole = list(mine)
    load(encoder, second, tiny)
    assert len(list(cache.iterdir())) == 2, "both are open: the second by the run that has just written it"
    encoder.calls.clear()
    load(encoder, first, tiny)
    assert encoder.calls == [] and len(list(cache.iterdir())) == 1, "nobody has the second open any more"
    assert list(mine) == whole
