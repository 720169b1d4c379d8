"""Mistakes in weights, adapters, exports and the planner."""

from __future__ import annotations

from mutation import Mutation

LOADS = ("tests/weight_sync/test_loads.py",)
MERGE = ("tests/models/test_merge.py",)
PLANNER = ("tests/planner/test_planner.py",)
REHEARSAL = ("tests/models/test_rehearsal.py",)
WORKERS = ("tests/rl/test_episode_workers.py",)
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
        'if (other := taken.get(name.rpartition(".")[0])) is not None:',
        "if (other := taken.get(name)) is not None:",
        LOADS,
    ),
    Mutation(
        "the head of an engine is its embedding although the policy has two",
        "weight_sync/loads.py",
        "if there != place.entry.name:",
        "if there is None:",
        LOADS,
    ),
    Mutation(
        "an engine keeps all weights that have arrived",
        "weight_sync/loads.py",
        """target.leaf, target.like)
        self._let_go()
""",
        """target.leaf, target.like)
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
    Mutation(
        "the KV cache of an engine on two devices has room for the tokens of one",
        "planner/memory.py",
        "return config.pipeline_parallel_size * min(config.tensor_parallel_size, found.kv_heads)",
        "return 1",
        (*PLANNER, "-k", "kv_cache"),
    ),
    Mutation(
        "a key/value head that several devices of an engine hold is counted as parts",
        "planner/memory.py",
        "min(config.tensor_parallel_size, found.kv_heads)",
        "config.tensor_parallel_size",
        (*PLANNER, "-k", "kv_cache"),
    ),
    Mutation(
        "each device of an engine is planned with all weights",
        "planner/memory.py",
        "own = size * found.total // config.devices",
        "own = size * found.total",
        (*PLANNER, "-k", "kv_cache"),
    ),
    Mutation(
        "the KV cache is planned for as many key/value heads as there are heads",
        "planner/trace.py",
        'kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads',
        "kv_heads = config.num_attention_heads",
        (*PLANNER, "-k", "parameters_of_qwen3"),
    ),
    Mutation(
        "a failed request of an episode worker fails another order",
        "rl/episode_workers.py",
        """            self.fail([*self.pending], error)
        else:
""",
        """            self.fail([number], error)
        else:
""",
        (*WORKERS, "-k", "fails_ends"),
    ),
    Mutation(
        "an adapter for a deeper model is merged into a part of it",
        "models/merge.py",
        "if surplus := sorted(adapter.weights.keys() - expected.keys() - wrapped.state_dict().keys()):",
        "if surplus := sorted(adapter.weights.keys() - adapter.weights.keys()):",
        MERGE,
    ),
    Mutation(
        "an adapter for the first layers of another model is merged",
        "models/merge.py",
        "and max(adapted) + 1 < layers:",
        "and max(adapted) + 1 > layers:",
        MERGE,
    ),
    Mutation(
        "an adapter with NaN is merged",
        "models/merge.py",
        "if not tensor.isfinite().all():",
        "if not tensor.numel():",
        MERGE,
    ),
    Mutation(
        "a model whose embedding and head were untied is exported as a tied one",
        "models/save.py",
        "            set_tied(config, False)\n",
        "            set_tied(config, True)\n",
        MERGE,
    ),
    Mutation(
        "the rehearsal of an export compares the number of dimensions alone",
        "models/rehearsal.py",
        "if shape != shapes[name]:",
        "if len(shape) != len(shapes[name]):",
        (*REHEARSAL, "-k", "another_shape"),
    ),
    Mutation(
        "the rehearsal of an export does not read its tokenizer again",
        "models/rehearsal.py",
        "            check_tokenizer(parts.tokenizer, place)\n",
        "",
        (*REHEARSAL, "-k", "tokenizer_that_reads"),
    ),
]
