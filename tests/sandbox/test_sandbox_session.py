"""Sessions of the jail: names persist over calls, limits hold, a session that ends says so and starts anew."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import select
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

import pytest

from rlhf_suite.sandbox.jail import BARE_NEEDS_LANDLOCK, choose_jail, jail_options, templates
from rlhf_suite.sandbox.kernel import landlock_version
from rlhf_suite.sandbox.memory import family
from rlhf_suite.sandbox.process import MAX_OUTPUT_BYTES, JailedProcess, Resources, SandboxError, Template
from rlhf_suite.sandbox.session import Session

T = TypeVar("T")
FD_SETSIZE = 1024  # descriptors that select(2) knows
LONG_S = 60.0  # for calls that end by themselves


@pytest.fixture(scope="module")
def template():
    return templates.get(choose_jail(False, ""))


@pytest.fixture
def session(template):
    with Session(template) as one:
        yield one


@pytest.mark.notices(
    "names are forgotten between calls", "sandbox/interpreter.py", 'request["soft_s"], names)', 'request["soft_s"], {})'
)
def test_names_persist_and_the_last_expression_is_echoed(session):
    assert session.run("def f(x):\n    return x + 1\ny = f(1)", LONG_S).value is None
    result = session.run("print('said')\nf(y)", LONG_S)
    assert (result.output, result.value, result.problem) == ("said\n", "3", None)


def test_an_exception_has_a_traceback_of_the_calls_code_and_keeps_the_names(session):
    result = session.run("x = 1\ndef f():\n    1 / 0\nf()", LONG_S)
    assert result.problem.startswith("Traceback") and result.problem.endswith("ZeroDivisionError: division by zero")
    assert 'File "<call 1>", line 3, in f\n    1 / 0' in result.problem and "interpreter.py" not in result.problem
    assert not result.timed_out and not result.state_lost
    assert session.run("x", LONG_S).value == "1"


def test_classes_of_a_session_can_be_pickled(session):
    code = "import pickle\nclass A:\n    pass\ntype(pickle.loads(pickle.dumps(A()))).__name__"
    assert session.run(code, LONG_S).value == "'A'"


def test_standard_errors_are_part_of_the_output(session):
    assert session.run("import sys\nprint(1)\nprint(2, file=sys.stderr)\nprint(3)", LONG_S).output == "1\n2\n3\n"


@pytest.mark.notices(
    "the soft limit comes after the hard one", "sandbox/session.py", "SOFT_SHARE = 0.8", "SOFT_SHARE = 1.8"
)
def test_the_soft_limit_keeps_the_names(session):
    session.run("x = 5", LONG_S)
    result = session.run("while True: pass", 5.0)
    assert (result.timed_out, result.state_lost) == (True, False)
    assert "TimeoutError: the call took too long" in result.problem
    assert session.run("x", LONG_S).value == "5"


def test_code_that_ignores_the_soft_limit_is_killed_and_the_next_call_begins_without_names(session):
    session.run("import signal, time\nx = 5\nsignal.signal(signal.SIGALRM, signal.SIG_IGN)", LONG_S)
    result = session.run(
        "signal.signal(signal.SIGALRM, signal.SIG_IGN)\nprint('in', flush=True)\nwhile True: pass", 2.0
    )
    assert (result.output, result.timed_out, result.state_lost) == ("in\n", True, True)
    assert result.problem == "it ran longer than 2 s; the session has ended"
    assert session.run("x", LONG_S).problem.endswith("NameError: name 'x' is not defined")


def test_a_session_that_ends_itself_says_how(session):
    result = session.run("import os\nos._exit(3)", LONG_S)
    assert (result.problem, result.state_lost) == ("it ended early (exit code 3); the session has ended", True)
    assert not result.timed_out


@pytest.mark.notices(
    "output is shown as it came",
    "sandbox/session.py",
    'return printable(output.decode(errors="replace"), len(output), keep_lines=True)',
    'return output.decode(errors="replace")',
)
def test_output_is_cut_and_acts_on_no_terminal(session):
    result = session.run("print('\\033[2J\\u202e' + 'y' * (2 << 20))", LONG_S)
    assert result.problem is None
    assert result.output == "\\x1b[2J\\u202e" + "y" * (MAX_OUTPUT_BYTES - 7)


def test_a_call_cannot_show_control_characters_by_its_value_or_problem(session):
    code = "class A:\n    def __repr__(self): return '\\033[2J'\n"
    assert session.run(f"{code}A()", LONG_S).value == "\\x1b[2J"
    assert session.run("raise ValueError('\\033[2J')", LONG_S).problem.endswith("ValueError: \\x1b[2J")


def test_a_child_that_the_code_forgets_to_end_answers_nothing(session):
    result = session.run("import os\npid = os.fork()\n'child' if pid == 0 else os.waitpid(pid, 0)[1]", LONG_S)
    assert result.value == "0"
    assert session.run("1", LONG_S).value == "1"


@pytest.mark.notices(
    "all sessions draw the same random numbers", "sandbox/interpreter.py", 'sys.modules["numpy.random"].seed()', "pass"
)
def test_sessions_have_nothing_in_common():
    """Also where the template has imported what draws random numbers."""
    template = templates.get(replace(choose_jail(False, ""), imports=("numpy.random",)))
    with Session(template) as one, Session(template) as other:
        one.run("open('x', 'w').write('y')", LONG_S)
        assert other.run("import os\nos.listdir('.')", LONG_S).value == "[]"
        draws = [each.run("import numpy\nnumpy.random.rand()", LONG_S).value for each in (one, other)]
        assert draws[0] != draws[1] and None not in draws


def test_a_session_starts_with_what_its_template_imported():
    with Session(templates.get(replace(choose_jail(False, ""), imports=("colorsys",)))) as one:
        assert one.run("import sys\n'colorsys' in sys.modules", LONG_S).value == "True"


def test_what_python_code_needs_works(session):
    code = (
        "import asyncio, multiprocessing, shutil, sqlite3, subprocess, sys, tempfile, threading, zoneinfo\n"
        "async def f(): return 1\n"
        "assert asyncio.run(f()) == 1\n"
        "with multiprocessing.Pool(2) as pool: assert pool.map(abs, [-1, -2]) == [1, 2]\n"
        "assert subprocess.run([sys.executable, '-c', 'print(1)'], capture_output=True).stdout == b'1\\n'\n"
        "with tempfile.NamedTemporaryFile() as file: shutil.copy2(file.name, 'copy')\n"
        "assert sqlite3.connect('x.db').execute('select 1').fetchone() == (1,)\n"
        "thread = threading.Thread(target=print, args=('thread',)); thread.start(); thread.join()"
    )
    result = session.run(code, LONG_S)
    assert (result.problem, result.output) == (None, "thread\n")


@pytest.mark.notices(
    "each process of a session may have all of its memory",
    "sandbox/memory.py",
    "dear + sum(map(proportional, pids))",
    "dear + max(map(proportional, pids))",
)
def test_the_memory_of_all_processes_together_is_limited(template):
    """Each process may have the memory by its own limit; only the watcher sees their sum."""
    code = "import os, time\nfor _ in range(6):\n    if os.fork() == 0:\n        x = bytearray(b'x') * (60 << 20)\n"
    with Session(template, Resources(memory_mb=128)) as one:
        result = one.run(f"{code}        time.sleep(1000)\ntime.sleep(1000)", LONG_S)
    assert result.problem.startswith("it used ") and result.problem.endswith(
        "its limit is 128 MiB; the session has ended"
    )
    assert result.state_lost


def test_the_kernel_kills_sessions_first_when_the_machine_is_out_of_memory(session):
    session.run("1", LONG_S)
    interpreter = family(session.process.pid)[-1]
    assert Path(f"/proc/{interpreter}/oom_score_adj").read_text() == "1000\n"


def test_a_session_that_is_given_up_before_it_starts_runs_nothing():
    template = Template(choose_jail(False, ""))
    template.wait_ready()
    ours = set(family(template.popen.pid))
    started = [JailedProcess(template, Resources()) for _ in range(8)]
    for one in started:
        one.send({"program": "import time\ntime.sleep(1000)"})
        one.close()
    with Session(template) as last:  # the template has started all of the others before
        last.run("1", LONG_S)
    deadline = time.monotonic() + LONG_S
    while set(family(template.popen.pid)) - ours and time.monotonic() < deadline:
        time.sleep(0.01)
    assert set(family(template.popen.pid)) == ours
    template.close()


@pytest.mark.notices(
    "a session that was given up goes on",
    "sandbox/template.py",
    "poller.register(guard, 0)",
    "poller.register(woken, 0)",
)
def test_the_end_of_the_connection_ends_a_session(session):
    """As when the process that started it is killed."""
    session.run("1", LONG_S)
    ended = os.dup(session.process.pidfd)  # the session closes its own when it sees the end
    try:
        session.process.guard.close()
        assert select.select([ended], [], [], LONG_S)[0]
    finally:
        os.close(ended)


def test_many_sessions_answer_in_one_event_loop_without_threads(template):
    async def episode(number: int) -> list[str | None]:
        with closing(Session(template)) as one:
            await one.run_async(f"x = {number}", LONG_S)
            return [(await one.run_async("x = x + 1; x", LONG_S)).value for _ in range(3)]

    async def everything() -> tuple[list[list[str | None]], int]:
        threads = threading.active_count()
        answers = await asyncio.gather(*(episode(number) for number in range(40)))
        return answers, threading.active_count() - threads

    template.wait_ready()
    answers, threads = asyncio.run(everything())
    assert answers == [[str(number + 1), str(number + 2), str(number + 3)] for number in range(40)]
    assert threads <= 1  # that of the watcher


def test_the_event_loop_goes_on_while_code_hangs_and_the_hard_limit_holds(template):
    async def hang() -> tuple[bool, bool, int]:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0)

        ticking = asyncio.create_task(tick())
        with closing(Session(template)) as one:
            result = await one.run_async("import signal\nsignal.signal(14, signal.SIG_IGN)\nwhile True: pass", 1.0)
        ticking.cancel()
        return result.timed_out, result.state_lost, ticks

    timed_out, lost, ticks = asyncio.run(hang())
    assert timed_out and lost and ticks > 100


@pytest.mark.notices(
    "a cancelled call leaves its session running",
    "sandbox/session.py",
    "        except BaseException:\n            self.close()\n            raise",
    "        except ValueError:\n            self.close()\n            raise",
)
def test_a_cancelled_call_ends_its_session(template):
    async def cancel() -> Session:
        one = Session(template)
        await one.run_async("1", LONG_S)
        call = asyncio.create_task(one.run_async("import time\ntime.sleep(1000)", LONG_S))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        return one

    assert asyncio.run(cancel()).process is None


def descriptors() -> dict[int, Path]:
    """The open descriptors of this process, each with its file."""
    gc.collect()
    paths = [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return {int(path.name): path.readlink() for path in paths}


def alone(function: Callable[..., T], *args: object) -> T:
    """Call a function in a process of its own, and return what it returns."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(function, *args).result(5 * LONG_S)


