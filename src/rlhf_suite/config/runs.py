"""One root dataclass per task: the sections that its command line has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from rlhf_suite import registry
from rlhf_suite.config.agent import AgentConfig
from rlhf_suite.config.algo import AlgoConfig
from rlhf_suite.config.ckpt import CheckpointConfig
from rlhf_suite.config.data import DataConfig
from rlhf_suite.config.ds import DeepSpeedConfig
from rlhf_suite.config.eval import LANGUAGE, PREFERENCE, QUANTILES, EvalConfig
from rlhf_suite.config.flags import FREE, flag, group, is_false, is_null, is_positive, needs
from rlhf_suite.config.generate import GenerateConfig, ScoreConfig
from rlhf_suite.config.launch import LaunchConfig
from rlhf_suite.config.logger import LoggerConfig
from rlhf_suite.config.loop import LoopConfig, LoopEvalConfig
from rlhf_suite.config.models import ActorConfig, CriticConfig, ReferenceConfig
from rlhf_suite.config.reward import RewardConfig
from rlhf_suite.config.rollout import RolloutConfig, VLLMConfig
from rlhf_suite.config.sections import adapt
from rlhf_suite.config.teacher import TeacherConfig
from rlhf_suite.config.tools import (
    AdapterConfig,
    ChatConfig,
    ServeConfig,
    ServedRewardConfig,
    ServeTrainConfig,
)
from rlhf_suite.config.train import TrainConfig

IF_NOT_REPLAYED = is_null("rollout.replay")
IF_THE_LOSS_HAS_ONE: Any = {
    "when": needs("algo.loss", registry.preference_loss, "reference"),
    "strict": "this loss has no reference",
}

CHOSEN = "The task; chosen with task=<name>"


@dataclass
class Run:
    """What every task has"""

    MODEL: ClassVar[str] = "actor.model_name_or_path"  # the flag without which there is nothing to run
    HAS_DEMO: ClassVar[bool] = True  # whether conf/demo has a preset that names one

    task: str = flag("", CHOSEN)
    explain: bool = flag(False, when=is_false("plan"), resume=FREE)
    """Print batch sizes, placement, the origin of each value; run nothing"""
    run_dir: str | None = flag(None, resume=FREE)
    """Folder of this run, or with -m of the whole sweep; null: a new one, outputs/<task>/<time>"""
    own_code: list[str] = flag([])
    """The files of the user's own functions, those of the user's own that they import, and their SHA-256, as the run
    found them; it writes them itself"""
    launch: LaunchConfig = group(LaunchConfig)

    def __init_subclass__(cls, task: str = "", flags_of: str = "") -> None:
        """Give the run of a task its name, and sections with the flags and defaults of this task, or of the task
        `flags_of`, of which it is a kind."""
        if task:
            adapt(cls, flags_of or task)
            cls.__annotations__["task"], cls.task = "str", flag(task, CHOSEN)


@dataclass
class ResumableRun(Run):
    """What every task that can be continued has"""

    ckpt: CheckpointConfig = group(CheckpointConfig)


@dataclass
class TrainedRun(ResumableRun):
    """What every task that trains a model has"""

    # What it measures on held-out data: `eval/<name>`, and `eval/<set>/<name>` for each of its sets. A test compares
    # them with what evaluations return.
    EVALUATED: ClassVar[tuple[str, ...]] = ()

    plan: bool = flag(False, "Print what memory, disk and time a run would take; run nothing", resume=FREE)
    ds: DeepSpeedConfig = group(DeepSpeedConfig)
    logger: LoggerConfig = group(LoggerConfig)


@dataclass
class SupervisedRun(TrainedRun):
    """What every task on the supervised trainer has"""

    actor: ActorConfig = group(ActorConfig)
    data: DataConfig = group(DataConfig)
    train: TrainConfig = group(TrainConfig)
    eval: EvalConfig = group(EvalConfig)


@dataclass
class SFTRun(SupervisedRun, task="sft"):
    """Supervised fine-tuning and continued pre-training"""

    EVALUATED: ClassVar[tuple[str, ...]] = LANGUAGE

    actor: ActorConfig = group(ActorConfig)


@dataclass
class RMRun(SupervisedRun, task="rm"):
    """Reward model from pairs of answers"""

    EVALUATED: ClassVar[tuple[str, ...]] = (*PREFERENCE, "reward_mean", "reward_std", *QUANTILES)

    actor: ActorConfig = group(ActorConfig)
    algo: AlgoConfig = group(AlgoConfig)


@dataclass
class DPORun(SupervisedRun, task="dpo"):
    """Preference optimisation from pairs of answers: DPO, cDPO, IPO, hinge, SimPO, ORPO"""

    EVALUATED: ClassVar[tuple[str, ...]] = (*PREFERENCE, "nll_loss", "chosen_logps", "reject_logps")

    actor: ActorConfig = group(ActorConfig)
    ref: ReferenceConfig = group(ReferenceConfig, **IF_THE_LOSS_HAS_ONE)
    algo: AlgoConfig = group(AlgoConfig)


@dataclass
class KTORun(SupervisedRun, task="kto"):
    """Preference optimisation from single answers, each desirable or not"""

    EVALUATED: ClassVar[tuple[str, ...]] = ("loss", "aux_loss", "kl", "chosen_reward", "reject_reward", "auc")

    actor: ActorConfig = group(ActorConfig)
    ref: ReferenceConfig = group(ReferenceConfig)
    algo: AlgoConfig = group(AlgoConfig)


@dataclass
class PRMRun(SupervisedRun, task="prm"):
    """Process reward model from solutions with a label for every step"""

    EVALUATED: ClassVar[tuple[str, ...]] = ("acc", "loss", "aux_loss", "auc")

    actor: ActorConfig = group(ActorConfig)
    algo: AlgoConfig = group(AlgoConfig)


@dataclass
class DistillRun(SupervisedRun, task="distill"):
    """Distillation from a teacher's token probabilities on given answers"""

    EVALUATED: ClassVar[tuple[str, ...]] = (*LANGUAGE, "loss", "distil_loss")

    actor: ActorConfig = group(ActorConfig)
    teacher: TeacherConfig = group(TeacherConfig)
    algo: AlgoConfig = group(AlgoConfig)


