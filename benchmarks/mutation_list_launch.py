"""Mistakes in devices, clusters, waits, logs, servers and the jobs of a sweep."""

from __future__ import annotations

from mutation import Mutation

ACTOR_LOG = ("tests/launch/test_actor_log.py",)
BATCHER = ("tests/serving/test_http_server.py",)
ENVIRONMENT = ("tests/launch/test_environment.py",)
JOBS = ("tests/launch/test_slurm_command.py",)
PLACEMENT = ("tests/config/test_plan.py",)
RESERVE = ("tests/launch/test_reserve.py", "-k", "shares_of or without_gpu or divide")
SLURM = ("tests/launch/test_slurm.py", "-k", "allocation or several or none")
SWEEP = ("tests/config/test_sweep.py",)
WAIT = ("tests/distributed/test_workers.py", "-k", "death")
NOT_ANSWERED = ("tests/distributed/test_workers.py", "-k", "not_answered")
WHY = ("tests/config/test_why.py",)

LAUNCH = [
    Mutation(
        "every actor takes all cores of its machine",
        "launch/environment.py",
        "cpu_count() // max(1, gpu_count())",
        "cpu_count()",
        ENVIRONMENT,
    ),
    Mutation(
        "Muon is compiled on a CPU",
        "launch/environment.py",
        '"TORCHDYNAMO_DISABLE": "1"',
        '"TORCHDYNAMO_DISABLE": "0"',
        ENVIRONMENT,
    ),
    Mutation(
        "a GPU that is hidden is counted",
        "launch/environment.py",
        '("", "-1", "NoDevFiles")',
        '("",)',
        ENVIRONMENT,
    ),
    Mutation(
        "what the user has set in the environment is replaced",
        "launch/environment.py",
        "os.environ.get(name, value) for name, value",
        "value for name, value",
        ENVIRONMENT,
    ),
    Mutation(
        "shares of a device are rounded up",
        "launch/placement.py",
        "math.floor(amount * RESOURCE_STEPS + 1e-6)",
        "math.ceil(amount * RESOURCE_STEPS)",
        RESERVE,
    ),
    Mutation(
        "an engine on several devices is counted as one",
        "config/plan.py",
        "self.num_actors * self.devices_per_actor",
        "self.num_actors",
        PLACEMENT,
    ),
    Mutation(
        "ranks of all nodes are packed on the first ones",
        "launch/placement.py",
        "for _ in range(pool.num_nodes or 1):",
        "for _ in range(1):",
        ("tests/launch/test_reserve_nodes.py",),
    ),
    Mutation(
        "the ranks of the next node may be on the same one",
        "launch/placement.py",
        "if taken else None",
        "if taken and False else None",
        ("tests/launch/test_reserve_nodes.py",),
    ),
    Mutation(
        "an engine is told the first of its GPUs alone",
        "launch/placement.py",
        "return replace(first, gpus=here)",
        "return first",
        ("tests/launch/test_reserve_gpus.py",),
    ),
    Mutation(
        "roles that share a device take all of it",
        "config/plan.py",
        "return 1 / len(self.roles)",
        "return 1.0",
        RESERVE,
    ),
    Mutation(
        "a reference runs without a KL term",
        "config/runs.py",
        'group(ReferenceConfig, when=is_positive("algo.kl.init_coef"))',
        "group(ReferenceConfig)",
        PLACEMENT,
    ),
    Mutation(
        "ranks of further nodes are forgotten",
        "config/plan.py",
        "return section.num_nodes * section.num_gpus_per_node",
        "return section.num_gpus_per_node",
        PLACEMENT,
    ),
    Mutation(
        "a run of several nodes sends weights through one node's memory",
        "config/plan.py",
        '"gloo" if machine.num_gpus is None else "shm"',
        '"shm"',
        PLACEMENT,
    ),
    Mutation(
        "the first lines of a log are quoted",
        "launch/actor_log.py",
        "list(deque(text.splitlines(), maxlen=count))",
        "text.splitlines()[:count]",
        ACTOR_LOG,
    ),
    Mutation(
        "of a long log the beginning is looked at",
        "launch/actor_log.py",
        "text = file.read(TAIL_BYTES).decode",
        "file.seek(0)\n            text = file.read(TAIL_BYTES).decode",
        ACTOR_LOG,
    ),
    Mutation(
        "a peer's echo is reported instead of the death",
        "launch/wait.py",
        "next((failure for failure in failures if _is_cause(failure[1])), failures[0])",
        "failures[0]",
        WAIT,
    ),
    Mutation(
        "the log of the first actor is quoted, whoever hangs",
        "launch/wait.py",
        "raise _expired([member[ref] for ref in pending], wait.what, timeout_s)",
        "raise _expired(list(member.values()), wait.what, timeout_s)",
        NOT_ANSWERED,
    ),
    Mutation(
        "a call takes one text more than it may",
        "serving/batcher.py",
        "len(batch) < self.max_rows",
        "len(batch) <= self.max_rows",
        BATCHER,
    ),
    Mutation(
        "a call that would be exactly full is not filled",
        "serving/batcher.py",
        "tokens + len(item[0]) > self.max_tokens",
        "tokens + len(item[0]) >= self.max_tokens",
        BATCHER,
    ),
    Mutation(
        "any bearer token opens a server",
        "serving/http_server.py",
        'not hmac.compare_digest(headers.get(b"authorization", b""), self.expected)',
        'not headers.get(b"authorization", b"").startswith(b"Bearer ")',
        BATCHER,
    ),
    Mutation(
        "a web page reaches a server without a token under a name of its own",
        "serving/http_server.py",
        "host_name(host) not in LOOPBACK",
        "not host_name(host)",
        BATCHER,
    ),
    Mutation(
        "every byte of a request buys its connection more time",
        "serving/http_server.py",
        "        elif self.deadline is None:\n",
        "        else:\n            self.stop_watch()\n",
        BATCHER,
    ),
    Mutation(
        "a restarted Slurm job finds the address of its first run",
        "launch/slurm.py",
        "{environ['SLURM_JOB_ID']}-{restart}",
        "{environ['SLURM_JOB_ID']}-0",
        SLURM,
    ),
    Mutation(
        "a Ray cluster whose daemons are late is given up at once",
        "launch/ray_cluster.py",
        "TRIES = 3",
        "TRIES = 1",
        ("tests/launch/test_ray_cluster.py", "-k", "late"),
    ),
    Mutation(
        "actors that share CPU cores have fewer slots than they need",
        "launch/ray_cluster.py",
        "math.ceil(slots * CPUS_PER_DEVICE)",
        "int(slots * CPUS_PER_DEVICE)",
        ("tests/launch/test_ray_cluster.py", "-k", "slot"),
    ),
    Mutation(
        "a job that Slurm queued again begins from the start",
        "sweeps/slurm_jobs.py",
        'os.environ.get("SLURM_RESTART_COUNT", "0")) > 0',
        'os.environ.get("SLURM_RESTART_COUNT", "0")) > 1',
        JOBS,
    ),
    Mutation(
        "a Slurm job is given up after three absences in all",
        "sweeps/slurm_jobs.py",
        "missing[number] + 1 if gone else 0",
        "missing[number] + 1 if gone else missing[number]",
        SWEEP,
    ),
    Mutation(
        "the GPUs of two slots overlap",
        "sweeps/local_jobs.py",
        "devices[slot * gpus_per_job : (slot + 1) * gpus_per_job]",
        "devices[slot : slot + gpus_per_job]",
        SWEEP,
    ),
    Mutation(
        "a run is judged by its training loss, though it was evaluated",
        "tracking/sweep_folder.py",
        "(*CHOSEN, *evaluated, *metrics)",
        "metrics",
        SWEEP,
    ),
    Mutation(
        "a continued sweep finds its jobs by their places on the command line",
        "sweeps/launchers.py",
        "same.get(cell(words), own) if resumes(run) else own",
        "own",
        SWEEP,
    ),
    Mutation(
        "a new value of a continued sweep takes the folder of another job",
        "sweeps/launchers.py",
        "is_new and own in taken and not is_earlier(RunFolder(folder / subfolder), run)",
        "False",
        SWEEP,
    ),
    Mutation(
        "the job of a sweep that was killed counts as running",
        "tracking/sweep_folder.py",
        'status["state"] == "running" and is_alive(status)',
        'status["state"] == "running"',
        SWEEP,
    ),
    Mutation(
        "a wait names those who have answered too",
        "launch/wait.py",
        "wait.who = names_of([member[ref] for ref in pending])",
        "wait.who = names_of(list(member.values()))",
        NOT_ANSWERED,
    ),
    Mutation(
        "a wait stays open after an error",
        "waits.py",
        """    finally:
        del _open[number]
""",
        """    else:
        del _open[number]
    finally:
""",
        ("tests/test_waits.py",),
    ),
    Mutation(
        "a run on another node is said to be killed",
        "locks.py",
        'holder.get("host") != socket.gethostname() or ',
        "",
        WHY,
    ),
    Mutation(
        "a run that stands still is said to work",
        "cli/why.py",
        "if late > STALE_S:",
        "if late > 100 * STALE_S:",
        WHY,
    ),
]
