"""An error that means that memory is used up says what would fit."""

from __future__ import annotations

import pytest
import torch

from rlhf_suite.cli.execute import describe_unexpected
from rlhf_suite.launch.out_of_memory import ADVICE, advise

TOO_MUCH = 1 << 55  # bytes


def take_too_much() -> None:
    torch.empty(TOO_MUCH, dtype=torch.uint8)


@pytest.mark.quick
def test_torch_says_that_memory_is_used_up_and_the_run_what_helps(tmp_path):
    with pytest.raises(RuntimeError) as caught:
        take_too_much()
    said = describe_unexpected(caught.value, tmp_path)
    assert str(TOO_MUCH) in said and ADVICE in said and "the traceback is in" in said


@pytest.mark.quick
@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("CUDA Error: out of memory at csrc/cumem_allocator.cpp:62"),
        ValueError("Free memory on device (3.2/79.1 GiB) on startup is less than desired GPU memory utilization"),
        MemoryError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_the_words_of_each_library_are_known(error):
    assert ADVICE in advise(error)


@pytest.mark.quick
def test_other_errors_get_no_advice():
    assert advise(ValueError("a memory of other days")) == advise(KeyError("out")) == ""


@pytest.mark.stack
def test_the_error_of_an_actor_has_the_advice(tmp_path):
    import ray

    from local_ray import local_ray
    from rlhf_suite.errors import RunError
    from rlhf_suite.launch.actor_log import Member
    from rlhf_suite.launch.wait import wait_for

    with local_ray(num_cpus=1):
        ray.cloudpickle.register_pickle_by_value(__import__(__name__))
        ref = ray.remote(take_too_much).remote()
        with pytest.raises(RunError, match="actor-0 failed during the update") as caught:
            wait_for([ref], "the update", 60, [Member("actor-0", tmp_path / "actor-0.log")])
    assert ADVICE in str(caught.value) and str(TOO_MUCH) in str(caught.value)
