"""What a configuration may take from the environment, and that a secret there reaches neither files nor the console."""

from __future__ import annotations

import shlex

import pytest
from omegaconf import OmegaConf

from rlhf_suite.cli.app import main
from rlhf_suite.composition.arguments import parse
from rlhf_suite.composition.config_file import with_config_file
from rlhf_suite.config.check.references import from_environment
from rlhf_suite.errors import UserError
from rlhf_suite.preflight.jobs import preflight
from rlhf_suite.run_folders.record import load, save

SECRET = "sk-4f9a/secret+value"
SFT = "task=sft demo=sft logger.wandb.enable=true"
REFERENCE = "${oc.env:WANDB_API_KEY}"
PLACES = [
    f"logger.wandb.run_name='x {REFERENCE}'",
    f"""logger.wandb.run_name='"${{oc.decode:{REFERENCE}}}"' """,
    f"data.dataset='/tmp/x_{REFERENCE}.jsonl'",
    f"train.seed='{REFERENCE}'",
    f"'eval.input_key=[a,\"{REFERENCE}\"]'",
    f"run_dir='runs/{REFERENCE}'",
    f"hydra.run.dir='runs/{REFERENCE}'",
    f"-m train.seed=1,2 hydra.sweep.dir='runs/{REFERENCE}'",
    f"-m train.seed=1,2 hydra.sweep.subdir='{REFERENCE}'",
    f"-m logger.wandb.run_name='a{REFERENCE}','b{REFERENCE}'",
    f"hydra/launcher=slurm hydra.launcher.name='{REFERENCE}'",
    f"+hydra.job.env_set.NAME='{REFERENCE}'",
    "--config shared.yaml",
    "--config shared.yaml explain=true",
    "--config shared.yaml --cfg job --resolve",
    "--config-dir presets logger=shared",
]


@pytest.mark.notices(
    "a secret of the environment is a value",
    "config/check/references.py",
    "    if not is_plain(name, value):",
    "    if False:",
)
@pytest.mark.notices(
    "a wrong reference in a setting of Hydra is a traceback",
    "preflight/jobs.py",
    "except InterpolationResolutionError as error:",
    "except KeyboardInterrupt as error:",
)
@pytest.mark.parametrize("place", PLACES)
def test_a_secret_of_the_environment_is_refused_without_being_shown(place, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shared.yaml").write_text(f'logger: {{wandb: {{run_name: "x {REFERENCE}"}}}}\n')
    (tmp_path / "presets" / "logger").mkdir(parents=True)
    (tmp_path / "presets" / "logger" / "shared.yaml").write_text(f'wandb: {{run_name: "x {REFERENCE}"}}\n')
    before = sorted(tmp_path.rglob("*"))
    assert main(shlex.split(f"{SFT} {place}")) == 2
    output = capfd.readouterr()
    assert SECRET not in output.out + output.err and "Traceback" not in output.err
    assert "WANDB_API_KEY} is neither an existing path" in output.err
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.notices(
    "the configuration of a foreign run reads the environment",
    "run_folders/record.py",
    "    with guard_environment():\n",
    "    if True:\n",
)
def test_a_foreign_run_folder_reads_no_secret_of_the_environment(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    (tmp_path / "config.yaml").write_text(f'task: sft\nlogger: {{wandb: {{run_name: "x {REFERENCE}"}}}}\n')
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "train/loss": 1.0}\n')
    (tmp_path / "status.json").write_text('{"state": "done", "fingerprint": "none"}')
    for command in ("report", "why"):
        main([command, str(tmp_path)])
    assert SECRET not in "".join(capfd.readouterr())
    assert all(SECRET.encode() not in file.read_bytes() for file in tmp_path.iterdir())
    with pytest.raises(Exception, match="may be a secret") as refused:
        load(tmp_path / "config.yaml")
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HOME", "{here}"),
        ("DATA_KEY_DIR", "{here}"),
        ("SEED", "17"),
        ("LR", "1e-6"),
        ("FAST", "True"),
        ("NOTHING", ""),
        ("USER", "ada"),
        ("SLURM_JOB_NAME", "sft-big"),
    ],
)
def test_paths_numbers_and_names_are_read(name, value, tmp_path, monkeypatch):
    value = value.format(here=tmp_path)
    monkeypatch.setenv(name, value)
    assert from_environment(name) == from_environment(name, "other") == value


