"""What losses are made of agrees with independent implementations: log-probs, entropies, token rewards, partitions."""

from __future__ import annotations

import pytest
import torch
from reference import DATA, SUPERVISED, Agreement, check
from reference import supervised_cases as cases

from rlhf_suite.algo.advantage import CreditInput, token_rewards
from rlhf_suite.algo.kl import estimate_kl
from rlhf_suite.algo.scores import clip_scores
from rlhf_suite.data.packing import balance, micro_batches
from rlhf_suite.losses.tokens import next_token_loss
from rlhf_suite.models.head import ChunkedLogProbs, HeadSettings


def scored(case, temperature):
    """(log-probs, entropies) of the head whose weight is the identity, so that hidden states are logits; labels."""
    labels = case["labels"].flatten().long()
    logits, at = case["student"].flatten(0, 1), labels >= 0
    settings = HeadSettings(temperature, True, 4)
    eye = torch.eye(logits.shape[1], dtype=torch.float64)
    log_probs, entropy = ChunkedLogProbs.apply(logits, eye, None, labels.clamp(min=0), settings)
    return log_probs, entropy, at


@pytest.mark.parametrize(("reference", "temperature"), [("openrlhf", 0.7), ("trl", 1.0), ("verl", 1.0)])
def test_log_probs_agree(reference, temperature):
    for case, theirs in cases(f"{reference}/logprobs"):
        log_probs, _, at = scored(case, temperature)
        check(log_probs[at], theirs["logp"].flatten()[at])


@pytest.mark.parametrize("reference", ["openrlhf", "trl", "verl"])
def test_entropies_agree(reference):
    for case, theirs in cases(f"{reference}/entropy"):
        check(scored(case, 1.0)[1], theirs["entropy"].flatten())


def test_the_language_loss_of_openrlhf_agrees():
    """Its label of a position is the token at it, so the logits of the position before are what it reads."""
    for case, theirs in cases("openrlhf/gpt_lm_loss"):
        log_p = case["student"][:, :-1].log_softmax(-1)
        labels = case["labels"][:, 1:].long()
        chosen = log_p.gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1).flatten()
        mask = (labels >= 0).flatten().double()
        check(next_token_loss(chosen, mask).total / mask.sum(), theirs["loss"])


def reward_of_tokens(case, scores, log_probs, turns=None):
    """Ours are of the model's tokens alone; here they stand in padded rows again, as those of the references."""
    own = case["mask"].bool()
    penalty = 0.1 * estimate_kl(case[log_probs], case["ref_logp"], "k1")
    groups = torch.zeros(len(scores), dtype=torch.long)
    given = CreditInput(scores, penalty[own], own.sum(1), groups, turn_rewards=None if turns is None else turns[own])
    return torch.zeros_like(case["mask"]).masked_scatter(own, token_rewards(given))


def test_the_reward_of_openrlhf_is_clipped_and_stands_at_the_last_token():
    for case, theirs in cases("openrlhf/compute_reward/kl0.1"):
        ours = reward_of_tokens(case, clip_scores(case["rewards"], (-0.5, 0.5)), "logp")
        check(ours, theirs["reward"], case["mask"])


def test_the_kl_penalty_of_verl_agrees():
    for case, theirs in cases("verl/compute_rewards/kl0.1"):
        zero = torch.zeros(len(case["mask"]), dtype=torch.float64)
        ours = reward_of_tokens(case, zero, "old_logp", case["token_rewards"])
        check(ours, theirs["reward"], case["mask"])


@pytest.mark.parametrize("reference", ["openrlhf", "verl"])
def test_no_partition_is_heavier_than_theirs(reference):
    for case, theirs in cases(f"{reference}/balanced_partitions"):
        lengths = case["lengths"].long().tolist()
        loads = [sum(lengths[i] for i in part) for part in balance(lengths, int(case["k"]))]
        assert max(loads) <= int(theirs["max_load"])


def test_there_are_no_more_micro_batches_than_openrlhf_makes():
    for case, theirs in cases("openrlhf/min_micro_batches"):
        assert len(micro_batches(case["lengths"].long().tolist(), token_budget=512)) <= int(theirs["n"])


def test_the_largest_error_is_remembered():
    agreement = Agreement()
    agreement.reference = "theirs"
    for error in (1e-7, -3e-7, 2e-7):
        agreement.add(agreement.errors, torch.tensor(error))
    assert agreement.errors == {"theirs": pytest.approx(3e-7)}


def test_no_name_is_in_both_files():
    assert not DATA["references"].keys() & SUPERVISED["references"].keys()
