"""What reward code may try, and what comes of it.

By a program that the model wrote (`reward.rule=code`) and by a user's reward file. Every attack stands between two
right answers: `run_goes_on` says that both were scored 1. `left_behind` counts processes that outlived the attack.
"""

from __future__ import annotations

import ctypes
import json
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from rlhf_suite.config.declarations.reward import RewardConfig, RuleConfig
from rlhf_suite.rewards.base import Sample, Scored
from rlhf_suite.rewards.reward_process import IsolatedScorer
from rlhf_suite.sandbox.programs import Limits, run_checks

MEMORY_MB = 512
ADOPT_ORPHANS = 36  # prctl: processes whose parents died become our children
SETTLED_S = 3.0  # for killed processes to be gone
# The others end by themselves, on a busy machine later.
HANGING, HANGING_FILES = ("infinite loop", "sleep"), ("infinite loop", "flood of output", "process that outlives it")
OTHERS_S = 10.0
KEY = "RLHF_SUITE_REWARD_TOKEN"
CHECK, RIGHT = "assert f(3) == 9", "def f(x): return x * x\n"
# Name -> (what is limited, the program). OUTSIDE is a folder with a file `kept` that nobody may touch. All but
# FORGERIES have the right function too, so that a reward of 0 says that the attack was stopped.
PROGRAMS = {
    "infinite loop": ("wall and CPU time", "while True: pass"),
    "sleep": ("wall time", "import time; time.sleep(1000)"),
    "fork bomb": ("number of processes", "import os\nwhile True: os.fork()"),
    "10 GB allocation": ("memory", "x = bytearray(10 << 30)"),
    "segmentation fault": ("a process of its own", "import ctypes; ctypes.string_at(0)"),
    "sys.exit(0) before the tests": ("only a run to the end counts", "import sys; sys.exit(0)"),
    "os._exit(0) before the tests": ("only a run to the end counts", "import os; os._exit(0)"),
    "flood of output": ("size of the output", "while True: print('x' * 1000)"),
    "huge file": ("file size", "f = open('x', 'wb')\nwhile True: f.write(bytes(1 << 20))"),
    "many files": (
        "disk",
        "for i in range(1000):\n    with open(str(i), 'wb') as f: f.write(bytes(7 << 20))",
    ),
    "socket": ("seccomp, network namespace", "import socket; socket.create_connection(('127.0.0.1', 22), timeout=2)"),
    "write outside its folder": ("root folder, Landlock", "open('OUTSIDE/new', 'w').write('x')"),
    "delete files in HOME": ("root folder, Landlock", "import os; os.remove('OUTSIDE/kept')"),
    "read another user's file": ("root folder, Landlock", "print(open('/etc/shadow').read())"),
    "read keys in the environment": ("environment", f"import os; os.environ[{KEY!r}]"),
    "read keys of other processes": ("process namespace", "print(open('/proc/1/environ').read())"),
    "raise its own limits": ("rights", "import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))"),
    "kill the reward process": ("process namespace", "import os; os.kill(REWARDER, 9)"),
    "kill every process": ("process namespace", "import os; os.kill(-1, 9); os.kill(os.getpid(), 9)"),
    "process that outlives it": (
        "process namespace",
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(1000)\nos._exit(0)",
    ),
    "trace the process of the tests": (
        "seccomp, process namespace",
        "import ctypes, os\nlibc = ctypes.CDLL(None)\n"
        "assert any(libc.ptrace(16, pid, 0, 0) == 0 for pid in range(2, 40000) if pid != os.getpid())",
    ),
}
FORGERIES = {
    "write the report itself": (
        "tests run elsewhere",
        "import os, sys\nframe, known = sys._getframe(), []\nwhile frame:\n"
        "    known += [*frame.f_locals.values(), *frame.f_locals.get('payload', {}).values()]\n"
        "    frame = frame.f_back\n"
        "for text in {each for each in known if isinstance(each, str)}:\n    for fd in range(3, 64):\n"
        "        try: os.write(fd, text.encode())\n        except OSError: pass\nos._exit(0)",
    ),
    "an answer equal to everything": (
        "tests compare plain values",
        "class Any:\n    def __eq__(self, other): return True\ndef f(x): return Any()",
    ),
    "functions of its own that tests use": (
        "builtins are the tests' own",
        "assert_ = eval = all = lambda *_: True\nf = all",
    ),
    "an order in place of an answer": (
        "tests only call back what they lent",
        'import os\ndef f(x):\n    for fd in range(3, 64):\n        try: os.write(fd, b\'{"do": "getattr", "to": 0, '
        '"args": ["__globals__"], "named": {}}\\n\')\n        except OSError: pass\n    return 9',
    ),
}
# The same of the reward file: statements of its reward_func. It is the user's own code, with the user's rights.
FILES = {
    "infinite loop": ("wall time", "while True: pass"),
    "allocation of 64 TB": ("memory", "bytearray(1 << 46)"),
    "segmentation fault": ("a process of its own", "import ctypes; ctypes.string_at(0)"),
    "exception": ("row by row", "raise ValueError('no')"),
    "sys.exit(0)": ("row by row", "import sys; sys.exit(0)"),
    "os._exit(0)": ("a process of its own", "import os; os._exit(0)"),
    "flood of output": ("wall time, size of the log", "while True: print('x' * 100000)"),
    "not a number": ("checked answers", "reward = float('nan')"),
    "process that outlives it": (
        "process group",
        "import subprocess, time; subprocess.Popen(['sleep', '1000']); time.sleep(1000)",
    ),
}
FILE = """
def reward_func(queries, prompts, labels):
    rewards = []
    for query in queries:
        reward = 1.0
        if query == "attack":
            names = {{"reward": 1.0}}
            exec({attack!r}, names)
            reward = names["reward"]
        rewards.append(reward)
    return rewards
"""


