"""Where things run, and in what portions, changes no number: the samples, rewards and losses are the plain run's."""

from __future__ import annotations

from dataclasses import dataclass

import jobs
import pytest
from same_numbers import check_same_numbers

STEPS = (1, 2)


@dataclass(frozen=True)
class Variant:
    """Flags against a plain run: one rank of each model and one engine, each on its own, ZeRO 2, packed, weights by
    shared memory, micro-batches of 4."""

    against: str
    words: tuple[str, ...]
    is_proof: bool = False


VARIANTS = {
    "all roles share two devices, ZeRO 3, padded": Variant(
        "baseline",
        (
            "train.colocate_all=true",
            "actor.num_gpus_per_node=2",
            "ref.num_gpus_per_node=2",
            "vllm.num_engines=2",
            "ds.zero_stage=3",
            "ds.packing_samples=false",
            "train.micro_batch_size=2",
        ),
    ),
    "ZeRO 0, a stream of weights, micro-batches by tokens": Variant(
        "actor_critic",
        (
            "ds.zero_stage=0",
            "vllm.sync_backend=gloo",
            "train.dynamic_batch_enable=true",
            "train.max_tokens_per_gpu=64",
            "ckpt.save_steps=-1",
        ),
        is_proof=True,
    ),
    "two ranks of policy, critic and reference split the tokens of each batch": Variant(
        "actor_critic",
        (
            "ds.ring_attn_size=2",
            "actor.num_gpus_per_node=2",
            "critic.num_gpus_per_node=2",
            "ref.num_gpus_per_node=2",
        ),
        is_proof=True,
    ),
    "two ranks of policy, critic and reference split the matrices of the layers": Variant(
        "actor_critic",
        (
            "ds.tensor_parallel_size=2",
            "actor.num_gpus_per_node=2",
            "critic.num_gpus_per_node=2",
            "ref.num_gpus_per_node=2",
        ),
        is_proof=True,
    ),
    "two ranks split the matrices of the layers, ZeRO 3": Variant(
        "actor_critic",
        (
            "ds.tensor_parallel_size=2",
            "ds.zero_stage=3",
            "actor.num_gpus_per_node=2",
            "critic.num_gpus_per_node=2",
            "ref.num_gpus_per_node=2",
        ),
        is_proof=True,
    ),
    "torch trains alone, without DeepSpeed": Variant("actor_critic", ("ds.zero_stage=null",), is_proof=True),
    "two ranks of the policy": Variant("baseline", ("actor.num_gpus_per_node=2",), is_proof=True),
    "all roles share two devices, of which each has a half of the engine": Variant(
        "baseline",
        (
            "train.colocate_all=true",
            "actor.num_gpus_per_node=2",
            "ref.num_gpus_per_node=2",
            "vllm.tensor_parallel_size=2",
            "vllm.enable_sleep=true",
        ),
        is_proof=True,
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.proof if each.is_proof else ()) for name, each in VARIANTS.items()]
)
def test_the_numbers_do_not_depend_on(name, runs, request):
    variant = VARIANTS[name]
    plain, words = (request.getfixturevalue(f"{variant.against}{kind}") for kind in ("", "_words"))
    folder = runs / f"variant_{list(VARIANTS).index(name)}"
    jobs.run(folder, [*words, *variant.words])
    check_same_numbers(folder, plain, STEPS)


def test_roles_that_share_devices_say_so(runs, baseline):
    """The first variant is what it says it is: so many actors, placed so."""
    shared = runs / "variant_0"
    names = {folder: {log.stem for log in (folder / "logs").glob("*.log")} for folder in (shared, baseline)}
    assert names[shared] == {"actor-0", "actor-1", "ref-0", "ref-1", "engine-0", "engine-1", "reward"}
    assert names[baseline] == {"actor-0", "ref-0", "engine-0", "reward"}
    said = {folder: folder.with_name(f"{folder.name}.out").read_text() for folder in (shared, baseline)}
    assert "2 x CPU slot: actor x 2, engine x 2, ref x 2" in said[shared]
    assert "1 x CPU slot: engine x 1" in said[baseline]
