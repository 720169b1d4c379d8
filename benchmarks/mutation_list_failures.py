"""Mistakes in runs that fail, wait or end: schedules, streams, replay, filters, signals."""

from __future__ import annotations

from mutation import Mutation

MATRIX = ("tests/rl/test_failure_matrix.py",)
WAITS = ("tests/test_waits.py",)
SIGNALS = ("tests/launch/test_stop.py",)
CLOSED = ("tests/rewards/test_reward_process.py", "-k", "rewards_are_closed")

FAILURES: list[Mutation] = [
    Mutation(
        "a rollout that fails out of turn is never told to the driver",
        "rl/schedules.py",
        "                self.fail(error)\n                return\n",
        "                return\n",
        (*MATRIX, "-k", "2 and ahead and generation"),
    ),
    Mutation(
        "who waits for a rollout does not look for failures",
        "waits.py",
        "                self.check()\n                found = ready()\n",
        "                found = ready()\n",
        WAITS,
    ),
    Mutation(
        "the last failure is raised instead of the first",
        "waits.py",
        "self.failure = self.failure or error",
        "self.failure = error",
        WAITS,
    ),
    Mutation(
        "silence of any length is waited for",
        "waits.py",
        "if self.silent_s > _life.limit_s:",
        "if self.silent_s > 100 * _life.limit_s:",
        WAITS,
    ),
    Mutation(
        "a wait that goes on is ended",
        "waits.py",
        "0.0 if signs != self.signs or is_somebody_within_a_limit() else silent_s",
        "silent_s",
        WAITS,
    ),
    Mutation(
        "a wait within its own limit is no sign of life",
        "waits.py",
        "signs != self.signs or is_somebody_within_a_limit()",
        "signs != self.signs",
        WAITS,
    ),
    Mutation(
        "a failed group of a stream is forgotten",
        "rl/stream.py",
        "self.failure = self.failure or error",
        "pass",
        (*MATRIX, "-k", "stream and generation"),
    ),
    Mutation(
        "a resumed stream forgets the round of the prompt filter",
        "rl/stream.py",
        'state.get("skipped", 0), state.get("round_end", 0)',
        "0, 0",
        ("tests/rl/test_stream.py", "-k", "prompt_filter_has_spoken"),
    ),
    Mutation(
        "a resumed stream forgets what the prompt filter chose",
        "rl/stream.py",
        '{*state.get("chosen", ())}',
        "set()",
        ("tests/rl/test_stream.py", "-k", "prompt_filter_has_spoken"),
    ),
    Mutation(
        "the first weights are not probed",
        "rl/engine_update.py",
        "            self.weights.sync(version)\n            self.weights.check()\n",
        "            self.weights.sync(version)\n",
        (*MATRIX, "-k", "first_weights"),
    ),
    Mutation(
        "an evaluation beside a step takes the error of the engines for a score",
        "rl/pipeline.py",
        "                self.rollouts.fail(error)\n                raise\n",
        "                return {}\n",
        (*MATRIX, "-k", "ahead and evaluation"),
    ),
    Mutation(
        "a damaged rollout that is replayed is taken for the end of the run",
        "rl/replay.py",
        "        while samples_file(self.folder, count + 1).exists():",
        "        while samples_file(self.folder, count + 1).exists() and count < 2:",
        (*MATRIX, "-k", "replay and rollout and 3"),
    ),
    Mutation(
        "an error of a user's filter leaves all groups in",
        "rl/filtering.py",
        '        raise UserError(f"{flag} raised {type(error).__name__}: {error}") from error',
        "        return None",
        (*MATRIX, "-k", "1 and ahead and group"),
    ),
    Mutation(
        "the requests of a run that has ended are left pending",
        "launch/loop_thread.py",
        "            for task in tasks:\n                task.cancel()\n",
        "            tasks = set()\n",
        ("tests/launch/test_loop_thread.py",),
    ),
    Mutation(
        "a reward is started again after the end",
        "rewards/reward_process.py",
        "        self.is_closed = True\n        self._kill()\n",
        "        self._kill()\n",
        CLOSED,
    ),
    Mutation(
        "a signal is answered when the main thread comes to it",
        "launch/stop.py",
        "                    self.hear(numbers[0])",
        "                    pass",
        SIGNALS,
    ),
    Mutation(
        "a second signal waits for the main thread",
        "launch/stop.py",
        "        os._exit(128 + stop.number)\n",
        "        return\n",
        SIGNALS,
    ),
    Mutation(
        "a process that is ended at once leaves no word",
        "launch/stop.py",
        "        for record in _state.at_the_end:\n",
        "        for record in ():\n",
        SIGNALS,
    ),
    Mutation(
        "a signal behind the cluster of Ray kills a run that is writing its last files",
        "launch/ray_cluster.py",
        "    with signals_blocked():\n        ray.shutdown()",
        "    if True:\n        ray.shutdown()",
        ("tests/launch/test_ray_cluster.py", "-k", "behind_a_cluster"),
    ),
    Mutation(
        "an interrupted run has failed",
        "cli/execute.py",
        'record.mark_stopped("interrupted")',
        'record.mark_failed("interrupted")',
        ("tests/config/test_execute.py",),
    ),
    Mutation(
        "a signal shows a traceback of what cleans up",
        "launch/stop.py",
        "signal.signal(number, signal.SIG_IGN)",
        "pass",
        ("tests/launch/test_stop.py",),
    ),
]
