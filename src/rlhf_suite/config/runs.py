"""One root dataclass per task: the sections its command line has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rlhf_suite import registry
from rlhf_suite.config.actor import (
    DPOActorConfig,
    KTOActorConfig,
    PolicyConfig,
    PRMActorConfig,
    RMActorConfig,
    SFTActorConfig,
    StudentConfig,
    SupervisedActorConfig,
)
from rlhf_suite.config.algo import AlgoConfig
from rlhf_suite.config.algo_supervised import (
    DistillAlgoConfig,
    DPOAlgoConfig,
    KTOAlgoConfig,
    PRMAlgoConfig,
    RMAlgoConfig,
)
from rlhf_suite.config.critic import CriticConfig
from rlhf_suite.config.data import (
    ConditionalDataConfig,
    GenerateDataConfig,
    LabelledDataConfig,
    PairDataConfig,
    PromptDataConfig,
    RewardPairDataConfig,
    RowRangeConfig,
    ScoreDataConfig,
    SFTDataConfig,
    SourceDataConfig,
    StepDataConfig,
)
from rlhf_suite.config.ds import DeepSpeedConfig, PrecisionConfig, RewardModelConfig
from rlhf_suite.config.eval import (
    AnswerEvalConfig,
    EvalConfig,
    LabelledEvalConfig,
    LoopEvalConfig,
    PairEvalConfig,
    RewardPairEvalConfig,
    RLEvalConfig,
    StepEvalConfig,
)
from rlhf_suite.config.flags import flag, group, is_positive, needs
from rlhf_suite.config.generate import GenerateConfig, GeneratorConfig
from rlhf_suite.config.logger import LoggerConfig
from rlhf_suite.config.loop import (
    ConditionalActorConfig,
    ConditionalLoopConfig,
    LoopCheckpointConfig,
    LoopConfig,
    PreferenceLoopActorConfig,
    PreferenceLoopConfig,
    RejectionActorConfig,
    RejectionLoopConfig,
)
from rlhf_suite.config.ref import PreferenceReferenceConfig, ReferenceConfig
from rlhf_suite.config.reward import JudgeConfig, RewardConfig, RLRewardConfig
from rlhf_suite.config.rollout import GenerationConfig, RolloutConfig
from rlhf_suite.config.run import ResumableRun, Run, TrainedRun
from rlhf_suite.config.runs_tools import ChatRun, CheckRewardRun, MergeLoRARun, ServeRMRun
from rlhf_suite.config.score import ScoreConfig
from rlhf_suite.config.teacher import RLTeacherConfig, TeacherConfig
from rlhf_suite.config.train import RLTrainConfig, TrainConfig
from rlhf_suite.config.vllm import EngineConfig, VLLMConfig


@dataclass
class SupervisedRun(TrainedRun):
    """What every task on the supervised trainer has"""

    actor: SupervisedActorConfig = group(SupervisedActorConfig)
    data: SourceDataConfig = group(SourceDataConfig)
    train: TrainConfig = group(TrainConfig)
    eval: EvalConfig = group(EvalConfig)


@dataclass
class SFTRun(SupervisedRun):
    """Supervised fine-tuning and continued pre-training"""

    task: str = flag("sft", "The task; chosen with task=<name>")
    actor: SFTActorConfig = group(SFTActorConfig)
    data: SFTDataConfig = group(SFTDataConfig)
    eval: AnswerEvalConfig = group(AnswerEvalConfig)


@dataclass
class RMRun(SupervisedRun):
    """Reward model from pairs of answers"""

    task: str = flag("rm", "The task; chosen with task=<name>")
    actor: RMActorConfig = group(RMActorConfig)
    data: RewardPairDataConfig = group(RewardPairDataConfig, {"max_len": 512, "input_template": None})
    train: TrainConfig = group(TrainConfig, {"max_epochs": 1, "micro_batch_size": 1})
    eval: RewardPairEvalConfig = group(RewardPairEvalConfig)
    algo: RMAlgoConfig = group(RMAlgoConfig)


@dataclass
class DPORun(SupervisedRun):
    """Preference optimisation from pairs of answers: DPO, cDPO, IPO, hinge, SimPO, ORPO"""

    task: str = flag("dpo", "The task; chosen with task=<name>")
    actor: DPOActorConfig = group(DPOActorConfig)
    ref: PreferenceReferenceConfig = group(PreferenceReferenceConfig)
    data: PairDataConfig = group(PairDataConfig, {"max_len": 512, "input_template": None})
    train: TrainConfig = group(TrainConfig, {"max_epochs": 1})
    eval: PairEvalConfig = group(PairEvalConfig, {"split": "test"})
    algo: DPOAlgoConfig = group(DPOAlgoConfig)


@dataclass
class KTORun(SupervisedRun):
    """Preference optimisation from single answers, each desirable or not"""

    task: str = flag("kto", "The task; chosen with task=<name>")
    actor: KTOActorConfig = group(KTOActorConfig)
    ref: PreferenceReferenceConfig = group(PreferenceReferenceConfig)
    data: LabelledDataConfig = group(LabelledDataConfig)
    train: TrainConfig = group(TrainConfig, {"max_epochs": 1})
    eval: LabelledEvalConfig = group(LabelledEvalConfig, {"split": "test"})
    algo: KTOAlgoConfig = group(KTOAlgoConfig)


@dataclass
class PRMRun(SupervisedRun):
    """Process reward model from solutions with a label for every step"""

    task: str = flag("prm", "The task; chosen with task=<name>")
    actor: PRMActorConfig = group(PRMActorConfig)
    data: StepDataConfig = group(StepDataConfig)
    train: TrainConfig = group(TrainConfig, {"max_epochs": 1, "micro_batch_size": 1})
    eval: StepEvalConfig = group(StepEvalConfig, {"split": "test"})
    algo: PRMAlgoConfig = group(PRMAlgoConfig)


@dataclass
class DistillRun(SupervisedRun):
    """Distillation from a teacher's token probabilities on given answers"""

    task: str = flag("distill", "The task; chosen with task=<name>")
    actor: StudentConfig = group(StudentConfig)
    teacher: TeacherConfig = group(TeacherConfig)
    data: SFTDataConfig = group(SFTDataConfig)
    train: TrainConfig = group(TrainConfig, {"max_epochs": 1})
    eval: AnswerEvalConfig = group(AnswerEvalConfig, {"split": "test"})
    algo: DistillAlgoConfig = group(DistillAlgoConfig)


