"""What is decided about an RL run from its flags and the machine: arithmetic, without Ray."""

from functools import reduce

import pytest

from rlhf_suite.config.declarations.reward import NamedSourceConfig
from rlhf_suite.config.declarations.rollout import VLLMConfig
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.plan.placement import Placement
from rlhf_suite.config.plan.run_plan import Machine, ModelPlan, Plan, resolve
from rlhf_suite.engines.spec import EngineSpec, sleep_level
from rlhf_suite.run_folders.record import load, save


def resolved(config: Run, device: str = "cuda", num_gpus: int | None = None) -> Plan:
    return resolve(config, Machine(device, num_gpus))


def placement(config: Run) -> Placement:
    return resolved(config).placement


def sizes(config: Run) -> list[list[tuple[str, int]]]:
    return [[(role.name, role.num_actors) for role in pool.roles] for pool in placement(config).pools]


@pytest.fixture
def config() -> Run:
    config = Run.of("ppo")
    config.algo.advantage.estimator = "group_norm"
    config.algo.kl.init_coef = 0.0
    config.reward.rule = "exact_match"
    config.actor.model_name_or_path = "org/policy"
    return config


@pytest.mark.notices(
    "engines discard weights that the next sync does not bring",
    "config/plan/run_plan.py",
    "brings_all = run.ds.lora.rank == 0 or not run.vllm.sync_adapters",
    "brings_all = True",
)
@pytest.mark.notices(
    "engines discard weights although a step may need another round of samples",
    "config/plan/run_plan.py",
    "not run.algo.filters and ",
    "",
)
def test_sleeping_engines_discard_their_weights_where_a_sync_brings_all_of_them(config):
    assert not resolved(config).engines.discards_weights, "they do not sleep"
    config.train.colocate_all = config.vllm.enable_sleep = True
    assert resolved(config).engines.discards_weights
    config.vllm.sync_check = "off"
    assert not resolved(config).engines.discards_weights, "nothing would prove that all are there again"
    config.vllm.sync_check = "digest"
    config.ds.lora.rank = 8
    assert not resolved(config).engines.discards_weights, "a sync brings the adapters alone"
    config.vllm.sync_adapters = False
    assert resolved(config).engines.discards_weights
    config.algo.dynamic_filtering_enable = True
    assert not resolved(config).engines.discards_weights, "a step may need another round of samples"
    config.train.partial_rollout_enable, config.train.async_queue_size = True, 1
    assert resolved(config).engines.discards_weights, "engines of a stream go on after a sync alone"


@pytest.mark.notices(
    "engines discard the weights of a model that guesses tokens",
    "config/plan/run_plan.py",
    " and not has_other_weights(run.vllm)",
    "",
)
def test_sleeping_engines_keep_weights_that_no_sync_brings(config):
    config.train.colocate_all = config.vllm.enable_sleep = True
    config.vllm.speculative_config = {"method": "ngram", "num_speculative_tokens": 3}
    assert resolved(config).engines.discards_weights, "it guesses without a model"
    config.vllm.speculative_config = {"method": "draft_model", "model": "m", "num_speculative_tokens": 3}
    assert not resolved(config).engines.discards_weights
    config.vllm.speculative_config, config.vllm.quantization = {}, "fp8"
    assert not resolved(config).engines.discards_weights


@pytest.mark.notices(
    "engines without a GPU sleep",
    "engines/spec.py",
    'spec.enable_sleep and spec.device == "cuda"',
    "spec.enable_sleep",
)
@pytest.mark.parametrize(
    ("device", "sleeps", "discards", "level"),
    [("cuda", True, True, 2), ("cuda", True, False, 1), ("cuda", False, True, None), ("cpu", True, True, None)],
)
def test_the_level_of_sleep_says_what_becomes_of_the_weights(device, sleeps, discards, level):
    spec = EngineSpec(
        "m", "bfloat16", device, 8, 0, VLLMConfig.of("ppo"), enable_sleep=sleeps, discards_weights=discards
    )
    assert sleep_level(spec) == level


@pytest.mark.notices(
    "a reference runs without a KL term",
    "config/declarations/runs.py",
    'when=is_positive("algo.kl.init_coef"),',
    "when=(),",
)
def test_only_the_roles_that_are_needed_exist(config):
    assert sizes(config) == [[("actor", 1)], [("engine", 1)]]
    config.algo.kl.init_coef = 0.01
    config.algo.advantage.estimator = "gae"
    config.reward.model_name_or_path = "some/model"
    assert sizes(config) == [[("actor", 1)], [("engine", 1)], [("critic", 1)], [("ref", 1)], [("reward", 1)]]


