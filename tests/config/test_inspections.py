"""What files and servers show about a run is found before anything heavy is imported."""

from __future__ import annotations

import json
import shlex
import socket
import struct
from contextlib import closing

import pyarrow
import pytest
from pyarrow.parquet import write_table

from rlhf_suite.composition.arguments import parse
from rlhf_suite.preflight.inspections import hub as hub_inspection
from rlhf_suite.preflight.inspections import inspect
from rlhf_suite.preflight.inspections.model_files import head_sizes_on_cpu, scorer_types
from rlhf_suite.preflight.inspections.network import first_hop, unreachable
from rlhf_suite.preflight.jobs import preflight

REWARD = "def reward_func(queries, prompts, labels):\n    return [0.0] * len(queries)\n"
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


@pytest.mark.notices(
    "nobody looks for the command of an MCP server",
    "preflight/inspections/machine.py",
    "shutil.which(command) is None",
    "shutil.which(command) is False",
)
@pytest.mark.parametrize(
    ("server", "what"),
    [
        ("mcp:no-such-command server.py", "there is no command 'no-such-command'"),
        ("mcp:'bash server.py", "No closing quotation"),
        ("mcp:bash -c true", None),
        ("mcp:http://host:8000/mcp", None),
    ],
)
def test_the_command_of_a_server_of_tools_is_on_this_machine(server, what):
    tools = shlex.quote(f"agent.tools=[{json.dumps(server)}]")
    line = f"task=ppo demo=ppo agent.kind=tools {tools} data.apply_chat_template=true"
    problems = found(line)
    assert [key for key, _ in problems] == (["agent.tools"] if what else [])
    assert all(what in text for _, text in problems)


@pytest.fixture
def model(tmp_path):
    """Makes a model folder, with other settings or files than those of a language model."""

    def make(name="model", shapes=LANGUAGE, without=(), tokenizer=None, **settings):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(CONFIG | settings))
        write_weights(folder / "model.safetensors", shapes)
        (folder / "tokenizer.json").write_text("{}")
        (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer or {}))
        for file in without:
            (folder / file).unlink()
        return folder

    return make


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
FILES = (
    (PPO + "actor.model_name_or_path=builtin:tiny ", "reward.remote_url={}"),
    ("task=check_reward data.dataset=builtin:reverse data.output_key=output ", "reward.remote_url={}"),
    ("task=score data.dataset=builtin:reverse data.output_key=output ", "reward.remote_url={}"),
    (
        "task=generate actor.model_name_or_path=builtin:tiny data.prompt_dataset=builtin:reverse ",
        "reward.remote_url={}",
    ),
    (
        "task=rejection_sampling actor.model_name_or_path=builtin:tiny data.prompt_dataset=builtin:reverse ",
        "reward.remote_url={}",
    ),
    (PPO + "actor.model_name_or_path=builtin:tiny ", "'reward.sources={{a: {{remote_url: {}}}}}'"),
)


@pytest.mark.parametrize(("line", "flag"), FILES)
def test_a_syntax_error_of_a_reward_file_is_found_with_its_line(line, flag, tmp_path):
    file = tmp_path / "reward.py"
    file.write_text("import math\ndef reward_func(queries, prompts, labels)\n    return 1\n")
    key, said = one(line + flag.format(file))
    assert key == ("reward.sources.a.remote_url" if "sources" in flag else "reward.remote_url")
    assert f"{file}:2: expected ':'" in said


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("def score(queries, prompts, labels): ...\n", "defines no reward_func; its functions are score"),
        ("", "defines no reward_func"),
        ("def reward_func(queries): ...\n", "reward.py:1: reward_func takes 1 arguments, not 3"),
        ("return 1\n", "'return' outside function"),
        ("x = '\0'\n", "null bytes"),
        ("# coding: nonsense\n", "unknown encoding"),
        ("def f():\n    reward_func = 1\n", "defines no reward_func"),
    ],
)
def test_a_reward_file_without_the_function_is_refused(content, words, tmp_path):
    (tmp_path / "reward.py").write_text(content)
    assert words in one(FILES[0][0] + f"reward.remote_url={tmp_path}/reward.py")[1]


