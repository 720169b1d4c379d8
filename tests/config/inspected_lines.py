"""Command lines, the files of a model, and the problems that their inspection has."""

from __future__ import annotations

import json
import shlex
import struct

from rlhf_suite.composition.arguments import parse
from rlhf_suite.preflight.inspections.inspect_runs import inspect
from rlhf_suite.preflight.jobs import preflight

CONFIG = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "max_position_embeddings": 512}
LANGUAGE, SCORE = {"model.embed_tokens.weight": [8, 4]}, {"score.weight": [1, 4]}


def write_weights(file, shapes):
    """A safetensors file of float32 zeros."""
    names, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 4 * shape[0] * shape[1]
        names[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    header = json.dumps(names).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * end)


def found(line, folder=None):
    """The problems of a command line that has none before its inspection, as (flag, what and fix)."""
    result = preflight(parse(shlex.split(line)))
    assert result.problems == []
    return [(each.key, f"{each.what}; {each.fix}") for each in inspect(result.runs, folder)]


def one(line, folder=None):
    (problem,) = found(line, folder)
    return problem


PPO = "task=ppo data.prompt_dataset=builtin:reverse data.label_key=label "
RULE = PPO + "reward.rule=exact_match data.max_len=256 rollout.max_new_tokens=64 "
SFT = "task=sft data.dataset=builtin:reverse data.output_key=output data.max_len=256 "
