"""Real ranks for tests: processes that stay up, meet over gloo, and run the functions of test modules.

Import nothing heavy here: a rank sets its environment before torch is loaded.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

DEADLINE_S = 240.0
LEAVE_S = 5.0  # for ranks that have nothing to do any more


class Ranks:
    """`size` processes; `call` runs a module-level function `f(world, *args)` on each of them."""

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("spawn")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.size, self.pipes, self.processes = size, [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, rank, size, port), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    @property
    def alive(self) -> bool:
        return all(process.is_alive() for process in self.processes)

    def call(self, function: Callable[..., Any], *args: Any, deadline_s: float = DEADLINE_S) -> list[Any]:
        """The results in rank order. A rank that raises, dies or does not answer ends all of them."""
        for pipe in self.pipes:
            pipe.send((function, args))
        results = []
        try:
            for rank, pipe in enumerate(self.pipes):
                assert pipe.poll(deadline_s), f"rank {rank} of {self.size} did not answer in {deadline_s} s"
                fine, result = pipe.recv()
                assert fine, f"rank {rank} of {self.size}:\n{result}"
                results.append(result)
        except (AssertionError, EOFError, OSError):
            self.close()
            raise
        return results

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(LEAVE_S)
            process.kill()
            process.join()


def serve(pipe: Connection, rank: int, size: int, port: int) -> None:
    """One rank: join the others, then answer calls for ever."""
    from rlhf_suite.launch.environment import runtime_env

    os.environ.update(runtime_env("cpu"))
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # a test of workers may have set it in this process
    import torch

    from rlhf_suite.distributed.mesh import Mesh, Rank
    from rlhf_suite.train.strategy import join_world

    torch.set_num_threads(1)
    world = join_world(Rank(rank, Mesh(size), "127.0.0.1", port, "cpu"))
    while True:
        try:
            function, args = pipe.recv()
            answer = (True, function(world, *args))
        except EOFError:
            os._exit(0)  # the tests are over; leaving properly would wait for the other ranks
        except Exception:
            answer = (False, traceback.format_exc())
        pipe.send(answer)
