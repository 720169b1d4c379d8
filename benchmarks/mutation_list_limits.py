"""Mistakes in the jail, its clients and the servers."""

from __future__ import annotations

from mutation import Mutation

MEMORY = "tests/sandbox/test_memory.py"
HOSTILE = "tests/sandbox/test_hostile_code.py"
FUSION = "tests/agents/test_sandbox_fusion.py"
SERVER = "tests/serving/test_http_server.py"
LIMITS: list[Mutation] = [
    Mutation(
        "shared memory without a file is allowed in the jail",
        "sandbox/seccomp.py",
        "refuse, shared, allow),",
        "refuse, allow),",
        (HOSTILE, "-k", "shared_pages or shared_memory or unix_socket_of_the_user"),
    ),
    Mutation(
        "the jail has /dev/zero",
        "sandbox/confine.py",
        'DEVICES = ("null", "urandom")',
        'DEVICES = ("null", "urandom", "zero")',
        (HOSTILE, "-k", "shared_pages"),
    ),
    Mutation(
        "code in the jail may ask for the locks of other sessions",
        "sandbox/seccomp.py",
        "FCNTL_REFUSED = (5, 36, ",
        "FCNTL_REFUSED = (",
        (HOSTILE, "-k", "message_in_a_lock"),
    ),
    Mutation(
        "code in the jail may watch the files of the machine",
        "sandbox/seccomp.py",
        '"inotify_init1": (294, 26), ',
        "",
        (HOSTILE, "-k", "watches_of_files"),
    ),
    Mutation(
        "a process whose first thread has ended has no memory",
        "sandbox/memory.py",
        "pages(pid) or max((pages(task) for task in tasks(pid)), default=0)",
        "pages(pid)",
        (MEMORY,),
    ),
    Mutation(
        "what the sockets of a session hold is not counted",
        "sandbox/memory.py",
        "+ sum(map(proportional, pids)) + sum(map(held_by_sockets, pids))",
        "+ sum(map(proportional, pids))",
        (MEMORY,),
    ),
    Mutation(
        "the kernel's memory of file locks is not counted",
        "sandbox/memory.py",
        "used = locks_of(set(map(str, pids))) * LOCK_BYTES",
        "used = 0",
        (MEMORY,),
    ),
    Mutation(
        "a session whose memory cannot be counted ends the watcher",
        "sandbox/memory.py",
        "    except Exception as error:\n        why",
        "    except OSError as error:\n        why",
        (MEMORY,),
    ),
    Mutation(
        "a bare session may have any number of files",
        "sandbox/memory.py",
        "if entries > MAX_DISK_ENTRIES:",
        "if entries < 0:",
        (MEMORY,),
    ),
    Mutation(
        "folders of a session are removed where they are",
        "sandbox/memory.py",
        'waiting.append(Path(entry).rename(top / f"{mark}.{len(waiting)}"))',
        "waiting.append(Path(entry))",
        (MEMORY, "-k", "removed"),
    ),
    Mutation(
        "the answer of a sandbox server may have any size",
        "agents/sandbox_fusion.py",
        "read_body(response, MAX_BODY_BYTES + 1, whole=False)",
        "response.aread()",
        (FUSION,),
    ),
    Mutation(
        "each piece of a sandbox server's answer has its own deadline",
        "agents/sandbox_fusion.py",
        "asyncio.timeout(client.timeout.read)",
        "asyncio.timeout(None)",
        (FUSION, "-k", "deadline"),
    ),
    Mutation(
        "a sandbox server's answer is taken for one of the protocol",
        "agents/sandbox_fusion.py",
        "if not isinstance(ran, dict):",
        "if False:",
        (FUSION,),
    ),
    Mutation(
        "requests of a client are answered one after another",
        "serving/batcher.py",
        "        requests.rotate(-1)\n",
        "",
        (SERVER,),
    ),
    Mutation(
        "the client that came first has all turns",
        "serving/batcher.py",
        "        self.waiting[client] = requests\n",
        "        self.waiting = {client: requests, **self.waiting}\n",
        (SERVER,),
    ),
    Mutation(
        "a page of any origin may use a server",
        "serving/http_server.py",
        'origin is not None and origin.partition(b"://")[2] != headers.get(b"host", b"")',
        "False",
        (SERVER,),
    ),
]
