"""`rlhf-suite why <folder>`: what a user reads of a run that works, waits, has ended, was killed or stands still."""

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time

import pytest

from rlhf_suite.agents.base import Task, ToolCall
from rlhf_suite.agents.tools import FunctionTools, ToolEnvironment
from rlhf_suite.api.why import read_record
from rlhf_suite.cli import main
from rlhf_suite.config.declarations.reward import RewardConfig
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.polling import poll_until
from rlhf_suite.python_source import import_file
from rlhf_suite.rewards.base import Sample
from rlhf_suite.rewards.reward_process import IsolatedScorer
from rlhf_suite.run_folders.record import save
from rlhf_suite.run_folders.run_folder import RunFolder
from rlhf_suite.train.checkpoint import store_of
from rlhf_suite.waits import keep, open_waits, record, record_waits, waiting

UPDATE = ("the policy update of step 4", ["actor-0", "actor-1"], 600.0, "launch.timeout_s")
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
    with waiting("the phase ppo_train"), waiting(*UPDATE):
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
    assert "  the phase ppo_train: for 1 min 20 s, since " in said
    assert (
        "  the policy update of step 4 (actor-0, actor-1): for 1 min 20 s of at most 10 min 0 s (launch.timeout_s),"
        in said
    )
    assert "in write_record\n" in said and "waiting for its peer" in said


@pytest.mark.notices(
    "why advises to continue without a checkpoint",
    "api/why.py",
    'it was killed{remedy(folder)}"',
    'it was killed; continue it with ckpt.load_enable=true"',
)
def test_a_run_that_was_killed_says_what_it_did_last(folder, capsys):
    write_record(folder, age_s=7200)
    write_status(folder, pid=NO_PROCESS)
    said = why(folder, capsys, 1)
    assert f"process {NO_PROCESS} on {socket.gethostname()} is gone: it was killed" in said
    assert "ckpt.load_enable" not in said
    assert (
        "when it was last seen it waited for (" in said
        and "the policy update of step 4 (actor-0, actor-1): for 1 min 20 s" in said
    )


@pytest.mark.notices(
    "a run that stands still is said to work", "api/why.py", "if late > STALE_S:", "if late > 100 * STALE_S:"
)
def test_a_run_that_stands_still_says_since_when(folder, capsys):
    write_record(folder, age_s=125)
    assert "but it has written no record for 2 min 5 s" in why(folder, capsys, 1)


@pytest.mark.notices(
    "a run on another node is said to be killed", "locks.py", 'holder.get("host") != socket.gethostname() or ', ""
)
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


def small_run(folder, **ckpt):
    run = Run.of("sft")
    run.actor.model_name_or_path = "builtin:tiny"
    for name, value in ckpt.items():
        setattr(run.ckpt, name, value)
    save(run, folder.config)
    return run


def test_a_killed_run_is_continued_from_its_checkpoint_or_not_at_all(folder, capsys):
    run = small_run(folder)
    write_status(folder, pid=NO_PROCESS)
    assert "it was killed; no checkpoint was saved (ckpt.save_steps=-1), so it cannot be continued" in why(
        folder, capsys, 1
    )
    store = store_of(run.ckpt, folder)
    store.begin(2)
    store.commit(2, {"step": 2})
    assert "killed; continue after step 2 with the same command and ckpt.load_enable=true" in why(folder, capsys, 1)


@pytest.mark.notices(
    "why shows the stack of the shutdown",
    "waits.py",
    "    calls = traceback.extract_tb(causes[-1].__traceback__)[-STACK_LINES:]",
    "    calls = traceback.extract_tb(causes[0].__traceback__)[-STACK_LINES:]",
)
@pytest.mark.notices(
    "a failure forgets what it waited for",
    "waits.py",
    '            vars(error).setdefault("_waits", []).append(wait)',
    '            vars(error).setdefault("_waits", [])',
)
def test_a_failed_run_shows_the_stack_of_the_failure_and_not_of_the_shutdown(folder, capsys):
    def shutdown():
        with waiting("the end of the engines"):
            raise OSError("an engine does not end")

    def work():
        try:
            with waiting("the scores of 4 samples"):
                raise KeyError("no such table")
        finally:
            shutdown()

    with pytest.raises(OSError, match="does not end") as caught, record_waits(folder.waits):
        work()
    folder.mark_failed(caught.value)
    said = why(folder, capsys, 1)
    assert "the scores of 4 samples: for 0 s" in said
    (stack,) = re.findall(r"the error came from, the innermost call last\n((?:  .*\n)+)", said)
    assert stack.endswith(" in work\n") and "shutdown" not in stack


@pytest.mark.notices(
    "why lists processes of an earlier run", "api/why.py", 'if record["time"] >= since - CLOCKS_S}', "}"
)
def test_the_processes_concerned_say_where_they_are_and_on_which_host(folder, capsys):
    write_record(folder)
    others = {"actor-0": "node-1", "actor-1": "node-2", "engine-0": "node-2"}
    for number, (name, host) in enumerate(others.items()):
        with waiting(f"the peers of {name}"):
            now = record() | {"host": host, "pid": 100 + number, "place": f"/home/me/{name}.py:7 in loss"}
        (folder.logs / f"{name}.json").write_text(json.dumps(now))
    (folder.logs / "previous-0.json").write_text(json.dumps(record() | {"time": time.time() - 7200}))
    said = why(folder, capsys, 0)
    assert "actor-1 (process 101 on node-2) at " in said and "  the peers of actor-1: for 0 s" in said
    assert "  its main thread: /home/me/actor-1.py:7 in loss" in said and "engine-0.py" not in said
    assert f"processes on {socket.gethostname()}: driver ({os.getpid()})" in said
    assert "processes on node-2: actor-1 (101), engine-0 (102)" in said and "previous-0" not in said


