"""Names from elsewhere: the suite takes a flag however its dashes are written, and tells what is called otherwise."""

from __future__ import annotations

import re
import shlex

import pytest

from rlhf_suite.cli.app import main
from rlhf_suite.cli.commands import COMMANDS
from rlhf_suite.composition.arguments import parse
from rlhf_suite.config.check.names import unknown_flag
from rlhf_suite.config.check.old_names import BECOMES, GONE, HINTS, NOTHING, RENAMED, VALUES
from rlhf_suite.config.declarations.runs import TASKS, flags_of
from rlhf_suite.migrate import fork, handlers
from rlhf_suite.preflight.jobs import Preflight, preflight


def checked(line: str) -> Preflight:
    return preflight(parse(shlex.split(line)))


@pytest.mark.parametrize(
    "line",
    [
        "--actor.adam.lr=1e-6",
        "--actor.adam.lr 1e-6",
        "-actor.adam.lr=1e-6",
        "--actor-adam-lr=1e-6",
        "--actor-adam-lr 1e-6",
        "actor-adam-lr=1e-6",
        "\u2014actor.adam.lr 1e-6",
        "\u2013\u2013actor.adam.lr=1e-6",
        "actor\u2011adam\u2011lr=1e-6",
    ],
)
def test_dashes_do_not_matter(line):
    assert parse(shlex.split(line)).overrides == ["actor.adam.lr=1e-6"]
    assert parse(shlex.split(line)).problems == []


@pytest.mark.notices(
    "a number below zero is not the value of a flag with dashes",
    "composition/arguments.py",
    'not after.startswith("-") or NUMBER.fullmatch(after) is not None',
    'not after.startswith("-")',
)
@pytest.mark.notices(
    "a flag with dashes takes the next override as its value",
    "composition/arguments.py",
    'return "=" not in after or (info is not None and find_key(key_of(after)) is None)',
    'return "=" not in after or info is not None',
)
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--task ppo --algo/advantage rloo", ["task=ppo", "algo/advantage=rloo"]),
        ("--algo.kl.init-coef 0 algo.kl.use-loss=true", ["algo.kl.init_coef=0", "algo.kl.use_loss=true"]),
        ("--ds.packing_samples task=sft", ["ds.packing_samples=true", "task=sft"]),
        ("--ds.packing-samples false --explain", ["ds.packing_samples=false", "explain=true"]),
        ("--eval.steps -1 --train.seed 3", ["eval.steps=-1", "train.seed=3"]),
        ("--reward.remote_url http://a/b?c=d", ["reward.remote_url=http://a/b?c=d"]),
        ("--actor.adam.lr task=sft", ["actor.adam.lr=true", "task=sft"]),  # then its type is told
        ("--hydra/launcher slurm", ["hydra/launcher=slurm"]),
        ("+no-flag=1 data.input_template=a-b", ["+no-flag=1", "data.input_template=a-b"]),
    ],
)
def test_words_with_dashes_are_overrides(line, expected):
    assert parse(shlex.split(line)).overrides == expected


def test_an_unknown_option_is_none_of_them():
    (problem, *_) = parse(["--foo"]).problems
    assert problem.what == "no such option"


@pytest.mark.notices(
    "settings of submitit keep their names",
    "composition/arguments.py",
    "if own in names else word",
    "if own == name else word",
)
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("hydra/launcher=submitit_local hydra.launcher.gpus_per_node=2", "hydra/launcher=local gpus_per_job=2"),
        ("hydra/launcher=submitit_slurm hydra.launcher.partition=a", "hydra/launcher=slurm slurm_partition=a"),
        (
            "hydra/launcher=slurm hydra.launcher.qos=a hydra.launcher.nodes=2",
            "hydra/launcher=slurm slurm_qos=a nodes=2",
        ),
        ("hydra.launcher.array_parallelism=2", "parallel=2"),
    ],
)
def test_launchers_of_submitit_are_those_here(words, expected):
    found = [word.removeprefix("hydra.launcher.") for word in parse(words.split()).overrides]
    assert found == expected.split()


