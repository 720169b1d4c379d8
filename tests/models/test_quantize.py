"""QLoRA: what is trained, exported and sent to the engines is the 4-bit model with its adapters, dequantised."""

from __future__ import annotations

import pytest
import torch

from rlhf_suite.config.declarations.data import DataConfig
from rlhf_suite.config.declarations.ds import DeepSpeedConfig, LoRAConfig
from rlhf_suite.config.declarations.models import TrainedModelConfig
from rlhf_suite.config.declarations.tools import ChatConfig
from rlhf_suite.config.plan.run_plan import ModelPlan
from rlhf_suite.errors import UserError
from rlhf_suite.models.chat_model import ChatModel
from rlhf_suite.models.forward import sequence_scores, token_log_probs
from rlhf_suite.models.load import load_model, load_tokenizer
from rlhf_suite.models.lora import disable_adapters
from rlhf_suite.models.prepare import make_trainable
from rlhf_suite.models.quantize import dequantize
from rlhf_suite.models.save import save_adapter, save_hf
from rlhf_suite.models.weights import weights_on_cpu
from rlhf_suite.rl.judge import TextJudge

CLOSE = {"atol": 1e-5, "rtol": 1e-5}


def quantized(path, head="lm", dtype="fp32"):
    ds = DeepSpeedConfig.of("sft", param_dtype=dtype, packing_samples=True, load_in_4bit=True)
    return load_model(str(path), head=head, ds=ds)


def adapted(model):
    make_trainable(model, TrainedModelConfig.of("ppo"), LoRAConfig(rank=4))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


@pytest.fixture
def tokenizer(folder):
    return load_tokenizer(str(folder()), DataConfig.of("sft"))


@pytest.fixture
def base(load, tokenizer, tmp_path):
    """A folder with weights of some size."""
    pytest.importorskip("bitsandbytes")

    def make(head="lm", **kwargs):
        save_hf(load(head=head, **kwargs), tokenizer, tmp_path / "base")
        return tmp_path / "base"

    return make


def test_matrices_are_in_4_bits_and_other_tensors_as_they_are(base, load):
    path = base()
    model, exact = quantized(path), load(path=path)
    small = {name for name, p in model.named_parameters() if p.dtype == torch.uint8}
    assert len(small) == 14 and all("_proj.weight" in name for name in small)
    for name, parameter in model.named_parameters():
        error = (dequantize(parameter) - exact.get_parameter(name)).abs().max()
        assert 0 < error < 0.2 * exact.get_parameter(name).abs().max() if name in small else error == 0


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_exported_model_computes_what_the_4_bit_model_does(base, load, batch, tokenizer, tmp_path, dtype):
    model = adapted(quantized(base(), dtype=dtype))
    if dtype == "bf16":
        model = model.to(torch.bfloat16)
    save_hf(model, tokenizer, tmp_path / "merged")
    merged = load(path=tmp_path / "merged")
    assert not hasattr(merged.model.config, "quantization_config")
    found, expected = (token_log_probs(each, batch).log_probs for each in (merged, model))
    tolerance = CLOSE if dtype == "fp32" else {"atol": 0.3, "rtol": 0}
    torch.testing.assert_close(found, expected, **tolerance)
    assert weights_on_cpu(model).keys() == weights_on_cpu(merged).keys()


def test_a_reward_model_trains_its_head_in_whole_precision(base, load, batch, tokenizer, tmp_path):
    model = adapted(quantized(base("value"), "value"))
    assert model.model.score.weight.requires_grad and model.model.score.weight.dtype == torch.float32
    save_hf(model, tokenizer, tmp_path / "merged")
    merged = load(head="value", path=tmp_path / "merged")
    torch.testing.assert_close(sequence_scores(merged, batch), sequence_scores(model, batch), **CLOSE)


def test_gradients_are_those_of_the_dequantised_model(base, load, batch, tokenizer, tmp_path):
    path = base()
    small = quantized(path)
    save_hf(small, tokenizer, tmp_path / "whole")
    models = [adapted(small), adapted(load(path=tmp_path / "whole"))]
    for model in models:
        token_log_probs(model, batch).log_probs.sum().backward()
    with torch.no_grad(), disable_adapters(small):
        assert (token_log_probs(small, batch).log_probs - token_log_probs(models[1], batch).log_probs).abs().max() > 0.1
    wanted = {name: p.grad for name, p in models[1].named_parameters() if p.requires_grad}
    for name, parameter in small.named_parameters():
        if parameter.requires_grad:
            assert (parameter.grad - wanted[name]).norm() / wanted[name].norm() < 1e-5, name


def test_the_adapter_alone_is_saved_as_usual(base, tokenizer, tmp_path):
    save_adapter(adapted(quantized(base())), tokenizer, tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_model.safetensors").stat().st_size < 200_000


def test_a_chat_answers_as_the_dequantised_model(base, tokenizer, tmp_path):
    path, settings = base(), ChatConfig(temperature=0, max_new_tokens=12, max_len=256)
    ids = tokenizer("reverse 1234 =")["input_ids"]
    save_hf(quantized(path), tokenizer, tmp_path / "whole")
    answers = {}
    for name, folder, in_4bit in (("4 bits", path, True), ("whole", tmp_path / "whole", False), ("exact", path, False)):
        talker = ChatModel(str(folder), settings, DataConfig.of("chat"), "cpu", load_in_4bit=in_4bit)
        answers[name] = talker.respond(ids, lambda _: None).text
    assert answers["4 bits"] == answers["whole"] != answers["exact"]


def test_a_served_reward_model_scores_as_the_dequantised_one(base, tokenizer, tmp_path):
    path = base("value")
    save_hf(quantized(path, "value"), tokenizer, tmp_path / "whole")
    scores = {}
    for name, folder, in_4bit in (("4 bits", path, True), ("whole", tmp_path / "whole", False), ("exact", path, False)):
        ds = DeepSpeedConfig.of("serve_rm", param_dtype="fp32", packing_samples=True, load_in_4bit=in_4bit)
        judge = TextJudge(ModelPlan("reward", str(folder), "value", load_in_4bit=in_4bit), ds, "cpu", None, 8)
        scores[name] = torch.tensor(judge.scores([judge.encode(text) for text in ("reverse 1234", "sort 31", "yes")]))
    torch.testing.assert_close(scores["4 bits"], scores["whole"], **CLOSE)
    assert float((scores["4 bits"] - scores["exact"]).abs().max()) > 1e-2


def test_without_the_package_the_error_says_how_to_get_it(folder, monkeypatch):
    monkeypatch.setattr("rlhf_suite.config.check.lacking.find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"pip install 'rlhf-suite\[qlora\]'"):
        quantized(folder())
