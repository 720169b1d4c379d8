"""A run: the sections of flags that the command line of its task has, and what else differs between tasks.

`Run.of("sft")` has the sections of task=sft and no others: to read or set another one is an AttributeError.
`run.has("rollout")` asks whether there is one.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from typing import Any

from rlhf_suite import registry
from rlhf_suite.config.declarations.agent import AgentConfig
from rlhf_suite.config.declarations.algo import AlgoConfig
from rlhf_suite.config.declarations.calls import is_constant
from rlhf_suite.config.declarations.ckpt import CheckpointConfig
from rlhf_suite.config.declarations.conditions import algorithm_needs, is_false, is_null, is_positive
from rlhf_suite.config.declarations.data import DataConfig
from rlhf_suite.config.declarations.ds import DeepSpeedConfig
from rlhf_suite.config.declarations.eval import LANGUAGE, PREFERENCE, QUANTILES, EvalConfig
from rlhf_suite.config.declarations.flag_types import field_types
from rlhf_suite.config.declarations.flags import FIXED, FREE, NAMED, FlagInfo, flag, group, walk
from rlhf_suite.config.declarations.generate import ANSWERS, GenerateConfig, ScoreConfig
from rlhf_suite.config.declarations.launch import LaunchConfig
from rlhf_suite.config.declarations.logger import LoggerConfig
from rlhf_suite.config.declarations.loop import LoopConfig, LoopEvalConfig
from rlhf_suite.config.declarations.models import IF_THE_LOSS_HAS_ONE, ActorConfig, CriticConfig, ReferenceConfig
from rlhf_suite.config.declarations.reward import RewardConfig
from rlhf_suite.config.declarations.rollout import RolloutConfig, VLLMConfig
from rlhf_suite.config.declarations.sections import Section
from rlhf_suite.config.declarations.task_groups import (
    BY_PREFERENCE,
    LOOPS,
    PROMPTED,
    RENDERED,
    RESUMABLE,
    REWARDED,
    RL,
    TRAINED,
    TRAINING,
)
from rlhf_suite.config.declarations.teacher import TeacherConfig
from rlhf_suite.config.declarations.tools import (
    AdapterConfig,
    ChatConfig,
    ServeConfig,
    ServedRewardConfig,
)
from rlhf_suite.config.declarations.train import TrainConfig

ROWS = "data.dataset"
SAMPLED = ("pass1", "pass1_stderr", "reward", "response_length_mean", "truncated_rate", "num_samples")
IF_NOT_REPLAYED = is_null("rollout.replay")
IF_IT_ANSWERS: Any = {"when": ANSWERS}  # a benchmark has its own sampling and rule
CHOSEN = "The task; chosen with task=<name>"


@dataclass(frozen=True)
class Task:
    """What differs between tasks beside their sections of flags.

    `evaluated` is what the task measures on held-out data: `eval/<name>`, and `eval/<set>/<name>` for each of its sets;
    a test compares them with what evaluations return. `model` is the flag without which there is nothing to run;
    `has_demo`: whether conf/demo has a preset that names one.
    """

    help: str
    evaluated: tuple[str, ...] = ()
    model: str = "actor.model_name_or_path"
    has_demo: bool = True


TASKS = {
    "sft": Task("Supervised fine-tuning and continued pre-training", LANGUAGE),
    "rm": Task("Train a reward model on pairs of answers", (*PREFERENCE, "reward_mean", "reward_std", *QUANTILES)),
    "dpo": Task(
        "Preference optimisation on pairs of answers: DPO, cDPO, IPO, hinge, SimPO, ORPO",
        (*PREFERENCE, "nll_loss", "chosen_logps", "reject_logps"),
    ),
    "kto": Task(
        "Preference optimisation on single answers that are desirable or undesirable (KTO)",
        ("loss", "aux_loss", "kl", "chosen_reward", "reject_reward", "auc"),
    ),
    "prm": Task(
        "Train a process reward model on solutions with a label for every step", ("acc", "loss", "aux_loss", "auc")
    ),
    "distill": Task(
        "Distillation: learn the token probabilities of a teacher on given answers", (*LANGUAGE, "loss", "distil_loss")
    ),
    "ppo": Task("Reinforcement learning with PPO, GRPO and related algorithms, on Ray, vLLM and DeepSpeed", SAMPLED),
    "serve_train": Task(
        "HTTP server for training with Tinker's protocol, with the policy and the engines of task=ppo",
        SAMPLED,
        has_demo=False,
    ),
    "generate": Task("Generate the answers of a model to the prompts of a file"),
    "score": Task(
        "Score the responses in a file by a rule, a reward file, reward servers or a reward model", model=ROWS
    ),
    "check_reward": Task("Show the rewards of a few rows, to test a reward without a GPU", model=ROWS),
    "merge_lora": Task("Merge a LoRA adapter into its base model, without training", has_demo=False),
    "rejection_sampling": Task(
        "Rejection sampling: repeat supervised fine-tuning on the best of the model's own answers"
    ),
    "iterative_dpo": Task("Iterative DPO: repeat DPO on the best and the worst of the model's own answers"),
    "conditional_sft": Task(
        "Conditional SFT: supervised fine-tuning on all of the model's own answers, with their rewards in the prompts"
    ),
    # There is no built-in reward model.
    "serve_rm": Task("HTTP server for a reward model", model="reward.model_name_or_path", has_demo=False),
    "chat": Task("Chat with a model in the terminal, without training"),
}


@dataclass
class Run(Section):
    """The run itself"""

    # Of what is a constant in task=serve_train (`calls.py`), reward, prompts and estimator are such that the shared
    # code of task=ppo finds nothing missing.
    task: str = flag("", CHOSEN, defaults={name: name for name in TASKS})
    explain: bool = flag(False, when=is_false("plan"), resume=FREE)
    """Print batch sizes, placement and the origin of each value, and do not run anything"""
    run_dir: str | None = flag(None, resume=FREE)
    """Folder of this run, or with -m of the whole sweep; null: a new folder outputs/<task>/<time>"""
    own_code: list[str] = flag([])
    """Files of your own functions, with the files that they import, and their SHA-256. The run writes this flag
    itself"""
    launch: LaunchConfig = group(LaunchConfig)
    ckpt: CheckpointConfig = group(
        CheckpointConfig,
        tasks=(*RESUMABLE, "merge_lora"),
        of_tasks={"serve_train": {"values": {"save_steps": 1}}},
    )
    plan: bool = flag(
        False,
        "Print the memory, disk space and time that the run would need, and do not run anything",
        resume=FREE,
        tasks=TRAINED,
    )
    ds: DeepSpeedConfig = group(DeepSpeedConfig, tasks=(*RENDERED, "merge_lora", "serve_rm"))
    logger: LoggerConfig = group(LoggerConfig, tasks=TRAINING)
    actor: ActorConfig = group(ActorConfig, tasks=(*TRAINING, "generate", "merge_lora", "chat"))
    critic: CriticConfig = group(
        CriticConfig, when=algorithm_needs("algo.advantage.estimator", registry.estimator, "values"), tasks=RL
    )
    ref: ReferenceConfig = group(
        ReferenceConfig,
        when=is_positive("algo.kl.init_coef"),
        tasks=(*RL, "kto", *BY_PREFERENCE),
        of_tasks=dict.fromkeys(BY_PREFERENCE, IF_THE_LOSS_HAS_ONE),
    )
    teacher: TeacherConfig = group(TeacherConfig, when=is_positive("algo.distill.coef"), tasks=(*RL, "distill"))
    reward: RewardConfig = group(
        RewardConfig,
        when=IF_NOT_REPLAYED,
        tasks=(*REWARDED, "serve_rm"),
        of_tasks={
            "serve_rm": {"section": ServedRewardConfig},
            "serve_train": {"values": {"rule": "length"}, "when": ()},
            "generate": IF_IT_ANSWERS,
        },
    )
    algo: AlgoConfig = group(
        AlgoConfig,
        tasks=("rm", "dpo", "kto", "prm", "distill", *RL, "iterative_dpo"),
        of_tasks={"serve_train": {"values": {"advantage.estimator": "reinforce", "kl.init_coef": 0.0}}},
    )
    rollout: RolloutConfig = group(RolloutConfig, tasks=PROMPTED, of_tasks={"generate": IF_IT_ANSWERS})
    agent: AgentConfig = group(AgentConfig, when=IF_NOT_REPLAYED, tasks=RL)
    vllm: VLLMConfig = group(VLLMConfig, when=IF_NOT_REPLAYED, tasks=PROMPTED)
    data: DataConfig = group(
        DataConfig,
        tasks=(*RENDERED, "check_reward"),
        of_tasks={"serve_train": {"values": {"prompt_dataset": "builtin:reverse"}}},
    )
    train: TrainConfig = group(TrainConfig, tasks=TRAINING)
    eval: EvalConfig = group(
        EvalConfig,
        when=IF_NOT_REPLAYED,
        tasks=TRAINING,
        of_tasks={task: {"section": LoopEvalConfig} for task in LOOPS},
    )
    generate: GenerateConfig = group(GenerateConfig, tasks=("generate",))
    score: ScoreConfig = group(ScoreConfig, tasks=("score",))
    lora: AdapterConfig = group(AdapterConfig, tasks=("merge_lora",))
    loop: LoopConfig = group(LoopConfig, tasks=LOOPS)
    serve: ServeConfig = group(ServeConfig, tasks=("serve_rm", "serve_train"))
    chat: ChatConfig = group(ChatConfig, tasks=("chat",))

    @property
    def replays(self) -> bool:
        """Return whether it trains on the rollouts of an earlier run, without engines and rewards."""
        return self.task in RL and self.rollout.replay is not None


@cache
def flags_of(task: str | None) -> dict[str, FlagInfo]:
    """Return the flags of a task by key, in the order of their declaration; None: those of all tasks together."""
    tasks = [task] if task else list(TASKS)
    return {info.key: info for name in tasks for info in walk(Run.of(name))}


def resume_of(key: str, task: str) -> str:
    """Return whether a continued run of a task may have another value of a flag: FREE, NAMED or FIXED."""
    if key == "task":
        return FIXED
    flags = flags_of(task)
    if key in flags:
        return flags[key].meta.resume
    return next((info.meta.resume for name, info in flags.items() if key.startswith(f"{name}.")), NAMED)  # of a table


def list_tasks_with(key: str) -> list[str]:
    """Return the tasks that have a flag, or the table that `key` is an entry of; without the runs of all tasks, which
    take long to make."""
    return [task for task in TASKS if declares(Run, task, key) and not is_constant(task, key)]


def declares(section: Any, task: str, key: str) -> bool:
    """Return whether a class of flags declares, for a task, a flag or the table that `key` is an entry of."""
    name, dot, rest = key.partition(".")
    declared = next((field for field in fields(section) if field.name == name), None)
    if declared is None or (declared.metadata["tasks"] and task not in declared.metadata["tasks"]):
        return False
    if "section" not in declared.metadata:
        return not dot or field_types(section)[name].base is dict
    return declares(
        declared.metadata["of_tasks"].get(task, {}).get("section", declared.metadata["section"]), task, rest
    )
