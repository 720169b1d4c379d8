"""Commands of OpenRLHF are found in shell scripts, with the values of variables."""

from __future__ import annotations

import subprocess

import pytest

from rlhf_suite.errors import UserError
from rlhf_suite.migrate.convert import command_line, migrate
from rlhf_suite.migrate.script import commands_in
from rlhf_suite.migrate.shell_text import readable

SCRIPT = """set -x
# deepspeed --module openrlhf.cli.train_rm --max_len 1
NODES=2
export GPUS=$((NODES * 4))
OUT="./out dir"
read -r -d '' training_commands <<EOF
openrlhf.cli.train_sft \\
   --max_len 2048 \\
   --dataset $HOME_OF_DATA/x \\
   --train_batch_size $((GPUS*4)) \\
   --save_path "${OUT}"
EOF
     # --use_wandb [WANDB_TOKENS]
if [[ ${1} != "slurm" ]]; then
    deepspeed --num_gpus 8 --module $training_commands
fi
"""


def test_a_here_document_is_the_command_of_its_variable():
    (found,) = commands_in(SCRIPT)
    assert found.entry == "train_sft" and (found.is_launched, found.per_node, found.nodes) == (True, 8, None)
    assert written(found.arguments) == [
        *("--max_len", "2048", "--dataset", "$HOME_OF_DATA/x"),
        *("--train_batch_size", "32", "--save_path", "./out dir"),
    ]
    assert any("$HOME_OF_DATA is not set" in text for text in found.remarks)


def written(arguments) -> list[str]:
    return [*map(readable, arguments)]


def test_a_job_of_ray_is_found_behind_its_launcher():
    text = """ray start --head --num-gpus 8
ray job submit --address="http://127.0.0.1:8265" \\
   --runtime-env-json='{"working_dir": "/a b"}' \\
   -- python3 -m openrlhf.cli.train_ppo_ray \\
   --vllm.num_engines ${ENGINES:-3} \\
   --data.input_template $'Q: {}\\n' && echo done # --use_ms
python -m openrlhf.cli.serve_rm --port 5000 &
"""
    first, second = commands_in(text)
    assert first.entry == "train_ppo_ray"
    assert first.arguments == ("--vllm.num_engines", "3", "--data.input_template", "Q: {}\n")
    assert any('{"working_dir": "/a b"}' in text for text in first.remarks)
    assert (second.entry, second.arguments, second.remarks) == ("serve_rm", ("--port", "5000"), ())


@pytest.mark.parametrize(
    ("line", "nodes", "per_node"),
    [
        ("torchrun --nproc_per_node=4 --nnodes 2 -m openrlhf.cli.train_dpo --beta 0.1", 2, 4),
        ("deepspeed ../train_dpo.py --beta 0.1", None, None),
    ],
)
def test_a_launcher_says_how_many_processes_start(line, nodes, per_node):
    (found,) = commands_in(line)
    assert (found.entry, found.arguments) == ("train_dpo", ("--beta", "0.1"))
    assert (found.is_launched, found.per_node, found.nodes) == (True, per_node, nodes)


def test_what_only_the_script_can_compute_is_said_and_stays_out_of_other_words():
    text = """N=$(nproc)
python -m openrlhf.cli.train_sft --train_batch_size $N --max_len $((2**70)) --max_samples $(wc -l rows) --seed `date`"""
    (found,) = commands_in(text)
    assert written(found.arguments)[1::2] == ["$N", "$((2**70))", "$(wc -l rows)", "`date`"]
    assert any("line 1 sets N=$(nproc)" in text for text in found.remarks)


def test_other_commands_are_none():
    assert commands_in("pip install openrlhf\nrm -r train_sft_out\necho python -m openrlhf.cli.train_sft") == []