def left_by_a_session() -> set[tuple[int, Path]]:
    """The descriptors that a session leaves. To be called in a process of its own: threads of Ray, which other tests
    start in this one, open some at any time."""
    template = templates.get(choose_jail(False, ""))
    template.wait_ready()
    before = descriptors()
    one = Session(template)
    one.run("import os\nos.fork() or [os.setsid(), os.fork() or __import__('time').sleep(1000)]\n1", LONG_S)
    assert one.process is not None
    watched = os.pidfd_open(one.process.pid)
    one.close()
    assert select.select([watched], [], [], LONG_S)[0], "the guard lives on"
    os.close(watched)
    return descriptors().items() - before.items()


def test_an_ended_session_leaves_no_process_and_no_descriptor():
    assert alone(left_by_a_session) == set()


def test_a_template_that_is_killed_is_replaced():
    options = replace(choose_jail(False, ""), imports=("wave",))
    first = templates.get(options)
    first.wait_ready()
    first.popen.kill()
    first.popen.wait()
    with Session(templates.get(options)) as one:
        assert one.run("1", LONG_S).value == "1"
    assert templates.get(options) is not first
    with pytest.raises(SandboxError):
        Session(first).run("1", LONG_S)


def test_a_template_outlives_the_thread_that_started_it():
    started: list[Template] = []
    thread = threading.Thread(target=lambda: started.append(Template(choose_jail(False, ""))))
    thread.start()
    thread.join()
    with Session(started[0]) as one:
        assert one.run("1", LONG_S).value == "1"
    started[0].close()


