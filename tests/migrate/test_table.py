"""A conversion is shown flag by flag: each old flag has a row, and everything in the new command is in one."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from test_convert import FORK
from test_ppo_commands import COMMON, WAYS
from test_script import SCRIPT

from rlhf_suite.cli.app import main
from rlhf_suite.migrate.convert import migrate
from rlhf_suite.migrate.script import commands_in
from rlhf_suite.migrate.table import NO_FLAG, rows, table

FLAGS = json.loads(Path(__file__).with_name("openrlhf_flags.json").read_text())
PPO = "python3 -m openrlhf.cli.train_ppo_ray"
COMMANDS = {
    **{name: f"{PPO} {COMMON} {way[0]}".replace("\n", " ") for name, way in WAYS.items()},
    **{
        entry: f"python -m openrlhf.cli.{entry} " + " ".join(f"--{flag} 2" for flag in flags)
        for entry, flags in FLAGS.items()
    },
    "fork": f"{PPO} --pretrain m --prompt_data d " + " ".join(f"--{flag} 1" for flag in FORK.split()),
    "script": SCRIPT,
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_table_has_every_old_flag_once_and_every_new_one(name):
    for command in commands_in(COMMANDS[name]):
        new = migrate(command)
        found = [*rows(new)]
        old = [first.split()[0].lstrip("-") for first, _ in found if first != NO_FLAG]
        given = [re.sub("-", "_", word[2:].partition("=")[0]) for word in command.arguments if re.match(r"--\w", word)]
        assert old == list(dict.fromkeys(given))
        right = [text for _, fates in found for text in fates]
        assert all(right) and {f"{key}={value}" for key, value in new.flags.items()} <= {*right}
        assert {*new.remarks} <= {*right} and {f"LOST: {text}" for text in new.lost} <= {*right}
        assert len(table(new).splitlines()) == len(found) + 2


@pytest.mark.notices(
    "a table shows what a flag became before later rules changed it",
    "migrate/table.py",
    'return f"{key}={new.flags[key]}"',
    "return text",
)
@pytest.mark.notices(
    "a table shows the key of Weights & Biases", "migrate/table.py", "if trace.name in SECRETS else", "if False else"
)
def test_a_flag_that_a_later_rule_changes_shows_its_end(capsys):
    line = f"{PPO} --pretrain builtin:tiny --colocate_all_models --zero_stage 1 --deepspeed_enable_sleep --save_path o"
    main(["migrate", "--table", f"{line} --ckpt_path o --use_wandb sk-secret --input_template 'a|b'"])
    lines = capsys.readouterr().out.splitlines()
    assert "| --ckpt_path o | ckpt.path=o/checkpoints |" in lines
    assert any(line.startswith("| --deepspeed_enable_sleep | ds.enable_sleep=true is left out: ") for line in lines)
    assert any(line.startswith("| --use_wandb | logger.wandb.enable=true") for line in lines)
    assert not any("secret" in line for line in lines)
    assert all(re.sub(r"\\\|", "", line).count("|") == 3 for line in lines if line.startswith("|"))


@pytest.mark.notices(
    "a table forgets what is lost of a flag", "migrate/table.py", ", *map(describe_loss, trace.lost)]", "]"
)
def test_a_table_ends_as_the_conversion_does(capsys):
    assert main(["migrate", "--table", f"{PPO} --no_such_flag 1"]) == 1
    assert "| --no_such_flag 1 | LOST: --no_such_flag 1: no counterpart is known |" in capsys.readouterr().out
    assert main(["migrate", "--table"]) == 2


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "No such file or directory. Check the path"), (b"\xff\xfe", "is not text in UTF-8. Name the shell script")],
)
def test_a_script_that_cannot_be_read_is_one_sentence_with_a_remedy(tmp_path, capsys, content, said):
    script = tmp_path / "train_ppo.sh"
    if content is not None:
        script.write_bytes(content)
    assert main(["migrate", str(script)]) == 2
    error = capsys.readouterr().err
    assert said in " ".join(error.split()) and "Errno" not in error and len(error.splitlines()) == 1