@pytest.mark.parametrize(
    "content",
    [
        REWARD,
        "async " + REWARD,
        "def reward_func(*args): ...\n",
        "def reward_func(queries, prompts, labels, answer=None, **columns): ...\n",
        "from other import reward_func\n",
        "from other import score as reward_func\n",
        "from other import *\n",
        "if True:\n    def reward_func(a, b, c): ...\n",
        "reward_func = make()\n",
        "import math, functools\n\n@functools.cache\ndef reward_func(x): ...\n",
        "pattern = '\\d'\n" + REWARD,
    ],
)
def test_a_reward_file_that_binds_the_function_is_accepted(content, tmp_path, recwarn):
    (tmp_path / "reward.py").write_text(content)
    assert found(FILES[0][0] + f"reward.remote_url={tmp_path}/reward.py") == []
    assert not recwarn.list


@pytest.fixture
def closed_port():
    """A port at which nobody listens."""
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.fixture
def open_port():
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        yield server.getsockname()[1]


def test_reward_servers_that_are_all_down_are_named_in_the_job_itself(tmp_path, closed_port, open_port):
    line = FILES[0][0] + "reward.rule=null 'reward.remote_url=\"{}\"'"
    down = f"http://127.0.0.1:{closed_port}/get_reward"
    key, said = one(line.format(f"{down},{down}"), tmp_path)
    assert key == "reward.remote_url" and f"127.0.0.1:{closed_port}: Connection refused" in said
    assert found(line.format(down)) == []  # a login node may not see it
    assert found(line.format(f"{down},http://127.0.0.1:{open_port}/get_reward"), tmp_path) == []


def test_servers_are_asked_together_and_a_name_that_does_not_exist_is_one_that_is_down(closed_port, open_port):
    servers = [("127.0.0.1", closed_port), ("127.0.0.1", open_port), ("no-such-host.invalid", 80), ("", 1)]
    assert ("127.0.0.1", open_port) not in unreachable(servers, 5)
    assert {("127.0.0.1", closed_port), ("no-such-host.invalid", 80)} <= {*unreachable(servers, 5)}


def test_a_proxy_of_the_environment_is_what_has_to_answer(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://proxy.example:3128")
    monkeypatch.setenv("no_proxy", "near.example")
    assert first_hop("http://far.example:5000/x") == ("proxy.example", 3128)
    assert first_hop("http://near.example:5000/x") == ("near.example", 5000)
    assert first_hop("http://127.0.0.1:5000/x") == ("127.0.0.1", 5000)
    assert first_hop("http://near.example/x") == ("near.example", 80)


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


def test_a_model_that_reads_no_images_is_refused(model):
    path = model(tokenizer={"chat_template": "x"})
    line = f"{SFT}data.apply_chat_template=true data.output_key=output actor.model_name_or_path={path}"
    assert found(line) == []
    key, said = one(f"{line} data.image_key=output")
    assert key == "actor.model_name_or_path" and "reads images (idefics3), and" in said and "is a qwen3; give" in said
    seeing = model("seeing", model_type="idefics3", tokenizer={"chat_template": "x"})
    _, said = one(f"{line.replace(str(path), str(seeing))} data.image_key=output")
    assert "has no processor_config.json" in said


@pytest.mark.parametrize("task", ["sft", "dpo", "ppo"])
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}},
        {"text_config": {"rope_parameters": {"rope_type": "default", "mrope_section": [24, 20, 20]}}},
    ],
)
def test_a_model_with_positions_along_several_axes_reads_no_images_and_the_reason_is_given(model, task, rope):
    """Packed with one position per token, Qwen2.5-VL would compute other log-probs without a word."""
    path = model("axes", model_type="qwen2_5_vl", tokenizer={"chat_template": "x"}, **rope)
    lines = {
        "sft": f"{SFT}data.output_key=output ",
        "dpo": "task=dpo data.dataset=builtin:reverse_pairs ",
        "ppo": f"{RULE}algo.advantage.estimator=reinforce ",
    }
    line = f"{lines[task]}data.apply_chat_template=true data.image_key=image actor.model_name_or_path={path}"
    (key, said) = one(line)
    assert key == "actor.model_name_or_path"
    assert "is a qwen2_5_vl, whose tokens have positions along several axes" in said


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


RING = (
    "task=sft data.dataset=builtin:reverse data.output_key=output ds.packing_samples=true actor.num_gpus_per_node=2 "
    "ds.ring_attn_size=2 "
)


