"""Text of others on a console: nothing in it acts, nothing in it fails to print, none of it is endless."""

from __future__ import annotations

import io
import json
import re
import sys

import pytest

from rlhf_suite.cli import main
from rlhf_suite.cli.execute import tell
from rlhf_suite.config.declarations.logger import LoggerConfig
from rlhf_suite.foreign_text import describe, printable
from rlhf_suite.launch.actor_log import Member
from rlhf_suite.run_folders.run_folder import RunFolder
from rlhf_suite.tracking.console import Progress
from rlhf_suite.tracking.journal import Journal

HOSTILE = "\x1b]0;owned\x07[/red]\ud800\x9b31m\u202e"
SHOWN = r"\x1b]0;owned\x07[/red]\ud800\x9b31m\u202e"


@pytest.mark.parametrize("text", ["plain", "naïve 数学 🙂", "می‌خواهم", "family 👨‍👩‍👧", "a\u00a0b", ""])
def test_what_shows_as_itself_stays(text):
    assert printable(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2J\x1b]0;owned\x07", r"\x1b[2J\x1b]0;owned\x07"),
        ("a\r\nb\tc", r"a\r\nb\tc"),
        ("\x7f\x9b31m", r"\x7f\x9b31m"),
        ("invoice\u202efdp.exe", r"invoice\u202efdp.exe"),
        ("one\u2028two", r"one\u2028two"),
        ("\ud800", r"\ud800"),
        ("\x00", r"\x00"),
    ],
)
def test_what_acts_on_a_terminal_is_written_out(text, shown):
    assert printable(text) == shown


def test_lines_and_tabs_stay_where_they_are_asked_for():
    assert printable("a\n\tb\x1b[0m\r", keep_lines=True) == "a\n\tb\\x1b[0m\\r"


def test_a_long_text_is_cut_and_says_how_long_it_was():
    assert printable("x" * 3_000_000, limit=5) == "xxxxx... (3000000 characters)"
    assert printable("x" * 5, limit=5) == "xxxxx"


@pytest.mark.notices(
    "a key that a text is cut within is shown in part",
    "foreign_text.py",
    "hide_secrets(text[: limit + LONGEST_SECRET])[:limit]",
    "hide_secrets(text[:limit])",
)
@pytest.mark.notices(
    "the password in an address is shown",
    "foreign_text.py",
    'return PASSWORD_OF_ADDRESS.sub("<password>@", text)',
    "return text",
)
@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("HTTP 401: wrong key sk-12345678", "HTTP 401: wrong key <MY_API_KEY>"),
        ("Illegal header value b'Bearer tok\\nen-123'", "Illegal header value b'Bearer <A_TOKEN>'"),
        ("http://me:pa55@host:80/x and https://host/y@z", "http://<password>@host:80/x and https://host/y@z"),
        ("wss://token@host/ws closed", "wss://<password>@host/ws closed"),
        ("http://me:pa@55@host/x, http://you:@@host", "http://<password>@host/x, http://<password>@host"),
        (f"{'x' * 995}sk-12345678", f"{'x' * 995}<MY_A... (1006 characters)"),
        ("true on 1234 in /tmp", "true on 1234 in /tmp"),
    ],
)
def test_no_key_and_no_password_is_shown(text, shown, monkeypatch):
    for name, value in {"MY_API_KEY": "sk-12345678", "A_TOKEN": "tok\nen-123", "PIN": "1234"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/tmp")
    assert printable(text) == shown


def test_the_result_can_always_be_encoded():
    printable("".join(map(chr, range(0xD7F0, 0xE010))), limit=10_000).encode()


def test_a_line_of_a_run_shows_what_others_wrote_in_it(tmp_path, capsys):
    Journal(LoggerConfig(), RunFolder(tmp_path), "ppo").info(f"why: {HOSTILE}")
    assert capsys.readouterr().out == f"why: {SHOWN}\n"


def test_the_last_message_shows_what_others_wrote_in_it(capsys):
    assert tell(f"why: {HOSTILE}\nmore", 1) == 1
    assert capsys.readouterr().err == f"why: {SHOWN}\nmore\n"


def test_an_evaluation_of_a_data_source_with_a_hostile_name_is_shown(capsys):
    progress = Progress(LoggerConfig(), "ppo", total=2, start=0)
    progress.print_evaluation(1, {f"eval/{HOSTILE}/pass1": 0.5})
    assert SHOWN in capsys.readouterr().out


def test_the_end_of_an_actors_log_shows_what_it_printed(tmp_path):
    (tmp_path / "a.log").write_bytes(b"one\x1b[2J\n" + b"x" * 5000 + b"\n")
    lines = Member("actor-0", tmp_path / "a.log").tail().splitlines()
    assert lines[1] == r"    one\x1b[2J" and lines[2].endswith("... (5000 characters)")


def test_a_console_that_lacks_a_character_ends_no_run(monkeypatch):
    console = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)
    monkeypatch.setattr(sys, "stdout", console)
    assert main(["--help", "task=sft", "data"]) == 0
    print("数学")
    assert console.buffer.getvalue().endswith(b"\\u6570\\u5b66\n")


@pytest.mark.notices(
    "an error of an environment has the line of a library",
    "foreign_text.py",
    " if is_of_user(Path(frame.filename))]",
    "]",
)
def test_an_error_is_told_with_the_line_of_the_user_and_not_that_of_a_library():
    try:
        json.loads("{")
    except ValueError as error:
        found = describe(error)
    assert re.match(r"test_foreign_text\.py:\d+: JSONDecodeError: Expecting", found)
    assert describe(KeyError("x")) == "KeyError: 'x'"