def test_signals_and_limits_of_the_starting_process_are_not_those_of_its_sessions():
    """A run blocks signals where Slurm sends them, and the reward process has a soft limit of CPU time of its own."""
    before, (soft, hard) = (
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM]),
        resource.getrlimit(resource.RLIMIT_CPU),
    )
    resource.setrlimit(resource.RLIMIT_CPU, (10_000, hard))
    try:
        template = Template(choose_jail(False, ""))
    finally:
        resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    template.wait_ready()
    limits = Path(f"/proc/{family(template.popen.pid)[-1]}/limits").read_text()  # before a session may be below it
    assert "10000" not in next(line for line in limits.splitlines() if "cpu time" in line)
    with Session(template, Resources(cpu_s=77)) as one:
        assert one.run("import resource\nresource.getrlimit(resource.RLIMIT_CPU)", LONG_S).value == "(77, 77)"
        assert not one.run("while True: pass", 5.0).state_lost
    template.close()


def left_by_a_session_without_room(room: int) -> set[tuple[int, Path]]:
    """The descriptors that a session leaves which may open `room` more. To be called in a process of its own."""
    template = templates.get(choose_jail(False, ""))
    template.wait_ready()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = descriptors()
    filled = [os.dup(0)]
    while filled[-1] < max(before) + 2:  # so that no number below is free
        filled.append(os.dup(0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (filled[-1] + 1 + room, hard))
    try:
        with pytest.raises(SandboxError, match=r"Too many open files: .* raise the limit"):
            Session(template).run("1", LONG_S)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in filled:
            os.close(fd)
    return descriptors().items() - before.items()


@pytest.mark.parametrize("room", [0, 3, 6, 9])
def test_a_session_that_gets_too_few_descriptors_says_so_and_keeps_none(room):
    assert alone(left_by_a_session_without_room, room) == set()


def has_folder_after_many_descriptors() -> bool:
    """Return whether a bare session whose descriptors have large numbers leaves its folder. To be called alone."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (2000, hard))
    template = Template(jail_options(bare=True))
    template.wait_ready()
    for _ in range(1100):
        os.dup(0)
    one = Session(template)
    assert one.run("1 + 1", LONG_S).value == "2" and one.process.pidfd >= FD_SETSIZE
    folder = one.process.folder
    one.close()
    template.close()
    return Path(folder).exists()


@pytest.mark.skipif(landlock_version() < BARE_NEEDS_LANDLOCK, reason="this machine offers no bare jail")
def test_a_session_ends_in_a_process_with_more_than_a_thousand_descriptors():
    assert alone(has_folder_after_many_descriptors) is False


def test_closing_the_template_ends_its_sessions():
    template = Template(choose_jail(False, ""))
    one = Session(template)
    one.run("1", LONG_S)
    template.close()
    assert one.run("1", LONG_S).problem == "its process was killed; the session has ended"