@pytest.mark.parametrize(
    ("mode", "settings", "said"),
    [
        ("gather", {"num_attention_heads": 3}, None),
        ("ulysses", {"num_attention_heads": 4, "num_key_value_heads": 1}, None),
        ("ulysses", {"num_attention_heads": 3}, "3 query and 3 key/value heads"),
        ("ulysses", {"num_attention_heads": 6, "num_key_value_heads": 3}, "6 query and 3 key/value heads"),
        ("ring", {"num_attention_heads": 4, "sliding_window": 99}, "the sliding window of 99 tokens"),
        ("gather", {"num_attention_heads": 4, "sliding_window": 99}, "the sliding window of 99 tokens"),
        ("ring", {"num_attention_heads": 4, "sliding_window": 100}, None),
        ("ring", {"num_attention_heads": 4, "sliding_window": 9, "use_sliding_window": False}, None),
        ("ulysses", {"num_attention_heads": 4, "sliding_window": 99}, None),
    ],
)
def test_the_mode_of_sequence_parallelism_fits_the_model(model, mode, settings, said):
    path = model(tokenizer={"chat_template": "x"}, **settings)
    line = RING + f"ds.ring_attn_mode={mode} data.max_len=100 actor.model_name_or_path={path}"
    if said is None:
        assert found(line) == []
    else:
        key, problem = one(line)
        assert key == "ds.ring_attn_mode" and said in problem


SPLIT = "ds.ring_attn_size=2"


@pytest.mark.notices(
    "what a family of models cannot do is found when it is loaded",
    "preflight/inspections/models.py",
    "        why = family(files).why_not(feature) if is_asked else None\n",
    "        why = None\n",
)
@pytest.mark.parametrize(
    ("settings", "words", "key", "said"),
    [
        ({"model_type": "qwen3_5_text"}, SPLIT, "ds.ring_attn_size", "has gated-delta layers"),
        ({"model_type": "qwen3_5", "text_config": {}}, SPLIT, "ds.ring_attn_size", "has gated-delta layers"),
        ({"model_type": "gpt_oss"}, f"{SPLIT} ds.ring_attn_mode=ring", "ds.ring_attn_mode", "=ulysses"),
        ({"model_type": "gpt_oss"}, f"{SPLIT} ds.ring_attn_mode=ulysses", None, None),
        ({"model_type": "lfm2"}, "ds.tensor_parallel_size=2", "ds.tensor_parallel_size", "has convolution layers"),
        ({"model_type": "gpt_oss"}, "ds.tensor_parallel_size=2", "ds.tensor_parallel_size", "has attention sinks"),
        ({"model_type": "llama4_text"}, "", "ds.packing_samples", "Llama 4 counts the positions"),
        ({"layer_types": ["new"]}, "", "ds.packing_samples", "layers of type new"),
        ({"model_type": "lfm2", "layer_types": ["conv"]}, "", None, None),
    ],
)
def test_what_the_family_of_a_model_cannot_do_is_refused(model, settings, words, key, said):
    path = model(tokenizer={"chat_template": "x"}, **settings)
    packed = f"{SFT} ds.packing_samples=true actor.num_gpus_per_node=2 actor.model_name_or_path={path}"
    problems = found(f"{packed} {words}")
    if key is None:
        assert problems == []
    else:
        assert key in {problem[0] for problem in problems}, problems
        assert any(said in problem[1] for problem in problems), problems


@pytest.mark.parametrize(
    ("model_type", "attention", "said"),
    [
        ("gemma2", "sdpa", "sdpa does not compute the attention of Gemma 2"),
        ("gpt_oss", "sdpa", "write ds.attn_implementation=null, which is varlen for this model"),
        ("llama4_text", "varlen", "which is sdpa for this model"),
        ("gemma2", "eager", None),
        ("gemma2", "null", None),
        ("llama", "sdpa", None),
    ],
)
def test_an_attention_that_computes_something_else_is_refused(model, model_type, attention, said):
    path = model(tokenizer={"chat_template": "x"}, model_type=model_type)
    words = f"{SFT} ds.packing_samples=false ds.attn_implementation={attention} actor.model_name_or_path={path}"
    problems = found(words)
    assert problems == [] if said is None else [said in problem[1] for problem in problems] == [True]


def test_a_family_without_a_score_head_trains_no_reward_model_and_no_critic(model):
    path = model(tokenizer={"chat_template": "x"}, model_type="lfm2")
    key, said = one(f"task=rm data.dataset=builtin:reverse_pairs data.max_len=256 actor.model_name_or_path={path}")
    assert key == "actor.model_name_or_path" and "no model of this type with a score head" in said
    line = f"{RULE} actor.model_name_or_path=builtin:tiny critic.model_name_or_path={path}"
    key, said = one(f"{line} algo.advantage.estimator=gae")
    assert key == "critic.model_name_or_path" and "algo.advantage.estimator=rloo" in said
    assert "qwen3" in scorer_types() and "llama" in scorer_types()


