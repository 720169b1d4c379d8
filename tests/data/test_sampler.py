"""The data order: pure in (seed, step), every row once per epoch."""

from __future__ import annotations

import pytest

from rlhf_suite.data.sampler import BatchOrder


@pytest.mark.notices(
    "the last short batch of an epoch is dropped",
    "data/sampler.py",
    "-(-self.num_rows // self.batch_size)",
    "self.num_rows // self.batch_size",
)
def test_each_epoch_sees_every_row_once_and_drops_none():
    order = BatchOrder(num_rows=10, batch_size=4, seed=1)
    assert order.steps_per_epoch == 3
    for epoch in range(3):
        batches = [order.indices(3 * epoch + batch) for batch in range(3)]
        assert [len(batch) for batch in batches] == [4, 4, 2]
        assert sorted(index for batch in batches for index in batch) == list(range(10))


def test_a_step_is_the_same_whatever_was_read_before():
    forward = [BatchOrder(50, 8, 7).indices(step) for step in range(20)]
    again = BatchOrder(50, 8, 7)
    assert [again.indices(step) for step in reversed(range(20))] == forward[::-1]


@pytest.mark.notices(
    "every epoch has the same order", "data/sampler.py", "np.random.PCG64([seed, epoch])", "np.random.PCG64([seed, 0])"
)
def test_the_order_depends_on_the_seed_and_on_the_epoch():
    order = BatchOrder(100, 100, 0)
    assert order.indices(0) != order.indices(1)
    assert order.indices(0) != BatchOrder(100, 100, 1).indices(0)
    assert order.indices(0) != sorted(order.indices(0))


def test_the_order_is_pinned_across_machines():
    assert BatchOrder(6, 6, 42).indices(0) == [3, 2, 5, 4, 1, 0]


def test_a_batch_larger_than_the_data_is_the_data():
    order = BatchOrder(3, 8, 0)
    assert order.steps_per_epoch == 1 and sorted(order.indices(5)) == [0, 1, 2]


def test_epoch_counts_from_zero():
    order = BatchOrder(10, 4, 0)
    assert [order.epoch(step) for step in (0, 2, 3, 6)] == [0, 0, 1, 2]
