"""What a message says to write is accepted when it is written."""

from __future__ import annotations

import shlex

import pytest
from command_lines import GENERATE, PPO, SFT
from remedies import advised

from rlhf_suite.composition.arguments import quote
from rlhf_suite.composition.compose import hydra_ready
from rlhf_suite.composition.overrides import parse_one
from rlhf_suite.config.check.validate import is_path
from rlhf_suite.config.declarations.runs import TASKS, flags_of

pytestmark = pytest.mark.stack

LISTS = [key for key, info in flags_of(None).items() if info.type.base is list]
PATHS = [key for key, info in flags_of(None).items() if is_path(info)]


def owner(key: str) -> str:
    """A task that has the flag."""
    return next(task for task in TASKS if key in flags_of(task))


@pytest.mark.parametrize("key", LISTS)
@pytest.mark.parametrize("value", ["[[1]]", "[null]", "[{a: 1}]"])
def test_a_list_in_a_list_is_refused_with_its_type(checked, key, value):
    problems = [each for each in checked(f"task={owner(key)} '{key}={value}'").problems if each.key == key]
    assert len(problems) == 1
    assert f"is not a list[{flags_of(None)[key].type.scalar.__name__}]" in problems[0].what


@pytest.mark.parametrize("key", PATHS)
def test_an_empty_path_is_refused(checked, key):
    (problem,) = [each for each in checked(f"task={owner(key)} {key}=").problems if each.key == key]
    assert (problem.what, problem.fix.startswith(f"write {key}=")) == ("is empty", True)


def test_every_flag_that_is_a_path_is_known_as_one():
    assert {"data.dataset", "eval.dataset", "ckpt.output_dir", "ckpt.path", "lora.path", "reward.remote_url"} <= {
        *PATHS
    }
    assert {"actor.model_name_or_path", "reward.process.model_name_or_path", "score.output_path"} <= {*PATHS}
    assert not {"data.dataset_split", "data.input_key", "serve.host", "generate.shard"} & {*PATHS}


def test_the_home_folder_is_meant_by_a_tilde_in_every_path(checked, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.jsonl").write_text('{"input": "x", "output": "y"}\n')
    (tmp_path / "b.jsonl").write_text('{"input": "x", "output": "y"}\n')
    (tmp_path / "m").mkdir()
    line = (
        SFT.replace("builtin:tiny", "~/m")
        + "'data.dataset=\"~/a.jsonl,~/b.jsonl\"' ckpt.output_dir=~/out ckpt.path=~/c"
    )
    found = checked(line)
    assert not found.problems
    (run,) = found.runs
    assert run.actor.model_name_or_path == f"{tmp_path}/m"
    assert run.data.dataset == f"{tmp_path}/a.jsonl,{tmp_path}/b.jsonl"
    assert (run.ckpt.output_dir, run.ckpt.path) == (f"{tmp_path}/out", f"{tmp_path}/c")
    swept = checked("-m " + SFT + "data.dataset=~/a.jsonl,~/b.jsonl")
    assert [run.data.dataset for run in swept.runs] == [f"{tmp_path}/a.jsonl", f"{tmp_path}/b.jsonl"]
    assert checked(SFT + "hydra.run.dir=~/run").folder == tmp_path / "run"


@pytest.mark.parametrize("text", ["a\\", "C:\\x\\y", 'say "x"', 'a\\"b', '\\\\"', "it's", "a=b,c{"])
def test_a_quoted_text_is_read_back_as_it_was(text):
    with hydra_ready():
        assert parse_one(f"data.dataset={quote(text)}").value() == text


def test_a_value_that_cannot_be_read_is_quoted_so_that_it_can_be(checked):
    (problem,) = checked("task=sft 'data.input_key=a{b\\'").problems
    word = advised(problem.fix)
    assert word is not None and not [
        each for each in checked(SFT + shlex.quote(word)).problems if each.key == "data.input_key"
    ]


def test_commas_without_quotes_are_explained_by_the_type_of_the_flag(checked):
    for word, fix in (
        ("data.dataset=a,b", """write 'data.dataset="a,b"' for one text; a sweep needs -m"""),
        ("actor.adam.betas=0.9,0.99", "a list is 'actor.adam.betas=[0.9,0.99]'; a sweep needs -m"),
        ("train.seed=1,2", "give one value; a sweep needs -m"),
    ):
        fixes = [each.fix for each in checked(SFT + word).problems if each.key == word.partition("=")[0]]
        assert fixes == [fix]


def test_a_task_or_a_preset_without_its_group_is_recognised(checked):
    (problem,) = checked("sft").problems
    assert problem.fix == "write task=sft"
    (problem,) = checked("task=ppo grpo").problems
    assert problem.fix == "write experiment=grpo"
    assert "did you mean task=sft?" in {each.fix for each in checked("sftt").problems}


def test_the_critic_is_not_blamed_where_there_is_none_or_the_actor_has_the_same_problem(checked):
    for words in ("experiment=grpo ", ""):
        keys = {each.key for each in checked(PPO + words + "train.batch_size=100").problems}
        assert "rollout.batch_size" in keys and "critic.num_gpus_per_node" not in keys


def test_an_output_that_is_a_folder_is_refused(checked, tmp_path):
    for name in (".", str(tmp_path)):
        (problem,) = checked(GENERATE + f"generate.output_path={name}").problems
        assert (problem.key, "is a folder" in problem.what) == ("generate.output_path", True)
