"""Micro-batches and rank shares: complete, within the budget, balanced, never empty."""

from __future__ import annotations

import random
from itertools import product

import pytest

from memory import peak_bytes
from rlhf_suite.data.packing import balance, micro_batches


def sums(lengths, bins):
    return [sum(lengths[index] for index in part) for part in bins]


def flat(bins):
    return sorted(index for part in bins for index in part)


def best_largest_sum(lengths, parts):
    assignments = product(range(parts), repeat=len(lengths))
    return min(
        max(sum(n for n, part in zip(lengths, choice, strict=True) if part == k) for k in range(parts))
        for choice in assignments
    )


@pytest.mark.notices(
    "the largest bins of two partitions meet", "data/packing.py", "reversed(other[-met:])", "other[-met:]"
)
def test_balance_by_hand():
    """8-7=1; 6-5=1; 4, 1, 1 -> 4-1=3; 3-1=2: a difference of 2 on a total of 30 is 14 and 16."""
    lengths = [8, 7, 6, 5, 4]
    assert sorted(sums(lengths, balance(lengths, 2))) == [14, 16]


def walked(lengths, parts):
    """Largest differencing as it is written down: every partition has all its bins, and every merge sorts them."""
    found = [
        (length if parts > 1 else 0, -age, [(length, 1, [age]), *[(0, 0, [])] * (parts - 1)])
        for age, length in enumerate(lengths)
    ]
    for age in range(len(lengths), 2 * len(lengths) - 1):
        one, other = sorted(found, reverse=True)[:2]
        found = [each for each in found if each is not one and each is not other]
        bins = [tuple(x + y for x, y in zip(a, b, strict=True)) for a, b in zip(one[2], other[2][::-1], strict=True)]
        bins.sort(key=lambda each: each[:2], reverse=True)
        found.append((bins[0][0] - bins[-1][0], -age, bins))
    return sorted((sorted(each[2]) for each in found[0][2]), key=lambda part: (not part, part[:1]))


@pytest.mark.notices(
    "the largest bin of a partition takes the next sequence",
    "data/packing.py",
    "_join(one.pop(), other[0])",
    "_join(one.pop(0), other[0])",
)
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("parts", [1, 2, 3, 6, 13, 50])
def test_balance_is_largest_differencing_step_by_step(seed, parts):
    """Also with many equal lengths, where the order among equals decides."""
    rng = random.Random(seed)
    lengths = [rng.randint(0, 5 if seed % 2 else 500) for _ in range(40)]
    assert balance(lengths, parts) == walked(lengths, parts)


def test_balance_holds_no_empty_bins():
    """Empty bins of 1,000 partitions with 400 bins each would be 64 MB of tuples and lists."""
    lengths = [random.Random(0).randint(20, 4000) for _ in range(1000)]
    assert peak_bytes(lambda: balance(lengths, 400)) < 1000 * len(lengths)


def test_balance_splits_equal_lengths_evenly():
    assert sorted(len(part) for part in balance([7] * 10, 4)) == [2, 2, 3, 3]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("parts", [2, 3])
def test_balance_is_near_the_optimum(seed, parts):
    """Largest differencing is at most 7/6 of the best largest sum for 2 parts, and 4/3 - 1/(3k) in general."""
    lengths = [random.Random(seed).randint(1, 50) for _ in range(8)]
    bound = 7 / 6 if parts == 2 else 4 / 3 - 1 / (3 * parts)
    assert max(sums(lengths, balance(lengths, parts))) <= bound * best_largest_sum(lengths, parts)


def test_balance_spread_is_below_the_shortest_sequence_for_many():
    lengths = [random.Random(0).randint(20, 400) for _ in range(256)]
    totals = sums(lengths, balance(lengths, 8))
    assert max(totals) - min(totals) <= 20


@pytest.mark.parametrize("lengths", [[100, 1, 1], [0, 0, 0, 0], [5, 0, 0, 3], [1000, 1, 1, 1, 1, 1]])
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_no_part_is_empty_when_there_are_enough_sequences(lengths, parts):
    bins = balance(lengths, parts)
    assert len(bins) == parts and all(bins) and flat(bins) == list(range(len(lengths)))


def test_five_items_on_four_ranks_leave_no_rank_idle():
    assert sorted(len(part) for part in balance([3, 3, 3, 3, 3], 4)) == [1, 1, 1, 2]


def test_fewer_sequences_than_parts_leave_empty_parts_last():
    assert balance([5, 9], 4) == [[0], [1], [], []]
    assert balance([], 2) == [[], []]


def test_micro_batches_by_count_keep_the_order():
    assert micro_batches([9, 1, 5, 3, 2], count=2) == [[0, 1], [2, 3], [4]]


@pytest.mark.notices(
    "a micro-batch has one token more than its budget",
    "data/packing.py",
    "for index in part) <= token_budget",
    "for index in part) <= token_budget + 1",
)
@pytest.mark.parametrize("seed", range(30))
def test_micro_batches_by_budget_hold_every_sequence_once_and_the_budget(seed):
    rng = random.Random(seed)
    lengths = [rng.randint(1, 100) for _ in range(rng.randint(1, 60))]
    bins = micro_batches(lengths, token_budget=120)
    assert flat(bins) == list(range(len(lengths)))
    assert max(sums(lengths, bins)) <= 120 and all(bins)
    fewest = max(-(-sum(lengths) // 120), sum(length > 60 for length in lengths))
    assert len(bins) <= 1.5 * fewest + 1


def test_the_number_of_micro_batches_is_rounded_up_not_down():
    assert sorted(sums([4, 4, 4, 4, 1], micro_batches([4, 4, 4, 4, 1], token_budget=8))) == [4, 5, 8]


def test_a_perfect_packing_that_differencing_misses_is_found_by_first_fit():
    """Differencing ends at 14 | 16, so a budget of 15 needs the fallback's two bins {8, 7} and {6, 5, 4}."""
    lengths = [8, 7, 6, 5, 4]
    assert micro_batches(lengths, token_budget=15) == [[0, 1], [2, 3, 4]]


def test_a_sequence_above_the_budget_raises_it():
    assert micro_batches([10, 65, 30, 25], token_budget=64) == [[0, 2, 3], [1]]


def test_sequences_that_are_padded_share_a_micro_batch_with_their_like():
    lengths = [2, 30, 3, 28, 4]
    bins = micro_batches(lengths, token_budget=60, padded=True)
    assert bins == [[0, 2, 4], [1, 3]]


def test_no_sequences_make_no_micro_batches():
    assert micro_batches([], token_budget=8) == [] and micro_batches([], count=8) == []


def test_the_split_is_the_same_each_time():
    lengths = [random.Random(3).randint(1, 9) for _ in range(40)]
    assert micro_batches(lengths, token_budget=20) == micro_batches(list(lengths), token_budget=20)
