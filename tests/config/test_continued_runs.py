"""A run that is continued: with the flags it had, or with those that the user names; refused before anything heavy."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from rlhf_suite.config.check.problems import Problem
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.preflight.folders import Place, for_run, how_to_continue
from rlhf_suite.preflight.inspections.inspect_runs import inspect
from rlhf_suite.run_folders.earlier_runs import describe_finished, keep_other_config
from rlhf_suite.run_folders.record import fingerprint, load, save
from rlhf_suite.run_folders.resume import changes
from rlhf_suite.run_folders.run_folder import RunFolder
from rlhf_suite.train.checkpoint import store_of

pytestmark = pytest.mark.stack

PPO = "task=ppo demo=ppo actor.adam.lr=1e-6 rollout.batch_size=1024 train.max_steps=null train.micro_batch_size=8"


def earlier(folder: Path, run: Run, steps: tuple[int, ...] = (3,)) -> RunFolder:
    """Leave what a run that was killed leaves: its record and checkpoints of some steps."""
    record = RunFolder(folder)
    record.start(fingerprint(run))
    save(run, record.config)
    store = store_of(run.ckpt, record)
    for step in steps:
        shutil.copy(record.config, store.begin(step))
        store.commit(step, {"step": step})
    return record


@pytest.fixture(scope="module")
def ppo(checked, tmp_path_factory) -> Path:
    """What a run of the command line PPO left; nothing changes it."""
    return earlier(tmp_path_factory.mktemp("earlier"), checked(PPO).runs[0]).path


def problems(checked, folder: Path, now: str) -> list[str]:
    """What is said when the run in a folder is to be continued by the command line `now`."""
    return [str(each) for each in inspect(checked(f"{now} ckpt.load_enable=true").runs, folder)]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("train.seed=7", "train.seed: 42 -> 7"),
        ("actor.adam.lr=1e-5", "actor.adam.lr: 1e-06 -> 1e-05"),
        ("rollout.batch_size=512", "rollout.batch_size: 1024 -> 512"),
        ("data.prompt_dataset=builtin:sort", "data.prompt_dataset: 'builtin:reverse' -> 'builtin:sort'"),
        ("train.max_steps=9", "train.max_steps: null -> 9"),
    ],
)
def test_another_value_is_refused_with_the_difference_and_can_be_allowed_by_name(checked, ppo, more, said):
    key = said.partition(":")[0]
    (problem,) = problems(checked, ppo, f"{PPO} {more}")
    assert said in problem and "step_000003 belongs to a run with other flags" in problem
    assert f"ckpt.allow_changes=[{key}]" in problem
    assert ("schedule" in problem) == (key == "train.max_steps")
    assert problems(checked, ppo, f"{PPO} {more} ckpt.allow_changes=[{key}]") == []


@pytest.mark.notices(
    "the remedy names a flag that the user may not set",
    "run_folders/resume.py",
    'if change.key not in ("task", OWN_CODE)',
    'if change.key != "task"',
)
def test_an_own_file_that_was_edited_or_dropped_is_named_and_what_is_told_can_be_done(checked, tmp_path):
    """What a run records of own files, their digests, is no flag: the user restores the file."""
    own = tmp_path / "my own.py"
    own.write_text("def f(moment, config):\n    return 1.0\n")
    line = f"{PPO} 'actor.lr_scheduler=\"{own}:f\"'"
    folder = earlier(tmp_path / "run", checked(line).runs[0]).path
    (dropped,) = problems(checked, folder, PPO)
    assert f"own_code: {own} is no longer used" in dropped and "earlier values (actor.lr_scheduler=" in dropped
    own.write_text("def f(moment, config):\n    return 0.5\n")
    (edited,) = problems(checked, folder, line)
    assert f"own_code: {own} has other contents" in edited and f"with the earlier contents of {own}, or" in edited
    (both,) = problems(checked, folder, f"{line} train.seed=7")
    assert f"values (train.seed=42) and the earlier contents of {own}, or" in both
    for problem in (dropped, edited, both):
        assert "own_code=" not in problem and "sha256" not in problem
    assert problems(checked, folder, f"{line} ckpt.allow_changes=[own_code]") == []


PADDED = "train.micro_batch_size=8 train.dynamic_batch_enable=false train.max_tokens_per_gpu=16192"


def test_a_run_of_the_time_when_rows_were_padded_names_the_flags_to_go_on_with(checked, tmp_path):
    """A padded run goes on with the same numbers when its values are written; packed rows round in another order."""
    line, now = "task=sft demo=sft", "task=sft demo=sft train.micro_batch_size=null"
    earlier(tmp_path, checked(f"{line} {PADDED} ds.packing_samples=false").runs[0])
    (problem,) = problems(checked, tmp_path, now)
    assert "ds.packing_samples: false -> null" in problem and "train.micro_batch_size: 8 -> null" in problem
    words = problem.partition("earlier values (")[2].partition(")")[0]
    assert sorted(words.split()) == sorted([*PADDED.split(), "ds.packing_samples=false"])
    assert problems(checked, tmp_path, f"{line} {words}") == []
    (other,) = problems(checked, tmp_path, f"{now} ds.use_universal_ckpt=true")
    assert "ds.packing_samples: false -> null" in other and "train.micro_batch_size:" not in other
    allowed = "ds.use_universal_ckpt=true ckpt.allow_changes=[ds.packing_samples]"
    assert problems(checked, tmp_path, f"{now} {allowed}") == []


@pytest.mark.notices(
    "a run goes on only with the words for its ZeRO stage",
    "run_folders/resume.py",
    "if zero_stage(before) == zero_stage(now):",
    "if False:",
)
@pytest.mark.parametrize(("ranks", "accepted"), [(1, False), (2, True)])
def test_a_run_of_the_time_when_the_zero_stage_was_2_goes_on_where_null_is_the_same(checked, tmp_path, ranks, accepted):
    line = f"{PPO} actor.num_gpus_per_node={ranks}"
    earlier(tmp_path, checked(f"{line} ds.zero_stage=2").runs[0])
    found = problems(checked, tmp_path, line)
    assert found == [] if accepted else "ds.zero_stage: 2 -> null" in found[0] and "ds.zero_stage=2)" in found[0]
    assert problems(checked, tmp_path, f"{line} ds.use_universal_ckpt=true") == []


SHAPES = [
    *("ds.zero_stage=3", "ds.ring_attn_size=2", "ds.adam_offload=true", "train.colocate_all=true"),
    *("actor.num_gpus_per_node=2", "actor.num_nodes=2", "ref.num_gpus_per_node=2"),
    *("vllm.tensor_parallel_size=2", "vllm.sync_backend=gloo", "train.micro_batch_size=2"),
]
MUON = "actor.optim=muon actor.max_norm=0"


@pytest.mark.parametrize("more", SHAPES)
def test_another_shape_is_let_through_by_the_universal_checkpoint(checked, ppo, more):
    key = more.partition("=")[0]
    (problem,) = problems(checked, ppo, f"{PPO} {more}")
    assert f"{key}: " in problem and "add ds.use_universal_ckpt=true" in problem
    assert problems(checked, ppo, f"{PPO} {more} ds.use_universal_ckpt=true") == []
    (other,) = problems(checked, ppo, f"{PPO} {more} train.seed=7 ds.use_universal_ckpt=true")
    assert f"{key}: " not in other and "train.seed: 42 -> 7" in other
    assert "'ckpt.allow_changes=[train.seed]'" in other


def test_the_momentum_of_muon_is_bound_to_its_ranks(checked, tmp_path):
    earlier(tmp_path, checked(f"{PPO} {MUON}").runs[0])
    (problem,) = problems(checked, tmp_path, f"{PPO} {MUON} ds.zero_stage=3 ds.use_universal_ckpt=true")
    assert "(ds.zero_stage cannot change: the momentum of Muon is saved as ZeRO and the ranks divide it)" in problem
    more = "ref.num_gpus_per_node=2 vllm.tensor_parallel_size=2 ds.use_universal_ckpt=true"
    assert problems(checked, tmp_path, f"{PPO} {MUON} {more}") == []


def test_a_task_without_universal_checkpoints_is_told_to_name_its_shape(tmp_path):
    run = Run.of("generate")
    run = replace(run, ckpt=replace(run.ckpt, load_enable=True))
    save(run, RunFolder(tmp_path).config)
    (tmp_path / "progress.json").write_text("{}")
    (problem,) = inspect([replace(run, vllm=replace(run.vllm, tensor_parallel_size=2))], tmp_path)
    assert "'ckpt.allow_changes=[vllm.tensor_parallel_size]'" in problem.fix


def test_a_checkpoint_without_the_optimiser_needs_a_word_to_go_on(checked, tmp_path):
    run = checked(f"{PPO} ckpt.disable_ds=true").runs[0]
    record = earlier(tmp_path, run, steps=())
    store = store_of(run.ckpt, record)
    save(run, store.begin(3) / "config.yaml")
    store.commit(3, {"step": 3, "has_optimizer": False})
    line = f"{PPO} ckpt.load_enable=true"
    (problem,) = inspect(checked(line).runs, tmp_path)
    assert "has only weights" in problem.what and "ckpt.reset_optimizer=true" in problem.fix
    assert inspect(checked(f"{line} ckpt.reset_optimizer=true").runs, tmp_path) == []


FIXED = ["ds.lora.rank=8", "ds.param_dtype=bf16", "actor.optim=muon actor.max_norm=0"]


@pytest.mark.parametrize("more", FIXED)
def test_what_a_checkpoint_cannot_be_loaded_with_is_never_allowed(checked, ppo, more):
    key = more.partition("=")[0]
    (problem,) = problems(checked, ppo, f"{PPO} {more}")
    assert f"{key}: " in problem and f"({key} cannot change)" in problem
    found = checked(f"{PPO} {more} ckpt.load_enable=true ckpt.allow_changes=[{key}]").problems
    (problem,) = (each for each in found if each.key == "ckpt.allow_changes")
    assert f"{key} can never change" in problem.what


def test_another_task_is_refused_in_one_message(checked, ppo):
    (problem,) = problems(checked, ppo, "task=sft demo=sft")
    assert "task: 'ppo' -> 'sft'" in problem


def test_what_changes_no_number_may_differ(checked, ppo):
    more = "logger.progress=false launch.timeout_s=5 ckpt.save_steps=2 data.cache_enable=false ckpt.max_num=1"
    assert problems(checked, ppo, f"{PPO} {more} vllm.kv_cache_mb=32") == []


def test_a_checkpoint_is_compared_with_wherever_it_is(checked, tmp_path):
    before = checked(f"{PPO} ckpt.path={tmp_path / 'kept'}").runs[0]
    earlier(tmp_path / "first", before)
    line = f"{PPO} ckpt.path={tmp_path / 'kept'} ckpt.load_enable=true"
    assert inspect(checked(line).runs, tmp_path / "second") == []
    assert len(inspect(checked(f"{line} train.seed=1").runs, tmp_path / "second")) == 1


def test_a_run_that_has_saved_nothing_may_start_again_with_other_flags(checked, tmp_path):
    earlier(tmp_path, checked(PPO).runs[0], steps=())
    assert inspect(checked(f"{PPO} train.seed=1 ckpt.load_enable=true").runs, tmp_path) == []


@pytest.mark.parametrize(
    ("run", "begun"), [(Run.of("generate"), "progress.json"), (Run.of("rejection_sampling"), "loop.json")]
)
def test_jobs_without_checkpoints_are_compared_with_their_folder(tmp_path, run, begun):
    run = replace(run, ckpt=replace(run.ckpt, load_enable=True))
    other = replace(run, rollout=replace(run.rollout, temperature=0.5))
    earlier_run = RunFolder(tmp_path)
    save(run, earlier_run.config)
    assert inspect([other], tmp_path) == []
    (tmp_path / begun).write_text("{}")
    assert inspect([run], tmp_path) == []
    (problem,) = inspect([other], tmp_path)
    assert "rollout.temperature: 1.0 -> 0.5" in problem.what


def test_a_misspelled_flag_among_the_allowed_ones_is_found(checked):
    (problem,) = checked(f"{PPO} ckpt.load_enable=true ckpt.allow_changes=[train.max_step]").problems
    assert problem.key == "ckpt.allow_changes" and "did you mean train.max_steps" in problem.fix


def test_load_enable_finds_the_run_whose_flags_may_change(checked, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    earlier(tmp_path / "outputs/ppo/a", checked(PPO).runs[0])
    line = f"{PPO} train.max_steps=9 ckpt.load_enable=true"
    assert "starting a new run" in for_run(checked(line)).note
    place = for_run(checked(f"{line} ckpt.allow_changes=[train.max_steps]"))
    assert isinstance(place, Place) and place.folder == Path("outputs/ppo/a")


def test_a_finished_run_says_so_with_its_result(checked, tmp_path):
    record = earlier(tmp_path, checked(PPO).runs[0])
    record.record_step(3)
    record.mark_done({"eval/pass1": 0.75, "train/reward": 0.5})
    again = checked(f"{PPO} ckpt.load_enable=true").runs[0]
    assert describe_finished(again, tmp_path) is None, "its model is not there"
    record.model.mkdir()
    said = describe_finished(again, tmp_path)
    assert f"the run in {tmp_path} is finished after step 3, eval/pass1 0.75. Its result is {record.model}" in said
    assert describe_finished(checked(PPO).runs[0], tmp_path) is None
    longer = checked(f"{PPO} ckpt.load_enable=true train.max_steps=9 ckpt.allow_changes=[train.max_steps]").runs[0]
    assert describe_finished(longer, tmp_path) is None


def test_a_finished_run_without_checkpoints_is_not_made_again_with_other_flags(checked, tmp_path):
    earlier(tmp_path, checked(PPO).runs[0], steps=()).mark_done({})
    assert len(inspect(checked(f"{PPO} train.seed=1 ckpt.load_enable=true").runs, tmp_path)) == 1


def test_an_interrupted_run_says_from_where_it_goes_on(checked, tmp_path):
    run = checked(f"{PPO} ckpt.save_steps=2").runs[0]
    assert how_to_continue(run, tmp_path) == "; no checkpoint was saved, so it cannot be continued"
    earlier(tmp_path, run, steps=(2, 4))
    said = how_to_continue(run, tmp_path)
    assert said == "; continue after step 4 with the same command and ckpt.load_enable=true"
    assert how_to_continue(Run.of("generate"), tmp_path) == "; nothing was saved yet"


def test_the_configuration_of_before_a_change_is_kept(checked, tmp_path):
    runs = [checked(f"{PPO} {more}").runs[0] for more in ("", "logger.progress=false", "train.seed=1", "train.seed=2")]
    for run in runs:
        keep_other_config(run, RunFolder(tmp_path))
        save(run, RunFolder(tmp_path).config)
    assert load(tmp_path / "config.1.yaml") == runs[1]
    assert [str(each) for each in changes(load(tmp_path / "config.2.yaml"), runs[3])] == ["train.seed: 1 -> 2"]
    kept = (tmp_path / "config.2.yaml").read_text()
    (tmp_path / "config.1.yaml").unlink()
    keep_other_config(runs[0], RunFolder(tmp_path))
    assert (tmp_path / "config.2.yaml").read_text() == kept


@pytest.mark.parametrize("text", ["task: ppo\ntrain: {sed: 1}\n", "task: [", "", "- a\n", "task: nothing\n", "\0"])
def test_a_damaged_configuration_is_one_message(checked, tmp_path, text):
    run = checked(f"{PPO} ckpt.load_enable=true").runs[0]
    earlier(tmp_path, run, steps=()).mark_done({})
    (tmp_path / "config.yaml").write_text(text)
    (problem,) = inspect([run], tmp_path)
    assert f"{tmp_path / 'config.yaml'} cannot be read: " in problem.what
    assert "\n" not in problem.what


@pytest.mark.parametrize("text", ["", "{", "[]", '{"state": "running"', "\udcff"])
def test_a_damaged_status_is_one_message(checked, tmp_path, monkeypatch, text):
    run = checked(f"{PPO} ckpt.load_enable=true").runs[0]
    record = earlier(tmp_path / "outputs/ppo/a", run)
    record.status_file.write_bytes(text.encode(errors="surrogateescape"))
    problem = for_run(checked(f"{PPO} ckpt.load_enable=true run_dir={record.path}"))
    assert isinstance(problem, Problem)
    assert f"{record.status_file} is damaged: it " in problem.what
    assert "delete it" in problem.fix
    monkeypatch.chdir(tmp_path)
    assert "starting a new run" in for_run(checked(f"{PPO} ckpt.load_enable=true")).note
    record.status_file.unlink()
    assert inspect([run], record.path) == []
    assert json.loads((record.checkpoints / "step_000003/state.json").read_text()) == {"step": 3}