def test_a_head_whose_settings_mean_nothing_known_is_refused(model):
    path = model(tokenizer={"chat_template": "x"}, model_type="llama", logits_scaling=8.0)
    assert "logits_scaling (8.0)" in one(f"{SFT} actor.model_name_or_path={path}")[1]
    path = model("other", tokenizer={"chat_template": "x"}, model_type="granite", logits_scaling=8.0)
    assert found(f"{SFT} actor.model_name_or_path={path}") == []


TENSOR = (
    "task=sft data.dataset=builtin:reverse data.output_key=output actor.num_gpus_per_node=4 ds.tensor_parallel_size=4 "
    "data.max_len=100 "
)


@pytest.mark.notices(
    "the preflight takes the matrices of a mixture of experts for divisible",
    "preflight/inspections/models.py",
    'if experts is not None or files.setting("vision_config") is not None:',
    'if files.setting("vision_config") is not None:',
)
@pytest.mark.notices(
    "the preflight looks at no width of a model",
    "preflight/inspections/models.py",
    "if isinstance(size, int) and size % use.tensor:",
    "if isinstance(size, int) and size < use.tensor:",
)
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 12}, None),
        ({"num_attention_heads": 8, "num_key_value_heads": 2}, "4 ranks cannot split the num_key_value_heads=2"),
        ({"num_attention_heads": 6, "num_key_value_heads": 8}, "write ds.tensor_parallel_size=2"),
        ({"num_attention_heads": 4, "intermediate_size": 9}, "write ds.tensor_parallel_size=1"),
        ({"num_attention_heads": 4, "num_local_experts": 8}, "a mixture of experts (num_local_experts)"),
        ({"num_attention_heads": 4, "vision_config": {}}, "a model that reads images"),
    ],
)
def test_tensor_parallelism_fits_the_model(model, settings, said):
    line = TENSOR + f"actor.model_name_or_path={model(tokenizer={'chat_template': 'x'}, **settings)}"
    if said is None:
        assert found(line) == []
    else:
        key, problem = one(line)
        assert key == "ds.tensor_parallel_size" and said in problem


