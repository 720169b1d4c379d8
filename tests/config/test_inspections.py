"""What files and servers show about a run is found before anything heavy is imported."""

from __future__ import annotations

import json
import shlex
import socket
import threading
from contextlib import closing, suppress

import pyarrow
import pytest
from inspected_lines import PPO, RULE, SFT, found, one
from pyarrow.parquet import write_table

from rlhf_suite.api.plans import plan
from rlhf_suite.composition.arguments import parse
from rlhf_suite.errors import UserError
from rlhf_suite.preflight.inspections import hub as hub_inspection
from rlhf_suite.preflight.inspections.network import first_hop, unreachable
from rlhf_suite.preflight.jobs import preflight

REWARD = "def reward_func(queries, prompts, labels):\n    return [0.0] * len(queries)\n"


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


@pytest.mark.notices(
    "a hub that never answers is waited for by a library for minutes",
    "preflight/inspections/hub.py",
    "return silent if is_silent(ENDPOINT, ANSWER_S) else None",
    "return None",
)
@pytest.mark.parametrize("answer", [None, b"", b"HTTP/1.1 503 Service Unavailable\r\n\r\n"])
def test_a_hub_that_takes_connections_must_answer_too(tmp_path, monkeypatch, answer):
    """Any answer will do: the library says what is wrong with it."""

    def serve(listener):
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                if answer is None:
                    silent.append(connection)
                else:
                    connection.recv(1000)
                    connection.sendall(answer)
                    connection.close()

    silent = []
    monkeypatch.setattr(hub_inspection, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(hub_inspection, "ANSWER_S", 0.5 if answer is None else 300.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setattr(hub_inspection, "ENDPOINT", f"http://127.0.0.1:{listener.getsockname()[1]}")
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        problem = hub_inspection.hub_problem()
    assert (problem is not None) == (answer is None)
    assert problem is None or "takes connections, and has not answered within 0.5 s" in problem


def test_an_address_is_neither_a_source_nor_a_model(tmp_path):
    key, said = one(
        "task=sft data.dataset=builtin:reverse data.output_key=output actor.model_name_or_path=https://far.example/a/b",
        tmp_path,
    )
    assert key == "actor.model_name_or_path" and "download it" in said
    data = "task=sft actor.model_name_or_path=builtin:tiny data.dataset=https://far.example/rows.jsonl"
    (problem,) = preflight(parse(shlex.split(data))).problems
    assert problem.key == "data.dataset" and "is an address, but the suite does not download data files" in problem.what


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
    with pytest.raises(UserError, match=r"org/model is neither a folder here .*refused"):
        plan("sft", **{"actor.model_name_or_path": "org/model", "data.dataset": "builtin:reverse"})
    assert found(line) == []  # a sweep's parent does not ask the network
    monkeypatch.setattr(hub_inspection, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE forbids" in one(line, tmp_path)[1]
    data = "task=sft actor.model_name_or_path=builtin:tiny data.dataset=org/rows data.output_key=output"
    assert "hf download org/rows --repo-type dataset" in one(data, tmp_path)[1]


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
