"""task=chat: a conversation with a model in the terminal, or through a pipe with one message per line."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

from rich.console import Console

from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.data.conversation import Conversation
from rlhf_suite.data.row import RowError
from rlhf_suite.disk import resolve_home
from rlhf_suite.errors import UserError
from rlhf_suite.foreign_text import printable
from rlhf_suite.launch.environment import device_kind
from rlhf_suite.models.chat_model import FLAG, ChatModel
from rlhf_suite.tasks.warm_start import warm_start

HELP = """\
/reset          forget the conversation; the system message stays
/system <text>  change the system message; without text, remove it
/save <file>    add the conversation to a .jsonl file, as a row {"messages": [...]}
/quit           end (also Ctrl-D)
Ctrl-C stops an answer. A line that ends with a backslash continues in the next line. A line that begins with a space is
a message even if a / follows."""


def run(config: Run, folder: Path) -> dict[str, float]:
    """Chat until /quit or the end of the input. Return the number of answers and of their tokens.

    Raises:
        UserError: the system message cannot be used, or the input is not UTF-8.
    """
    path = warm_start(config.actor.model_name_or_path, "teacher")
    device, in_4bit = device_kind(config.launch), config.ds.load_in_4bit
    chat_model = ChatModel(path, config.chat, config.data, device, load_in_4bit=in_4bit)
    conversation = Conversation(chat_model.tokenizer, config.data, chat_model.max_len - config.chat.max_new_tokens)
    try:
        conversation.set_system(config.chat.system)
    except RowError as error:
        raise UserError(f"chat.system: {error.reason}. Remove this flag") from error
    chat = Chat(chat_model, conversation, is_terminal=sys.stdin.isatty() and sys.stdout.isatty())
    chat.note(f"{FLAG}={config.actor.model_name_or_path}. /help lists the commands", in_pipe=False)
    chat.talk()
    return {"chat/answers": float(chat.num_answers), "chat/tokens": float(chat.num_tokens)}


class Chat:
    """Reads lines and writes answers. In a pipe, only answers go to stdout; notices go to stderr."""

    def __init__(self, chat_model: ChatModel, conversation: Conversation, is_terminal: bool) -> None:
        self.chat_model, self.conversation, self.is_terminal = chat_model, conversation, is_terminal
        self.console = Console(stderr=not is_terminal, highlight=False, soft_wrap=True)
        self.num_answers = self.num_tokens = 0
        if is_terminal:
            import_module("readline")  # arrow keys and history for input()

    def talk(self) -> None:
        """Read and answer messages until the input ends or /quit."""
        goes_on = True
        while goes_on:
            try:
                message = self.read()
            except EOFError:
                return
            except UnicodeDecodeError as error:
                raise UserError(f"standard input is not UTF-8 ({error.reason})") from error
            except KeyboardInterrupt:
                if not self.is_terminal:
                    raise
                self.note("\n/quit or Ctrl-D ends the chat")
                continue
            goes_on = self.handle(message)

    def read(self) -> str:
        """Return the next message: a line, joined with the next line as long as it ends with a backslash."""
        lines = [input("> " if self.is_terminal else "")]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(input(". " if self.is_terminal else ""))
        return "\n".join(lines)

    def handle(self, message: str) -> bool:
        """Answer a message or carry out a command. Return whether the chat continues."""
        if message.startswith("/"):
            return self.command(*message.partition(" ")[::2])
        if message.strip():
            self.reply(message.strip())
        return True

    def command(self, name: str, rest: str) -> bool:
        """Carry out a command. Return whether the chat continues."""
        rest = rest.strip()
        match name:
            case "/quit":
                return False
            case "/help":
                self.note(HELP)
            case "/reset":
                self.conversation.reset()
                self.note("The conversation is forgotten", in_pipe=False)
            case "/system":
                self.set_system(rest)
            case "/save":
                self.save(rest)
            case _:
                self.note(
                    f"There is no command {name}; /help lists them. Put a space before a message that begins with /"
                )
        return True

    def reply(self, message: str) -> None:
        """Stream the answer, and say if it was stopped or cut, or if old turns were dropped."""
        try:
            ids, dropped = self.conversation.add_message(message)
        except RowError as error:
            self.note(error.reason)
            return
        if dropped:
            self.note(f"(turns dropped from the start of the conversation: {dropped}; it is longer than chat.max_len)")
        answer = self.chat_model.respond(ids, self.write)
        self.write("\n")
        if answer.is_interrupted and not self.is_terminal:
            raise KeyboardInterrupt
        self.num_answers, self.num_tokens = self.num_answers + 1, self.num_tokens + answer.num_tokens
        if answer.is_interrupted and not answer.text:
            self.conversation.remove_message()
        else:
            self.conversation.add_response(answer.text)
        if answer.is_capped or answer.is_interrupted:
            self.note("(stopped)" if answer.is_interrupted else "(cut at chat.max_new_tokens)")

    def set_system(self, text: str) -> None:
        """Change the system message; an empty text removes it."""
        try:
            self.conversation.set_system(text)
        except RowError as error:
            self.note(error.reason)

    def save(self, file: str) -> None:
        """Add the conversation to a file."""
        if not file or not self.conversation.turns:
            self.note("write /save <file>" if not file else "There is nothing to save yet")
            return
        try:
            self.conversation.save(resolve_home(file))
        except OSError as error:
            self.note(f"{file}: {error.strerror}")
        except UserError as error:
            self.note(str(error))
        else:
            self.note(f"saved to {file}", in_pipe=False)

    def write(self, text: str) -> None:
        """Write a piece of an answer. On a terminal, control characters are escaped."""
        sys.stdout.write(printable(text, len(text), keep_lines=True) if self.is_terminal else text)
        sys.stdout.flush()

    def note(self, text: str, in_pipe: bool = True) -> None:
        """Print a line that is not part of an answer."""
        if self.is_terminal or in_pipe:
            self.console.print(printable(text, keep_lines=True), style="dim", markup=False)