def test_a_hub_name_that_is_not_cached_needs_a_network(tmp_path, monkeypatch, closed_port):
    line = SFT + "actor.model_name_or_path=org/model"
    monkeypatch.setattr(hub_inspection, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(hub_inspection, "ENDPOINT", f"http://127.0.0.1:{closed_port}")
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    key, said = one(line, tmp_path)
    assert (
        key == "actor.model_name_or_path" and f"cannot be reached (127.0.0.1:{closed_port}: Connection refused)" in said
    )
    assert "hf download org/model" in said
    assert found(line) == []  # a sweep's parent does not ask the network
    monkeypatch.setattr(hub_inspection, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE forbids" in one(line, tmp_path)[1]
    data = "task=sft actor.model_name_or_path=builtin:tiny data.dataset=org/rows data.output_key=output"
    assert "hf download org/rows --repo-type dataset" in one(data, tmp_path)[1]


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


def test_a_text_that_is_no_name_of_the_hub_is_refused_at_once():
    line = "task=sft actor.model_name_or_path=builtin:tiny 'data.dataset=\"a b!\"' data.output_key=output"
    assert "nor a name of the hub" in one(line)[1]


@pytest.mark.parametrize("name", ["rows.xlsx", "rows", "rows.jsonl.zip"])
def test_a_file_of_an_unknown_type_is_refused(name, tmp_path):
    (tmp_path / name).write_text("x")
    (problem,) = preflight(
        parse(["task=sft", "actor.model_name_or_path=x", f"data.dataset={tmp_path / name}"])
    ).problems
    assert "is not of a known type" in problem.what and ".jsonl.gz" in problem.fix


def test_a_folder_without_data_is_refused_and_the_columns_of_parquet_are_known(tmp_path):
    (tmp_path / "notes.md").write_text("x")
    (problem,) = preflight(parse(["task=sft", "actor.model_name_or_path=x", f"data.dataset={tmp_path}"])).problems
    assert "has no data files" in problem.what
    file = tmp_path / "rows.parquet"
    write_table(pyarrow.table({"question": ["a"], "output": ["b"]}), file)
    (problem,) = preflight(parse(["task=sft", "actor.model_name_or_path=x", f"data.dataset={file}"])).problems
    assert problem.key == "data.input_key" and "<one of question, output>" in problem.fix


@pytest.mark.parametrize(
    ("line", "name", "fix"),
    [
        (SFT + "actor.model_name_or_path=x eval.dataset=builtin:reverse ", "accuracy", "=eval/gpt_loss, or none"),
        (SFT + "actor.model_name_or_path=x eval.dataset=builtin:reverse ", "eval/gpt_los", "did you mean ckpt.best_"),
        (RULE + "actor.model_name_or_path=x eval.dataset=builtin:reverse eval.steps=1 ", "eval/pass3", "eval/pass"),
        (RULE + "actor.model_name_or_path=x eval.dataset=builtin:reverse eval.steps=1 ", "pass1", "eval/pass1"),
        (RULE + "actor.model_name_or_path=x eval.dataset=builtin:reverse eval.steps=1 ", "eval/num_samples", "eval/"),
    ],
)
def test_an_unknown_metric_for_the_best_checkpoint_is_refused(line, name, fix):
    (problem,) = preflight(parse(shlex.split(line + f"ckpt.best_metric_key={name}"))).problems
    assert problem.key == "ckpt.best_metric_key" and fix in problem.fix


def test_a_metric_without_a_better_side_is_refused_with_those_that_have_one():
    line = "task=dpo actor.model_name_or_path=x eval.dataset=builtin:reverse ckpt.best_metric_key=eval/chosen_reward"
    found = [each for each in preflight(parse(line.split())).problems if each.key == "ckpt.best_metric_key"]
    (problem,) = found
    assert problem.what.startswith("of eval/chosen_reward neither more nor less is better")
    assert "eval/acc" in problem.what and "eval/chosen_logps" not in problem.what


@pytest.mark.parametrize("name", ["eval/pass1", "eval/pass2", "eval/pass4", "eval/math/reward", "none"])
def test_a_metric_that_is_measured_is_accepted(name):
    line = RULE + "actor.model_name_or_path=x eval.dataset=builtin:reverse eval.steps=1 ckpt.best_metric_key="
    assert preflight(parse(shlex.split(line + name))).problems == []


@pytest.mark.notices(
    "heads whose size is the default of their family are taken from the width",
    "preflight/inspections/model_files.py",
    "            return int(default[1])\n",
    "            pass\n",
)
@pytest.mark.notices(
    "heads without kernels are found by the engine",
    "preflight/inspections/models.py",
    "    if sizes and size is not None and size not in sizes:\n",
    "    if False:\n",
)
@pytest.mark.parametrize(
    ("settings", "size"),
    [
        ({"head_dim": 24}, 24),
        ({"head_dim": 64}, None),
        ({"hidden_size": 96, "num_attention_heads": 4}, None),  # qwen3 has 128 where nothing is said
        ({"model_type": "llama", "hidden_size": 96, "num_attention_heads": 4}, 24),
        ({"model_type": "llama", "hidden_size": 96, "num_attention_heads": 3}, None),
        ({"model_type": "gpt2", "n_embd": 96, "n_head": 2}, 48),
        ({"text_config": {"model_type": "gemma3_text", "hidden_size": 2560, "num_attention_heads": 8}}, None),
        ({"head_dim": 24, "kv_lora_rank": 512}, None),
    ],
)
def test_attention_heads_without_kernels_on_the_cpu_are_told_before_the_start(model, tmp_path, settings, size):
    path, folder = model(**settings), tmp_path / "run"
    line = f"{PPO}reward.rule=exact_match rollout.max_new_tokens=64 data.max_len=256 actor.model_name_or_path={path} "
    assert found(line + "launch.device=cpu") == [], "which machine it will be is not known yet"
    said = [text for _, text in found(line + "launch.device=cpu", folder)]
    assert [f"have {size} dimensions" in each for each in said] == ([True] if size else [])
    sft = f"{SFT}actor.model_name_or_path={path}"
    assert found(sft, folder) == []


def test_the_sizes_of_heads_are_those_of_vllm():
    vllm = pytest.importorskip("vllm.v1.attention.backends.cpu_attn")
    assert list(head_sizes_on_cpu()) == vllm.CPUAttentionBackend.get_supported_head_sizes()


@pytest.mark.notices(
    "the address of a cluster is not tried before the run",
    "preflight/inspections/machine.py",
    '        yield Problem("launch.ray_address", problem, fix)\n',
    "        pass\n",
)
def test_a_cluster_that_accepts_no_connection_is_found_before_the_run(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        line = f"task=ppo demo=ppo launch.ray_address={address}"
        assert found(line, tmp_path) == []
    key, said = one(line, tmp_path)
    assert key == "launch.ray_address" and f"no Ray cluster accepts a connection at {address}" in said
    assert found(line) == found("task=ppo demo=ppo launch.ray_address=auto", tmp_path) == []
