"""Weight sync: the policy's weights go to every engine, and digests and a log-prob probe show that they are there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import ray
import torch

from rlhf_suite.config.declarations.rollout import VLLMConfig
from rlhf_suite.data.batch import TokenBatch, take
from rlhf_suite.distributed.group import Pending
from rlhf_suite.engines.pool import EnginePool
from rlhf_suite.rl.model_groups import PolicyGroup
from rlhf_suite.rl.sharding import ForwardBatch
from rlhf_suite.tracking.console import show_line
from rlhf_suite.weight_sync.digests import ADAPTER, BASE, WHOLE, Manifest, SyncReport, WeightSyncError

PROBE_SEQUENCES = 4


class WeightSync:
    """Keeps the engines' weights those of the policy. `prompts` is what the first sync is probed with."""

    def __init__(  # noqa: PLR0913 - values instead of the whole run
        self,
        config: VLLMConfig,
        policy: PolicyGroup,
        engines: EnginePool,
        backend: str,
        prompts: TokenBatch,
        *,
        max_len: int,
        mismatch_limit: float,
        timeout_s: float,
        is_async: bool = False,
    ) -> None:
        self.config, self.policy, self.engines, self.backend = config, policy, engines, backend
        self.prompts, self.max_len, self.mismatch_limit = prompts, max_len, mismatch_limit
        self.timeout_s = timeout_s
        self.restarts, self.is_async = config.max_restarts > 0, is_async
        self.takes_adapters = config.sync_adapters and engines.takes_adapters
        self.has_base = False  # the engines have the model without its adapters
        self.probe: Probe | None = None  # of the newest sync

    @property
    def keeps(self) -> bool:
        """Return whether what was sent last is kept: an engine that is started again needs it.

        Where the policy trains while engines generate, it has newer weights by then; and a file needs nobody who sends
        it. There engines also load a file while the policy trains.
        """
        return (self.restarts or self.is_async) if self.backend == "shm" else (self.restarts and self.is_async)

    def connect(self) -> None:
        """Introduce trainer and engines to each other. Where they cannot share the memory of a GPU, weights go through
        that of the host."""
        self.open()
        if reason := self.meet():
            show_line(
                f"Warning: weights cannot be shared through the memory of the GPU ({reason}); they go through shared "
                "memory of the host, which is slower (vllm.sync_backend=shm). In a container, --ipc=host and "
                "--cap-add=SYS_PTRACE may help",
                to_stderr=True,
            )
            self.backend = "shm"
            self.open()
        self.engines.send_again = self.send_again

    def open(self) -> None:
        """Prepare the policy to send."""
        check = self.config.sync_check != "off"
        self.address = self.policy.open_sender(self.backend, check, self.timeout_s, self.keeps)
        if self.backend == "ipc":
            self.policy.join_sender(*self.address)

    def meet(self) -> str:
        """Bring trainer and engines together, for a stream of weights; return why they cannot share memory, or ""."""
        if self.backend == "shm":
            return ""
        trainer = self.policy.group.members[0]
        return self.engines.connect(*self.address, lambda *asked: self.policy.connect_sender(*asked).refs[0], trainer)

    def send_again(self, published: Sequence[Manifest]) -> None:
        """Bring what was published last to all engines again, since at least one of them was started again. The policy
        does this after what it is doing now; no response waits for anything else."""
        if reason := self.meet():
            raise WeightSyncError(f"an engine that was started again cannot share memory with the trainer: {reason}")
        for sent in published:
            publish = partial(self.publish_again, sent)
            self.engines.stream(sent.version, publish, self.policy.group.members, sent.part)

    def publish_again(self, sent: Manifest) -> Sequence[Any]:
        """Have the policy publish once more what it has sent, and return the calls of its ranks."""
        return self.policy.publish_again(sent.version, sent.part).refs

    def close(self) -> None:
        """Take note that the run ends: an engine that dies now is not started again."""
        self.engines.retire()

    def sync(
        self, version: int, batch: TokenBatch | None = None, queued: Callable[[], object] = lambda: None
    ) -> dict[str, float]:
        """Bring the policy's weights, now of `version`, to every engine, and prove by digests that they are there.

        While the engines take them, the policy computes its part of the probe, on sequences of `batch`. `queued` is
        called when the policy has been asked for all of this: what it is asked for later finds the same weights read.
        """

        def send() -> Sequence[ray.ObjectRef]:
            refs = self.policy.publish(version, ADAPTER if self.takes_adapters else WHOLE).refs
            self.probe = self.begin_probe(version, self.prompts if batch is None else batch)
            queued()
            return refs

        # The cache comes last: while weights are sent, the trainer has them too, and more of its own.
        if self.config.enable_sleep:
            self.engines.wake("weights")
        try:
            manifest, reports = self.send(version, send)
        finally:  # it is not waited for: if the policy is gone, the error of the sync itself is what the user needs
            self.policy.release()
        if self.config.enable_sleep:
            self.engines.wake("kv_cache")
            self.engines.resume()
        read_back = min(report.read_back for report in reports)
        metrics = {"sync/tensors": float(len(manifest.entries)), "sync/read_back": float(read_back)}
        metrics["sync/bytes"] = float(manifest.nbytes)
        if self.engines.caches_prefixes and (hits := self.engines.cache_hits()) is not None:
            metrics["perf/prefix_cache_hits"] = hits  # of the cache that this sync has emptied
        if guessed := sum(report.guessed for report in reports):
            metrics["engine/acceptance"] = sum(report.accepted for report in reports) / guessed
        return metrics | {"perf/engine_restarts": float(self.engines.restarts)}

    def send(self, version: int, send: Callable[[], Sequence[ray.ObjectRef]]) -> tuple[Manifest, list[SyncReport]]:
        """Bring the engines what `send()` starts to send: the weights, or an adapter. Before the first adapter they get
        the model without it."""
        sync, members = partial(self.engines.sync, self.backend, version), self.policy.group.members
        if not self.takes_adapters:
            return sync(send, members)
        if not self.has_base:
            sync(lambda: self.policy.publish(version, BASE).refs, members, BASE)
            self.has_base = True
        return sync(send, members, ADAPTER)

    def begin_probe(self, version: int, batch: TokenBatch) -> Probe | None:
        """Start the policy's part of a probe (vllm.sync_check=full). An engine generates one more token, so a sequence
        of data.max_len is left out."""
        # An engine scores prompts with the tokens that it never samples. Rollouts are compared in any case.
        if self.config.sync_check != "full" or batch.images is not None:
            return None
        fitting = (batch.lengths < self.max_len).nonzero().flatten()[:PROBE_SEQUENCES]
        if len(fitting) == 0:
            return None
        chosen = every_token(take(batch, fitting))
        ours = self.policy.log_probs(ForwardBatch(chosen), 1.0, activity=f"the probe of sync {version}")
        return Probe(version, chosen, ours)

    def check(self) -> dict[str, float]:
        """Prove by the probe of the newest sync that the engines compute what the trainer does: compare the mean
        |log-prob difference| of every engine and the trainer with the limit."""
        if self.probe is None:
            return {}
        probe, self.probe = self.probe, None
        sequences = [ids.tolist() for ids in torch.split(probe.batch.ids, probe.batch.lengths.tolist())]
        theirs = self.engines.score(sequences)
        ours, mask = probe.ours.result().numpy(), probe.batch.mask.numpy().astype(bool)
        worst = float(np.max([np.abs(np.concatenate(log_probs) - ours)[mask].mean() for log_probs in theirs]))
        if not worst <= self.mismatch_limit:  # NaN passes it too
            raise WeightSyncError(
                f"sync of version {probe.version}: all tensors arrived, but an engine's log-probs differ from the "
                f"trainer's by {worst:.2e} on average, and algo.mismatch_max allows {self.mismatch_limit:.2e}. "
                "Raise it if only rounding differs. Otherwise look for what engines and trainer compute in different "
                "ways"
            )
        return {"sync/probe": worst}


@dataclass(frozen=True)
class Probe:
    """What the policy says of a few sequences with the weights of a sync; the engines have yet to say it."""

    version: int
    batch: TokenBatch  # all tokens but the first of each sequence are in the mask
    ours: Pending[torch.Tensor]  # log-probs, [T]


def every_token(batch: TokenBatch) -> TokenBatch:
    """Return the batch with all tokens but each sequence's first in the mask."""
    mask = torch.ones(batch.num_tokens).index_fill(0, batch.starts, 0.0)
    return TokenBatch(batch.ids, batch.lengths, mask)