@dataclass
class PPORun(TrainedRun):
    """PPO-family reinforcement learning on Ray, vLLM and DeepSpeed"""

    task: str = flag("ppo", "The task; chosen with task=<name>")
    actor: PolicyConfig = group(PolicyConfig)
    critic: CriticConfig = group(CriticConfig, when=needs("algo.advantage.estimator", registry.estimator, "values"))
    ref: ReferenceConfig = group(ReferenceConfig, when=is_positive("algo.kl.init_coef"))
    teacher: RLTeacherConfig = group(RLTeacherConfig, when=is_positive("algo.distill.coef"))
    reward: RLRewardConfig = group(RLRewardConfig)
    algo: AlgoConfig = group(AlgoConfig)
    rollout: RolloutConfig = group(RolloutConfig)
    vllm: VLLMConfig = group(VLLMConfig)
    data: PromptDataConfig = group(PromptDataConfig)
    train: RLTrainConfig = group(RLTrainConfig)
    eval: RLEvalConfig = group(RLEvalConfig)


@dataclass
class GenerateRun(ResumableRun):
    """Answers of a model to the prompts of a file"""

    task: str = flag("generate", "The task; chosen with task=<name>")
    actor: GeneratorConfig = group(GeneratorConfig)
    ds: PrecisionConfig = group(PrecisionConfig)
    data: GenerateDataConfig = group(GenerateDataConfig)
    rollout: GenerationConfig = group(GenerationConfig)
    vllm: EngineConfig = group(EngineConfig)
    reward: RewardConfig = group(RewardConfig)
    generate: GenerateConfig = group(GenerateConfig)


