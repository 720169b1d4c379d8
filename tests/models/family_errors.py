"""How far a model of a family is from transformers' own, one sequence at a time: log-probs, and gradients of losses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from alike import begin_alike
from rlhf_suite.config.declarations.ds import DeepSpeedConfig, LoRAConfig
from rlhf_suite.data.batch import TokenBatch
from rlhf_suite.models.forward import ScalarModel, sequence_scores, token_log_probs
from rlhf_suite.models.load import load_model
from rlhf_suite.models.lora import add_lora

LENGTHS = [5, 40, 1, 9, 9, 17]
ALIKE = [(3, 1, 8), (4, 3, 9), (5, 1, 12)]  # rows that begin as others do: so many tokens
FLOOR = 1e-3  # of the norm of a gradient: where it is almost 0, only rounding is left
Gradients = dict[str, Tensor]


def batch() -> TokenBatch:
    ids = torch.randint(0, 256, (sum(LENGTHS),), generator=torch.Generator().manual_seed(3))
    ids = begin_alike(ids, LENGTHS, ALIKE)
    return TokenBatch(ids, torch.tensor(LENGTHS), torch.ones(len(ids)))


def next_token(log_probs: Tensor) -> Tensor:
    """A loss that weighs every token differently."""
    return (log_probs * torch.linspace(0.1, 1, len(log_probs), device=log_probs.device)).sum()


def preference(log_probs: Tensor, lengths: Sequence[int] = LENGTHS) -> Tensor:
    """The loss of DPO for pairs of neighbours, without a reference."""
    sums = torch.stack([part.sum() for part in log_probs.split([*lengths])])
    return -F.logsigmoid(0.1 * (sums[0::2] - sums[1::2])).sum()


def of_pairs(scores: Tensor) -> Tensor:
    """The loss of a reward model for pairs of neighbours."""
    return -F.logsigmoid(scores[0::2] - scores[1::2]).sum()


@cache
def alone(path: str, loss: Callable[[Tensor], Tensor] = next_token, device: str = "cpu") -> tuple[Tensor, Gradients]:
    """Log-probs [T] of each sequence alone by the eager forward pass of transformers, and the gradients of a loss."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    log_probs = log_probs_alone(model.to(device), batch().ids.to(device))
    loss(log_probs).backward()
    return log_probs.detach(), gradients(model)


def log_probs_alone(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Log-probs [T] of each sequence alone by the forward pass of transformers."""
    log_probs = []
    for part in ids.split(LENGTHS):
        log_p = model(input_ids=part[None], use_cache=False).logits[0, :-1].float().log_softmax(-1)
        log_probs.append(F.pad(log_p.gather(-1, part[1:, None]).squeeze(-1), (1, 0)))
    return torch.cat(log_probs)


def gradients(model: torch.nn.Module) -> Gradients:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def largest(found: Gradients, wanted: Gradients) -> float:
    """The largest relative error of a tensor."""
    assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
    return max(float((found[name] - wanted[name]).norm() / (wanted[name].norm() + FLOOR)) for name in wanted)


def language_errors(
    path: str,
    *,
    packed: bool,
    attention: str | None = None,
    loss: Callable[[Tensor], Tensor] = next_token,
    device: str = "cpu",
) -> tuple[float, float]:
    """The largest difference of a log-prob, and the largest relative error of a gradient."""
    ds = DeepSpeedConfig.of("sft", param_dtype="fp32", packing_samples=packed, attn_implementation=attention)
    model = load_model(path, head="lm", ds=ds).to(device)
    log_probs = token_log_probs(model, batch().to(device)).log_probs
    loss(log_probs).backward()
    expected, wanted = alone(path, loss, device)
    return float((log_probs.detach() - expected).abs().max()), largest(gradients(model.model), wanted)


def adapter_error(path: str, *, packed: bool) -> float:
    """The largest relative error of a gradient of adapters of all linear layers that are not zero."""
    model = load_model(path, head="lm", ds=DeepSpeedConfig.of("sft", param_dtype="fp32", packing_samples=packed))
    add_lora(model, LoRAConfig(rank=2), 0)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = 0.02 * torch.randn(parameter.shape, generator=generator)
    next_token(token_log_probs(model, batch()).log_probs).backward()
    computed, hf = gradients(model.model), model.model
    model.zero_grad()
    hf.set_attn_implementation("eager")
    next_token(log_probs_alone(hf, batch().ids)).backward()
    return largest(computed, gradients(hf))


def score_error(path: str, *, packed: bool) -> float:
    """The largest relative error of a gradient of a reward model."""
    model: ScalarModel = load_model(
        path, head="value", ds=DeepSpeedConfig.of("sft", param_dtype="fp32", packing_samples=packed)
    )
    of_pairs(sequence_scores(model, batch())).backward()
    found = gradients(model.model)
    model.zero_grad()
    hf = model.model
    hf.set_attn_implementation("eager")
    scores = [hf(input_ids=ids[None], use_cache=False).logits[0, 0] for ids in batch().ids.split(LENGTHS)]
    of_pairs(torch.stack(scores)).backward()
    return largest(found, gradients(hf))