@pytest.mark.notices(
    "an engine on several devices is counted as one",
    "config/plan/placement.py",
    "self.num_actors * self.devices_per_actor",
    "self.num_actors",
)
@pytest.mark.notices(
    "ranks of further nodes are forgotten",
    "config/plan/run_plan.py",
    "return section.num_nodes * section.num_gpus_per_node",
    "return section.num_gpus_per_node",
)
def test_separate_placement_adds_devices_up(config):
    config.actor.num_nodes, config.actor.num_gpus_per_node = 2, 4
    config.vllm.num_engines, config.vllm.tensor_parallel_size = 3, 2
    placed = placement(config)
    assert placed.num_devices == 2 * 4 + 3 * 2
    assert placed.num_actors == 8 + 3
    assert placed.lines() == ["8 x GPU on 2 nodes: actor x 8", "6 x GPU: engine x 3 of 2"]


def test_colocation_of_all_puts_every_role_on_the_same_devices(config):
    config.algo.kl.init_coef = 0.01
    config.train.colocate_all = True
    config.actor.num_gpus_per_node = config.ref.num_gpus_per_node = config.vllm.num_engines = 2
    placed = placement(config)
    assert placed.lines() == ["2 x GPU: actor x 2, engine x 2, ref x 2"]
    assert placed.num_devices == 2
    assert placed.pools[0].share == pytest.approx(1 / 3)


def test_several_reward_models_have_ranks_of_their_own(config):
    config.algo.advantage.estimator = "gae"
    config.reward.rule = None
    config.reward.sources = {
        "kind": NamedSourceConfig(model_name_or_path="org/kind"),
        "right": NamedSourceConfig(rule="math"),
        "short": NamedSourceConfig(model_name_or_path="org/short", weight=0.5),
    }
    config.reward.num_gpus_per_node = 2
    kind, short = "reward.sources.kind", "reward.sources.short"
    assert sizes(config) == [[("actor", 1)], [("engine", 1)], [("critic", 1)], [(kind, 2)], [(short, 2)]]
    models = resolved(config).models
    assert {name: (each.path, each.head, each.ranks) for name, each in models.items() if name.startswith("reward")} == {
        kind: ("org/kind", "value", 2),
        short: ("org/short", "value", 2),
    }
    assert models[short].flag == "reward.sources.short.model_name_or_path"
    assert models["critic"].path == "org/kind", "that of the first reward model"
    config.train.colocate_critic_reward, config.critic.num_gpus_per_node = True, 2
    assert sizes(config)[0] == [("critic", 2), (kind, 2), (short, 2)]


def test_an_engine_shares_the_devices_of_several_ranks(config):
    config.algo.kl.init_coef = 0.01
    config.train.colocate_all = True
    config.actor.num_gpus_per_node = config.ref.num_gpus_per_node = 8
    config.vllm.num_engines, config.vllm.tensor_parallel_size, config.vllm.pipeline_parallel_size = 2, 2, 2
    placed = placement(config)
    assert placed.lines() == ["8 x GPU: actor x 8, engine x 2 of 4, ref x 8"]
    assert (placed.num_devices, placed.pools[0].bundle, placed.pools[0].share) == (8, 1, pytest.approx(1 / 3))
    assert resolved(config).engines.sync_backend == "ipc"


def test_a_split_engine_and_its_ranks_share_the_gpus_of_a_machine_that_has_too_few(config):
    config.actor.num_gpus_per_node, config.vllm.tensor_parallel_size = 4, 4
    assert resolved(config, num_gpus=4).placement.lines() == ["4 x GPU: actor x 4, engine x 1 of 4"]


def test_pairs_share_devices(config):
    config.algo.kl.init_coef = 0.01
    config.algo.advantage.estimator = "gae"
    config.reward.model_name_or_path = "some/model"
    config.train.colocate_actor_ref = config.train.colocate_critic_reward = True
    assert sizes(config) == [[("actor", 1), ("ref", 1)], [("critic", 1), ("reward", 1)], [("engine", 1)]]


