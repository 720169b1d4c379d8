"""Models that a run cannot use are found in their files before it starts."""

from __future__ import annotations

import json

import pytest
from inspected_lines import CONFIG, PPO, RULE, SCORE, SFT, found, one

from rlhf_suite.preflight.inspections import hub as hub_inspection
from rlhf_suite.preflight.inspections.model_files import files_of
from rlhf_suite.preflight.inspections.model_uses import ModelUse
from rlhf_suite.preflight.inspections.models import reads_images

MODEL = "actor.model_name_or_path"


def test_a_model_that_is_as_it_should_be_is_accepted_everywhere(model):
    path, judge = (
        model(tokenizer={"chat_template": "x"}),
        model("rm", SCORE, architectures=["Qwen3ForSequenceClassification"]),
    )
    assert found(SFT + f"actor.model_name_or_path={path} data.apply_chat_template=true") == []
    words = f"actor.model_name_or_path={path} reward.rule=null reward.model_name_or_path={judge}"
    assert found(RULE + words) == []
    assert found(f"task=serve_rm serve.max_len=512 reward.model_name_or_path={judge}") == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"without": ["config.json"]}, "has no config.json"),
        ({"without": ["model.safetensors"]}, "has no weights"),
        ({"without": ["tokenizer.json", "tokenizer_config.json"]}, "has no tokenizer"),
        ({"model_type": "qwen99"}, "'qwen99', which the installed transformers does not know"),
        ({"model_type": "own", "auto_map": {"AutoConfig": "x.C"}}, "add launch.trust_remote_code=true"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised weights (gptq), which cannot be trained"),
        (
            {"shapes": SCORE, "architectures": ["Qwen3ForSequenceClassification"]},
            "is a Qwen3ForSequenceClassification, which scores texts and cannot write them",
        ),
    ],
)
@pytest.mark.parametrize("line", [SFT, RULE], ids=["sft", "ppo"])
def test_a_model_that_cannot_be_trained_is_refused(model, line, changes, words):
    key, said = found(line + f"actor.model_name_or_path={model(**changes)}")[0]
    assert key == "actor.model_name_or_path" and words in said


STATES = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}


@pytest.mark.parametrize(
    ("settings", "key", "words"),
    [
        ({"model_type": "olmo_hybrid"}, MODEL, "OLMo-hybrid needs kernels of Triton in vLLM, so an engine without a"),
        ({"model_type": "minimax_m2"}, MODEL, "MiniMax-M2 cannot get other weights in vLLM 0.32, so an engine"),
        ({"model_type": "qwen3_5_text"}, "ds.param_dtype", "need bf16 weights"),
        ({"model_type": "qwen3_5_text"} | STATES, "ds.param_dtype", "need bf16 weights"),
        (
            {"model_type": "qwen3_next"} | STATES | {"linear_key_head_dim": 64},
            MODEL,
            "Qwen3-Next has linear_key_head_dim=64 and linear_value_head_dim=128, and vLLM's kernels there need the",
        ),
        (
            {"model_type": "qwen3_next", "linear_key_head_dim": 256, "linear_value_head_dim": 256},
            MODEL,
            "need the same of 64, 128 for both, so an engine without a GPU cannot serve it",
        ),
        (
            {"model_type": "nemotron_h", "layers_block_type": ["mamba", "moe"]},
            MODEL,
            "Nemotron-H has layers of type moe, for which vLLM has no kernels there",
        ),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "M-E*"}, MODEL, "has layers of type E, for which"),
        (
            {"model_type": "llama4_text", "attention_chunk_size": 48},
            MODEL,
            "has chunks of 48 tokens, and vLLM's blocks",
        ),
        (
            {"model_type": "deepseek_v3", "kv_lora_rank": 16, "qk_rope_head_dim": 16},
            MODEL,
            "latent heads (kv_lora_rank + qk_rope_head_dim)",
        ),
    ],
)
@pytest.mark.vllm
def test_a_family_that_vllm_does_not_serve_without_a_gpu_is_refused(model, settings, key, words, tmp_path):
    path = model(**settings)
    rest = f"actor.model_name_or_path={path} launch.device=cpu"
    problems = [(flag, said) for flag, said in found(f"{RULE}{rest} ds.param_dtype=fp32", tmp_path) if words in said]
    assert [flag for flag, _ in problems] == [key]
    assert (
        not any(words in said for _, said in found(f"{RULE}{rest} ds.param_dtype=bf16", tmp_path))
        or key != "ds.param_dtype"
    )
    assert not any(words in said for _, said in found(f"{SFT}{rest}", tmp_path))