SFT = "python -m openrlhf.cli.train_sft"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f'{SFT} --input_template "" --max_len 3', ["--input_template", "", "--max_len", "3"]),
        (f'E=(--a 1 # --b\n --c \'x y\')\nE+=("")\n{SFT} "${{E[@]}}"', ["--a", "1", "--c", "x y", ""]),
        (f'E=()\n{SFT} "${{E[@]}}" --a', ["--a"]),
        (f"f() {{ {SFT} \"$@\" --n $1; }}\nf 'x y' z", ["x y", "z", "--n", "x", "y"]),
        (f"srun bash -c \"cd / && {SFT} --a 'b c'\"", ["--a", "b c"]),
        (f"CMD='{SFT} --a 1'\neval $CMD --b", ["--a", "1", "--b"]),
        (f"sbatch <<EOF\n{SFT} --a \\$X\nEOF", ["--a", "$X"]),
        (f"cat > job.sh <<'EOF'\n{SFT} --a 1\nEOF", ["--a", "1"]),
        (f"A=/x/y.z\n{SFT} ${{A##*/}} ${{A%.z}}", ["y.z", "/x/y"]),
        (f"{SFT} <your model> ...", ["<your model>", "..."]),
        (f"run_it() {{\n {SFT} --a 1\n}}\n", ["--a", "1"]),
    ],
)
def test_arguments_are_those_of_a_shell(text, expected):
    (found,) = commands_in(text)
    assert written(found.arguments) == expected


def test_a_loop_over_words_is_a_command_for_each():
    found = commands_in(f"for lr in 1e-6 5e-7; do {SFT} --learning_rate $lr; done")
    assert [each.arguments for each in found] == [("--learning_rate", "1e-6"), ("--learning_rate", "5e-7")]


def test_another_loop_gives_its_first_round_and_says_so():
    (found,) = commands_in(f"i=0\nwhile ((i < 3)); do\n {SFT} --seed $i\n i=$((i + 1))\ndone")
    assert found.arguments == ("--seed", "0")
    assert any("line 2 begins a loop" in text and "i change" in text for text in found.remarks)


@pytest.mark.notices(
    "a variable that a branch sets has that value without a word", "migrate/shell.py", "after.insert(0, before)", "pass"
)
@pytest.mark.parametrize(
    ("text", "value", "remark"),
    [
        ("M=a\nif [[ $1 ]]; then M=b; fi", "a", "line 2 sets M under a condition: a is taken, not b"),
        ("if x; then M=a; else M=b; fi", "a", "a is taken, not b"),
        ("if x; then M=a; fi", "a", "a is taken, not no value"),
        ("case $1 in\n x|y) M=a;;\n *) M=b;;\nesac", "a", "a is taken, not b or no value"),
    ],
)
def test_what_depends_on_a_condition_is_said(text, value, remark):
    (found,) = commands_in(f"{text}\nOUT=/x/$M\n{SFT} --save_path $OUT")
    assert found.arguments == ("--save_path", f"/x/{value}")
    assert any(remark in text for text in found.remarks)


def test_words_that_a_comment_cuts_off_are_lost_aloud():
    (found,) = commands_in(f"{SFT} --a 1 \\\n # --b 2 \\\n --c 3")
    assert found.arguments == ("--a", "1") and found.lost == (
        "line 3: --c 3: no longer a part of the command above for a shell",
    )


@pytest.mark.notices(
    "what the script exports is forgotten", "migrate/shell.py", "{**self.exported, **environment}", "{**environment}"
)
def test_the_environment_of_a_command_is_known():
    (found,) = commands_in(f"export A=1\nB=2\nC=3 env D=4 {SFT}")
    assert found.environment == {"A": "1", "C": "3", "D": "4"}


COMMAND = f"{SFT} --a "
ENDLESS = {
    "a variable that doubles": ("A=x\n" + "A=$A$A\n" * 40, "grow beyond"),
    "a quote over many lines": (f"{COMMAND}'" + "x\n" * 20_000, "line 1: .* never closed"),
    "a long word": (COMMAND + "x" * 5_000_000, "characters"),
    "nested defaults": (COMMAND + "${A:-" * 3000 + "x" + "}" * 3000, "within each other"),
    "nested branches": ("if a; then " * 3000, "within each other"),
    "nested substitutions": (COMMAND + "$(" * 3000 + ")" * 3000, "within each other"),
    "nested loops": ("for a in {1..99}; do " * 4 + "echo; " + "done; " * 4, "commands"),
    "a function that calls itself": ("f() { f; f; }; f", "run each other"),
    "an eval of itself": ("A='eval $A'; eval $A", "run each other"),
}