@dataclass
class PPORun(TrainedRun, task="ppo"):
    """PPO-family reinforcement learning on Ray, vLLM and DeepSpeed"""

    EVALUATED: ClassVar[tuple[str, ...]] = (
        "pass1",
        "pass1_stderr",
        "reward",
        "response_length_mean",
        "truncated_rate",
        "num_samples",
    )

    actor: ActorConfig = group(ActorConfig)
    critic: CriticConfig = group(CriticConfig, when=needs("algo.advantage.estimator", registry.estimator, "values"))
    ref: ReferenceConfig = group(ReferenceConfig, when=is_positive("algo.kl.init_coef"))
    teacher: TeacherConfig = group(TeacherConfig, when=is_positive("algo.distill.coef"))
    reward: RewardConfig = group(RewardConfig, when=IF_NOT_REPLAYED)
    algo: AlgoConfig = group(AlgoConfig)
    rollout: RolloutConfig = group(RolloutConfig)
    agent: AgentConfig = group(AgentConfig, when=IF_NOT_REPLAYED)
    vllm: VLLMConfig = group(VLLMConfig, when=IF_NOT_REPLAYED)
    data: DataConfig = group(DataConfig)
    train: TrainConfig = group(TrainConfig)
    eval: EvalConfig = group(EvalConfig, when=IF_NOT_REPLAYED)

    @property
    def replays(self) -> bool:
        """Return whether it trains on the rollouts of an earlier run, without engines and rewards."""
        return self.rollout.replay is not None


@dataclass
class ServeTrainRun(PPORun, task="serve_train", flags_of="ppo"):
    """Training, call by call, behind HTTP: Tinker's protocol over the policy and the engines of task=ppo"""

    HAS_DEMO: ClassVar[bool] = False

    serve: ServeTrainConfig = group(ServeTrainConfig)
    # What task=ppo cannot do without, and a server does not read.
    reward: RewardConfig = group(RewardConfig, {"rule": "length"})
    algo: AlgoConfig = group(AlgoConfig, {"advantage.estimator": "reinforce", "kl.init_coef": 0.0})
    data: DataConfig = group(DataConfig, {"prompt_dataset": "builtin:reverse"})
    ckpt: CheckpointConfig = group(CheckpointConfig, {"save_steps": 1})


