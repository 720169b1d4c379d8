"""A model of random weights whose responses end: after each token with about the same probability, so that lengths are
spread as those of a trained model are. Weights that are merely random end a response once in a thousand tokens."""

from __future__ import annotations

import math
from pathlib import Path

LARGE = 30.0  # the constant feature, beside others of about 1
STEPS = 8  # of the search for the logit


def ending_model(folder: Path, model: str, mean_length: int) -> str:
    """Return `folder`, with a copy of the model whose responses have about `mean_length` tokens at temperature 1.

    One feature of the hidden states is made a constant: every embedding has it, and no layer writes into it. The head
    reads it for the end-of-text token alone, which gives this token a logit above all others.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if (folder / "config.json").exists():
        return str(folder)
    tokenizer = AutoTokenizer.from_pretrained(model)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    head, embeddings = network.get_output_embeddings().weight, network.get_input_embeddings().weight
    with torch.no_grad():
        for name, weight in network.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight[0] = 0
        embeddings[:, 0] = LARGE
        end = tokenizer.eos_token_id
        ids = torch.randint(len(head), (4, 128), generator=torch.Generator().manual_seed(0))
        for _ in range(STEPS):
            found = network(input_ids=ids).logits.float().softmax(-1)[..., end].mean()
            head[end, 0] -= float((found * mean_length).log()) / math.sqrt(embeddings.shape[1])
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
