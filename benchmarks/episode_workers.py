"""What episode workers gain and cost: turns per second of environments in the driver and in 1 and 2 workers.

    python benchmarks/episode_workers.py [--workers 0 1 2] [--episodes 64] [--save]

Two environments: one that answers at once, and one that computes in Python for 20 ms per turn. An engine stands in that
answers each request at once with 32 tokens, so that only episodes and their messages take time; the workers and the
connections to the engine are real ones, on a real Ray. For each number of workers: turns per second, with 32 episodes
at a time; CPU milliseconds of the driver per turn; and milliseconds per turn of one episode alone.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import psutil
import ray

from common import publish, scratch
from rlhf_suite.agents.build import make_episodes
from rlhf_suite.agents.episodes import EpisodeRunner
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.plan.run_plan import ACTOR, Machine, resolve
from rlhf_suite.data.generation import Generation, GenerationRequest, SamplingSettings
from rlhf_suite.data.text_encoders import Prompt
from rlhf_suite.data.trajectory import Trajectory
from rlhf_suite.engines.pool import EnginePool
from rlhf_suite.launch.actor_log import Member
from rlhf_suite.launch.environment import runtime_env
from rlhf_suite.launch.loop_thread import LoopThread
from rlhf_suite.models.load import load_tokenizer, model_folder
from rlhf_suite.rl.episode_workers import EpisodeWorkers, start_episode_workers
from rlhf_suite.rl.sampling import stop_token_ids
from rlhf_suite.serving.chat_server import ChatServer

TURNS, TOKENS, AT_A_TIME = 8, 32, 32
CODE = """
import time
from rlhf_suite.agents.base import Start, Step

class Environment:
    async def reset(self, task):
        self.turns = 0
        return Start()

    def work(self):
        end = time.thread_time() + {seconds}
        while time.thread_time() < end:
            sum(range(1000))

    def step(self, turn):
        self.turns += 1
        self.work()
        return Step(text=" more ", reward=1.0, done=self.turns == {turns})

    async def close(self): ...
"""
ENVIRONMENTS = {"at once": 0.0, "20 ms of Python": 0.02}


class InstantEngine:
    """Takes requests as `engines.actor.Engine` does, and answers at once."""

    def __init__(self) -> None:
        self.outboxes: dict[str, asyncio.Queue[tuple[int, Generation]]] = {}

    async def submit(self, client: str, requests: Sequence[tuple[int, GenerationRequest]]) -> None:
        outbox = self.outboxes.setdefault(client, asyncio.Queue())
        for number, request in requests:
            ids = np.full(TOKENS, 40, np.int32)
            ids[-1] = request.sampling.stop_token_ids[0]
            zeros = np.zeros(TOKENS, np.float32)
            outbox.put_nowait((number, Generation(request.id, ids, zeros, "stop", np.zeros(TOKENS, np.int32))))

    async def wait_for_finished(self, client: str) -> list[tuple[int, Generation]]:
        outbox = self.outboxes[client]
        done = [await outbox.get()]
        while not outbox.empty():
            done.append(outbox.get_nowait())
        return done


def settings(folder: Path, seconds: float, workers: int) -> Run:
    """Return a run with an environment."""
    file = folder / f"environment_{seconds:g}.py"
    file.write_text(CODE.format(seconds=seconds, turns=TURNS))
    run = Run.of("ppo")
    run.actor.model_name_or_path = model_folder("builtin:tiny", "actor.model_name_or_path")
    run.agent.kind, run.agent.num_workers, run.agent.max_turns = "environment", workers, TURNS
    run.agent.max_concurrent, run.train.agent_func_path, run.reward.rule = AT_A_TIME, str(file), None
    run.data.max_len, run.launch.device = 4096, "cpu"
    return run


def measure(folder: Path, name: str, workers: int, episodes: int) -> dict[str, float]:
    """Return what an environment takes in so many workers."""
    run = settings(folder, ENVIRONMENTS[name], workers)
    engine = ray.remote(InstantEngine).options(num_cpus=0).remote()
    engines = EnginePool([engine], [Member("engine-0", folder / "engine-0.log")], run.launch.timeout_s)
    plan = resolve(run, Machine("cpu", 0))
    tokenizer = load_tokenizer(plan.models[ACTOR].path, run.data)
    stop_ids = stop_token_ids(plan.models[ACTOR].path, tokenizer)
    runner: EpisodeRunner | None = start_episode_workers(run, plan, engines, folder / f"logs_{workers}")
    if isinstance(runner, EpisodeWorkers):
        runner.ready()
    else:
        runner = make_episodes(run, engines, tokenizer, stop_ids, ChatServer)
    assert runner is not None
    play(runner, engines.loop, stop_ids, 2 * AT_A_TIME)  # until everything is imported and warm
    cpu, wall = time.process_time(), play(runner, engines.loop, stop_ids, episodes)
    cpu = time.process_time() - cpu
    alone = min(play(runner, engines.loop, stop_ids, 1) for _ in range(5))
    if isinstance(runner, EpisodeWorkers):
        runner.close()
    engines.retire()
    ray.kill(engine)
    turns = episodes * TURNS
    return {
        "turns_per_s": round(turns / wall, 1),
        "driver_cpu_ms_per_turn": round(1000 * cpu / turns, 2),
        "ms_per_turn_alone": round(1000 * alone / TURNS, 2),
    }


def play(runner: EpisodeRunner, loop: LoopThread, stop_ids: Sequence[int], count: int) -> float:
    """Return the seconds in which so many episodes end."""
    prompt, sampling = Prompt([40] * 64, "x" * 64, "", "default", "here"), SamplingSettings(stop_token_ids=(*stop_ids,))
    began = time.perf_counter()
    futures = [loop.start(runner.run(Trajectory.start(prompt, n, 0), sampling, (n,))) for n in range(count)]
    for future in futures:
        (ledger,) = future.result()
        assert ledger.response_length == TURNS * TOKENS, ledger.failure
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--environments", nargs="+", choices=ENVIRONMENTS, default=[*ENVIRONMENTS])
    parser.add_argument("--save", action="store_true")
    given = parser.parse_args()
    os.environ |= runtime_env("cpu")
    ray.init(address="local", include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False)
    found = {}
    with scratch() as folder:
        for name in given.environments:
            found[name] = {str(workers): measure(folder, name, workers, given.episodes) for workers in given.workers}
    ray.shutdown()
    shape = {"turns": TURNS, "tokens_per_turn": TOKENS, "episodes": given.episodes, "at_a_time": AT_A_TIME}
    publish("episode_workers", {**shape, "by_workers": found, "load_1_5_15": psutil.getloadavg()}, given.save)


if __name__ == "__main__":
    main()
