"""Mistakes in the jail for untrusted code."""

from __future__ import annotations

from mutation import Mutation

SESSION = ("tests/sandbox/test_sandbox_session.py",)
HOSTILE = ("tests/sandbox/test_hostile_code.py",)
JAIL = ("tests/sandbox/test_jail.py",)
CODE = ("tests/rewards/test_code_reward.py",)

SANDBOX = [
    Mutation(
        "code in the jail may open sockets",
        "sandbox/seccomp.py",
        '"socket": (41, 198), ',
        "",
        JAIL,
    ),
    Mutation(
        "code in the jail may make files in memory",
        "sandbox/seccomp.py",
        '"memfd_create": (319, 279), ',
        "",
        HOSTILE,
    ),
    Mutation(
        "code in the jail may handle page faults",
        "sandbox/seccomp.py",
        ', "userfaultfd": (323, 282)',
        "",
        (*HOSTILE, "-k", "userfaultfd"),
    ),
    Mutation(
        "a child of the code may enter new namespaces",
        "sandbox/seccomp.py",
        "on_call(CLONE, load_argument(0), no_new_spaces, only_threads, allow)",
        "on_call(CLONE, load_argument(0), only_threads, allow)",
        (*HOSTILE, "-k", "child_in_a_user_namespace"),
    ),
    Mutation(
        "the folder of a session has no limit",
        "sandbox/confine.py",
        'f"size={session.disk_mb}m,',
        'f"size=4000m,',
        (*HOSTILE, "-k", "full_disk"),
    ),
    Mutation(
        "each process of a session may have all of its memory",
        "sandbox/memory.py",
        "dear + sum(map(proportional, pids))",
        "dear + max(map(proportional, pids))",
        (*SESSION, "-k", "memory"),
    ),
    Mutation(
        "a reply to another call counts",
        "sandbox/session.py",
        ' or found["id"] != self.calls',
        "",
        (*HOSTILE, "-k", "another"),
    ),
    Mutation(
        "names are forgotten between calls",
        "sandbox/interpreter.py",
        'request["soft_s"], names)',
        'request["soft_s"], {})',
        SESSION,
    ),
    Mutation(
        "the soft limit comes after the hard one",
        "sandbox/session.py",
        "SOFT_SHARE = 0.8",
        "SOFT_SHARE = 1.8",
        (*SESSION, "-k", "soft"),
    ),
    Mutation(
        "all sessions draw the same random numbers",
        "sandbox/interpreter.py",
        'sys.modules["numpy.random"].seed()',
        "pass",
        (*SESSION, "-k", "common"),
    ),
    Mutation(
        "a cancelled call leaves its session running",
        "sandbox/session.py",
        "        except BaseException:\n            self.close()\n            raise",
        "        except ValueError:\n            self.close()\n            raise",
        (*SESSION, "-k", "cancelled"),
    ),
    Mutation(
        "a session that was given up goes on",
        "sandbox/template.py",
        "poller.register(guard, 0)",
        "poller.register(woken, 0)",
        (*SESSION, "-k", "connection"),
    ),
    Mutation(
        "output is shown as it came",
        "sandbox/session.py",
        'return printable(output.decode(errors="replace"), len(output), keep_lines=True)',
        'return output.decode(errors="replace")',
        (*SESSION, "-k", "terminal"),
    ),
    Mutation(
        "a weaker jail needs no flag",
        "sandbox/jail.py",
        "(allow_weaker or not found.is_weaker)",
        "True",
        JAIL,
    ),
    Mutation(
        "what a jail does not stop is not looked at",
        "sandbox/jail.py",
        "if got_through else None",
        "if not got_through else None",
        JAIL,
    ),
    Mutation(
        "a program's exit code does not matter",
        "sandbox/programs.py",
        "program.exit_code == 0",
        "program.exit_code is not None",
        CODE,
    ),
    Mutation(
        "tests that end early count as passed",
        "sandbox/interpreter.py",
        "PEER_ANSWERS, PEER_ASKS)) is None:",
        "PEER_ANSWERS, PEER_ASKS)) in (None, 0):",
        CODE,
    ),
]
