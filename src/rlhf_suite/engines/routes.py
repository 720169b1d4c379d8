"""The routes of an engine: to which experts each layer of its model sent each token.

On a GPU vLLM returns them with a response (`enable_return_routed_experts`), for all layers. On the CPU it cannot: only
its newer model runner does it, which needs Triton. There a recorder in each worker keeps what the routers chose in each
step, for the tokens that the runner laid end to end in it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rlhf_suite.models.families import NARROW

RECORDER = "rlhf_routes"  # the attribute of a model runner

Routes = NDArray[np.signedinteger[Any]]


class RouteRecorder:
    """Keeps the routes of the requests that a model runner works on. A token that is read again, after a weight sync or
    because memory was short, gets the route of that time: all tokens after it are sampled from what was read then."""

    def __init__(self, runner: Any) -> None:
        self.runner, self.execute = runner, runner.execute_model
        self.chosen: dict[int, torch.Tensor] = {}  # by layer, of the step under way, [rows, K]
        self.parts: dict[str, list[torch.Tensor]] = {}  # of each request by vLLM's name of it
        routers = moe_routers(runner.get_model())
        self.dtype = torch.int8 if max(router.global_num_experts for router in routers) <= NARROW else torch.int16
        for layer, router in enumerate(routers):
            router.set_capture_fn(partial(self.chosen.__setitem__, layer))

    def execute_model(self, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a step as the runner does, and keep the routes of its tokens."""
        result = self.execute(scheduled, *args, **kwargs)
        for name in scheduled.finished_req_ids:
            self.parts.pop(name, None)
        if scheduled.total_num_scheduled_tokens:
            self.keep(scheduled)
        return result

    def keep(self, scheduled: Any) -> None:
        """Keep the routes of a step that has run."""
        layers = [self.chosen[layer].to(self.dtype) for layer in sorted(self.chosen)]
        rows, batch, begin = torch.stack(layers, 1), self.runner.input_batch, 0  # [rows, M, K]
        for place, name in enumerate(batch.req_ids):
            count = scheduled.num_scheduled_tokens[name]
            parts = self.parts.setdefault(name, [])
            before, known = int(batch.num_computed_tokens_cpu[place]), sum(map(len, parts))
            assert before <= known, f"request {name}: tokens {known} to {before} were not read"
            if before < known:
                parts[:] = [torch.cat(parts)[:before]]
            parts.append(rows[begin : begin + count])
            begin += count

    def take(self, name: str) -> Routes:
        """Return the routes of a request, [n, M, K], under the name that it was added by."""
        own = next(known for known in self.parts if known.rpartition("-")[0] == name)
        return torch.cat(self.parts.pop(own)).numpy()


def moe_routers(model: torch.nn.Module) -> list[Any]:
    """Return the routers of the layers with experts, in order."""
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    runners = [module for module in model.modules() if isinstance(module, MoERunner)]
    return [runner.router for runner in sorted(runners, key=lambda runner: int(runner.layer_id))]


def moe_layers(worker: Any) -> list[int]:
    """Return the numbers of the layers with experts, among all layers."""
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    runners = [module for module in worker.get_model().modules() if isinstance(module, MoERunner)]
    return sorted(int(runner.layer_id) for runner in runners)


def record_routes(worker: Any) -> None:
    """Have the model runner of a worker keep the routes of its requests."""
    recorder = RouteRecorder(worker.model_runner)
    setattr(worker.model_runner, RECORDER, recorder)
    worker.model_runner.execute_model = recorder.execute_model


def take_routes(worker: Any, name: str) -> Routes | None:
    """Return the routes of a request from the first worker; the others have the same."""
    routes: Routes = getattr(worker.model_runner, RECORDER).take(name)
    return routes if worker.rank == 0 else None


class RouteSource:
    """Gives the routes of the requests of an engine that are done."""

    def __init__(self, engine: Any) -> None:
        self.engine, config = engine, engine.vllm_config
        self.is_recorded = not config.aux_output_config.enabled
        self.layers: list[int] = engine.collective_rpc(moe_layers)[0]
        self.dtype = np.int8 if config.model_config.get_num_experts() <= NARROW else np.int16
        if self.is_recorded:
            engine.collective_rpc(record_routes)

    def take(self, output: Any) -> Routes:
        """Return the routes [P + n - 1, M, K] of a request with a prompt of P tokens and a response of n."""
        done = output.outputs[0]
        if self.is_recorded:
            routes: Routes = self.engine.collective_rpc(take_routes, args=(output.request_id,))[0]
        else:
            routes = done.routed_experts[:, self.layers].astype(self.dtype)
        count = len(output.prompt_token_ids or ()) + len(done.token_ids) - 1
        assert len(routes) >= count, f"{len(routes)} routes of {count} tokens"
        return routes[:count]
