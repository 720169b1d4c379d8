"""`rlhf-suite why <folder>`: what a user reads of a run that works, waits, has ended, was killed or stands still."""

import json
import os
import socket
import time

import pytest

from rlhf_suite.cli import main
from rlhf_suite.tracking.run_folder import RunFolder
from rlhf_suite.waits import record, waiting

NO_PROCESS = 2**22 + 1  # above the largest number of a process


@pytest.fixture
def folder(tmp_path):
    result = RunFolder(tmp_path / "run")
    result.start("fingerprint")
    result.record_step(3)
    return result


def write_status(folder, **values):
    folder.status_file.write_text(json.dumps(folder.status() | values))


def write_record(folder, age_s=0.0, waited_s=80.0):
    with waiting("the phase ppo_train"), waiting("the policy update of step 4", ["actor-0", "actor-1"], 600.0):
        now = record()
    for each in now["waits"]:
        each["began"] = time.time() - age_s - waited_s
    folder.waits.write_text(json.dumps(now | {"time": time.time() - age_s}))
    folder.logs.mkdir()
    (folder.logs / "actor-0.log").write_text("reading the batch\nwaiting for its peer\n")


def why(folder, capsys, code):
    assert main(["why", str(folder.path)]) == code
    return capsys.readouterr().out


def test_a_run_that_works_says_what_it_waits_for_and_shows_the_logs_of_those(folder, capsys):
    write_record(folder)
    said = why(folder, capsys, 0)
    assert f"{folder.path}: running, 3 steps are done" in said
    assert f"as process {os.getpid()} on {socket.gethostname()} since " in said
    assert "  the phase ppo_train: for 1 min 20 s\n" in said
    assert "  the policy update of step 4 (actor-0, actor-1): for 1 min 20 s of at most 10 min 0 s\n" in said
    assert "in write_record\n" in said and "waiting for its peer" in said


def test_a_run_that_was_killed_says_what_it_did_last(folder, capsys):
    write_record(folder, age_s=7200)
    write_status(folder, pid=NO_PROCESS)
    said = why(folder, capsys, 1)
    assert f"process {NO_PROCESS} on {socket.gethostname()} is gone: it was killed" in said
    assert "ckpt.load_enable=true continues it" in said
    assert (
        "when it was last seen it waited for (" in said
        and "the policy update of step 4 (actor-0, actor-1): for 1 min 20 s" in said
    )


def test_a_run_that_stands_still_says_since_when(folder, capsys):
    write_record(folder, age_s=125)
    assert "but it has written no record for 2 min 5 s" in why(folder, capsys, 1)


def test_a_run_on_another_node_is_not_taken_for_a_killed_one(folder, capsys):
    write_record(folder)
    write_status(folder, pid=NO_PROCESS, host="another-node")
    assert f"as process {NO_PROCESS} on another-node since" in why(folder, capsys, 0)


def test_a_failed_run_says_its_error_and_what_it_waited_for(folder, capsys):
    write_record(folder)
    folder.mark_failed(ValueError("actor-1 died\nits log: logs/actor-1.log"))
    said = why(folder, capsys, 1)
    assert ": failed, 3 steps are done\n  ValueError: actor-1 died\n  its log: logs/actor-1.log\n" in said
    assert "when it ended it waited for (" in said and "the policy update of step 4" in said


def test_a_finished_run_says_where_its_models_are(folder, capsys):
    folder.record_model("actor", folder.model)
    folder.mark_done({})
    assert why(folder, capsys, 0) == f"{folder.path}: done, 3 steps are done\n  actor: {folder.model}\n"


def test_texts_of_others_act_on_no_terminal(folder, capsys):
    folder.mark_failed("\x1b[31mred")
    assert "\x1b" not in why(folder, capsys, 1)


def test_what_is_no_run_is_refused(tmp_path, capsys):
    assert main(["why", str(tmp_path)]) == 2
    assert f"{tmp_path} is not the folder of a run: it has no status.json" in capsys.readouterr().err
    assert main(["why"]) == 2
    assert "usage: rlhf-suite why <run folder>" in capsys.readouterr().err