def test_a_pair_with_an_absent_partner_is_alone(config):
    config.train.colocate_actor_ref = config.train.colocate_critic_reward = True
    assert sizes(config) == [[("actor", 1)], [("engine", 1)]]


def test_roles_share_the_gpu_of_a_machine_that_has_too_few(config):
    config.algo.kl.init_coef = 0.01
    alone, one = resolved(config, num_gpus=3), resolved(config, num_gpus=1)
    assert alone.placement.lines() == ["1 x GPU: actor x 1", "1 x GPU: engine x 1", "1 x GPU: ref x 1"]
    assert one.placement.lines() == ["1 x GPU: actor x 1, engine x 1, ref x 1"]
    assert (alone.engines.gpu_memory_utilization, one.engines.gpu_memory_utilization) == (None, 0.4)
    assert (alone.engines.sync_backend, one.engines.sync_backend) == ("nccl", "ipc")


def test_nobody_is_made_to_share_what_is_not_known_or_not_equal_or_forbidden(config):
    assert not resolved(config).engines.shares_gpu
    assert not resolved(config, "cpu", 0).engines.shares_gpu
    config.vllm.num_engines = 2
    assert not resolved(config, num_gpus=1).engines.shares_gpu
    config.vllm.num_engines, config.train.colocate_all = 1, False
    assert not resolved(config, num_gpus=1).engines.shares_gpu


def test_an_engine_that_shares_its_gpu_takes_what_it_is_told_to(config):
    config.train.colocate_all, config.vllm.gpu_memory_utilization = True, 0.6
    assert resolved(config, num_gpus=8).engines.gpu_memory_utilization == 0.6


def test_the_ranks_of_all_nodes_count_for_every_role(config):
    config.algo.kl.init_coef = 0.01
    config.algo.advantage.estimator = "gae"
    for section in (config.actor, config.ref, config.critic):
        section.num_nodes, section.num_gpus_per_node = 2, 3
    assert sizes(config) == [[("actor", 6)], [("engine", 1)], [("critic", 6)], [("ref", 6)]]


@pytest.mark.notices(
    "a run of several nodes sends weights through one node's memory",
    "config/plan/run_plan.py",
    '"gloo" if machine.num_gpus is None else "shm"',
    '"shm"',
)
@pytest.mark.parametrize(
    ("device", "num_gpus", "colocate", "backend"),
    [("cpu", 0, False, "shm"), ("cpu", None, False, "gloo"), ("cuda", 1, False, "nccl"), ("cuda", None, True, "ipc")],
)
def test_weights_go_through_memory_only_where_trainer_and_engines_share_it(config, device, num_gpus, colocate, backend):
    """Where the run has more than this machine, an engine may be on another node than a trainer of one node."""
    config.train.colocate_all = colocate
    assert resolved(config, device, num_gpus).engines.sync_backend == backend
    config.vllm.sync_backend = "gloo"
    assert resolved(config, device, num_gpus).engines.sync_backend == "gloo"


def test_reference_and_critic_start_where_nothing_else_is_said(config):
    config.algo.kl.init_coef, config.algo.advantage.estimator = 0.01, "gae"
    models = resolved(config).models
    assert (models["ref"].path, models["critic"].path) == ("org/policy", "org/policy")
    assert models["critic"].head == "value"
    config.reward.model_name_or_path, config.ref.model_name_or_path = "org/judge", "org/reference"
    models = resolved(config).models
    assert [models[name].path for name in ("ref", "critic", "reward")] == ["org/reference", "org/judge", "org/judge"]
    config.critic.model_name_or_path = "org/critic"
    assert resolved(config).models["critic"].path == "org/critic"


def test_a_built_in_model_is_trained_first_and_its_reference_is_the_trained_one(config):
    config.actor.model_name_or_path, config.algo.kl.init_coef = "builtin:tiny", 0.01
    config.algo.distill.coef, config.teacher.model_name_or_path = 0.1, "builtin:tiny"
    recipes = {name: model.recipe for name, model in resolved(config).models.items()}
    assert recipes == {"actor": "warm_start", "ref": "warm_start", "teacher": "teacher"}
    config.ref.model_name_or_path = "builtin:tiny"
    assert resolved(config).models["ref"].recipe is None, "a named reference is taken as it is"