@dataclass
class ScoreRun(ResumableRun):
    """Scores of the responses in a file, by a rule, a file, servers or a reward model"""

    MODEL: ClassVar[str] = "data.dataset"

    task: str = flag("score", "The task; chosen with task=<name>")
    ds: RewardModelConfig = group(RewardModelConfig)
    data: ScoreDataConfig = group(ScoreDataConfig)
    reward: JudgeConfig = group(JudgeConfig)
    score: ScoreConfig = group(ScoreConfig)


@dataclass
class LoopRun(ResumableRun):
    """What every loop over answering, scoring and training has: the sections of those tasks"""

    actor: SupervisedActorConfig = group(SupervisedActorConfig)
    ds: DeepSpeedConfig = group(DeepSpeedConfig)
    data: RowRangeConfig = group(RowRangeConfig)
    rollout: GenerationConfig = group(GenerationConfig, {"n_samples_per_prompt": 8})
    vllm: EngineConfig = group(EngineConfig)
    reward: RewardConfig = group(RewardConfig)
    train: TrainConfig = group(TrainConfig)
    eval: LoopEvalConfig = group(LoopEvalConfig)
    loop: LoopConfig = group(LoopConfig)
    ckpt: LoopCheckpointConfig = group(LoopCheckpointConfig)
    logger: LoggerConfig = group(LoggerConfig)


@dataclass
class RejectionSamplingRun(LoopRun):
    """Rejection sampling: supervised tuning on the best of the model's own answers, again and again"""

    task: str = flag("rejection_sampling", "The task; chosen with task=<name>")
    actor: RejectionActorConfig = group(RejectionActorConfig)
    loop: RejectionLoopConfig = group(RejectionLoopConfig)


@dataclass
class IterativeDPORun(LoopRun):
    """Iterative DPO: preferring the best of the model's own answers to the worst, again and again"""

    task: str = flag("iterative_dpo", "The task; chosen with task=<name>")
    actor: PreferenceLoopActorConfig = group(PreferenceLoopActorConfig)
    ref: PreferenceReferenceConfig = group(PreferenceReferenceConfig)
    algo: DPOAlgoConfig = group(DPOAlgoConfig)
    loop: PreferenceLoopConfig = group(PreferenceLoopConfig)


@dataclass
class ConditionalSFTRun(LoopRun):
    """Conditional SFT: supervised tuning on all of the model's own answers, with their rewards in the prompts"""

    task: str = flag("conditional_sft", "The task; chosen with task=<name>")
    actor: ConditionalActorConfig = group(ConditionalActorConfig)
    data: ConditionalDataConfig = group(ConditionalDataConfig)
    loop: ConditionalLoopConfig = group(ConditionalLoopConfig, {"num_iterations": 1})


SamplingRun = PPORun | GenerateRun  # what has engines
RewardedRun = SamplingRun | ScoreRun
ScoredTextRun = RewardedRun | CheckRewardRun

TASKS: dict[str, type[Run]] = {
    "sft": SFTRun,
    "rm": RMRun,
    "dpo": DPORun,
    "kto": KTORun,
    "prm": PRMRun,
    "distill": DistillRun,
    "ppo": PPORun,
    "generate": GenerateRun,
    "score": ScoreRun,
    "check_reward": CheckRewardRun,
    "merge_lora": MergeLoRARun,
    "rejection_sampling": RejectionSamplingRun,
    "iterative_dpo": IterativeDPORun,
    "conditional_sft": ConditionalSFTRun,
    "serve_rm": ServeRMRun,
    "chat": ChatRun,
}
