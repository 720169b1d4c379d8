"""Whole runs of the supervised tasks on ranks that split the matrices of each layer: losses, evaluations and the
exported model are those of one rank. `test_same_numbers.py` has the one of reinforcement learning."""

from __future__ import annotations

from pathlib import Path

import jobs
import pytest
import torch
from safetensors.torch import load_file

from rlhf_suite.models.builtin import Shape, create
from rlhf_suite.run_folders.run_folder import RunFolder
from rlhf_suite.tracking.metrics import is_measured, read_rows

pytestmark = pytest.mark.proof
COMMON = (
    *("data.max_len=64", "data.max_samples=64", "data.input_template=null", "train.batch_size=16"),
    *(
        "train.micro_batch_size=4",
        "train.max_steps=4",
        "actor.adam.lr=1e-3",
        "actor.adam.eps=1e-4",
        "actor.lr_scheduler=constant",
    ),
    *("eval.steps=2", "eval.max_samples=16", "ds.param_dtype=fp32", "ds.packing_samples=true", "launch.device=cpu"),
)
PAIRS = ("data.dataset=builtin:reverse_pairs", "data.prompt_key=prompt", "eval.dataset=builtin:reverse_pairs_eval")
TEXTS = ("data.dataset=builtin:reverse", "data.output_key=output", "eval.dataset=builtin:reverse_eval")
TASKS = {"sft": TEXTS, "distill": TEXTS, "dpo": PAIRS, "rm": PAIRS}
SPLITS = {
    "2 tensor": ("ds.tensor_parallel_size=2", "actor.num_gpus_per_node=2"),
    "2 data x 2 tensor": ("ds.tensor_parallel_size=2", "actor.num_gpus_per_node=4"),
    "2 data x 2 tensor at ZeRO-3": ("ds.tensor_parallel_size=2", "actor.num_gpus_per_node=4", "ds.zero_stage=3"),
}
LEAST_STEP = 1e-4  # by which the runs move their weights at least


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """A student and a teacher with other random weights."""
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("student", "teacher")):
        create(folder / name, Shape(), seed=seed)
    return folder


@pytest.fixture(scope="module")
def plain(runs, models):
    """The run of a task on one rank, made once."""
    known: dict[str, Path] = {}

    def get(task: str) -> Path:
        if task not in known:
            known[task] = runs / f"one_rank_{task}"
            jobs.run(known[task], words(task, models))
        return known[task]

    return get


def words(task: str, models: Path) -> list[str]:
    teacher = [f"teacher.model_name_or_path={models / 'teacher'}"] if task == "distill" else []
    return [f"task={task}", f"actor.model_name_or_path={models / 'student'}", *COMMON, *TASKS[task], *teacher]


@pytest.mark.notices(
    "a model on ranks that split matrices is exported with one rank's parts",
    "train/strategy.py",
    "with gather_parameters(self.ds, parameters), tensor_parallel.whole(parameters):",
    "with gather_parameters(self.ds, parameters):",
    cases="sft and not data",
    limit_s=600,
)
@pytest.mark.notices(
    "a run on ranks that split matrices counts each token once per rank",
    "distributed/world.py",
    "return self._reduce(tensor, dist.ReduceOp.SUM, self.mesh.data, self.data_ranks)",
    "return self._reduce(tensor, dist.ReduceOp.SUM, self.mesh.size, None)",
    cases="sft and not data",
    limit_s=600,
)
@pytest.mark.notices(
    "groups that split matrices get each other's parts of a batch",
    "distributed/mesh.py",
    "return rank // (self.sequence * self.tensor)",
    "return rank % self.data",
    cases="distill and data",
    limit_s=600,
)
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("task", TASKS)
def test_a_run_on_ranks_that_split_matrices_is_that_of_one_rank(runs, models, plain, task, split):
    whole, folder = plain(task), runs / f"{split.replace(' ', '_')}_{task}"
    jobs.run(folder, [*words(task, models), *SPLITS[split]])
    rows, wanted = (
        [
            {name: value for name, value in row.items() if not is_measured(name)}
            for row in read_rows(RunFolder(path).metrics)
        ]
        for path in (folder, whole)
    )
    assert [row["step"] for row in wanted if "train/actor_grad_norm" in row or "train/grad_norm" in row] == [1, 2, 3, 4]
    for row, right in zip(rows, wanted, strict=True):
        assert row == pytest.approx(right, rel=1e-3, abs=1e-5)
    ours, theirs, start = (
        load_file(path / "model.safetensors") for path in (folder / "model", whole / "model", models / "student")
    )
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=LEAST_STEP / 2, msg=name)
    assert max(float((value - start[name]).abs().max()) for name, value in theirs.items() if name in start) > LEAST_STEP