@pytest.mark.notices(
    "quotes within each other have no limit",
    "migrate/shell_words.py",
    "if len(kinds) > MAX_DEPTH:",
    "if len(kinds) > MAX_DEPTH**4:",
    cases="nested",
)
@pytest.mark.parametrize("name", ENDLESS)
def test_a_script_without_end_is_refused_in_a_sentence(name):
    text, reason = ENDLESS[name]
    with pytest.raises(UserError, match=reason) as error:
        commands_in(text)
    assert len(str(error.value)) < 250


@pytest.mark.notices(
    "arithmetic is that of Python and not of a shell",
    "migrate/shell_values.py",
    "if abs(result) >= LARGEST",
    "if abs(result) < 0",
)
@pytest.mark.parametrize("expression", ["9**9**9", "9" * 3000 + "*" + "9" * 3000, "1/0", "*".join(["999999999"] * 3)])
def test_arithmetic_that_no_shell_could_do_stays_as_it_is_written(expression):
    (found,) = commands_in(f"{COMMAND} $(({expression}))")
    assert written(found.arguments) == ["--a", f"$(({expression}))"]


@pytest.mark.notices(
    "a remainder has the sign that Python gives it and not that of a shell",
    "migrate/shell_values.py",
    "abs(left) % abs(right) * (-1 if left < 0 else 1)",
    "left % right",
)
@pytest.mark.parametrize(
    "expression", [f"{left} {sign} {right}" for left in (-7, 7) for sign in "/%" for right in (-3, 3)]
)
def test_division_is_that_of_a_shell(expression):
    (found,) = commands_in(f"{COMMAND} $(({expression}))")
    asked = subprocess.run(["bash", "-c", f"echo $(({expression}))"], capture_output=True, text=True, check=True)
    assert written(found.arguments) == ["--a", asked.stdout.strip()]


@pytest.mark.parametrize("index", ["1", "-1", "-3", "-4", "$i", "i", "i+1", "$((i))", "5", "i-1"])
def test_an_item_of_an_array_is_that_of_a_shell(index):
    script = "A=(m/a m/b m/c); i=1"
    (found,) = commands_in(f'{script}\n{COMMAND} "${{A[{index}]}}"')
    asked = subprocess.run(
        ["bash", "-c", f'{script}; echo "${{A[{index}]}}"'], capture_output=True, text=True, check=False
    )
    assert written(found.arguments) == ["--a", asked.stdout.strip()]


def test_an_item_whose_number_the_script_does_not_say_is_lost_and_not_empty():
    (found,) = commands_in(f"A=(m/a m/b)\n{COMMAND} ${{A[$SLURM_ARRAY_TASK_ID]}}")
    assert written(found.arguments) == ["--a", "${A[$SLURM_ARRAY_TASK_ID]}"]


@pytest.mark.notices(
    "a digit that is no digit of a shell ends in a traceback",
    "migrate/shell_text.py",
    'return int(text) if re.fullmatch(r"-?[0-9]{1,18}", text) else None',
    "return int(text) if text.isdigit() else None",
)
@pytest.mark.parametrize(
    "words",
    [
        "torchrun --nnodes \u00b2 -m openrlhf.cli.train_sft",
        "python -m openrlhf.cli.train_ppo_ray --freezing_actor_steps \u00b2",
        "python -m openrlhf.cli.train_ppo_ray --freezing_actor_steps --5",
        "python -m openrlhf.cli.train_ppo_ray --freezing_actor_steps $STEPS",
        "python -m openrlhf.cli.train_ppo_ray --prompt_max_len \u00b2",
        f"python -m openrlhf.cli.train_ppo_ray --prompt_max_len {'9' * 5000}",
        "A=(a b)\npython -m openrlhf.cli.train_sft --max_len ${A[\u00b2]}",
    ],
)
def test_a_number_is_one_of_a_shell(words):
    (command,) = commands_in(words)
    new = migrate(command)
    assert command_line(new).startswith("python run.py task=")
    if "freezing_actor_steps \u00b2" in words:
        assert "--freezing_actor_steps \u00b2: not a whole number; write critic.freezing_steps=<steps>" in new.lost
    if "$STEPS" in words:
        assert "critic.freezing_steps=$((STEPS + 1))" in command_line(new)


@pytest.mark.parametrize("word", ["{1..99999999}", "{a,b}" * 50, "${A[99999999999999999999]}", "$" * 1000])
def test_no_word_of_a_script_grows_without_end(word):
    assert sum(map(len, commands_in(COMMAND + word)[0].arguments)) < 5000
