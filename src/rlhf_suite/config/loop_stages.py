"""The runs that a loop consists of, made of the loop's own sections."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from rlhf_suite.config.actor import DPOActorConfig, SFTActorConfig
from rlhf_suite.config.ckpt import CheckpointConfig
from rlhf_suite.config.data import GenerateDataConfig, PairDataConfig, ScoreDataConfig, SFTDataConfig
from rlhf_suite.config.ds import PrecisionConfig, RewardModelConfig
from rlhf_suite.config.generate import GeneratorConfig
from rlhf_suite.config.reward import JudgeConfig, RewardConfig
from rlhf_suite.config.runs import (
    ConditionalSFTRun,
    DPORun,
    GenerateRun,
    IterativeDPORun,
    LoopRun,
    ScoreRun,
    SFTRun,
    SupervisedRun,
)
from rlhf_suite.config.score import ScoreConfig

T = TypeVar("T")
S = TypeVar("S", bound=SupervisedRun)
# The columns of the rows that a loop writes for its training stage.
INPUT, OUTPUT, CHOSEN, REJECTED, SCORE = "input", "output", "chosen", "rejected", "score"


@dataclass(frozen=True)
class Share:
    """The prompts of an iteration: `count` rows behind the first `start`."""

    start: int
    count: int


def generate_run(run: LoopRun, model: str, iteration: int, share: Share, target: float | None = None) -> GenerateRun:
    """Several answers to each prompt of an iteration's share, scored; `target` is the reward that they are asked for.
    Prompts that come again get other answers."""
    data = like(GenerateDataConfig, run.data, skip_samples=share.start, max_samples=share.count, target_reward=target)
    return _answers(run, model, data=data, rollout=replace(run.rollout, seed=run.rollout.seed + iteration))


def evaluate_run(run: LoopRun, model: str, target: float | None = None) -> GenerateRun:
    """The likeliest answer to each held-out prompt, scored."""
    held_out = run.eval
    data = like(
        GenerateDataConfig,
        run.data,
        target_reward=target,
        prompt_dataset=held_out.dataset,
        prompt_split=held_out.split,
        skip_samples=0,
        max_samples=held_out.max_samples,
        input_key=held_out.input_key or run.data.input_key,
        label_key=held_out.label_key or run.data.label_key,
    )
    return _answers(run, model, data=data, rollout=replace(run.rollout, n_samples_per_prompt=1, temperature=0.0))


def sft_run(run: LoopRun, model: str, rows: Path | str, output: str | None) -> SFTRun:
    """Supervised tuning of `model` on rows with INPUT and OUTPUT, and SCORE where prompts say it. `output`: the folder
    of the trained model, if not in that of the run."""
    data = like(
        SFTDataConfig, run.data, dataset=str(rows), max_samples=None, input_key=INPUT, output_key=OUTPUT,
        reward_key=SCORE if isinstance(run, ConditionalSFTRun) else None,
    )  # fmt: skip
    return SFTRun(**_training(run, SFTActorConfig, model, output), data=data)


def dpo_run(run: IterativeDPORun, models: tuple[str, str | None], rows: Path | str, output: str | None) -> DPORun:
    """Preference optimisation of the first of `models` on rows with INPUT, CHOSEN and REJECTED; the second is the
    reference, null: the first."""
    model, reference = models
    data = like(
        PairDataConfig, run.data, dataset=str(rows), max_samples=None,
        prompt_key=INPUT, chosen_key=CHOSEN, rejected_key=REJECTED,
    )  # fmt: skip
    ref = replace(run.ref, model_name_or_path=reference)
    return DPORun(**_training(run, DPOActorConfig, model, output), data=data, algo=run.algo, ref=ref)


def score_run(run: LoopRun, answers: Path | str) -> ScoreRun:
    """The scores of a reward model for an output of `generate_run`."""
    data = ScoreDataConfig(dataset=str(answers), max_len=run.data.max_len, on_bad_row=run.data.on_bad_row)
    score = ScoreConfig()
    score.max_tokens_per_gpu = max(score.max_tokens_per_gpu, run.data.max_len)
    reward = like(JudgeConfig, run.reward, rule=None, remote_url=None)
    return ScoreRun(ds=like(RewardModelConfig, run.ds), data=data, reward=reward, score=score, launch=run.launch)


def like(cls: type[T], section: object, **changes: Any) -> T:
    """A section of class `cls` with the flags that `section` has too, and `changes`."""
    shared = {field.name: getattr(section, field.name) for field in fields(cls) if hasattr(section, field.name)}  # type: ignore[arg-type]
    return cls(**shared | changes)


def _answers(run: LoopRun, model: str, **sections: Any) -> GenerateRun:
    reward = (
        run.reward if run.reward.model_name_or_path is None else RewardConfig()
    )  # a model scores in a stage of its own
    shared: dict[str, Any] = {"reward": reward, "vllm": run.vllm, "launch": run.launch}
    return GenerateRun(actor=GeneratorConfig(model), ds=like(PrecisionConfig, run.ds), **shared, **sections)


def _training(run: LoopRun, actor: type, model: str, output: str | None) -> dict[str, Any]:
    """The sections that every training stage has. One checkpoint is enough to go on from."""
    return {
        "actor": like(actor, run.actor, model_name_or_path=model),
        "ckpt": CheckpointConfig(output_dir=output, save_steps=run.ckpt.save_steps, max_num=1),
        **{name: getattr(run, name) for name in ("train", "ds", "logger", "launch")},
    }