@pytest.mark.parametrize("path", [None, "org/policy"])
def test_with_adapters_the_reference_is_the_actor_without_them(config, path):
    """It has neither devices of its own nor a copy of the weights; another model has both."""
    config.algo.kl.init_coef, config.ds.lora.rank, config.actor.num_gpus_per_node = 0.01, 4, 2
    config.ref.model_name_or_path = path
    assert sizes(config) == [[("actor", 2)], [("engine", 1)]]
    assert resolved(config).models["ref"] == ModelPlan("ref", "org/policy", ranks=2, is_actor=True)
    config.ref.model_name_or_path = "org/reference"
    assert sizes(config) == [[("actor", 2)], [("engine", 1)], [("ref", 1)]]
    assert not resolved(config).models["ref"].is_actor


def test_a_model_of_other_weights_is_not_the_actor_without_adapters(config):
    """A built-in actor is trained before its adapters are added, and a teacher is not held in 4 bits."""
    config.algo.kl.init_coef, config.ds.lora.rank = 0.01, 4
    config.algo.distill.coef, config.teacher.model_name_or_path = 0.1, "org/policy"
    assert {name for name, model in resolved(config).models.items() if model.is_actor} == {"ref", "teacher"}
    config.ds.load_in_4bit = True
    assert {name for name, model in resolved(config).models.items() if model.is_actor} == {"ref"}
    config.actor.model_name_or_path = config.ref.model_name_or_path = "builtin:tiny"
    assert not any(model.is_actor for model in resolved(config).models.values())


def test_models_are_held_as_their_sections_say(config):
    """A reference is held in 4 bits as its policy is; models whose word counts keep their precision."""
    config.algo.kl.init_coef, config.ds.load_in_4bit = 0.01, True
    config.reward.model_name_or_path, config.reward.offload, config.reward.num_gpus_per_node = "org/judge", True, 2
    models = resolved(config).models
    assert models["ref"] == ModelPlan("ref", "org/policy", load_in_4bit=True)
    assert models["reward"] == ModelPlan("reward", "org/judge", head="value", ranks=2, offload=True)


def test_schedules_count_optimiser_steps_and_the_policys_begins_after_the_warm_up(config):
    config.rollout.batch_size, config.rollout.n_samples_per_prompt = 5, 3
    config.train.batch_size, config.train.max_epochs, config.critic.freezing_steps = 4, 2, 2
    without = resolved(config)
    assert (without.optimizer_steps_per_rollout, without.policy_steps(10)) == (8, 80)
    config.algo.advantage.estimator = "gae"
    assert (resolved(config).policy_steps(10), resolved(config).critic_steps(10)) == (64, 80)


def test_the_saved_configuration_holds_the_plan_and_loads_without_it(config, tmp_path):
    save(config, tmp_path / "config.yaml", resolved(config))
    assert "sync_backend: nccl" in (tmp_path / "config.yaml").read_text()
    assert load(tmp_path / "config.yaml") == config


def test_a_supervised_run_has_a_plan_of_its_models_and_their_ranks():
    run = Run.of("dpo")
    run.actor.model_name_or_path, run.actor.num_nodes, run.actor.num_gpus_per_node = "org/policy", 2, 4
    run.ref.offload, run.ds.load_in_4bit = True, True
    plan = resolve(run, Machine("cuda", 8))
    assert plan.placement.lines() == ["8 x GPU on 2 nodes: actor x 8"]
    assert plan.models["ref"] == ModelPlan("ref", "org/policy", ranks=8, offload=True, load_in_4bit=True)
    run.algo.loss = "simpo"
    assert list(resolve(run, Machine("cuda", 8)).models) == ["actor"], "a loss without a reference"


def test_the_teacher_of_a_distillation_is_trained_first_and_its_student_is_not():
    run = Run.of("distill")
    run.actor.model_name_or_path = run.teacher.model_name_or_path = "builtin:tiny"
    recipes = {name: model.recipe for name, model in resolve(run, Machine("cpu", 0)).models.items()}
    assert recipes == {"actor": None, "teacher": "warm_start"}


def test_rows_are_answered_by_engines_and_scored_by_the_ranks_of_a_reward_model():
    generate, score = Run.of("generate"), Run.of("score")
    generate.actor.model_name_or_path, generate.vllm.num_engines = "builtin:tiny", 3
    assert resolve(generate, Machine("cpu", 0)).placement.lines() == ["3 x CPU slot: engine x 3"]
    assert resolve(generate, Machine("cpu", 0)).models["actor"].recipe == "warm_start"
    score.reward.rule = "exact_match"
    assert resolve(score, Machine("cpu", 0)).placement.pools == ()
    score.reward.rule, score.reward.model_name_or_path, score.reward.num_gpus_per_node = None, "org/judge", 2
    plan = resolve(score, Machine("cpu", 0))
    assert plan.placement.lines() == ["2 x CPU slot: reward x 2"] and plan.models["reward"].head == "value"


