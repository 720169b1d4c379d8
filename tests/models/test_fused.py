"""`ds.use_liger_kernel`: refused where it would do nothing; on a GPU the same numbers as without."""

from __future__ import annotations

import pytest
import torch

from rlhf_suite.errors import UserError
from rlhf_suite.models.forward import token_log_probs
from rlhf_suite.models.prepare import fuse_layers


def test_without_a_gpu_or_the_package_it_is_refused(load, monkeypatch):
    model = load().model
    with pytest.raises(UserError, match=r"needs a GPU, but this machine has none: .*write ds.use_liger_kernel=false"):
        fuse_layers(model, "cpu")
    monkeypatch.setattr("rlhf_suite.config.check.lacking.find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"pip install 'rlhf-suite\[gpu\]'"):
        fuse_layers(model, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen3_moe"])
def test_log_probs_and_gradients_are_those_of_the_plain_layers(load, batch, family):
    pytest.importorskip("liger_kernel")
    results = []
    for fused in (False, True):
        model = load(family).cuda()
        if fused:
            fuse_layers(model.model, "cuda")
        log_probs = token_log_probs(model, batch.to(torch.device("cuda"))).log_probs
        log_probs.sum().backward()
        results.append((log_probs.detach(), {name: p.grad for name, p in model.named_parameters()}))
    (plain, gradients), (found, others) = results
    torch.testing.assert_close(found, plain, rtol=1e-3, atol=1e-3)
    for name, gradient in gradients.items():
        assert (others[name] - gradient).norm() <= 1e-2 * gradient.norm(), name
