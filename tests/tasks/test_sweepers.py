"""A sweep whose jobs an installed sweeper of Hydra chooses, from the number of each job before."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from hydra.core.utils import JobStatus
from omegaconf import OmegaConf

from rlhf_suite.composition.arguments import parse
from rlhf_suite.errors import UserError
from rlhf_suite.preflight.jobs import Preflight, preflight
from rlhf_suite.run_folders.run_folder import RunFolder
from rlhf_suite.sweeps.sweepers import check_direction, job_of, list_varied_words, result_of

# Asks for a job at each end of `range(a,b)`, then for one in between the better end and the middle.
PLUGIN = """
from dataclasses import dataclass
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper

class Halving(Sweeper):
    def __init__(self, rounds): self.rounds = rounds
    def setup(self, *, hydra_context, task_function, config):
        self.launcher = Plugins.instance().instantiate_launcher(
            config=config, hydra_context=hydra_context, task_function=task_function)
    def sweep(self, arguments):
        (word,) = arguments
        override = OverridesParser.create().parse_override(word)
        key, bounds = override.key_or_group, override.value()
        ends = [bounds.start, bounds.stop]
        got = self.launcher.launch([[f"{key}={each}"] for each in ends], initial_job_idx=0)
        better = max(zip([each.return_value for each in got], ends))[1]
        self.launcher.launch([[f"{key}={int((better + sum(ends) / 2) / 2)}"]], initial_job_idx=2)

@dataclass
class Settings:
    _target_: str = "hydra_plugins.halving.Halving"
    rounds: int = 1

ConfigStore.instance().store(group="hydra/sweeper", name="halving", node=Settings, provider="halving")
"""


@pytest.mark.stack
def test_a_sweeper_that_is_installed_chooses_the_jobs(tmp_path):
    plugin = tmp_path / "site" / "hydra_plugins" / "halving.py"
    plugin.parent.mkdir(parents=True)
    plugin.write_text(PLUGIN)
    words = ["-m", "task=check_reward", "hydra/sweeper=halving", "run_dir=sweep", "reward.timeout_s=50"]
    words += ["reward.rules.length_limit=range(1,9)"]
    paths = os.pathsep.join(filter(None, [str(plugin.parents[1]), os.environ.get("PYTHONPATH")]))
    ended = subprocess.run(
        [sys.executable, "-m", "rlhf_suite.cli", *words],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    jobs = json.loads((tmp_path / "sweep" / "summary.json").read_text())
    limits = [int(job["overrides"][0].partition("=")[2]) for job in jobs]
    assert limits[:2] == [1, 9] and limits[2] in (3, 7)
    assert [job["state"] for job in jobs] == ["done"] * 3
    assert all("reward.timeout_s=50" in job["words"] for job in jobs)


def checked(*words: str) -> Preflight:
    return preflight(parse([*words]))


def test_what_varies_is_the_sweepers_and_the_rest_is_of_every_job(tmp_path):
    line = parse(["-m", "task=sft", "actor.adam.lr=interval(1e-5,1e-3)", "train.seed=1,2", "hydra.sweeper.params=null"])
    assert list_varied_words(line) == ["actor.adam.lr=interval(1e-5,1e-3)", "train.seed=1,2"]
    job = job_of(3, ["task=sft"], ["train.seed=1"], tmp_path)
    assert job.words[:2] == ["task=sft", "train.seed=1"] and job.folder == str(tmp_path / "3")
    assert checked("task=sft", *job.words[1:]).problems == []


@pytest.mark.notices(
    "a sweeper learns the metric of the table, not the one that was named",
    "sweeps/sweepers.py",
    "(key, metrics[key]) if key is not None and key in metrics else (job.metric, job.value)",
    "(job.metric, job.value)",
)
@pytest.mark.parametrize(("key", "expected"), [("eval/gpt_loss", 0.5), ("eval/other", 2.0), (None, 2.0)])
def test_a_sweeper_gets_the_metric_of_the_best_checkpoint_or_that_of_the_table(tmp_path, key, expected):
    found = checked("task=sft", *([f"ckpt.best_metric_key={key}"] if key else []))
    job = job_of(0, [], [], tmp_path)
    RunFolder(tmp_path / "0").path.mkdir(parents=True, exist_ok=True)
    (tmp_path / "0" / "status.json").write_text(json.dumps({"state": "done", "metrics": {"eval/gpt_loss": 0.5}}))
    job.state, job.value = "done", 2.0
    assert result_of(job, found).return_value == expected


@pytest.mark.parametrize(("way", "metric"), [("minimize", "eval/gpt_loss"), ("maximize", "eval/pass4")])
def test_a_sweeper_that_looks_for_the_worst_of_a_metric_is_refused(way, metric):
    found = checked("task=sft")
    other = {"minimize": "maximize", "maximize": "minimize"}[way]
    for asked, is_refused in ((way, False), (other, True), ("Pareto", False)):
        asking = replace(found, hydra=OmegaConf.create({"sweeper": {"direction": asked}}))
        check_direction(asking, "eval/kl")
        if is_refused:
            with pytest.raises(
                UserError, match=rf"direction={other} looks for the worst job: .* Write hydra.sweeper.direction={way}"
            ):
                check_direction(asking, metric)
        else:
            check_direction(asking, metric)
    check_direction(found, metric)


def test_a_job_that_failed_gives_the_sweeper_its_reason(tmp_path):
    job = job_of(0, [], ["train.seed=1"], tmp_path)
    job.state, job.error = "failed", "no data"
    result = result_of(job, checked("task=sft"))
    assert result.status == JobStatus.FAILED and "no data" in str(result._return_value)


def test_a_sweeper_that_waits_for_its_jobs_has_them_on_this_machine():
    (problem,) = checked("-m", "task=sft", "train.seed=1,2", "hydra/sweeper=halvingg").problems
    assert problem.key == "hydra/sweeper"
