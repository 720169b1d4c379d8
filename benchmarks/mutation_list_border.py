"""Mistakes in weights, adapters, exports and the planner."""

from __future__ import annotations

from mutation import Mutation

LOADS = ("tests/weight_sync/test_loads.py",)
REPORTS = ("tests/weight_sync/test_weight_sync.py",)

BORDER: list[Mutation] = [
    Mutation(
        "a packed matrix is read back by the number of its outputs",
        "weight_sync/read_back.py",
        "torch.eye(like.shape[1]",
        "torch.eye(like.shape[0]",
        LOADS,
    ),
    Mutation(
        "the packed copy in a tied head is not read back",
        "weight_sync/read_back.py",
        "in held.get(id(value), ()):",
        "in [(target.path, target.module, target.leaf)]:",
        LOADS,
    ),
    Mutation(
        "the padding of packed experts is taken for their rows",
        "weight_sync/read_back.py",
        "half[:, : like.shape[1] // 2]",
        "half[:, : half.shape[1]]",
        LOADS,
    ),
    Mutation(
        "a parameter that the engine keeps in fewer bits is compared all the same",
        "weight_sync/read_back.py",
        "value.element_size() >= like.element_size()",
        "value.element_size() > 0",
        LOADS,
    ),
    Mutation(
        "each part of a fused parameter is looked for at its beginning",
        "weight_sync/loads.py",
        "values.storage_offset() + self.offset",
        "values.storage_offset()",
        LOADS,
    ),
    Mutation(
        "a reordered tensor has the digest of the one that arrived",
        "weight_sync/loads.py",
        "is_whole = source.data_ptr() == whole.data_ptr() and source.shape == whole.shape",
        "is_whole = source.shape == whole.shape",
        LOADS,
    ),
    Mutation(
        "a square matrix that is loaded transposed has the digest of the one that arrived",
        "weight_sync/loads.py",
        "is_whole and source.is_contiguous() and target.dtype",
        "is_whole and target.dtype",
        LOADS,
    ),
    Mutation(
        "what a loader has computed from a tensor must be the tensor",
        "weight_sync/loads.py",
        """        if source.is_meta:
            found.is_computed = True
            return
""",
        """        if source.is_meta:
            return
""",
        LOADS,
    ),
    Mutation(
        "a bias that is loaded once more with its layer is taken for the newest tensor",
        "weight_sync/loads.py",
        "(earlier.entry if earlier else self._newest[0])",
        "self._newest[0]",
        LOADS,
    ),
    Mutation(
        "a tensor that the engine's model drops is not noticed",
        "weight_sync/loads.py",
        "if not count and (other",
        "if count < 0 and (other",
        LOADS,
    ),
    Mutation(
        "an engine keeps all weights that have arrived",
        "weight_sync/loads.py",
        """requires_grad=False))
        self._let_go()
""",
        """requires_grad=False))
""",
        LOADS,
    ),
    Mutation(
        "a bias that the model made while it was loaded is lost with vLLM's reload",
        "weight_sync/loads.py",
        "is None and not target.like.is_meta:",
        "is None and target.like.is_meta:",
        LOADS,
    ),
    Mutation(
        "an engine that has loaded half of a tensor has it",
        "weight_sync/digests.py",
        "if 0 < placed < whole.numbers:",
        "if placed > whole.numbers:",
        REPORTS,
    ),
    Mutation(
        "a tensor counts as read back if one of the workers has read it",
        "weight_sync/digests.py",
        "all(part.is_read for part in parts)",
        "any(part.is_read for part in parts)",
        REPORTS,
    ),
]