@dataclass(frozen=True)
class Result:
    """What came of one attack."""

    by: str
    attack: str
    limited: str
    outcome: str
    seconds: float
    run_goes_on: bool
    left_behind: int
    outside_untouched: bool


class Watch:
    """What attacks leave behind, processes and changes in the folder `outside`."""

    def __init__(self, outside: Path) -> None:
        self.outside, self.before = outside, set[int]()
        outside.mkdir()
        (outside / "kept").write_text("kept")
        for path in (outside.parent, outside):  # whoever is not kept out by the sandbox may
            path.chmod(0o777)

    def begin(self) -> None:
        self.before = children()

    def left_behind(self, known: set[int]) -> int:
        """How many new processes do not go away by themselves."""
        deadline = time.monotonic() + SETTLED_S
        while (left := children() - self.before - known) and time.monotonic() < deadline:
            time.sleep(0.02)
        return len(left)

    def untouched(self) -> bool:
        return [path.name for path in self.outside.iterdir()] == ["kept"]


def children() -> set[int]:
    """Our living children; with ADOPT_ORPHANS also what our children left behind."""
    found = set[int]()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = path.read_text().rpartition(") ")[2].split()[:2]
        except OSError:  # it has just ended
            continue
        if int(parent) == os.getpid() and state != "Z":
            found.add(int(path.parent.name))
    return found


def results(timeout_s: float, file_timeout_s: float) -> Iterator[Result]:
    """Try every attack. The programs share one reward process; each file has its own.

    `timeout_s` is reward.rules.code_timeout_s of the programs that hang, `file_timeout_s` reward.timeout_s of the
    files.
    """
    libc = ctypes.CDLL(None)
    libc.prctl(ADOPT_ORPHANS, 1, 0, 0, 0)
    os.environ[KEY] = "s3cret"
    try:
        with tempfile.TemporaryDirectory(prefix="attacked_") as folder:
            watch = Watch(Path(folder, "home"))
            stopped = {name: (limited, RIGHT + text) for name, (limited, text) in PROGRAMS.items()}
            hanging = {name: stopped.pop(name) for name in HANGING}
            yield from of_programs(watch, hanging, timeout_s)
            yield from of_programs(watch, stopped | FORGERIES, OTHERS_S)
            yield from of_files(watch, file_timeout_s)
    finally:
        del os.environ[KEY]
        libc.prctl(ADOPT_ORPHANS, 0, 0, 0, 0)


def of_programs(watch: Watch, programs: dict[str, tuple[str, str]], timeout_s: float) -> Iterator[Result]:
    rules = RuleConfig(code_timeout_s=timeout_s, code_memory_mb=MEMORY_MB)
    rewarder = IsolatedScorer(
        RewardConfig.of("generate", rule="code", rules=rules), watch.outside.parent / "reward.log"
    )
    label = json.dumps({"asserts": [CHECK]})
    try:
        for name, (limited, text) in programs.items():
            assert rewarder.process is not None
            number = rewarder.process.popen.pid
            program = text.replace("OUTSIDE", str(watch.outside)).replace("REWARDER", str(number))
            rows = [Sample("", "", f"```python\n{each}\n```", label, "") for each in (RIGHT, program, RIGHT)]
            result = tried(rewarder, rows, watch, ("program", name, limited), keeps=True)
            if "scored 0" in result.outcome and "longer" not in result.outcome:
                why = run_checks(program, [CHECK], Limits(timeout_s, MEMORY_MB)).problem
                result = Result(**asdict(result) | {"outcome": f"{result.outcome} ({why})"})
            yield result
    finally:
        rewarder.close()


def of_files(watch: Watch, timeout_s: float) -> Iterator[Result]:
    rows = [Sample(query, "", query, "", "") for query in ("good", "attack", "fine")]
    for name, (limited, attack) in FILES.items():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "my_reward.py")
            path.write_text(FILE.format(attack=attack))
            limit_s = timeout_s if name in HANGING_FILES else OTHERS_S
            config = RewardConfig.of("generate", remote_url=str(path), timeout_s=limit_s)
            watch.begin()
            rewarder = IsolatedScorer(config, Path(folder, "reward.log"))
            try:
                yield tried(rewarder, rows, watch, ("file", name, limited), keeps=False)
            finally:
                rewarder.close()


def tried(
    rewarder: IsolatedScorer, rows: list[Sample], watch: Watch, names: tuple[str, str, str], keeps: bool
) -> Result:
    """An attack between two right answers. `keeps`: the reward process serves on; else it is closed before counting."""
    if keeps:
        watch.begin()
    began = time.perf_counter()
    before, attack, after = rewarder.score(rows)
    seconds = round(time.perf_counter() - began, 2)
    goes_on = all(isinstance(each, Scored) and each.reward == 1 for each in (before, after))
    if not keeps:
        rewarder.close()
    known = {rewarder.process.popen.pid} if rewarder.process is not None else set()
    return Result(*names, said(attack), seconds, goes_on, watch.left_behind(known), watch.untouched())


def said(attack: object) -> str:
    if isinstance(attack, Scored):
        late = " (it ran longer than it may)" if attack.extra.get("tests_timed_out") else ""
        return f"scored {attack.reward:g}{late}"
    return f"{attack.kind}: {attack.reason}"  # type: ignore[attr-defined]
