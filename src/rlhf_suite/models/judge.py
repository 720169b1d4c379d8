"""The frozen chat model of a run that judges: its path, its engines, and how long its questions may be."""

from __future__ import annotations

from dataclasses import replace

from rlhf_suite.config.declarations.rollout import VLLMConfig
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.models.load import count_positions

JUDGE_FLAG = "reward.judge.model"
LONGEST = 8192  # tokens of a question with its reply, unless reward.judge.max_len says


def judge_path(run: Run) -> str:
    """Return the path of the model; the checks have made sure that there is one."""
    assert run.reward.judge.model is not None
    return run.reward.judge.model


def judge_engines(run: Run) -> VLLMConfig:
    """Return the flags of the judge's engines: those of the rollout engines, without what is for the policy. They have
    devices of their own, and never sleep."""
    judge = run.reward.judge
    return replace(
        run.vllm,
        num_engines=judge.num_engines,
        tensor_parallel_size=judge.tensor_parallel_size,
        pipeline_parallel_size=1,
        gpu_memory_utilization=None,
        quantization=None,
        speculative_config={},
        engine_args={},
        enable_sleep=False,
    )


def judge_length(run: Run) -> int:
    """Return the longest question with its reply in tokens."""
    positions = count_positions(judge_path(run), JUDGE_FLAG)
    return run.reward.judge.max_len or min(LONGEST, positions or LONGEST)