@pytest.mark.parametrize(
    "settings",
    [
        {"model_type": "qwen3_next"} | STATES,
        {"model_type": "nemotron_h", "hybrid_override_pattern": "M-M*"},
        {"model_type": "llama4_text", "attention_chunk_size": 8192},
        {"model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_rope_head_dim": 64},
    ],
)
@pytest.mark.vllm
def test_a_model_of_a_family_that_has_kernels_is_accepted(model, settings, tmp_path):
    rest = f"actor.model_name_or_path={model(**settings)} launch.device=cpu ds.param_dtype=bf16"
    assert not any("vLLM" in said for _, said in found(f"{RULE}{rest}", tmp_path))


def test_a_model_that_reads_no_images_is_refused(model):
    path = model(tokenizer={"chat_template": "x"})
    line = f"{SFT}data.apply_chat_template=true data.output_key=output actor.model_name_or_path={path}"
    assert found(line) == []
    key, said = one(f"{line} data.image_key=output")
    assert (
        key == "actor.model_name_or_path"
        and "that reads images (" in said
        and "idefics3" in said
        and "is a qwen3: it has no vision_config; give" in said
    )
    seeing = model("seeing", model_type="idefics3", vision_config={}, tokenizer={"chat_template": "x"})
    _, said = one(f"{line.replace(str(path), str(seeing))} data.image_key=output")
    assert "has no processor_config.json" in said


@pytest.mark.parametrize(
    ("kind", "tower", "why"),
    [
        ("gemma4", {}, "the tokens of an image see later ones in its layers with a window alone"),
        ("llava_onevision", {}, "depends on how many images are beside it"),
        ("llava", {"model_type": "pixtral"}, "its tower needs the size of each image"),
        ("ovis2", {}, "have not been compared"),
    ],
)
@pytest.mark.parametrize("task", ["sft", "dpo", "ppo"])
def test_a_family_whose_images_are_not_known_here_is_refused_with_the_reason(model, task, kind, tower, why):
    path = model("other", model_type=kind, vision_config=tower, tokenizer={"chat_template": "x"})
    lines = {
        "sft": f"{SFT}data.output_key=output ",
        "dpo": "task=dpo data.dataset=builtin:reverse_pairs ",
        "ppo": f"{RULE}algo.advantage.estimator=reinforce ",
    }
    line = f"{lines[task]}data.apply_chat_template=true data.image_key=image actor.model_name_or_path={path}"
    (key, said) = one(line)
    assert key == "actor.model_name_or_path"
    assert "qwen2_5_vl" in said and f"is a {kind}: " in said and why in said


def test_a_text_model_of_a_family_that_reads_images_is_refused_with_images(model):
    path = model("text", model_type="qwen3_5", tokenizer={"chat_template": "x"})
    words = "data.output_key=output data.apply_chat_template=true data.image_key=image"
    _, said = one(f"{SFT}{words} actor.model_name_or_path={path}")
    assert "is a qwen3_5: it has no vision_config" in said


def test_an_image_longer_than_the_window_is_not_sampled(model):
    for window, problems in ((256, 0), (255, 1)):
        path = model(
            f"window{window}", model_type="gemma3", vision_config={}, mm_tokens_per_image=256,
            text_config={"sliding_window": window}, tokenizer={"chat_template": "x"},
        )  # fmt: skip
        (path / "processor_config.json").write_text("{}")
        words = f"data.apply_chat_template=true data.image_key=image actor.model_name_or_path={path}"
        assert found(f"{SFT}data.output_key=output {words}") == []
        assert len(found(f"{RULE}algo.advantage.estimator=reinforce {words}")) == problems
    _, said = one(f"{RULE}algo.advantage.estimator=reinforce {words}")
    assert "256 tokens, more than its sliding_window=255" in said


def test_a_critic_that_reads_images_otherwise_than_the_policy_is_refused(model):
    actor, critic = (
        model(kind, model_type=kind, vision_config={}, tokenizer={"chat_template": "x"})
        for kind in ("qwen2_5_vl", "qwen3_vl")
    )
    for folder in (actor, critic):
        (folder / "processor_config.json").write_text("{}")
    line = f"{RULE}algo.advantage.estimator=gae data.apply_chat_template=true data.image_key=image "
    line += f"actor.model_name_or_path={actor} critic.model_name_or_path="
    assert found(line + str(actor)) == []
    key, said = one(line + str(critic))
    assert key == "critic.model_name_or_path" and "is a qwen3_vl and reads images as other tokens" in said


