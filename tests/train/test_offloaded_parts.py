"""A frozen model that ZeRO-3 divides, and whose parts are in host memory, computes what it computes whole."""

from __future__ import annotations

import pytest
import torch

from rlhf_suite.config.declarations.ds import DeepSpeedConfig
from rlhf_suite.models.forward import token_log_probs
from rlhf_suite.models.host_weights import HOST_WEIGHTS, on_device
from rlhf_suite.models.load import load_model
from rlhf_suite.train.strategy import make_load_context, prepare_frozen

pytestmark = pytest.mark.stack


@torch.no_grad()
def log_probs(world, folder, batch, zero):
    """Log-probs of two forward passes in one phase, and how many elements are kept in host memory."""
    ds = DeepSpeedConfig.of("sft", zero_stage=zero, param_dtype="fp32")
    with make_load_context(ds):
        module = load_model(str(folder / "lm"), head="lm", ds=ds)
    model = prepare_frozen(module, ds, world, offload=zero == 3)
    with on_device(model):
        results = [token_log_probs(model, batch).log_probs for _ in range(2)]
    kept = getattr(module, HOST_WEIGHTS, None)
    return results, 0 if kept is None else sum(host.numel() for _, host in kept.kept)


def test_parts_in_host_memory_give_the_log_probs_of_the_whole_model(ranks, folder, batch):
    (whole, _), *_ = ranks(1).call(log_probs, folder, batch, 0)
    divided = ranks(2).call(log_probs, folder, batch, 3)
    for results, _ in divided:
        for result in results:
            torch.testing.assert_close(result, whole[0], rtol=1e-5, atol=1e-6)
    assert divided[0][1] == divided[1][1] > 0
