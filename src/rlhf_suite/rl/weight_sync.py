"""Weight sync: the policy's weights go to every engine, and digests and a log-prob probe show that they are there."""

from __future__ import annotations

import numpy as np
import torch

from rlhf_suite.config.rollout import VLLMConfig
from rlhf_suite.data.batch import TokenBatch, take
from rlhf_suite.engines.pool import EnginePool
from rlhf_suite.rl.model_groups import PolicyGroup
from rlhf_suite.rl.sharding import ForwardBatch
from rlhf_suite.weight_sync.digests import WeightSyncError

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
        # An engine that is started again needs the weights of the last sync. Where the policy trains while engines
        # generate, it has newer ones by then; and a file needs nobody who sends it.
        self.keeps = config.max_restarts > 0 and (backend == "shm" or is_async)

    def connect(self) -> None:
        """Introduce trainer and engines to each other."""
        check = self.config.sync_check != "off"
        self.address = self.policy.open_sender(self.backend, check, self.timeout_s, self.keeps)
        if self.backend == "ipc":
            self.policy.join_sender(*self.address)
        self.meet()
        self.engines.send_again = self.send_again

    def meet(self) -> None:
        """Bring trainer and engines together, for a stream of weights."""
        if self.backend != "shm":
            trainer = self.policy.group.members[0]
            self.engines.connect(*self.address, lambda *asked: self.policy.connect_sender(*asked).refs[0], trainer)

    def send_again(self) -> None:
        """Bring the weights of the last sync to all engines again, since at least one of them was started again. The
        policy does this behind what it is doing now; no response waits for anything else."""
        self.meet()
        version = self.version
        self.engines.stream(version, lambda: self.policy.publish_again(version).refs, self.policy.group.members)

    def close(self) -> None:
        """Take note that the run ends: an engine that dies now is not started again."""
        self.engines.retire()

    def sync(self, version: int) -> dict[str, float]:
        """Bring the policy's weights, now of `version`, to every engine, and prove by digests that they are there."""
        # The cache comes last: while weights are sent, the trainer has them too, and more of its own.
        if self.config.enable_sleep:
            self.engines.wake("weights")
        try:
            manifest, reports = self.engines.sync(
                self.backend, version, lambda: self.policy.publish(version).refs, self.policy.group.members
            )
        finally:  # it is not waited for: if the policy is gone, the error of the sync itself is what the user needs
            self.policy.release()
        self.version = version
        if self.config.enable_sleep:
            self.engines.wake("kv_cache")
            self.engines.resume()
        read_back = min(report.read_back for report in reports)
        metrics = {"sync/tensors": float(len(manifest.entries)), "sync/read_back": float(read_back)}
        return metrics | {"perf/engine_restarts": float(self.engines.restarts)}

    def check(self, version: int, batch: TokenBatch | None = None) -> dict[str, float]:
        """Prove by a probe that the engines compute what the trainer does (vllm.sync_check=full)."""
        chosen = self.prompts if batch is None else batch
        # An engine scores prompts with the tokens that it never samples. Rollouts are compared in any case.
        if self.config.sync_check != "full" or chosen.images is not None:
            return {}
        return {"sync/probe": self.probe(version, chosen)}

    def probe(self, version: int, batch: TokenBatch) -> float:
        """Return the largest mean |log-prob difference| of an engine and the trainer on a few sequences; past the limit
        the run stops. An engine generates one more token, so a sequence of data.max_len is left out."""
        fitting = (batch.lengths < self.max_len).nonzero().flatten()[:PROBE_SEQUENCES]
        if len(fitting) == 0:
            return 0.0
        chosen = every_token(take(batch, fitting))
        ours = self.policy.log_probs(ForwardBatch(chosen), 1.0, what=f"the probe of sync {version}").result().numpy()
        sequences = [ids.tolist() for ids in torch.split(chosen.ids, chosen.lengths.tolist())]
        mask = chosen.mask.numpy().astype(bool)
        gaps = [np.abs(np.concatenate(theirs) - ours)[mask].mean() for theirs in self.engines.score(sequences)]
        worst = float(np.max(gaps))
        if not worst <= self.mismatch_limit:  # NaN passes it too
            raise WeightSyncError(
                f"sync of version {version}: all tensors arrived, but an engine's log-probs differ from the trainer's "
                f"by {worst:.2e} on average (limit {self.mismatch_limit:.2e}, algo.mismatch_max)"
            )
        return worst


def every_token(batch: TokenBatch) -> TokenBatch:
    """Return the batch with all tokens but each sequence's first in the mask."""
    mask = torch.ones(batch.num_tokens).index_fill(0, batch.starts, 0.0)
    return TokenBatch(batch.ids, batch.lengths, mask)
