"""The losses of the supervised tasks as formulas in float64 over plain transformers models, one sequence at a time.

They share no code with what they judge.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from rlhf_suite.data.batch import Example, Item, sequences
from rlhf_suite.models.builtin import byte_tokenizer

PLACEHOLDER, PLUS, MINUS = (byte_tokenizer()(sign)["input_ids"][0] for sign in ";+-")
BETA, SMOOTHING, NLL, GAMMA, DESIRABLE, KD, HEAT = 0.3, 0.1, 0.2, 0.7, 1.7, 0.6, 1.5


class Plain:
    """A plain model in float64, read one sequence at a time."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def logits(self, example: Example) -> Tensor:
        """[L, V]: of what follows each token."""
        return self.model(input_ids=torch.tensor(example.ids)[None], use_cache=False).logits[0]

    def log_p(self, example: Example) -> Tensor:
        """[L-1, V]: of each token but the first."""
        return self.logits(example)[:-1].log_softmax(-1)

    def answer(self, example: Example) -> tuple[Tensor, int]:
        """log p of the masked tokens, and how many they are."""
        ids, mask = torch.tensor(example.ids)[1:], torch.tensor(example.mask)[1:]
        chosen = self.log_p(example)[torch.arange(len(ids)), ids]
        return (chosen * mask).sum(), int(mask.sum())

    def score(self, example: Example) -> Tensor:
        ids = torch.tensor(example.ids)
        hidden = self.model.model(input_ids=ids[None], use_cache=False).last_hidden_state
        return self.model.score(hidden)[0, -1, 0]


def log_sigmoid(x: Tensor) -> Tensor:
    return -torch.log(1 + torch.exp(-x))


def sft_formula(model: Plain, _: Plain, items: list[Item]) -> Tensor:
    answers = [model.answer(example) for example in items]
    return -sum(log_p for log_p, _ in answers) / sum(tokens for _, tokens in answers)


def rm_formula(model: Plain, _: Plain, items: list[Item], margin: bool) -> Tensor:
    losses = []
    for chosen, rejected in map(sequences, items):
        gap = model.score(chosen) - model.score(rejected)
        losses.append(-log_sigmoid(gap - (chosen.numbers["margin"] if margin else 0)))
    return sum(losses) / len(losses)


# Of a pair: log p and number of tokens of both answers, and both log-ratios to the reference.


def sigmoid_loss(p: tuple[Tensor, Tensor], n: tuple[int, int], r: tuple[Tensor, Tensor]) -> Tensor:
    h = BETA * (r[0] - r[1])
    return -(1 - SMOOTHING) * log_sigmoid(h) - SMOOTHING * log_sigmoid(-h)


def ipo_loss(p: tuple[Tensor, Tensor], n: tuple[int, int], r: tuple[Tensor, Tensor]) -> Tensor:
    return (r[0] - r[1] - 0.5 / BETA) ** 2


def hinge_loss(p: tuple[Tensor, Tensor], n: tuple[int, int], r: tuple[Tensor, Tensor]) -> Tensor:
    h = BETA * (r[0] - r[1])
    return 1 - h if h < 1 else 0 * h


def simpo_loss(p: tuple[Tensor, Tensor], n: tuple[int, int], r: tuple[Tensor, Tensor]) -> Tensor:
    return -log_sigmoid(BETA * (p[0] / n[0] - p[1] / n[1]) - GAMMA)


def orpo_loss(p: tuple[Tensor, Tensor], n: tuple[int, int], r: tuple[Tensor, Tensor]) -> Tensor:
    chosen, rejected = torch.exp(p[0] / n[0]), torch.exp(p[1] / n[1])
    odds_ratio = chosen / (1 - chosen) * (1 - rejected) / rejected
    return -BETA * torch.log(odds_ratio / (1 + odds_ratio))


PAIR_LOSSES: dict[str, Callable[..., Tensor]] = {
    "sigmoid": sigmoid_loss,
    "ipo": ipo_loss,
    "hinge": hinge_loss,
    "simpo": simpo_loss,
    "orpo": orpo_loss,
}


def dpo_formula(model: Plain, reference: Plain, items: list[Item], loss: Callable[..., Tensor]) -> Tensor:
    losses = []
    for pair in map(sequences, items):
        p, n = zip(*map(model.answer, pair), strict=True)
        ratios = [own - reference.answer(example)[0] for own, example in zip(p, pair, strict=True)]
        losses.append(loss(p, n, ratios) - NLL * p[0] / n[0])
    return sum(losses) / len(losses)


def kto_formula(model: Plain, reference: Plain, items: list[Item]) -> Tensor:
    ratios = [[model.answer(x)[0] - reference.answer(x)[0] for x in sequences(item)] for item in items]
    labels = [sequences(item)[0].numbers["label"] for item in items]
    mismatched = float(sum(pair[1].detach() for pair in ratios)) / len(items) if len(ratios[0]) == 2 else None
    losses = []
    for (ratio, *_), label in zip(ratios, labels, strict=True):
        others = [float(pair[0].detach()) for pair, other in zip(ratios, labels, strict=True) if other != label]
        point = max(0.0, mismatched if mismatched is not None else sum(others) / max(len(others), 1))
        sigmoid = 1 / (1 + torch.exp(-BETA * ((ratio - point) if label else (point - ratio))))
        losses.append((DESIRABLE if label else 1) * (1 - sigmoid))
    return sum(losses) / len(losses)


def prm_formula(model: Plain, _: Plain, items: list[Item], names: list[str] | None, soft: bool) -> Tensor:
    losses = []
    for example in items:
        logits = model.logits(example)
        for place in [index for index, token in enumerate(example.ids) if token == PLACEHOLDER]:
            target, weight = (example.token_numbers[name][place] for name in ("target", "weight"))
            log_p = (logits[place] if names is None else logits[place][[PLUS, MINUS]]).log_softmax(-1)
            losses.append(-weight * log_p[0] - (1 - weight) * log_p[1] if soft else -log_p[int(target)])
    return sum(losses) / len(losses)


# Of two distributions [K], the teacher's and the student's.


def kl(p: Tensor, q: Tensor) -> Tensor:
    return (p * (p / q).log()).sum()


DISTANCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "forward_kl": kl,
    "reverse_kl": lambda p, q: kl(q, p),
    "jsd": lambda p, q: (kl(p, (p + q) / 2) + kl(q, (p + q) / 2)) / 2,
}


def distill_formula(
    model: Plain, teacher: Plain, items: list[Item], distance: Callable[[Tensor, Tensor], Tensor], top_k: int | None
) -> Tensor:
    losses = []
    for example in items:
        p = (teacher.logits(example) / HEAT).softmax(-1)
        q = (model.logits(example) / HEAT).softmax(-1)
        language = model.log_p(example)
        for place in range(1, len(example)):
            if example.mask[place]:
                divergence = distance(*merged(p[place - 1], q[place - 1], top_k))
                losses.append(-(1 - KD) * language[place - 1, example.ids[place]] + KD * HEAT**2 * divergence)
    return sum(losses) / len(losses)


def merged(p: Tensor, q: Tensor, top_k: int | None) -> tuple[Tensor, Tensor]:
    """Both over p's likeliest tokens and the event that it is another."""
    if top_k is None:
        return p, q
    chosen = p.argsort(descending=True)[:top_k]
    p, q = (torch.cat([x[chosen], 1 - x[chosen].sum().reshape(1)]) for x in (p, q))
    return p, q
