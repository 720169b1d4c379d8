"""Mistakes on ranks that split the matrices or the tokens of a model, and in training by torch alone."""

from __future__ import annotations

from mutation import Mutation

WORLD = ("tests/train/test_world.py",)
PLAN = ("tests/train/test_tensor_parallel.py", "-k", "refused")
STEPS = ("tests/train/test_tensor_parallel.py", "-m", "not proof", "-k", "clipped and fp32 and (ZeRO-0 or ZeRO-2)")
INSPECTIONS = ("tests/config/test_inspections.py", "-k", "tensor_parallelism")
TORCH = ("tests/train/test_torch_engine.py", "-k", "added_up or own_master or too_small")
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
]