@pytest.mark.parametrize("launcher", ["submitit_local", "submitit_slurm"])
def test_a_sweep_is_accepted_with_a_launcher_of_submitit(launcher):
    found = checked(f"-m task=sft train.seed=1,2 hydra/launcher={launcher}")
    assert found.problems == [] and len(found.runs) == 2


@pytest.mark.notices(
    "a value of elsewhere is only a likeness",
    "config/check/validate.py",
    "if known is not None or spelt is not None:",
    "if spelt is not None:",
)
def test_values_of_elsewhere_are_told_and_exist():
    for key, values in VALUES.items():
        choices = [str(each) for each in flags_of(None)[key].meta.choices]
        assert set(values.values()) <= set(choices) and not set(values) & set(choices), key
    (problem,) = checked("task=ppo algo.advantage.estimator=grpo").problems
    assert problem.fix == "write algo.advantage.estimator=group_norm"
    (problem,) = checked("task=ppo algo/advantage=grpo").problems
    assert problem.fix == "write algo/advantage=group_norm"
    (problem,) = checked("task=ppo agent.kind=Single-Turn").problems
    assert problem.fix == "write agent.kind=single_turn"


@pytest.mark.notices(
    "one of several flags with the same last word is guessed",
    "config/check/names.py",
    'if several := [name for name in known if name.rpartition(".")[2] == key]:',
    "if several := [name for name in known if name == key]:",
)
def test_a_word_that_ends_several_flags_names_them():
    (problem,) = checked("task=ppo lr=1e-6").problems
    assert problem.fix == "write one of actor.adam.lr, actor.muon.lr, critic.adam.lr, critic.muon.lr"


@pytest.mark.notices(
    "the remedy for a renamed flag keeps the value that is called otherwise",
    "config/check/names.py",
    "known or spell(",
    "spell(",
)
@pytest.mark.notices(
    "the remedy for a renamed flag does not quote its value",
    "config/check/names.py",
    "words if PLAIN.fullmatch(words) else quote(words)",
    "words",
)
@pytest.mark.notices(
    "a sweeper that is not installed is a misspelt preset",
    "composition/compose.py",
    'if key == "hydra/sweeper":',
    "if False:",
)
@pytest.mark.notices(
    "the remedy for a renamed flag has a value that it does not take",
    "config/check/names.py",
    "if known is None and (is_odd or",
    "if False and (is_odd or",
)
@pytest.mark.notices(
    "an old name with dashes alone is an unknown option",
    "composition/arguments.py",
    " or old_names().get(in_dashes(name))",
    "",
)
@pytest.mark.parametrize(
    ("line", "fix"),
    [
        ("task=dpo model.ipo_enable=true", "write algo.loss=ipo"),
        ("task=ppo normalize_mean=true", "write reward.normalize_enable=true reward.normalize_mean_only=true"),
        ("task=chat greedy-sampling=true", "write chat.temperature=0"),
        ("task=ppo use_icepop=true", "write correction=tis, correction=icepop or correction=seq-mask-tis"),
        ("task=sft local_rank=0", "remove it"),
        ("task=ppo num_generations=8", "write rollout.n_samples_per_prompt=8"),
        ("task=sft num_train_epochs=1", "write train.max_epochs=1"),
        ("task=ppo estimator=grpo", "write algo.advantage.estimator=group_norm"),
        ("task=ppo advantage_estimator=rloo", "write algo.advantage.estimator=rloo"),
        ("task=ppo 'adam_betas=[0.9,0.98]'", "write 'actor.adam.betas=[0.9,0.98]'"),
        ("task=ppo pretrain=Qwen/Qwen3-4B", "write actor.model_name_or_path=Qwen/Qwen3-4B"),
        ("""task=ppo 'pretrain="a b"'""", """write 'actor.model_name_or_path="a b"'"""),
        ("task=ppo use_kl_loss=true", "write algo.kl.use_loss=true"),
        ("-m task=sft learning_rate=1e-5,1e-6", "write actor.adam.lr=..."),
        ("task=sft --bf16", "write ds.param_dtype=..."),
        ("task=dpo --model-ipo-enable", "write algo.loss=ipo"),
        ("task=dpo --model-ipo-enable=true", "write algo.loss=ipo"),
        ("task=ppo --num-generations 8", "write rollout.n_samples_per_prompt=8"),
        ("task=sft flash_attn=true", "write ds.attn_implementation=..."),
        ("task=dpo loss_type=ipo", "write algo.loss=ipo"),
        ("task=dpo loss_type=nothing", "write algo.loss=..."),
        ("task=ppo experiment=GRPO", "did you mean experiment=grpo? (also close: gspo, dr_grpo)"),
        (
            "-m hydra/sweeper=nowhere task=sft train.seed=1,2",
            "install it, such as hydra-nowhere-sweeper, or remove hydra/sweeper: basic, the default, tries all of them",
        ),
    ],
)
def test_old_names_are_told(line, fix):
    assert fix in [problem.fix for problem in checked(line).problems]