def test_a_kernel_that_hides_tokens_of_an_image_from_each_other_is_refused(model):
    path = model("whole", model_type="gemma3", vision_config={}, tokenizer={"chat_template": "x"})
    (path / "processor_config.json").write_text("{}")
    words = "data.output_key=output data.apply_chat_template=true data.image_key=image"
    assert found(f"{SFT}{words} actor.model_name_or_path={path} ds.attn_implementation=varlen") == []
    use = ModelUse("actor.model_name_or_path", str(path), reads_images=True, attention="flash_attention_2")
    (problem,) = reads_images(use, files_of(path))
    assert "does not let the tokens of an image of Gemma 3 see each other" in problem.what


@pytest.mark.parametrize("task", ["ppo", "score", "serve_rm", "rejection_sampling"])
def test_a_language_model_does_not_score(model, task, tmp_path):
    words = {
        "ppo": RULE + "reward.rule=null actor.model_name_or_path=builtin:tiny ",
        "score": "task=score data.dataset=builtin:reverse data.output_key=output data.max_len=256 ",
        "serve_rm": "task=serve_rm serve.max_len=256 ",
        "rejection_sampling": "task=rejection_sampling actor.model_name_or_path=builtin:tiny "
        "data.prompt_dataset=builtin:reverse data.max_len=256 rollout.max_new_tokens=64 ",
    }[task]
    key, said = one(words + f"reward.model_name_or_path={model()}")
    assert key == "reward.model_name_or_path"
    assert "has no tensor score.weight to score with (Qwen3ForCausalLM)" in said


def test_a_reward_model_may_call_its_head_otherwise_and_has_one_output(model):
    line = "task=serve_rm serve.max_len=512 reward.model_name_or_path="
    named = model("named", {"value_head.weight": [1, 4]})
    assert "ds.value_head_prefix=<name>" in one(line + str(named))[1]
    assert found(line + f"{named} ds.value_head_prefix=value_head") == []
    assert "has 3 outputs in score.weight" in one(line + str(model("three", {"score.weight": [3, 4]})))[1]


def test_the_head_that_openrlhf_names_in_the_checkpoint_is_found(model):
    folder = model("named", {"value_head.weight": [1, 4]}, value_head_prefix="value_head")
    assert found(f"task=serve_rm serve.max_len=512 reward.model_name_or_path={folder}") == []


def with_vocabulary(folder, vocabulary, special):
    tokens = [{"content": token, "id": number} for token, number in special.items()]
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": tokens}))
    return folder


def test_a_reward_model_that_reads_other_words_in_the_policys_tokens_is_found(model):
    policy = with_vocabulary(model(), {"a": 0, "b": 1}, {"<eos>": 2})
    line = RULE + f"reward.rule=null actor.model_name_or_path={policy} data.apply_chat_template=false "
    line += "reward.model_name_or_path="
    for name, more in (("same", {}), ("with another token", {"<pad>": 3})):
        fine = with_vocabulary(model(name.replace(" ", "_"), SCORE), {"b": 1, "a": 0}, {"<eos>": 2} | more)
        assert found(line + str(fine)) == []
    for number, (vocabulary, special, said) in enumerate((
        ({"a": 1, "b": 0}, {"<eos>": 2}, "'a' is 1 and 0"),
        ({"a": 0, "b": 1}, {}, "2 and 3 tokens; '<eos>' is None and 2"),
        ([["a", -1.0], ["c", -2.0]], {"<eos>": 2}, "'b' is None and 1"),
    )):  # fmt: skip
        other = with_vocabulary(model(f"other{number}", SCORE), vocabulary, special)
        key, words = one(line + str(other))
        assert key == "reward.model_name_or_path" and said in words
    several = f"'reward.sources={{a: {{model_name_or_path: {fine}}}, b: {{model_name_or_path: {other}}}}}'"
    assert one(line.rpartition(" ")[0] + f" {several}")[0] == "reward.sources.b.model_name_or_path"
    sizes = [model(name, SCORE, ["tokenizer.json"], vocab_size=size) for name, size in (("few", 2), ("as_many", 3))]
    line = line.replace(str(policy), str(model("sized", vocab_size=3)))
    assert "has a vocabulary of 2 tokens, but the policy has 3" in one(line + str(sizes[0]))[1]
    assert found(line + str(sizes[1])) == []


