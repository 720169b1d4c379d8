"""Commands of OpenRLHF are found in shell scripts, with the values of variables."""

from __future__ import annotations

import pytest

from rlhf_suite.migrate.script import Command, commands_in

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
    words = (
        "--max_len",
        "2048",
        "--dataset",
        "$HOME_OF_DATA/x",
        "--train_batch_size",
        "32",
        "--save_path",
        "./out dir",
    )
    assert found == Command("train_sft", words, is_launched=True, per_node=8)


def test_a_job_of_ray_is_found_behind_its_launcher():
    text = """ray start --head --num-gpus 8
ray job submit --address="http://127.0.0.1:8265" \\
   --runtime-env-json='{"working_dir": "/a b"}' \\
   -- python3 -m openrlhf.cli.train_ppo_ray \\
   --vllm.num_engines ${ENGINES:-3} \\
   --data.input_template $'Q: {}\\n' && echo done # --use_ms
python -m openrlhf.cli.serve_rm --port 5000 &
"""
    assert commands_in(text) == [
        Command("train_ppo_ray", ("--vllm.num_engines", "3", "--data.input_template", "Q: {}\n")),
        Command("serve_rm", ("--port", "5000")),
    ]


@pytest.mark.parametrize(
    ("line", "nodes", "per_node"),
    [
        ("torchrun --nproc_per_node=4 --nnodes 2 -m openrlhf.cli.train_dpo --beta 0.1", 2, 4),
        ("deepspeed ../train_dpo.py --beta 0.1", None, None),
    ],
)
def test_a_launcher_says_how_many_processes_start(line, nodes, per_node):
    (found,) = commands_in(line)
    assert found == Command("train_dpo", ("--beta", "0.1"), is_launched=True, per_node=per_node, nodes=nodes)


def test_what_needs_a_shell_stays_as_it_is_written():
    (found,) = commands_in("N=$(nproc)\npython -m openrlhf.cli.train_sft --train_batch_size $N --max_len $((2**70))")
    assert found.arguments == ("--train_batch_size", "$N", "--max_len", "$((2**70))")


def test_other_commands_are_none():
    assert commands_in("pip install openrlhf\nrm -r train_sft_out\necho 'unclosed") == []