@dataclass
class GenerateRun(ResumableRun, task="generate"):
    """Answers of a model to the prompts of a file"""

    actor: ActorConfig = group(ActorConfig)
    ds: DeepSpeedConfig = group(DeepSpeedConfig)
    data: DataConfig = group(DataConfig)
    rollout: RolloutConfig = group(RolloutConfig)
    vllm: VLLMConfig = group(VLLMConfig)
    reward: RewardConfig = group(RewardConfig)
    generate: GenerateConfig = group(GenerateConfig)


@dataclass
class ScoreRun(ResumableRun, task="score"):
    """Scores of the responses in a file, by a rule, a file, servers or a reward model"""

    MODEL: ClassVar[str] = "data.dataset"

    ds: DeepSpeedConfig = group(DeepSpeedConfig)
    data: DataConfig = group(DataConfig)
    reward: RewardConfig = group(RewardConfig)
    score: ScoreConfig = group(ScoreConfig)


@dataclass
class CheckRewardRun(Run, task="check_reward"):
    """The reward of a few rows, shown row by row before any GPU is used"""

    MODEL: ClassVar[str] = "data.dataset"

    data: DataConfig = group(DataConfig)
    reward: RewardConfig = group(RewardConfig)


@dataclass
class MergeLoRARun(Run, task="merge_lora"):
    """A LoRA adapter merged into its base model; trains nothing"""

    HAS_DEMO: ClassVar[bool] = False

    actor: ActorConfig = group(ActorConfig)
    lora: AdapterConfig = group(AdapterConfig)
    ckpt: CheckpointConfig = group(CheckpointConfig)
    ds: DeepSpeedConfig = group(DeepSpeedConfig)


@dataclass
class LoopRun(ResumableRun):
    """What every loop over answering, scoring and training has: the sections of those tasks"""

    actor: ActorConfig = group(ActorConfig)
    ds: DeepSpeedConfig = group(DeepSpeedConfig)
    data: DataConfig = group(DataConfig)
    rollout: RolloutConfig = group(RolloutConfig)
    vllm: VLLMConfig = group(VLLMConfig)
    reward: RewardConfig = group(RewardConfig)
    train: TrainConfig = group(TrainConfig)
    eval: LoopEvalConfig = group(LoopEvalConfig)
    loop: LoopConfig = group(LoopConfig)
    logger: LoggerConfig = group(LoggerConfig)


@dataclass
class RejectionSamplingRun(LoopRun, task="rejection_sampling"):
    """Rejection sampling: supervised tuning on the best of the model's own answers, again and again"""

    actor: ActorConfig = group(ActorConfig)


@dataclass
class IterativeDPORun(LoopRun, task="iterative_dpo"):
    """Iterative DPO: preferring the best of the model's own answers to the worst, again and again"""

    actor: ActorConfig = group(ActorConfig)
    ref: ReferenceConfig = group(ReferenceConfig, **IF_THE_LOSS_HAS_ONE)
    algo: AlgoConfig = group(AlgoConfig)


@dataclass
class ConditionalSFTRun(LoopRun, task="conditional_sft"):
    """Conditional SFT: supervised tuning on all of the model's own answers, with their rewards in the prompts"""

    actor: ActorConfig = group(ActorConfig)


@dataclass
class ServeRMRun(Run, task="serve_rm"):
    """A reward model behind HTTP"""

    MODEL = "reward.model_name_or_path"
    HAS_DEMO = False  # there is no built-in reward model

    reward: ServedRewardConfig = group(ServedRewardConfig)
    ds: DeepSpeedConfig = group(DeepSpeedConfig)
    serve: ServeConfig = group(ServeConfig)


@dataclass
class ChatRun(Run, task="chat"):
    """A conversation with a model in the terminal; trains nothing"""

    actor: ActorConfig = group(ActorConfig)
    data: DataConfig = group(DataConfig)
    ds: DeepSpeedConfig = group(DeepSpeedConfig)
    chat: ChatConfig = group(ChatConfig)


SamplingRun = PPORun | GenerateRun  # what has engines
RewardedRun = SamplingRun | ScoreRun
ScoredTextRun = RewardedRun | CheckRewardRun
AnyTrainedRun = SupervisedRun | PPORun
TextRun = AnyTrainedRun | GenerateRun | ScoreRun | ChatRun
# Every run with a task of its own, in the order of this file.
TASKS: dict[str, type[Run]] = {
    root.task: root for root in [*globals().values()] if isinstance(root, type) and issubclass(root, Run) and root.task
}
