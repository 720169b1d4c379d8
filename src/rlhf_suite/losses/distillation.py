"""Divergences between the token distributions of a teacher p and a student q. Shapes: N tokens; unit: tokens.

Log-probs come as [N, K]: of the V tokens of the vocabulary, or of the teacher's k likeliest tokens and of the event
that it is another one (K = k + 1). Merging outcomes never raises a divergence, and k = V merges nothing.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rlhf_suite.losses.reduce import log1mexp
from rlhf_suite.registry import divergence
from rlhf_suite.shapes import is_like, same_shape

FLOOR = -1e4  # a log-prob whose exp is 0 in any precision


def kl(first: Tensor, second: Tensor) -> Tensor:
    """KL(first, second) = sum_k exp(first_k) (first_k - second_k); outcomes that a model rules out (-inf) are 0."""
    same_shape(first, second, dims=2)
    return (first.exp() * (first.clamp(min=FLOOR) - second.clamp(min=FLOOR))).sum(-1)


def distances(name: str, teacher: Tensor, student: Tensor) -> Tensor:
    """Return the divergence of this name at each token, [N], from log-probs [N, V]."""
    distance: Tensor = divergence.load(name)(teacher, student)
    if not is_like(distance, teacher[:, 0]):
        raise divergence.wrong_result(name, distance, f"the divergence at each of the {len(teacher)} tokens")
    return distance


@divergence()
def forward_kl(teacher: Tensor, student: Tensor) -> Tensor:
    """KL(p, q): the student covers all that the teacher says (Hinton et al., arXiv:1503.02531)."""
    return kl(teacher, student)


@divergence()
def reverse_kl(teacher: Tensor, student: Tensor) -> Tensor:
    """KL(q, p): the student says nothing that the teacher would not (MiniLLM, arXiv:2306.08543)."""
    return kl(student, teacher)


@divergence()
def jsd(teacher: Tensor, student: Tensor) -> Tensor:
    """(KL(p, m) + KL(q, m)) / 2 with m = (p + q) / 2; at most log 2."""
    middle = torch.logaddexp(teacher, student) - math.log(2)
    return (kl(teacher, middle) + kl(student, middle)) / 2


def with_others(log_probs: Tensor) -> Tensor:
    """[N, k] of distinct tokens, and log(1 - their sum) as the last column, [N, k + 1]."""
    return torch.cat([log_probs, log1mexp(log_probs.logsumexp(-1, keepdim=True))], -1)