@pytest.mark.parametrize(
    "line",
    [
        "task=distill data.dataset=builtin:reverse data.output_key=output teacher.model_name_or_path={} ",
        f"{RULE} algo.distill.coef=1 teacher.model_name_or_path={{}} ",
        f"{RULE} algo.distill.coef=1 'teacher.sources={{{{a: {{{{model_name_or_path: {{}}}}}}}}}}' ",
    ],
)
def test_a_teacher_with_another_vocabulary_is_found(model, line):
    student = with_vocabulary(model(), {"a": 0, "b": 1}, {"<eos>": 2})
    line += f"actor.model_name_or_path={student} data.apply_chat_template=false data.max_len=128"
    same, other = (
        with_vocabulary(model(name), vocabulary, {"<eos>": 2})
        for name, vocabulary in (("same", {"b": 1, "a": 0}), ("other", {"a": 1, "b": 0}))
    )
    assert found(line.format(same)) == []
    key, words = one(line.format(other))
    assert key.startswith("teacher.") and "'a' is 1 and 0" in words and "give a teacher of the student's" in words


def test_weights_that_are_not_whole_are_named(model):
    folder = model()
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(60)
    assert "model.safetensors is not complete" in one(SFT + f"actor.model_name_or_path={folder}")[1]
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (sharded := model("sharded")).joinpath("model.safetensors.index.json").write_text(json.dumps(index))
    (sharded / "model.safetensors").rename(sharded / "model-1.safetensors")
    assert "has no file model-2.safetensors" in one(SFT + f"actor.model_name_or_path={sharded}")[1]


def test_an_adapter_is_not_a_model(model, tmp_path):
    folder = model(without=["config.json"])
    (folder / "adapter_config.json").write_text("{}")
    assert f"task=merge_lora lora.path={folder}" in one(SFT + f"actor.model_name_or_path={folder}")[1]


@pytest.mark.parametrize("line", [SFT, RULE, "task=generate data.prompt_dataset=builtin:reverse data.max_len=256 "])
def test_a_missing_chat_template_is_found(model, line):
    path = model()
    key, said = one(line + f"actor.model_name_or_path={path} data.apply_chat_template=true")
    assert key == "data.apply_chat_template" and "has no chat template" in said
    words = f"actor.model_name_or_path={path} data.apply_chat_template=true "
    assert found(line + words + "data.tokenizer_chat_template=t.jinja") == []
    (path / "chat_template.jinja").write_text("x")
    assert found(line + words) == []


@pytest.mark.notices(
    "an answer in a chat may fill all positions of the model",
    "preflight/inspections/model_uses.py",
    "length=run.chat.max_new_tokens + 1)",
    "length=run.chat.max_new_tokens)",
)
def test_an_answer_in_a_chat_leaves_room_for_a_message(model):
    """As much room as the model has is the default, so only the length of an answer may be too large."""
    line = f"task=chat actor.model_name_or_path={model()} "  # of 512 positions
    assert found(line + "chat.max_new_tokens=511") == []
    for words in ("", "chat.max_new_tokens=512"):
        key, said = one(line + words)
        assert key == "chat.max_new_tokens" and "write chat.max_new_tokens=256, or less" in said
    key, said = one(line + "chat.max_len=600")
    assert key == "chat.max_len" and "write chat.max_len=512, or less" in said


@pytest.mark.parametrize(
    ("settings", "positions"),
    [
        ({}, 512),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}}, 2048),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 1024),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 2.0}}}, 1024),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}}, 512),
        ({"max_position_embeddings": None, "text_config": {"max_position_embeddings": 128}}, 128),
    ],
)
def test_more_tokens_than_a_model_has_positions_are_refused(model, settings, positions):
    path = model(tokenizer={"chat_template": "x"}, **{k: v for k, v in settings.items() if v is not None})
    if "text_config" in settings:
        kept = {key: value for key, value in CONFIG.items() if key != "max_position_embeddings"}
        (path / "config.json").write_text(json.dumps(kept | {"text_config": settings["text_config"]}))
    for line in (SFT, PPO + "reward.rule=exact_match rollout.max_new_tokens=64 "):
        words = line + f"actor.model_name_or_path={path} data.max_len="
        key, said = one(words + str(positions + 1))
        assert key == "data.max_len" and f"write data.max_len={positions}" in said
        assert found(words + str(positions)) == []


def test_a_hub_name_in_the_cache_is_inspected_as_a_folder(model, tmp_path, monkeypatch):
    monkeypatch.setattr(hub_inspection, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(hub_inspection, "HF_HUB_OFFLINE", True)
    cached = tmp_path / "models--org--model"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("abc")
    (cached / "snapshots").mkdir()
    model().rename(cached / "snapshots" / "abc")
    line = SFT + "actor.model_name_or_path=org/model "
    assert found(line, tmp_path) == []
    assert "512 positions" in one(line + "data.max_len=600", tmp_path)[1]
