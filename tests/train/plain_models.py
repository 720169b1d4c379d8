"""The tiny models that gradients are compared on, and the gradient of a formula over a plain float64 one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf_suite.config.declarations.ds import LoRAConfig
from rlhf_suite.models.builtin import Shape, byte_tokenizer, create

Gradients = dict[str, torch.Tensor]

LORA = LoRAConfig(rank=4, alpha=8)


def make_models(folder: Path, family: str = "qwen3", tied: bool = True) -> Path:
    """A tiny model of `family` with weights large enough to matter: a language model `lm`, a scalar model `value`,
    and `reference`, a language model near the first."""
    create(folder / "plain", Shape(family=family, tied=tied))
    generator = torch.Generator().manual_seed(7)
    for head, auto in (("lm", AutoModelForCausalLM), ("value", AutoModelForSequenceClassification)):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(11)
            model = auto.from_pretrained(folder / "plain", **({"num_labels": 1} if head == "value" else {}))
        move(model, 0.1, generator)
        model.save_pretrained(folder / head)
    model = AutoModelForCausalLM.from_pretrained(folder / "lm")
    move(model, 0.05, torch.Generator().manual_seed(11))
    model.save_pretrained(folder / "reference")
    for name in ("lm", "value", "reference"):
        byte_tokenizer().save_pretrained(folder / name)
    return folder


@torch.no_grad()
def move(model: nn.Module, size: float, generator: torch.Generator) -> None:
    for parameter in model.parameters():
        parameter.add_(size * torch.randn(parameter.shape, generator=generator))


def reference_model(folder: Path, name: str) -> nn.Module:
    """`lm`, `value` or `reference` in float64."""
    auto = AutoModelForSequenceClassification if name == "value" else AutoModelForCausalLM
    settings = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return auto.from_pretrained(folder / name, dtype=torch.float64, **settings)


def outputs(model: nn.Module, head: str, ids: torch.Tensor) -> torch.Tensor:
    """Of a sequence alone: the logits of its tokens but the first [L-1, V], or the values of their states [L-1]."""
    if head == "lm":
        return model(input_ids=ids[None], use_cache=False).logits[0, :-1]
    return model.score(model.model(input_ids=ids[None], use_cache=False).last_hidden_state)[0, :-1, 0]


def balancing(model: nn.Module, sequences: list[torch.Tensor]) -> torch.Tensor:
    """The load-balancing loss of the given ids: all layers and tokens together."""
    top_k, logits = model.config.num_experts_per_tok, []
    for ids in sequences:
        logits += model.model(input_ids=ids[None], use_cache=False, output_router_logits=True).router_logits
    p = torch.cat(logits).softmax(-1)
    share = torch.zeros_like(p).scatter(1, p.argsort(descending=True)[:, :top_k], 1.0).mean(0)
    return p.shape[1] * (share * p.mean(0)).sum()


def formula_gradient(model: nn.Module, lora: bool, formula: Callable[[nn.Module], torch.Tensor]) -> Gradients:
    """The gradient of `formula(model)` by the names of a plain transformers model; with `lora` that of adapters alone,
    which are added to the weights first."""
    (gradient,) = formula_gradients(model, lora, lambda changed: [formula(changed)])
    return gradient


def formula_gradients(
    model: nn.Module, lora: bool, formulas: Callable[[nn.Module], Iterable[torch.Tensor]]
) -> Iterator[Gradients]:
    """As `formula_gradient`, of several formulas that share forward passes."""
    adapters = {}
    for name, parameter in model.named_parameters() if lora else ():
        if parameter.ndim == 2 and "layers" in name:
            adapters[name] = [part.double() for part in adapter(name, parameter.shape)]
            parameter.data += LORA.alpha / LORA.rank * adapters[name][0] @ adapters[name][1]
    for total in formulas(model):
        model.zero_grad()
        total.backward(retain_graph=True)
        whole = {name: parameter.grad for name, parameter in model.named_parameters()}
        yield adapter_gradients(whole, adapters) if lora else whole


def adapter_gradients(whole: Gradients, adapters: dict[str, list[torch.Tensor]]) -> Gradients:
    """Of the adapters (B, A) that were added to weights, and of the scalar head."""
    result = {name: gradient for name, gradient in whole.items() if name == "score.weight"}
    for name, (up, down) in adapters.items():  # W = W0 + s up down, so d up = s dW down^T and d down = s up^T dW
        stem, scale = name.removesuffix(".weight"), LORA.alpha / LORA.rank
        result[f"{stem}.lora_A.default.weight"] = scale * up.T @ whole[name]
        result[f"{stem}.lora_B.default.weight"] = scale * whole[name] @ down.T
    return result


def adapter(name: str, shape: torch.Size) -> tuple[torch.Tensor, torch.Tensor]:
    """(B [out, r], A [r, in]) of the weight of this name, both far from zero."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    up, down = ((shape[0], LORA.rank), (LORA.rank, shape[1]))
    return 0.1 * torch.randn(up, generator=generator), 0.1 * torch.randn(down, generator=generator)


def relative_error(found: Gradients, wanted: Gradients) -> float:
    """Largest over the tensors of |found - wanted| / |wanted|, in the 2-norm."""
    assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
    return max(float((found[name].double() - wanted[name]).norm() / wanted[name].norm()) for name in wanted)