def test_the_placement_knows_how_many_ranks_split_the_tokens_of_a_batch(config):
    assert placement(config).sequence == 1
    config.ds.ring_attn_size, config.actor.num_gpus_per_node = 2, 4
    assert placement(config).sequence == 2


def test_the_placement_knows_how_many_ranks_split_the_matrices_of_a_model(config):
    assert placement(config).tensor == 1
    config.ds.tensor_parallel_size, config.actor.num_gpus_per_node = 2, 4
    assert placement(config).tensor == 2


@pytest.mark.notices(
    "a judge sleeps with the engines that share their devices",
    "config/plan/run_plan.py",
    "return (Pool(tuple(role for role in left if role.name != JUDGE)), *alone)",
    "return (Pool(tuple(left)),)",
)
def test_the_engines_of_a_judge_have_devices_of_their_own(config):
    config.reward.rule, config.reward.rubric, config.reward.judge.model = None, "rubric.md", "org/judge"
    assert sizes(config) == [[("actor", 1)], [("engine", 1)], [("judge", 1)]]
    config.train.colocate_all = config.vllm.enable_sleep = True
    config.reward.judge.num_engines, config.reward.judge.tensor_parallel_size = 2, 2
    assert sizes(config) == [[("actor", 1), ("engine", 1)], [("judge", 2)]]
    assert placement(config).num_devices == 1 + 4
    config.reward.judge.url = "http://judge/v1"
    assert sizes(config) == [[("actor", 1), ("engine", 1)]]


def test_a_machine_whose_gpus_are_few_keeps_one_for_the_judge(config):
    config.reward.rule, config.reward.rubric, config.reward.judge.model = None, "rubric.md", "org/judge"
    roles = [[role.name for role in pool.roles] for pool in resolved(config, num_gpus=2).placement.pools]
    assert roles == [["actor", "engine"], ["judge"]]


def test_a_judge_is_no_model_that_ranks_hold_and_a_replay_asks_none(config):
    config.reward.rule, config.reward.rubric, config.reward.judge.model = None, "rubric.md", "org/judge"
    assert [*resolved(config).models] == ["actor"]
    config.rollout.replay = "runs/before"
    assert sizes(config) == [[("actor", 1)]]


@pytest.mark.notices(
    "several ranks train without DeepSpeed",
    "config/plan/zero.py",
    "return 2 if ranks > 1 or by_muon",
    "return 2 if by_muon",
)
@pytest.mark.notices(
    "one rank gets the buffers of ZeRO",
    "config/plan/zero.py",
    "return 2 if ranks > 1 or",
    "return 2 if ranks > 0 or",
)
@pytest.mark.parametrize(
    ("changes", "stage"),
    [
        ({}, None),
        ({"actor.num_gpus_per_node": 2}, 2),
        ({"actor.num_nodes": 2}, 2),
        ({"ref.num_gpus_per_node": 2, "algo.kl.init_coef": 0.1}, 2),
        ({"ref.num_gpus_per_node": 2}, None),  # without the penalty there is no reference
        ({"ds.adam_offload": True}, 2),
        ({"ds.overlap_comm": True}, 2),
        ({"ds.overlap_comm": False}, None),
        ({"ds.deepcompile": True}, 2),
        ({"ds.enable_sleep": True}, 2),
        ({"actor.optim": "muon"}, 2),
        ({"ds.zero_stage": 0}, 0),
        ({"ds.zero_stage": 3}, 3),
        ({"ds.zero_stage": 1, "actor.num_gpus_per_node": 2}, 1),
    ],
)
def test_deepspeed_comes_with_several_ranks_or_a_flag_that_asks_for_it(config, changes, stage):
    for name, value in changes.items():
        section, _, flag = name.rpartition(".")
        setattr(reduce(getattr, section.split("."), config), flag, value)
    plan = resolved(config)
    assert (plan.zero_stage, plan.hold(config.ds).zero_stage) == (stage, stage)