def test_every_name_that_migrate_knows_is_known_to_the_checks():
    for name in {*handlers.HANDLERS, *fork.HANDLERS} - {*flags_of(None)}:
        told = (unknown_flag(name, task) for task in [*TASKS, None])
        assert any("did you mean" not in each.fix and "see --help" not in each.fix for each in told), name


def test_no_name_of_elsewhere_is_told_in_two_ways():
    tables = [set(table) for table in (BECOMES, NOTHING, GONE, HINTS)]
    assert sum(map(len, tables)) == len(set().union(*tables))
    assert not set(RENAMED) & (tables[0] | tables[1] | tables[2])


@pytest.mark.notices(
    "a misspelt preset also hides a task",
    "preflight/jobs.py",
    "problem.key in BEFORE_EXPERIMENT or",
    'problem.key == "task" or',
)
@pytest.mark.parametrize("line", ["experiment=grpoo", "demo=pppo", "task=pppo", "experiment=grpoo task=ppo"])
def test_a_misspelt_preset_is_one_problem(line):
    (problem,) = checked(line).problems
    assert "did you mean" in problem.fix


def test_help_lists_every_command(capsys):
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    for name, command in COMMANDS.items():
        assert f"  rlhf-suite {name} {command.words}" in printed
        assert main([name, "--help"]) == 0
        said = capsys.readouterr().out
        assert said.startswith(f"usage: {command.usage(name)}\n") and command.about in said
        assert all(argument in said for argument in command.arguments if argument.startswith("-"))


@pytest.mark.parametrize("width", ["40", "80", "200"])
def test_no_flag_is_broken_in_a_table(width, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", width)
    assert (
        main(shlex.split("task=ppo explain=true actor.gradient_checkpointing_enable=true rollout.batch_size=64")) == 0
    )
    printed = capsys.readouterr().out
    names = {"actor.gradient_checkpointing_enable", "rollout.n_samples_per_prompt", "vllm.sync_backend=auto"}
    assert names <= set(re.findall(r"[a-z]\w*(?:\.\w+)+(?:=\w+)?", printed))
    assert all(line[-1] in "┓┩┤│┘┨┥" for line in printed.splitlines() if line[0] in "┏┡│└")


def test_an_evaluation_set_alone_is_enough_in_rl():
    found = checked("task=ppo eval.dataset=builtin:reverse_eval")
    assert found.problems == [] and found.runs[0].eval.steps > 0  # that of the demo
    line = "task=ppo actor.model_name_or_path=builtin:tiny data.prompt_dataset=builtin:reverse data.label_key=answer "
    found = checked(f"{line} reward.rule=exact_match eval.dataset=builtin:reverse_eval")
    assert found.problems == [] and found.runs[0].eval.steps == -1


def test_the_remedy_for_a_renamed_flag_is_a_command_that_works():
    for line in ("task=ppo demo=ppo n_samples_per_prompt=4", "task=sft demo=sft 'adam_betas=[0.9,0.98]'"):
        (problem,) = checked(line).problems
        *others, _ = shlex.split(line)
        assert checked(shlex.join([*others, *shlex.split(problem.fix.removeprefix("write "))])).problems == []
