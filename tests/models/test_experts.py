"""ds.experts_implementation chooses how a mixture of experts is computed; the numbers stay those of the model."""

from __future__ import annotations

import pytest
import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from rlhf_suite.config.declarations.ds import DeepSpeedConfig
from rlhf_suite.errors import UserError
from rlhf_suite.models.forward import token_log_probs
from rlhf_suite.models.load import load_model


def settings(name: str | None) -> DeepSpeedConfig:
    return DeepSpeedConfig.of("sft", param_dtype="fp32", packing_samples=True, experts_implementation=name)


def test_the_named_function_computes_the_experts(folder, batch, monkeypatch):
    path, calls = str(folder("qwen3_moe")), []
    plain = token_log_probs(load_model(path, head="lm", ds=settings("eager")), batch).log_probs
    batched = ALL_EXPERTS_FUNCTIONS["batched_mm"]

    def counted(*args, **kwargs):
        calls.append(1)
        return batched(*args, **kwargs)

    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._local_mapping, "batched_mm", counted)
    found = token_log_probs(load_model(path, head="lm", ds=settings("batched_mm")), batch).log_probs
    torch.testing.assert_close(found, plain, atol=1e-5, rtol=1e-5)
    assert calls, "batched_mm was not called"


def test_a_model_without_experts_refuses_the_flag(folder):
    with pytest.raises(UserError, match=r"ds\.experts_implementation=eager: .* has no experts"):
        load_model(str(folder()), head="lm", ds=settings("eager"))
