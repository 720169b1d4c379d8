"""Scripts made at random: their words are those that bash finds, and no argument of a command is passed over."""

from __future__ import annotations

import json
import random
import shlex
import subprocess
from pathlib import Path

import pytest

from rlhf_suite.cli.app import main
from rlhf_suite.config.check.names import SECRETS
from rlhf_suite.migrate.convert import migrate
from rlhf_suite.migrate.script import commands_in
from rlhf_suite.migrate.shell import statements
from rlhf_suite.migrate.shell_text import readable

FLAGS = json.loads(Path(__file__).with_name("openrlhf_flags.json").read_text())
TEXTS = (
    "x", "--flag", "a b", "", "1e-6", "*", "$", "\\", "it's", 'say "hi"', "User: {}\\n", "#no", "a=b", "{a,b}", "[1,2]",
    "ü", "\t", "\n", "-1", "~",
)  # fmt: skip
ARITHMETIC = ("$((2*3+1))", "$((7/2))", "$((10%4))", "-{p,q}", "{1..3}")


def quoted(dice: random.Random, text: str) -> str:
    """The same text in one of the ways of a shell."""
    way = dice.randrange(4)
    if way == 0:
        return shlex.quote(text)
    if way == 1:
        return '"' + "".join(f"\\{sign}" if sign in '\\"$`' else sign for sign in text) + '"'
    if way == 2 and text and text.isascii() and "\n" not in text:
        return "".join(sign if sign.isalnum() else f"\\{sign}" for sign in text)
    escaped = text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n").replace("\t", "\\t")
    return f"$'{escaped}'"


def part(dice: random.Random, names: list[str], arrays: list[str]) -> str:
    """A part of a word, with the variables and arrays that are set."""
    parts = [quoted(dice, dice.choice(TEXTS)), dice.choice(ARITHMETIC)]
    if names:
        name, other = dice.choice(names), dice.choice(names)
        parts += [f"${{{name}}}", f'"${name}"', f'"${{{name}:-d ${other}}}"', f"${{{name}:+y}}", f'"${{{name}%b}}"']
        parts += [f"${{{name}##*/}}", parts[0], parts[0]]
    if arrays:
        array = dice.choice(arrays)
        parts += [f'"${{{array}[@]}}"', f"${{{array}[*]}}", f'"${{{array}[*]}}"', f'"${{{array}[0]}}-${{#{array}[@]}}"']
    return dice.choice(parts)


def script_of(seed: int) -> str:
    """A script whose commands are called `program`."""
    dice, names, arrays, lines = random.Random(seed), list[str](), list[str](), list[str]()

    def words(least: int, most: int, between: str = " ") -> str:
        made = ("".join(part(dice, names, arrays) for _ in range(dice.choice((1, 1, 2, 3)))) for _ in range(most))
        return between.join(list(made)[: dice.randint(least, most)])

    for _ in range(dice.randint(3, 8)):
        kind = dice.randrange(7)
        if kind < 2:
            name = dice.choice("ABC")
            lines.append(f"{name}={words(1, 1)}")
            names.append(name)
        elif kind == 2:
            name = dice.choice("VW")
            adds = "+" if name in arrays else ""
            lines.append(f"{name}{adds}=({words(0, 3, dice.choice((' ', chr(10))))})")
            arrays.append(name)
        elif kind == 3:
            lines.append(f'for X in {words(1, 2)}; do program "$X" {words(0, 1)}; done')
        elif kind == 4:
            lines.append(f'f() {{ program "$@" $1; }}; f {words(1, 2)}')
        elif kind == 5:
            name = names[0] if names else "Q"
            lines.append(f"read -r -d '' H <<EOF\nx ${name} \\$y 'q' \\\n z\nEOF\nprogram \"$H\"")
        else:
            between, end = dice.choice((" ", " \\\n")), dice.choice(("", "# c", "| cat"))
            lines.append(f"program {words(1, 4, between)} {end}")
    return "\n".join(lines)


def in_bash(script: str, folder: Path) -> list[list[str]]:
    """The words of each `program` of a script, as bash finds them."""
    before = 'set -f; Q=; program() { printf \'%s\\0\' "$#" "$@"; }\n'
    printed = subprocess.run(["bash", "-c", before + script], capture_output=True, cwd=folder, check=False).stdout
    words, found = printed.decode().split("\0")[:-1], []
    while words:
        number = int(words.pop(0))
        found.append(words[:number])
        words = words[number:]
    return found


@pytest.mark.notices(
    "an empty array is an empty argument",
    "migrate/shell_values.py",
    "if not ALL_OF_ARRAY.fullmatch(inside)",
    "if inside is not None",
)
@pytest.mark.notices(
    "an empty variable has no default",
    "migrate/shell_values.py",
    'is_set = value is not None and (not sign.startswith(":") or any(value.texts))',
    "is_set = value is not None",
)
@pytest.mark.parametrize("first", range(0, 150, 50))
def test_words_are_those_that_bash_finds(first, tmp_path):
    for seed in range(first, first + 50):
        script = script_of(seed)
        found = [[*map(readable, each.words[1:])] for each in statements("Q=\n" + script) if each.words[0] == "program"]
        assert found == in_bash(script, tmp_path), script


