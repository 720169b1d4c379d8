"""Trainer and engines find out that they cannot share the memory of a GPU, and exchange weights in another way."""

from __future__ import annotations

from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist

from rlhf_suite.background import in_background
from rlhf_suite.distributed.world import open_store
from rlhf_suite.weight_sync import cuda_ipc
from rlhf_suite.weight_sync.sender import IpcSender

LIMIT = timedelta(seconds=60)
without_a_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the channel works")


@without_a_gpu
def test_both_sides_learn_that_the_memory_of_a_gpu_cannot_be_shared():
    sender = IpcSender(torch.bfloat16, True, "127.0.0.1", 0, LIMIT.total_seconds())
    workers = [dist.TCPStore("127.0.0.1", sender.port, is_master=False, timeout=LIMIT) for _ in range(2)]
    answers = [
        in_background("worker", partial(cuda_ipc.answer_proof, store, 1, number, 0))
        for number, store in enumerate(workers, 1)
    ]
    assert "CUDA" in sender.connect(3, 1)
    assert [answer.result(60) for answer in answers] == [None, None]


def test_a_worker_that_does_not_answer_is_a_reason(monkeypatch):
    monkeypatch.setattr(cuda_ipc, "PROOF_TIMEOUT", timedelta(seconds=0.2))
    store = open_store("127.0.0.1", LIMIT)
    assert "timeout" in cuda_ipc.read_answers(store, 1, 1).lower()


@pytest.mark.parametrize("reason", ["", "no peer access"])
def test_the_trainer_reads_the_answer_of_every_worker(reason):
    store = open_store("127.0.0.1", LIMIT)
    store.set(cuda_ipc.answer_key(7, 1), cuda_ipc.ANSWER)
    store.set(cuda_ipc.answer_key(7, 2), cuda_ipc.ANSWER + reason)
    assert cuda_ipc.read_answers(store, 7, 2) == reason