@pytest.mark.notices(
    "a number of a secret name is a value",
    "config/check/references.py",
    "    if SECRET_NAMES.search(name):\n        return False\n",
    "",
)
@pytest.mark.notices(
    "a reference to a path of elsewhere is read",
    "config/check/references.py",
    'value.startswith("/") and os.path.exists(value)',
    'value.startswith("/")',
)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MODEL", "Qwen/Qwen3-4B"),
        ("ANY", "/not/a/path/of/this/machine"),
        ("ANY", "/" + "x" * 5000),
        ("ANY", "1" * 40),
        ("MY_PIN", "1234"),
        ("SLURM_JWT_TOKEN", "eyJhbGciOi"),
    ],
)
def test_what_may_be_a_secret_is_refused(name, value, monkeypatch):
    monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=name) as refused:
        from_environment(name)
    assert value not in str(refused.value)


def test_a_reference_may_have_a_default(monkeypatch):
    monkeypatch.delenv("SEED", raising=False)
    assert from_environment("SEED", "3") == "3"
    assert from_environment("SEED", None) is None
    with pytest.raises(UserError, match="SEED} is not set; export SEED"):
        from_environment("SEED")


@pytest.mark.notices(
    "a file of flags is resolved before the command line",
    "composition/config_file.py",
    "OmegaConf.to_container(loaded)",
    "OmegaConf.to_container(loaded, resolve=True)",
)
def test_a_file_of_flags_refers_to_flags_to_the_environment_and_to_what_the_command_line_says(tmp_path, monkeypatch):
    monkeypatch.setenv("SEED", "17")
    monkeypatch.setenv("DATA", str(tmp_path))
    (tmp_path / "mine.yaml").write_text(
        "task: ppo\ndemo: ppo\ncritic: {adam: {lr: '${actor.adam.lr}'}}\ntrain: {seed: '${oc.env:SEED}'}\n"
        "ckpt: {output_dir: '${oc.env:DATA}/seed-${train.seed}'}\n"
    )
    found = preflight(with_config_file(parse(["--config", str(tmp_path / "mine.yaml"), "actor.adam.lr=3e-6"])))
    assert found.problems == []
    (run,) = found.runs
    assert (run.critic.adam.lr, run.train.seed, run.ckpt.output_dir) == (3e-6, 17, f"{tmp_path}/seed-17")


@pytest.mark.parametrize(
    ("word", "key"),
    [("hydra.run.dir", "hydra.run.dir"), ("hydra.launcher.name", "hydra.launcher.name"), ("run_dir", "run_dir")],
)
def test_a_reference_to_nothing_names_its_flag(word, key, monkeypatch):
    monkeypatch.delenv("NOPE", raising=False)
    found = preflight(parse(shlex.split(f"{SFT} hydra/launcher=slurm {word}='${{oc.env:NOPE}}'")))
    assert [(each.key, each.what) for each in found.problems] == [(key, "${oc.env:NOPE} is not set")]


@pytest.mark.notices(
    "own code cannot read keys of the environment any more",
    "config/check/references.py",
    "        if not GUARDS:\n",
    "        if GUARDS:\n",
)
def test_own_code_reads_its_own_files_as_before(tmp_path, monkeypatch):
    """Also within the process of a run that has read its configuration: only values of a run are guarded."""
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    (run,) = preflight(parse(shlex.split(SFT))).runs
    save(run, tmp_path / "config.yaml")
    load(tmp_path / "config.yaml")
    assert OmegaConf.create({"key": "${oc.env:OPENAI_API_KEY}"}).key == SECRET


@pytest.mark.stack
def test_a_secret_in_a_setting_of_logging_is_refused_without_being_shown(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    word = f"'hydra.job_logging.root.level=\"{REFERENCE}\"'"
    assert main(shlex.split(f"task=sft demo=sft {word} run_dir={tmp_path}/run")) == 2
    output = capfd.readouterr()
    assert SECRET not in output.out + output.err and "WANDB_API_KEY} is neither an existing path" in output.err
