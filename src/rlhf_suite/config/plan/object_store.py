"""How much shared memory Ray's object store needs: what a run sends through it at one time.

It holds what one process has sent and another has not read yet: responses on their way from the engines, the parts of a
batch on their way to the ranks of each model, and what these answer. Weights do not pass through it. With
actor.routing_replay responses have routes, which the policy gets again with each batch.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from rlhf_suite.config.declarations.reward import reward_models
from rlhf_suite.config.declarations.rollout import most_sequences
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.declarations.task_groups import RL

LEAST_MB = 75  # Ray takes no less
MARGIN = 1.25  # for headers, ledgers that episodes have beside their last one, and what is read and not freed yet
# Bytes of each token as arrays. A forward pass gets ids and mask, and answers a number; an update of the policy gets
# the log-probs of engine, policy and reference, the correction, the advantages and which tokens are chosen besides, and
# one of the critic the values and the returns.
RESPONSE = 4 + 4 + 4  # id, log-prob, weight version
FORWARD = 8 + 4 + 4
UPDATE, UPDATE_OF_CRITIC = 8 + 4 + 5 * 4 + 1, 8 + 4 + 2 * 4
READERS = ("actor", "ref", "teacher", "critic")  # models that run forward over a rollout
AHEAD = 2  # samples of task=generate that are under way, in multiples of those that the engines run at once


def object_store_mb(run: Run, models: Collection[str], device: str, routes: int = 0) -> int:
    """Return the MiB of Ray's object store on each node: as the flag says, or what the run needs with these models.
    `device`: that of the engines ("cpu" or "cuda"); `routes`: the bytes of those of one token, which follow from the
    model."""
    if run.launch.object_store_mb is not None:
        return run.launch.object_store_mb
    return max(LEAST_MB, math.ceil(MARGIN * bytes_at_once(run, models, routes, device) / 2**20))


def bytes_at_once(run: Run, models: Collection[str], routes: int, device: str) -> int:
    """Return the most bytes that are under way at one time, if every sample has data.max_len tokens. Responses, scores
    and the steps of the models may overlap."""
    if run.has("generate"):
        return AHEAD * most_sequences(run.vllm, device) * run.vllm.num_engines * run.data.max_len * RESPONSE
    if run.task not in RL:
        return 0
    judges = 0 if run.replays else len(reward_models(run.reward)) + ("reward.process" in models)
    forward = FORWARD * sum(name.split(".")[0] in READERS for name in models)
    update = UPDATE + (UPDATE_OF_CRITIC if "critic" in models else 0)
    responses = 0 if run.replays else RESPONSE + routes
    return samples_of_step(run) * run.data.max_len * (responses + judges * FORWARD + max(forward, update) + routes)


def samples_of_step(run: Run) -> int:
    """Return the samples that a step trains on."""
    return run.rollout.batch_size * run.rollout.n_samples_per_prompt
