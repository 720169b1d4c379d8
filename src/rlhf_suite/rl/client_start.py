"""The start of what a client calls: the actors of task=ppo, with a policy that is trained call by call."""

from __future__ import annotations

from contextlib import ExitStack

from rlhf_suite.config.declarations.eval import EvalConfig
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.plan.run_plan import ACTOR, Plan
from rlhf_suite.engines.start import engine_adapter
from rlhf_suite.launch.placement import reserve
from rlhf_suite.launch.ray_cluster import ray_cluster
from rlhf_suite.models.load import load_tokenizer
from rlhf_suite.rl.actors import start_actors
from rlhf_suite.rl.build import connect_weight_sync
from rlhf_suite.rl.client import Started, as_prompt
from rlhf_suite.rl.mismatch import mismatch_limit
from rlhf_suite.rl.pipeline import CLOSING_S
from rlhf_suite.rl.primitives import SteppedPolicyGroup, SteppedPolicyRole
from rlhf_suite.rl.prompts import load_prompts
from rlhf_suite.run_folders.run_folder import RunFolder

PROBE = "The engines have the weights of the policy."


def start_client(run: Run, plan: Plan, record: RunFolder, stack: ExitStack, *, has_prompts: bool) -> Started:
    """Bring up the actors of a client, with the first weights in the engines; `stack` ends them. `has_prompts`: whether
    data.prompt_dataset is read.

    Raises:
        RunError: a process did not come up.
    """
    tokenizer = load_tokenizer(plan.models[ACTOR].path, run.data)
    prompts = load_prompts(run.data, EvalConfig.of("ppo"), run.train.seed, tokenizer).train if has_prompts else None
    stack.enter_context(ray_cluster(run.launch, record.path, plan.placement.num_devices))
    slots = reserve(plan.placement, run.launch.timeout_s)
    adapter, _ = engine_adapter(run, plan.models[ACTOR])
    kind = SteppedPolicyGroup, SteppedPolicyRole
    actors = start_actors(run, plan, slots, record.logs, run.train.max_steps or 1, None, adapter, kind)
    actors.ready()
    assert isinstance(actors.policy, SteppedPolicyGroup) and actors.engines is not None
    engines = actors.engines
    stack.callback(engines.loop.join_threads, CLOSING_S)
    limit = mismatch_limit(run.algo.mismatch_max, run.ds.precision, plan.device)
    probe = as_prompt(tokenizer(PROBE, add_special_tokens=False)["input_ids"], 0)
    weights = connect_weight_sync(run, plan, actors.policy, engines, [probe], limit)
    stack.callback(weights.close)
    return Started(run, plan, record, tokenizer, prompts, actors.policy, actors, engines, weights)
