"""task=chat: commands and messages in a pipe; answers are transformers' own, and no engine is imported."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_suite.config.declarations.data import DataConfig
from rlhf_suite.config.declarations.tools import ChatConfig
from rlhf_suite.data.conversation import Conversation
from rlhf_suite.models.builtin import create_tiny
from rlhf_suite.models.chat_model import ChatModel
from rlhf_suite.tasks.chat import Chat

pytestmark = pytest.mark.stack

LIGHT = """
import sys
from rlhf_suite.cli.app import main
code = main(sys.argv[1:])
print("imported:", sorted({"vllm", "deepspeed", "ray"} & set(sys.modules)), file=sys.stderr)
sys.exit(code)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("chat") / "model"
    create_tiny(path, seed=1)
    return path


@pytest.fixture
def chat(model):
    """A chat in a pipe, answering at most four tokens."""
    config = ChatConfig(temperature=0, max_new_tokens=4, max_len=64)
    chat_model = ChatModel(str(model), config, DataConfig.of("chat"), "cpu")
    return Chat(chat_model, Conversation(chat_model.tokenizer, DataConfig.of("chat"), 60), is_terminal=False)


def answers(model, *conversations):
    """The greedy answer to each list of messages, by transformers alone."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    plain = AutoModelForCausalLM.from_pretrained(model)
    for messages in conversations:
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
        out = plain.generate(**prompt, max_new_tokens=8, do_sample=False)[0, prompt["input_ids"].shape[1] :]
        yield tokenizer.decode(out, skip_special_tokens=True)


def said(*texts):
    return [{"role": "assistant" if at % 2 else "user", "content": text} for at, text in enumerate(texts)]


def test_a_pipe_gets_the_answers_of_transformers_and_imports_no_engine(model, tmp_path):
    (first,) = answers(model, said("hello"))
    second, alone = answers(model, said("hello", first, "what\nnow"), said("what\nnow"))
    assert second != alone
    words = [
        "task=chat",
        f"actor.model_name_or_path={model}",
        "chat.temperature=0",
        "chat.max_new_tokens=8",
        "launch.device=cpu",
        f"hydra.run.dir={tmp_path}/run",
    ]
    lines = f"hello\n\nwhat\\\nnow\n/save {tmp_path}/talk.jsonl\n/reset\n/rest\nwhat\\\nnow\n"
    command = [sys.executable, "-c", LIGHT, *words]
    done = subprocess.run(command, input=lines, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{first}\n{second}\n{alone}\n"
    assert "There is no command /rest; /help lists them" in done.stderr
    assert "imported: []" in done.stderr
    (row,) = (tmp_path / "talk.jsonl").read_text().splitlines()
    assert json.loads(row)["messages"] == said("hello", first, "what\nnow", second)
    status = json.loads((tmp_path / "run/status.json").read_text())
    assert status["metrics"]["chat/answers"] == 3


def test_commands_do_what_they_say_and_only_quit_ends(chat, capsys, tmp_path):
    assert chat.handle("/system Be brief.") and chat.conversation.system == "Be brief."
    assert chat.handle("hello") and [message["role"] for message in chat.conversation.turns] == ["user", "assistant"]
    assert chat.handle("/reset") and not chat.conversation.turns and chat.conversation.system == "Be brief."
    assert chat.handle("/system") and chat.conversation.system is None
    assert chat.handle(f"/save {tmp_path}/x.jsonl") and not (tmp_path / "x.jsonl").exists()
    assert chat.handle(" /etc is a folder") and chat.conversation.turns[0]["content"] == "/etc is a folder"
    assert chat.handle(f"/save {tmp_path}/no/x.jsonl") and chat.handle("/save") and chat.handle("/help")
    notes = capsys.readouterr().err
    for words in ("nothing to save yet", "x.jsonl: No such file", "write /save <file>", "/system <text>"):
        assert words in notes
    assert not chat.handle("/quit")


def test_dropped_turns_and_messages_that_do_not_fit_are_reported(chat, capsys):
    chat.conversation.max_prompt_tokens = 40
    for _ in range(3):
        assert chat.handle("0123456789012345")
    assert capsys.readouterr().err.count("(turns dropped from the start of the conversation: 1;") == 2
    assert chat.handle("x" * 99) and len(chat.conversation.turns) == 2
    assert "; at most 40 are possible" in capsys.readouterr().err


def test_an_interrupted_response_ends_a_pipe_but_not_a_terminal(chat, capsys, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    hook = chat.chat_model.model.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        chat.handle("hello")
    chat.conversation.reset()
    chat.is_terminal = True
    assert chat.handle("hello") and chat.conversation.turns == []
    hook.remove()
    lines = iter(["hello\\", "you", KeyboardInterrupt(), EOFError()])

    def typed(prompt):
        line = next(lines)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", typed)
    chat.talk()
    assert chat.conversation.turns[0]["content"] == "hello\nyou"
    assert "/quit or Ctrl-D ends the chat" in capsys.readouterr().err