@pytest.mark.notices(
    "a name in a record leads out of the logs",
    "api/why.py",
    'folder.logs / f"{Path(name).name}.log"',
    'folder.logs / f"{name}.log"',
)
def test_names_in_a_record_lead_to_no_file_outside_the_logs(folder, capsys, tmp_path):
    (tmp_path / "secret.log").write_text("a secret")
    write_record(folder)
    now = json.loads(folder.waits.read_text())
    now["waits"][0]["who"] = ["../../secret", "/" + str(tmp_path / "secret")]
    folder.waits.write_text(json.dumps(now))
    (folder.logs / "secret.log").symlink_to(tmp_path / "secret.log")
    assert "a secret" not in why(folder, capsys, 0)


TOOLS = """
import threading, time

release = threading.Event()

def slow_search(query: str) -> str:
    '''Search.

    Args:
        query: what for.
    '''
    release.wait()
    return query
"""


@pytest.mark.notices(
    "alike waits are all listed",
    "waits.py",
    "groups.setdefault(one.alike or (one.what, tuple(one.who)), [])",
    "groups.setdefault(id(one), [])",
)
@pytest.mark.notices(
    "a tool that hangs has no line",
    "agents/calls.py",
    "    with runs(partial(in_thread, thread.ident)):",
    "    with runs(str):",
)
@pytest.mark.notices(
    "the wait for a tool does not say its limit",
    "agents/tools.py",
    'with waiting(f"the tool {call.name}", limit_s=self.timeout_s, ',
    'with waiting(f"the tool {call.name}", ',
)
def test_a_tool_that_hangs_is_named_with_its_line_its_limit_and_its_number(folder, capsys, tmp_path):
    (tmp_path / "tools.py").write_text(TOOLS)
    module = import_file(tmp_path / "tools.py")
    calls = [ToolCall(str(number), "slow_search", {"query": str(number)}) for number in range(11)]

    async def episode(number, call):
        environment = ToolEnvironment([FunctionTools([module.slow_search])], 30.0)
        with waiting(f"an episode of the prompt at data.jsonl:{number}", alike="episode"):
            await environment.reset(Task((), ""))
            return await environment.answer(call)

    async def episodes():
        answers = [asyncio.create_task(episode(number, call)) for number, call in enumerate(calls)]
        async with asyncio.timeout(60):
            while sum(bool(w.what == "the tool slow_search" and w.place and w.place()) for w in open_waits()) < 11:
                await asyncio.sleep(0.01)
        keep(folder.waits)
        module.release.set()
        assert await asyncio.gather(*answers) == [str(number) for number in range(11)]

    asyncio.run(episodes())
    said = why(folder, capsys, 0)
    assert "an episode of the prompt at data.jsonl:0 and 10 others: for " in said
    line = 1 + TOOLS.splitlines().index("    release.wait()")
    assert re.search(
        rf"the tool slow_search and 10 others, at {tmp_path}/tools.py:{line} in slow_search: for \d s of at most 30 s "
        r"\(agent.tool_timeout_s\), since \d\d:", said,
    )  # fmt: skip


@pytest.mark.notices(
    "the record of a reward process stays empty",
    "rewards/worker.py",
    'is not None and kind == "file":',
    'is not None and kind == "rule":',
)
@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_reward_function_that_hangs_is_named_with_its_line_and_its_limit(folder, capsys, tmp_path, kind):
    rest = "import time\n    time.sleep(600)" if kind == "def" else "import asyncio\n    await asyncio.sleep(600)"
    file = tmp_path / "reward.py"
    file.write_text(f"{kind} reward_func(queries, prompts, labels):\n    {rest}\n")
    scorer = IsolatedScorer(
        RewardConfig.of("check_reward", remote_url=str(file), timeout_s=300), folder.logs / "reward.log"
    )
    thread = threading.Thread(target=scorer.score, args=([Sample("q", "p", "r", "l", "d")],), daemon=True)
    thread.start()
    name = scorer.process.name
    assert poll_until(lambda: "reward_func" in read_record(folder.logs / f"{name}.json").get("place", ""), 60)
    keep(folder.waits)
    said = why(folder, capsys, 0)
    scorer.process.popen.kill()
    assert f"1 rows by reward.file {file} ({name}): for " in said and " of at most 5 min 0 s (reward.timeout_s)" in said
    assert f"{name} (process " in said and f"  its main thread: {file}:3 in reward_func" in said


@pytest.mark.notices(
    "a reader that has gone is a traceback",
    "cli/app.py",
    "    except BrokenPipeError:\n        silence(sys.stdout)",
    "    except BlockingIOError:\n        silence(sys.stdout)",
)
@pytest.mark.parametrize("command", ["why {run}", "--help", "--help task=ppo", "task=sft --cfg job", "plan --help"])
def test_a_reader_that_has_seen_enough_ends_a_command_without_a_traceback(folder, command):
    words = command.format(run=folder.path).split()
    read, write = os.pipe()
    os.close(read)
    ended = subprocess.run(
        [sys.executable, "-m", "rlhf_suite.cli", *words], stdout=write, stderr=subprocess.PIPE, check=False
    )
    os.close(write)
    assert ended.returncode == 0 and b"Traceback" not in ended.stderr and b"BrokenPipe" not in ended.stderr
