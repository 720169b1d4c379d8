"""Padding and unpadding."""

from __future__ import annotations

import torch

from rlhf_suite.algo.advantage import pad, unpad


def test_pad_puts_each_sequence_in_its_row_and_fills_the_rest():
    padded = pad(torch.tensor([1.0, 2, 3, 4]), torch.tensor([1, 0, 3]), fill=-1)
    assert padded.tolist() == [[1, -1, -1], [-1, -1, -1], [2, 3, 4]]


def test_unpad_undoes_pad():
    lengths = torch.tensor([3, 1, 0, 2])
    values = torch.arange(6)
    assert torch.equal(unpad(pad(values, lengths), lengths), values) and pad(values, lengths).dtype == torch.int64


def test_no_sequences_at_all():
    none = torch.zeros(0, dtype=torch.int64)
    assert pad(torch.zeros(0), none).shape == (0, 0) and unpad(pad(torch.zeros(0), none), none).shape == (0,)
