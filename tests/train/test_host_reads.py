"""The host launches the kernels of micro-batch after micro-batch, and waits for the device only at the end of a step.

Without a GPU the columns of a batch that was "sent" are tensors that note when the host reads them, and so is all that
is computed from them. On a GPU torch itself says what waits.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from policy_formulas import NextToken

from alike import begin_alike
from rlhf_suite.config.declarations.algo import KLConfig
from rlhf_suite.config.declarations.ds import DeepSpeedConfig
from rlhf_suite.config.declarations.models import ActorConfig, CriticConfig, TrainedModelConfig
from rlhf_suite.config.plan.run_plan import ModelPlan
from rlhf_suite.data.batch import HostCopy, send_together, take, weightless
from rlhf_suite.data.trajectory import Experience
from rlhf_suite.distributed.mesh import Mesh
from rlhf_suite.distributed.world import World
from rlhf_suite.models.builtin import Shape, create
from rlhf_suite.registry import policy_loss
from rlhf_suite.rl.objectives import PolicyObjective, ValueObjective
from rlhf_suite.rl.roles import MicroBatches, Role
from rlhf_suite.train.step import global_counts, optimizer_step
from rlhf_suite.train.strategy import TrainedModel, load_trained

pytestmark = pytest.mark.stack

LENGTHS = (5, 70, 1, 40, 9, 9, 33)
READS = {  # what needs a value in host memory, or a shape that depends on one
    *("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "__array__", "nonzero"),
    *("unique", "unique_consecutive", "masked_select", "equal", "allclose", "bincount"),
}
PER_STEP = {"cpu": 1, "cuda": 2}  # the metrics; on a device also the norm of the gradient


class Sent(torch.Tensor):
    """A tensor that stands for one on a device."""

    reads: list[str] = []  # noqa: RUF012 - of all of them

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        by_mask = name == "__getitem__" and isinstance(args[1], torch.Tensor) and args[1].dtype == torch.bool
        if name in READS or by_mask or (name == "repeat_interleave" and "output_size" not in (kwargs or {})):
            cls.reads.append(name)
        result = super().__torch_function__(func, types, args, kwargs)
        return result.as_subclass(torch.Tensor) if name == "cpu" else result


class Sendable(Experience):
    """A batch on the CPU, of which `to` gives one of `Sent` tensors."""

    def to(self, device: Any) -> Experience:
        sent = self.map_columns(lambda value: value.as_subclass(Sent), lambda value: value.as_subclass(Sent), None)
        known = HostCopy(self.lengths, self.mask, self.ids, (sent.lengths, sent.mask, sent.ids))
        return Experience(**vars(replace(sent, host_copy=known)))


@contextmanager
def count_reads(device: str) -> Iterator[list[str]]:
    """Give a list that has an entry for each time that the host waited within the block."""
    if device == "cpu":
        Sent.reads = reads = []
        yield reads
        Sent.reads = []
        return
    reads = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield reads
        finally:
            torch.cuda.set_sync_debug_mode("default")
    reads += [f"{w.filename}:{w.lineno}" for w in caught if "called a synchronizing" in str(w.message)]


def rollout(device: str) -> Experience:
    """Sequences with every column that an objective reads; the mask has first tokens and whole sequences out."""
    generator = torch.Generator().manual_seed(5)
    total, lengths = sum(LENGTHS), torch.tensor(LENGTHS)
    numbers = {
        name: torch.randn(total, generator=generator) - 5
        for name in ("old_log_probs", "engine_log_probs", "ref_log_probs", "values", "returns", "advantages")
    }
    kind = Sendable if device == "cpu" else Experience
    return kind(
        begin_alike(torch.randint(16, 256, (total,), generator=generator), LENGTHS, [(3, 1, 30), (6, 1, 20)]),
        lengths,
        (torch.rand(total, generator=generator) > 0.3).float().index_fill(0, torch.arange(5), 0.0),
        index=torch.arange(len(LENGTHS)),
        correction=torch.rand(total, generator=generator),
        chosen=torch.rand(total, generator=generator) > 0.9,
        **numbers,
    )


def policy(loss: str) -> PolicyObjective:
    """The objective with all of its terms."""
    actor = ActorConfig.of("ppo", policy_loss_type=loss, entropy_coef=0.1, loss_agg_mode="seq-mean-token-mean")
    return PolicyObjective(actor, KLConfig(use_loss=True, estimator="k3"), 0.9, 64, 0.1)


OBJECTIVES = {"sft": NextToken(), "value": ValueObjective(CriticConfig.of("ppo"))}
OBJECTIVES |= {name: policy(name) for name in policy_loss.names()}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("host_reads") / "tiny"
    create(path, Shape())
    return path


@pytest.fixture(scope="module")
def load(folder: Path) -> Callable[[str, str], TrainedModel]:
    """A model under torch alone, for an objective; loaded once for each head and device."""
    loaded: dict[tuple[str, str], TrainedModel] = {}

    def get(device: str, objective: str) -> TrainedModel:
        head = "value" if objective == "value" else "lm"
        if (device, head) not in loaded:
            world = World(0, Mesh(1), torch.device(device, 0) if device == "cuda" else torch.device("cpu"))
            config = TrainedModelConfig.of("ppo", model_name_or_path=str(folder), gradient_checkpointing_enable=True)
            plan = ModelPlan("actor", str(folder), head=head)
            ds = DeepSpeedConfig.of("sft", zero_stage=None, share_prefixes=True)
            loaded[device, head] = load_trained(plan, config, ds, world, total_steps=100, seed=0)
        return loaded[device, head]

    return get


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_no_micro_batch_waits_for_the_device(load, name, device):
    model, batch = load(device, name), rollout(device)
    counts = []
    for parts in ([range(7)], [[0, 1], [2, 3], [4], [5, 6]]):
        micro_batches = [take(batch, list(part)) for part in parts]
        optimizer_step(model, OBJECTIVES[name], micro_batches, 0, "skip")  # warm: kernels are compiled and tuned
        with count_reads(device) as reads:
            optimizer_step(model, OBJECTIVES[name], micro_batches, 0, "skip")
        counts.append(reads)
    assert len(counts[0]) == len(counts[1]) == PER_STEP[device], counts


@pytest.mark.parametrize("device", DEVICES)
def test_forward_passes_are_read_once(load, device):
    model, batch = load(device, "sft"), rollout(device)
    role = Role.__new__(Role)  # a worker without a process around it
    role.model, role.world, role.micro_batches = model, model.world, MicroBatches(rows=2)
    role.compute_log_probs(model, batch, 0.9, entropy=True)
    with count_reads(device) as reads:
        role.compute_log_probs(model, batch, 0.9, entropy=True)
    assert len(reads) == 1, reads


@pytest.mark.notices(
    "a batch on a device answers with the lengths that it had before",
    "data/batch.py",
    "known.lengths if known is not None and known.sent[0] is self.lengths else",
    "known.lengths if known is not None else",
)
def test_what_the_host_keeps_is_of_this_batch_alone():
    sent = rollout("cpu").to("cpu")
    assert sent.host_lengths.tolist() == list(LENGTHS) and type(sent.host_mask) is torch.Tensor
    assert take(sent, [1, 3]).host_lengths.tolist() == [70, 40]
    assert take(sent, [3]).host_ids.tolist() == sent.ids.split([*LENGTHS])[3].tolist()
    assert not weightless(sent).host_mask.any()
    assert replace(sent, lengths=sent.lengths.flip(0)).host_lengths.tolist() == list(LENGTHS)[::-1]
    assert torch.equal(replace(sent, ids=sent.ids + 1).host_ids, sent.ids + 1)


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_taken_of_a_sent_batch_is_known_to_the_host(device):
    """KTO takes sequences out of such batches, and several tasks ask where the mask is."""
    batch, world = rollout(device), World(0, Mesh(1), torch.device(device))
    sent = batch.to(device)
    take(sent, [5]).masked  # noqa: B018 - warm: memory is allocated
    with count_reads(device) as reads:
        taken = take(sent, [3, 1])
        masked, lengths = taken.masked, taken.host_lengths
    assert reads == [] and lengths.tolist() == [40, 70]
    expected = take(batch, [3, 1])
    assert torch.equal(masked.cpu(), expected.mask.nonzero().squeeze(1)) and torch.equal(taken.ids.cpu(), expected.ids)
    with count_reads(device) as reads:
        counts = global_counts(NextToken(), [taken, sent], world)
    assert len(reads) == 1 and counts["tokens"] == float(batch.mask.sum() + expected.mask.sum())


@pytest.mark.parametrize("device", DEVICES)
def test_columns_are_sent_as_they_are(device):
    values = [
        torch.arange(3),
        torch.tensor([], dtype=torch.int64),
        torch.tensor([True, False, True]),
        torch.randn(5, 2, 3, dtype=torch.float64),
        torch.randn(7).to(torch.bfloat16),
        torch.arange(12, dtype=torch.int16).view(4, 3).T,
    ]
    for value, sent in zip(values, send_together(values, device), strict=True):
        assert sent.device.type == device and sent.dtype == value.dtype
        assert torch.equal(sent.cpu(), value)
