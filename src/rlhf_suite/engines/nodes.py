"""A vLLM engine whose workers are Ray actors, so that its devices may be on several nodes.

vLLM asks an executor to call its workers. Its own executor for several devices starts processes of one machine, and
those for Ray take whole GPUs. The workers here have the slots that were reserved for the engine, which it may share
with ranks of the trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar

import ray
from ray.exceptions import GetTimeoutError, RayActorError
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.executor.abstract import Executor
from vllm.v1.outputs import AsyncModelRunnerOutput
from vllm.v1.serial_utils import run_method
from vllm.v1.worker.worker_base import WorkerWrapperBase

from rlhf_suite.distributed.world import open_store
from rlhf_suite.launch.actor_log import redirect_output
from rlhf_suite.launch.address import join_address, use_interface_to
from rlhf_suite.launch.placement import Slot, show_own_gpus


class NodesExecutor(Executor):
    """Calls the workers of an engine, each of which is a Ray actor in a slot of its own.

    vLLM makes the executor from its class alone, so the class says which slots there are and where the engine's output
    goes: a process has one engine. An actor ends with the process that created it, and so do the workers.
    """

    supports_pp = True
    slots: ClassVar[Sequence[Slot]] = ()
    log: ClassVar[Path | None] = None

    def _init_executor(self) -> None:
        """Start the workers and have them load the model. Neighbours on a node have successive ranks."""
        self.actors = [
            ray.remote(NodeWorker).options(**slot.options()).remote(self._log(rank), slot.gpus)
            for rank, slot in enumerate(self.slots)
        ]
        nodes = ray.get([actor.node.remote() for actor in self.actors])
        meeting = ray.get(self.actors[0].open_meeting.remote(len(nodes)))
        ray.get(
            [
                actor.start.remote(self.vllm_config, rank, nodes[:rank].count(nodes[rank]), meeting)
                for rank, actor in enumerate(self.actors)
            ]
        )
        size = self.parallel_config.tensor_parallel_size
        self._last_stage = len(self.actors) - size  # the first rank of it: that which knows what was sampled

    def _log(self, rank: int) -> Path | None:
        return None if self.log is None else self.log.with_name(f"{self.log.stem}-worker-{rank}{self.log.suffix}")

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
        only: int | None = None,
    ) -> Any:
        """Call a method, or a function, of all workers and return their answers; with `only` that of this rank."""
        answers = Answers([actor.call.remote(method, args, kwargs or {}) for actor in self.actors], only)
        return answers if non_block else answers.result(timeout)

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        return self.collective_rpc("execute_model", None, (scheduler_output,), None, non_block, self._last_stage)

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        return self.collective_rpc("sample_tokens", None, (grammar_output,), None, non_block, self._last_stage)

    def check_health(self) -> None:
        self.collective_rpc("check_health")

    def has_lost_a_worker(self, timeout_s: float) -> bool:
        """Return whether the process of a worker has ended. One that hangs, as others may without it, has not."""
        for ping in [actor.node.remote() for actor in self.actors]:
            try:
                ray.get(ping, timeout=timeout_s)
            except RayActorError:
                return True
            except GetTimeoutError:
                continue
        return False

    def shutdown(self) -> None:
        """End the workers."""
        for actor in self.actors:
            ray.kill(actor)


class Answers(Future[Any]):
    """What workers will answer: all of them, or that of rank `only`. The error of any of them is that of all."""

    def __init__(self, refs: Sequence[ray.ObjectRef], only: int | None) -> None:
        super().__init__()
        self._refs, self._only = refs, only

    def result(self, timeout: float | None = None) -> Any:
        results = ray.get(self._refs, timeout=timeout)
        return results if self._only is None else results[self._only]


class NodeWorker:
    """A worker of an engine in a Ray actor. `gpus`: those of the engine on this node, by name."""

    def __init__(self, log: Path | None, gpus: Sequence[str]) -> None:
        if log is not None:
            redirect_output(log)
        show_own_gpus(gpus)
        use_interface_to(ray.util.get_node_ip_address())

    def node(self) -> str:
        """Return the name of the node that this worker is on."""
        return str(ray.get_runtime_context().get_node_id())

    def open_meeting(self, world_size: int) -> str:
        """Return where the workers meet: at the first one."""
        host = ray.util.get_node_ip_address()
        # Torch's own store of the group will use this one, so its port cannot be taken in between.
        self._store = open_store(host, size=world_size)
        return f"tcp://{join_address(host, self._store.port)}"

    def start(self, config: VllmConfig, rank: int, local_rank: int, meeting: str) -> None:
        """Join the other workers and load the model. `local_rank`: the rank among the workers of this node."""
        self._worker = WorkerWrapperBase(rpc_rank=0, global_rank=rank)
        # On the CPU vLLM lets workers with the same address talk through shared memory, and those of two nodes have
        # none. Torch does not read what it does not know of an address.
        arguments = {
            "vllm_config": config,
            "rank": rank,
            "local_rank": local_rank,
            "distributed_init_method": f"{meeting}?node={self.node()}",
            "is_driver_worker": rank % config.parallel_config.tensor_parallel_size == 0,
        }
        self._worker.init_worker([arguments])
        self._worker.init_device()
        self._worker.load_model()
        current_platform.update_block_size_for_backend(config)

    def call(self, method: str | Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method of the worker, or a function with the worker as its first argument."""
        answer = run_method(self._worker, method, args, kwargs)
        return answer.get_output() if isinstance(answer, AsyncModelRunnerOutput) else answer
