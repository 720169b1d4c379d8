"""A critic or reward model that OpenRLHF saved scores with its own head."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from rlhf_suite.config.declarations.data import DataConfig
from rlhf_suite.config.declarations.ds import DeepSpeedConfig
from rlhf_suite.models.forward import sequence_scores
from rlhf_suite.models.load import load_model, load_tokenizer
from rlhf_suite.models.reward_model import reward_stats
from rlhf_suite.models.save import save_hf


@pytest.mark.parametrize("name", ["value_head", "score"])
def test_the_head_that_the_checkpoint_names_is_read_whatever_the_flag_says(load, folder, batch, tmp_path, name):
    """OpenRLHF keeps the tensors of the language model, adds `<name>.weight` and writes the name into config.json."""
    model = load(head="value")
    save_hf(model, load_tokenizer(str(folder()), DataConfig.of("sft")), tmp_path)
    file, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    tensors = load_file(file)
    tensors[f"{name}.weight"] = tensors.pop("score.weight")
    save_file(tensors, file, {"format": "pt"})
    written = json.loads(config.read_text()) | {"value_head_prefix": name, "architectures": ["CriticModel"]}
    config.write_text(json.dumps(written | {"mean": 0.5, "std": 2.0}))
    for prefix in ("score", "value_head"):
        ds = DeepSpeedConfig.of("sft", param_dtype="fp32", packing_samples=True, value_head_prefix=prefix)
        again = load_model(str(tmp_path), head="value", ds=ds)
        assert not again.head_is_new and again.head_name == name
        torch.testing.assert_close(sequence_scores(again, batch), sequence_scores(model, batch))
    assert reward_stats(AutoConfig.from_pretrained(tmp_path)) == (0.5, 2.0)
