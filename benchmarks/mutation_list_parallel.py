"""Mistakes on ranks that split the matrices or the tokens of a model, and in training by torch alone."""

from __future__ import annotations

from mutation import Mutation

WORLD = ("tests/train/test_world.py",)
PLAN = ("tests/train/test_tensor_parallel.py", "-k", "refused")
STEPS = ("tests/train/test_tensor_parallel.py", "-m", "not proof", "-k", "clipped and fp32 and (ZeRO-0 or ZeRO-2)")
INSPECTIONS = ("tests/config/test_inspections.py", "-k", "tensor_parallelism")
TORCH = ("tests/train/test_torch_engine.py", "-k", "added_up or own_master or too_small")
SHARDS = ("tests/weight_sync/test_shards.py",)
OVERLAP = ("tests/train/test_overlap.py", "-k", "zero_1")
HEADS = ("tests/models/test_sequence_parallel.py", "-k", "heads_for_every_rank")

PARALLEL = [
    Mutation(
        "ranks that split matrices drop other activations",
        "distributed/mesh.py",
        "return rank // self.tensor",
        "return rank",
        WORLD,
    ),
    Mutation(
        "layers whose plan has other ways to split are split all the same",
        "train/tensor_parallel.py",
        "if not plan or other or sees:",
        "if not plan or sees:",
        PLAN,
    ),
    Mutation(
        "heads are split that the ranks do not divide",
        "train/tensor_parallel.py",
        "if value is not None and value % size:",
        "if value is not None and size % value:",
        PLAN,
    ),
    Mutation(
        "the preflight takes the matrices of a mixture of experts for divisible",
        "cli/inspections/models.py",
        'if experts is not None or files.setting("vision_config") is not None:',
        'if files.setting("vision_config") is not None:',
        INSPECTIONS,
    ),
    Mutation(
        "the preflight looks at no width of a model",
        "cli/inspections/models.py",
        "if isinstance(size, int) and size % use.tensor:",
        "if isinstance(size, int) and size < use.tensor:",
        INSPECTIONS,
    ),
    Mutation(
        "the norm counts the gradients of whole parameters once per rank that splits matrices",
        "train/tensor_parallel.py",
        "if p.grad is not None and (is_first or is_shard(p))",
        "if p.grad is not None",
        STEPS,
    ),
    Mutation(
        "ulysses splits key/value heads over ranks that do not divide them",
        "models/sequence_parallel.py",
        "(pairs % self.size and self.size % pairs)",
        "pairs > heads",
        HEADS,
    ),
    Mutation(
        "without DeepSpeed the gradient of a micro-batch replaces the sum of those before",
        "train/torch_engine.py",
        "master.grad += gradient",
        "master.grad = gradient.float()",
        TORCH,
    ),
    Mutation(
        "without DeepSpeed a bf16 weight is its own master",
        "train/torch_engine.py",
        "p: p if p.dtype == torch.float32 else p.detach().float() for p in trained",
        "p: p for p in trained",
        TORCH,
    ),
    Mutation(
        "gradients are reduced after every micro-batch",
        "train/step.py",
        "last=number == len(micro_batches)",
        "last=True",
        OVERLAP,
    ),
    Mutation(
        "a split engine: a matrix whose inputs are split is cut by its outputs",
        "weight_sync/shards.py",
        "whole.chunk(size, 1)[rank]",
        "whole.chunk(size, 0)[rank]",
        SHARDS,
    ),
    Mutation(
        "a split engine: workers that share a key/value head have different ones",
        "weight_sync/shards.py",
        "section.chunk(size // copies)[rank // copies]",
        "section.chunk(size // copies)[rank % (size // copies)]",
        SHARDS,
    ),
    Mutation(
        "a split engine: queries, keys and values in one tensor are cut as one",
        "weight_sync/shards.py",
        "enumerate(whole.split(sizes), first)",
        "enumerate([whole], first)",
        SHARDS,
    ),
    Mutation(
        "a split engine: the first worker has the rows of all others in its vocabulary",
        "weight_sync/shards.py",
        "module.shard_indices.org_vocab_start_index : module.shard_indices.org_vocab_end_index",
        "module.shard_indices.org_vocab_start_index :",
        SHARDS,
    ),
    Mutation(
        "a split engine: a layer of another stage has a part to prove",
        "weight_sync/shards.py",
        "if place is None or isinstance(place.module, PPMissingLayer):",
        "if place is None:",
        SHARDS,
    ),
    Mutation(
        "a split engine: the digest of a part is that of the whole tensor",
        "weight_sync/shards.py",
        "replace(entry, shape=tuple(part.shape), digest=digest(part))",
        "replace(entry, shape=tuple(part.shape))",
        SHARDS,
    ),
]
