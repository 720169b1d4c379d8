"""The machine is known before a run: GPUs that are missing, that stay idle, and that are somewhere else."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys

import pytest

from rlhf_suite.cli.app import main
from rlhf_suite.composition.arguments import parse
from rlhf_suite.preflight.devices import device_problems, devices_of, remarks
from rlhf_suite.preflight.jobs import preflight

SMALL = "train.batch_size=8 train.micro_batch_size=1 rollout.batch_size=8 rollout.micro_batch_size=1"
PPO = f"task=ppo demo=ppo {SMALL}"
SFT = "task=sft demo=sft train.batch_size=8 train.micro_batch_size=1"
SLURM = "hydra/launcher=slurm hydra.launcher."


def answer(line: str, gpus: str, monkeypatch, capsys) -> tuple[int, str, str]:
    """The exit code and the output of a command line on a machine with these GPUs."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    monkeypatch.setenv("COLUMNS", "200")
    code = main(shlex.split(line))
    output = capsys.readouterr()
    return code, output.out, output.err


def asked(line: str, gpus: str, monkeypatch) -> tuple[list[str], list[str]]:
    """The problems of the devices of a command line, and the remarks about them."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    found = preflight(parse(shlex.split(line)))
    assert found.problems == []
    problems = [f"{each.key}: {each.what}; {each.fix}" for each in device_problems(found)]
    return problems, [each for run in found.runs for each in remarks(run, devices_of(run, found))]


@pytest.mark.notices(
    "a run starts on GPUs that are not here",
    "preflight/devices.py",
    "    if no_gpu_here(run, devices):\n        fix",
    "    if False:\n        fix",
)
@pytest.mark.parametrize("line", [PPO, SFT, "task=chat", "task=serve_rm"])
def test_a_run_on_gpus_that_are_not_here_is_refused_before_it_has_a_folder(line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if "serve_rm" in line:
        line += " reward.model_name_or_path=builtin:tiny"
    code, _, said = answer(f"{line} launch.device=cuda run_dir=run", "", monkeypatch, capsys)
    assert (code, [*tmp_path.iterdir()]) == (2, [])
    assert "launch.device: cuda, but no GPU is visible here" in said and "use launch.device=cpu" in said


@pytest.mark.parametrize(
    ("line", "number", "backend"),
    [
        (PPO, "the 4 GPUs of the placement", "nccl"),
        (f"{PPO} train.colocate_all=true", "the 1 GPU of the placement", "ipc"),
        (SFT, "the 1 GPU of the placement", None),
        ("task=rejection_sampling demo=rejection_sampling", "the 1 GPU of the placement", None),
        ("task=chat demo=chat", "a GPU", None),
        ("task=score demo=score", "a GPU", None),
    ],
)
def test_a_machine_that_is_not_here_is_explained(line, number, backend, monkeypatch, capsys):
    code, shown, said = answer(f"{line} launch.device=cuda explain=true", "", monkeypatch, capsys)
    assert (code, said) == (0, "")
    assert f"No GPU is visible here. The plan assumes a machine with {number}, as" in shown
    assert "CPU process" not in shown
    assert backend is None or backend in shown


@pytest.mark.notices(
    "a run for more GPUs than there are starts",
    "preflight/devices.py",
    "placement.num_devices > devices.num_gpus:",
    "placement.num_devices > 9 * devices.num_gpus:",
)
@pytest.mark.notices(
    "a job of a sweep is taken to have all GPUs of the machine",
    "preflight/devices.py",
    "if limit is not None and here.num_gpus:",
    "if limit is None and here.num_gpus:",
)
def test_more_gpus_than_there_are_are_refused_and_explained(monkeypatch, capsys):
    line = f"{SFT} actor.num_gpus_per_node=8"
    code, _, said = answer(line, "0", monkeypatch, capsys)
    reason = "actor.num_gpus_per_node: the run takes 8 GPUs (8 x GPU: actor x 8), and 1 is visible to this machine"
    assert code == 2 and reason in said and "lower actor.num_gpus_per_node" in said
    code, shown, said = answer(f"{line} explain=true", "0", monkeypatch, capsys)
    assert code == 2 and reason in said and "8 actor" in shown


def test_models_that_would_fit_one_after_another_may_share_their_gpus(monkeypatch):
    line = f"{PPO} actor.num_gpus_per_node=2 ref.num_gpus_per_node=2 critic.num_gpus_per_node=2"
    (problem,), _ = asked(f"{line} vllm.num_engines=2 train.colocate_all=false", "0,1,2", monkeypatch)
    assert "write train.colocate_all=true" in problem
    assert asked(f"{line} vllm.num_engines=2 train.colocate_all=true", "0,1,2", monkeypatch)[0] == []
    (problem,), _ = asked(line, "0,1,2", monkeypatch)
    assert problem.startswith("actor.num_gpus_per_node: ") and "colocate_all" not in problem
    (problem,), _ = asked(f"{line} vllm.num_engines=4", "0,1,2", monkeypatch)
    assert problem.startswith("vllm.num_engines: ") and "colocate_all" not in problem


@pytest.mark.parametrize(
    ("line", "key"),
    [
        (f"{PPO} vllm.tensor_parallel_size=4", "vllm.tensor_parallel_size"),
        ("task=rejection_sampling actor.num_gpus_per_node=4 train.micro_batch_size=1", "actor.num_gpus_per_node"),
        ("task=rejection_sampling vllm.num_engines=4", "vllm.num_engines"),
        (
            f"{PPO} 'reward.sources={{a: {{model_name_or_path: builtin:tiny}}, b: {{rule: math}}}}' reward.rule=null "
            "reward.num_gpus_per_node=4 data.label_key=label",
            "reward.num_gpus_per_node",
        ),
    ],
)
def test_the_flag_of_the_largest_part_is_named(line, key, monkeypatch):
    problems, _ = asked(line, "0", monkeypatch)
    assert problems[0].startswith(f"{key}: the run takes")


@pytest.mark.notices(
    "idle GPUs are not said",
    "preflight/devices.py",
    "used < devices.num_gpus:",
    "used < devices.num_gpus - 5:",
)
def test_idle_gpus_are_said(monkeypatch, capsys):
    assert asked(PPO, "0,1,2,3,4,5,6,7,8", monkeypatch) == (
        [],
        ["The run takes 4 of the 9 GPUs of this machine: 5 of them stay idle."],
    )
    assert asked(PPO, "0,1,2,3", monkeypatch) == ([], [])
    assert asked(PPO, "0", monkeypatch) == ([], [])  # which all share
    _, shown, _ = answer(f"{SFT} explain=true", "0,1", monkeypatch, capsys)
    assert "The run takes 1 of the 2 GPUs of this machine: 1 of them stays idle." in shown


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (f"{SLURM}gpus_per_node=2 actor.num_gpus_per_node=4", "4 GPUs (4 x GPU: actor x 4), and 2 are visible to the"),
        (f"-m {SLURM}gpus_per_node=2 actor.num_gpus_per_node=4", "and 2 are visible to the job of Slurm"),
        ("-m hydra.launcher.gpus_per_job=1 actor.num_gpus_per_node=2", "and 1 is visible to a job of hydra.launcher."),
    ],
)
def test_a_job_has_the_gpus_that_its_launcher_gives_it(words, said, monkeypatch):
    (problem,), _ = asked(f"{SFT} {words}", "0,1,2,3", monkeypatch)
    assert said in problem


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (f"{SLURM}gpus_per_node=2", "The run takes 1 of the 2 GPUs of the job of Slurm: 1 of them stays idle."),
        (
            f"{SLURM}nodes=1 launch.device=cuda",
            "How many GPUs the job of Slurm has is not known here.",
        ),
        (f"{SLURM}nodes=1", "The plan assumes a job on nodes without GPUs, like this machine"),
        (
            "actor.num_gpus_per_node=2 launch.ray_address=head:6379 launch.device=cuda",
            "How many GPUs the cluster has is not known here.",
        ),
    ],
)
def test_devices_of_elsewhere_are_assumed_aloud(words, said, monkeypatch):
    problems, (remark,) = asked(f"{SFT} {words}", "", monkeypatch)
    assert problems == [] and remark.startswith(said)


def test_cpu_slots_that_the_user_limits_are_enough_for_all_processes(monkeypatch):
    line = f"{PPO} actor.num_gpus_per_node=8 launch.device=cpu"
    (problem,), _ = asked(f"{line} launch.num_cpus=1", "", monkeypatch)
    assert problem.startswith("launch.num_cpus: 1, and the run's 11 processes take 3 CPU slots")
    assert asked(line, "", monkeypatch) == asked(f"{line} launch.num_cpus=3", "", monkeypatch) == ([], [])


@pytest.mark.parametrize(
    "line",
    [
        "report {0}",
        "why {0}",
        "sweep status {0}",
        "migrate {0}/script.sh",
        "plan --gpu nothing task=sft",
        "plan task=chat",
        "plan task=sft actor.model_name_or_path={0}",
        "task=sft --config {0}",
        "task=nothing --cfg hydra",
        "task=generate actor.model_name_or_path={0} data.prompt_dataset={0} explain=true",
    ],
)
def test_no_mistake_of_a_user_is_a_traceback(line, tmp_path, monkeypatch, capsys):
    """Whatever the command: `main` would raise what is not handled."""
    code, _, said = answer(line.format(tmp_path / "nothing"), "", monkeypatch, capsys)
    assert code in (1, 2) and said.strip() and "Traceback" not in said


@pytest.mark.notices(
    "the damaged configuration of a stage is a traceback",
    "cli/execute.py",
    "        run = load(RunFolder(folder).config)\n    except UserError as error:",
    "        run = load(RunFolder(folder).config)\n    except KeyError as error:",
)
@pytest.mark.stack
def test_a_stage_whose_configuration_is_damaged_says_so(tmp_path):
    (tmp_path / "config.yaml").write_text("task: sft\nactor: [")
    command = [sys.executable, "-m", "rlhf_suite.cli.execute", str(tmp_path), str(os.getpid())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "config.yaml is not valid YAML" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.notices(
    "a wrong setting of logging is a traceback",
    "cli/execute.py",
    "except (ValueError, TypeError, AttributeError, ImportError) as error:  # those",
    "except ImportError as error:  # those",
)
@pytest.mark.stack
def test_a_wrong_setting_of_logging_is_one_sentence(tmp_path, monkeypatch, capsys):
    code, _, said = answer(f"{SFT} run_dir={tmp_path}/run hydra.job_logging.root.level=NONE", "", monkeypatch, capsys)
    assert code == 2 and "hydra.job_logging: Unable to configure root logger (Unknown level: 'NONE')" in said