VALUES = ("2", "0.5", "text", "a/b c", "", "null", "$UNSET", "$(pwd)", "-1", "a,b", "'q'", 'say "x"', "[1,2]", "x=y")


@pytest.mark.notices(
    "words after the value of a flag vanish",
    "migrate/convert.py",
    "for word in values[len(kept) :]:",
    "for word in ():",
)
@pytest.mark.notices(
    "of two old flags for one the first vanishes without a word",
    "migrate/command.py",
    "if (before := self.flags.get(flag, value)) != value:",
    "if (before := self.flags.get(flag, value)) is None:",
)
@pytest.mark.parametrize("first", range(0, 240, 60))
def test_no_argument_is_passed_over(first):
    for seed in range(first, first + 60):
        dice = random.Random(seed)
        entry = dice.choice([*FLAGS])
        texts = [dice.choice(("", "stray")), *(word for _ in range(dice.randint(1, 8)) for word in flag(dice, entry))]
        arguments = [word for word in texts if word or dice.random() < 0.5]
        assigned = "A=(" + " ".join(map(in_script, arguments[2:])) + ")\n"
        line = " ".join(map(in_script, arguments[:2]))
        (command,) = commands_in(f'{assigned}python -m openrlhf.cli.{entry} {line} "${{A[@]}}"')
        assert [*map(readable, command.arguments)] == arguments
        new = migrate(command)
        said = readable("\n".join([*new.words, *new.remarks, *new.lost])).replace("\\", "")
        secret = {each for name in SECRETS for each in after(arguments, f"--{name}")}
        for word in arguments:
            is_there = "''" in said or '=""' in said if word == "" else word.replace("\\", "") in said
            assert word.startswith("--") or word in secret or is_there, (arguments, word, said)


def flag(dice: random.Random, entry: str) -> list[str]:
    """A flag of an entry point with no value, one, or two."""
    values = [dice.choice(VALUES) for _ in range(dice.choice((0, 1, 1, 1, 2)))]
    return [f"--{dice.choice(FLAGS[entry])}", *values]


def in_script(word: str) -> str:
    """A word as a script has it, whose shell replaces its variables."""
    return f'"{word}"' if word.startswith("$") else shlex.quote(word)


def after(words: list[str], name: str) -> list[str]:
    return [words[place + 1] for place, word in enumerate(words[:-1]) if word == name]


def test_a_command_is_the_same_as_script_as_text_and_as_words(tmp_path, capsys):
    words = ["deepspeed", "--module", "openrlhf.cli.train_sft", "--input_template", "", "--learning_rate", "2e-6"]
    words += ["--pretrain", "builtin:tiny", "--dataset", "a b", "--save_path", "$OUT", "--input_key", "it's"]
    script = tmp_path / "train.sh"
    script.write_text(shlex.join(words))
    printed = []
    for given_as in ([str(script)], [shlex.join(words)], words):
        main(["migrate", *given_as])
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] == printed[2]
    assert "actor.adam.lr=2e-6" in printed[0] and "data.input_template=null" in printed[0]


def test_a_long_command_as_one_word_is_no_name_of_a_file(capsys):
    line = "python -m openrlhf.cli.train_sft --pretrain builtin:tiny --max_len 64 --dataset " + "x" * 5000
    main(["migrate", line])
    assert "data.max_len=64" in capsys.readouterr().out


@pytest.mark.notices(
    "a variable of the environment becomes a folder of that name",
    "migrate/shell_text.py",
    "    if OPEN in word:",
    "    if OPEN not in word:",
)
def test_a_variable_that_the_script_does_not_set_stays_one(capsys):
    main(["migrate", 'python -m openrlhf.cli.train_sft --pretrain $BASE --save_path "$OUT/model" --max_len $N'])
    printed = capsys.readouterr().out
    assert all(f"${name} is not set by the script" in printed for name in ("BASE", "OUT", "N"))
    command = "\n".join(line for line in printed.splitlines() if not line.startswith("#"))
    shell = f"python() {{ printf '%s\\0' \"$@\"; }}; OUT='/a, b' BASE=m N=7\n{command}"
    words = subprocess.run(["bash", "-c", shell], capture_output=True, check=True).stdout.decode().split("\0")
    assert {'ckpt.output_dir="/a, b/model"', 'actor.model_name_or_path="m"', "data.max_len=7"} <= set(words)


@pytest.mark.notices(
    "pasting what is printed runs what the script had in quotes",
    "migrate/shell_text.py",
    'escaped = re.sub(r\'([\\\\"$`])\', r"\\\\\\1", word)',
    'escaped = re.sub(r\'([\\\\"])\', r"\\\\\\1", word)',
)
def test_pasting_what_is_printed_runs_nothing(tmp_path, capsys):
    mark = tmp_path / "ran"
    value = f'$(touch {mark})`touch {mark}`";touch {mark};"'
    main(["migrate", "python", "-m", "openrlhf.cli.train_sft", "--pretrain", "builtin:tiny", "--save_path", value])
    main(["migrate", f"python -m openrlhf.cli.train_sft --save_path {shlex.quote(value)}$X --dataset $X{value}"])
    printed = capsys.readouterr().out
    subprocess.run(["bash", "-c", f"python() {{ :; }}\n{printed}"], capture_output=True, check=False)
    assert printed and not mark.exists()
