"""What one rank holds and computes when ranks split the tokens of a batch: `python benchmarks/long_context.py`.

Every row is one forward and backward pass over one row of packed tokens, on gloo ranks of one thread each, with a
random model. It prints one JSON line per row: megabytes (2^20 bytes) that autograd saves of activations, the growth of
the resident memory to its highest point, CPU seconds, all of the rank with the most, and the sum of the CPU seconds.
The first number is the same on every machine. Linux only.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests")]

from ranks import Ranks  # noqa: E402 - it is found by the line above
from rlhf_suite.distributed.world import World  # noqa: E402

MB = 2**20
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 1024,
}


def model(mode: str, world: World) -> Any:
    """A random language model whose tokens all ranks split."""
    import torch
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM, LlamaConfig

    from rlhf_suite.models.forward import LanguageModel
    from rlhf_suite.models.sequence_parallel import SequenceGroup

    torch.manual_seed(0)
    config = LlamaConfig(**SHAPE, max_position_embeddings=2**20, tie_word_embeddings=True)
    result = LanguageModel(AutoModelForCausalLM.from_config(config, attn_implementation="varlen"), packed=True)
    if world.mesh.size > 1:
        result.sequence_group = SequenceGroup(dist.group.WORLD, world.rank, world.mesh.size, mode)
    return result


def highest_memory() -> int:
    """The most resident memory of this process since it was last reset, in bytes."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))
    assert found is not None
    return int(found[1]) * 1024


def measured(world: World, mode: str, lengths: list[int], checkpointing: bool) -> dict[str, float]:
    """What one pass costs this rank, after a small one that is not counted."""
    import torch

    from rlhf_suite.data.batch import TokenBatch
    from rlhf_suite.models.forward import token_log_probs

    language = model(mode, world)
    language.train()
    if checkpointing:
        language.model.gradient_checkpointing_enable({"use_reentrant": False})
    parameters = {each.untyped_storage().data_ptr() for each in language.parameters()}
    saved: dict[int, int] = {}

    def counted(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    def run(lengths: list[int]) -> None:
        total = sum(lengths)
        ids = torch.arange(total) % SHAPE["vocab_size"]
        batch = TokenBatch(ids, torch.tensor(lengths), torch.ones(total))
        with torch.autograd.graph.saved_tensors_hooks(counted, lambda tensor: tensor):
            loss = -token_log_probs(language, batch).log_probs.mean()
        loss.backward()

    run([64])
    saved.clear()
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the highest point is the present one
    before, cpu = highest_memory(), time.process_time()
    run(lengths)
    return {
        "saved_mb": sum(saved.values()) / MB,
        "peak_growth_mb": (highest_memory() - before) / MB,
        "cpu_s": time.process_time() - cpu,
    }


def row(size: int, mode: str, lengths: list[int], checkpointing: bool) -> dict[str, Any]:
    """One line: the rank with the most of each, on ranks that start for it."""
    ranks = Ranks(size)
    try:
        found = ranks.call(measured, mode, lengths, checkpointing, deadline_s=1800.0)
    finally:
        ranks.close()
    most = {name: round(max(each[name] for each in found), 2) for name in found[0]}
    shown = mode if size > 1 else "one rank"
    total = round(sum(each["cpu_s"] for each in found), 2)
    settings = {"ranks": size, "mode": shown, "lengths": lengths, "checkpointing": checkpointing}
    return settings | most | {"cpu_s_of_all": total}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[6144, 2048], help="tokens of the packed sequences")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--modes", nargs="+", default=["gather", "ring", "ulysses"])
    parser.add_argument("--checkpointing", action="store_true")
    chosen = parser.parse_args()
    for size in chosen.ranks:
        for mode in chosen.modes if size > 1 else chosen.modes[:1]:
            print(json.dumps(row(size, mode, chosen.lengths, chosen.checkpointing)), flush=True)


if __name__ == "__main__":
    main()
