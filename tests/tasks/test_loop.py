"""A loop's iterations: which prompts, which model, what is trained on and recorded. The stages are done already."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from rlhf_suite.config import conf_dir
from rlhf_suite.config.declarations.data import DataConfig
from rlhf_suite.config.declarations.logger import LoggerConfig, WandbConfig
from rlhf_suite.config.declarations.loop import LoopConfig, LoopEvalConfig
from rlhf_suite.config.declarations.models import TrainedModelConfig
from rlhf_suite.config.declarations.reward import RewardConfig
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.plan.loop_stages import Share, dpo_run, evaluate_run, generate_run, judge_run, score_run, sft_run
from rlhf_suite.errors import RunError, UserError
from rlhf_suite.report.curves import draw_curves
from rlhf_suite.run_folders.record import fingerprint, save
from rlhf_suite.run_folders.run_folder import RunFolder
from rlhf_suite.tasks import conditional_sft, iterative_dpo, rejection_sampling
from rlhf_suite.tasks.loop import apart, shares_of, with_trained_judge
from rlhf_suite.tasks.warm_start import warm_folder
from rlhf_suite.tracking.metrics import read_rows

DATA = DataConfig.of("rejection_sampling", prompt_dataset="builtin:reverse", label_key="label")  # 2048 rows
SECTIONS = {
    "actor": TrainedModelConfig.of("ppo", model_name_or_path="org/first"),
    "data": DATA,
    "reward": RewardConfig.of("rejection_sampling", rule="exact_match"),
    "logger": LoggerConfig(progress=False),
}


def looping(data, **loop):
    return Run.of("rejection_sampling", data=data, loop=LoopConfig.of("rejection_sampling", **loop))


def done(folder, run, answers=(), score=0.0):
    """A stage that has ended. `answers`: for each prompt, its answers' scores."""
    record = RunFolder(folder)
    record.start(fingerprint(run))
    save(run, folder / "config.yaml")
    rows = [
        {"input": f"q{n}", "prompt": f"q{n}", "sample": s, "response": f"a{s}", "score": value, "finish_reason": "stop"}
        for n, scores in enumerate(answers)
        for s, value in enumerate(scores)
    ]
    (folder / {"score": "scores.jsonl"}.get(run.task, "generations.jsonl")).write_text(
        "".join(json.dumps(row) + "\n" for row in rows)
    )
    record.mark_done({"score": score})


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rejection_sampling_tunes_each_model_on_its_own_best_answers(tmp_path):
    config = Run.of(
        "rejection_sampling",
        **SECTIONS,
        eval=LoopEvalConfig(dataset="builtin:reverse_eval"),
        loop=LoopConfig.of("rejection_sampling", min_score=1.0),
    )
    models = ["org/first", str(tmp_path / "iter_0/sft/model"), str(tmp_path / "model")]
    for i, model in enumerate(models):
        done(tmp_path / f"evaluate_{i}", evaluate_run(config, model), answers=[[1.0]] * i + [[0.0]] * (4 - i))
    for i, model in enumerate(models[:2]):
        share, output = Share(1024 * i, 1024), models[2] if i == 1 else None
        answers = [[0.0, 1.0, 1.0], [0.0, 0.5, 0.0], [1.0, 0.0, 0.0]]
        done(tmp_path / f"iter_{i}/generate", generate_run(config, model, i, share), answers, 0.25 + i / 4)
        done(tmp_path / f"iter_{i}/sft", sft_run(config, model, tmp_path / f"iter_{i}/rows.jsonl", output))
    assert rejection_sampling.run(config, tmp_path)["eval/pass1"] == 0.5
    best = [{"input": "q0", "output": "a1", "score": 1.0}, {"input": "q2", "output": "a0", "score": 1.0}]
    assert rows_of(tmp_path / "iter_1/rows.jsonl") == best
    state = json.loads((tmp_path / "loop.json").read_text())
    before = [
        {"eval/pass1": i / 4, "eval/reward": i / 4, "train/reward": 0.25 + i / 4, "loop/rows": 2, "loop/dropped": 1}
        for i in (0, 1)
    ]
    assert state["metrics"] == [*before, {"eval/pass1": 0.5, "eval/reward": 0.5}]
    assert set(state["stages"].values()) == {"done"}
    logged = [row["eval/pass1"] for row in read_rows(tmp_path / "metrics.jsonl") if "eval/pass1" in row]
    assert logged == [0.0, 0.25, 0.5]
    assert draw_curves(RunFolder(tmp_path)).exists()


@pytest.mark.parametrize("fixed", [False, True])
def test_iterative_dpo_measures_against_the_iterations_model_or_the_first(tmp_path, fixed):
    config = Run.of("iterative_dpo", **SECTIONS, loop=LoopConfig.of("iterative_dpo", fixed_reference_enable=fixed))
    models = ["org/first", str(tmp_path / "iter_0/dpo/model"), str(tmp_path / "model")]
    for i, model in enumerate(models[:2]):
        rows, output = tmp_path / f"iter_{i}/rows.jsonl", models[2] if i == 1 else None
        answers = [[0.0, 1.0], [1.0, 1.0], [0.5, 0.25]]
        done(tmp_path / f"iter_{i}/generate", generate_run(config, model, i, Share(1024 * i, 1024)), answers)
        expected = dpo_run(config, (model, "org/first" if fixed else None), rows, output)
        done(tmp_path / f"iter_{i}/dpo", expected)
    assert iterative_dpo.run(config, tmp_path) == {"train/reward": 0.0, "loop/rows": 2, "loop/dropped": 1}
    pairs = [(row["input"], row["chosen"], row["rejected"]) for row in rows_of(tmp_path / "iter_0/rows.jsonl")]
    assert pairs == [("q0", "a1", "a0"), ("q2", "a0", "a1")]


@pytest.mark.parametrize("target", [None, 5.0])
def test_conditional_sft_asks_the_trained_model_for_the_highest_reward_it_has_seen(tmp_path, target):
    data = DataConfig.of(
        "conditional_sft", prompt_dataset="builtin:reverse", label_key="label", reward_template="{prompt}{reward}"
    )
    config = Run.of(
        "conditional_sft",
        **SECTIONS | {"data": data},
        eval=LoopEvalConfig(dataset="builtin:reverse_eval"),
        loop=LoopConfig.of("conditional_sft", num_iterations=2, target_reward=target),
    )
    models, seen = ["org/first", str(tmp_path / "iter_0/sft/model"), str(tmp_path / "model")], [None, 0.75, 0.5]
    asked = seen if target is None else [None, target, target]
    for i, model in enumerate(models):
        expected = evaluate_run(config, model, asked[i])
        assert (expected.data.target_reward, expected.data.reward_template) == (asked[i], "{prompt}{reward}")
        done(tmp_path / f"evaluate_{i}", expected, answers=[[0.0]])
    for i, model in enumerate(models[:2]):
        tuned = sft_run(config, model, tmp_path / f"iter_{i}/rows.jsonl", models[2] if i == 1 else None)
        assert (tuned.data.reward_key, tuned.data.reward_template) == ("score", "{prompt}{reward}")
        answered = generate_run(config, model, i, Share(1024 * i, 1024), asked[i])
        done(tmp_path / f"iter_{i}/generate", answered, [[seen[i + 1], 0.25]])
        done(tmp_path / f"iter_{i}/sft", tuned)
    conditional_sft.run(config, tmp_path)
    assert [row["score"] for row in rows_of(tmp_path / "iter_0/rows.jsonl")] == [0.75, 0.25]


def test_rewards_of_conditional_sft_may_be_standardised_over_all_answers_of_the_iteration(tmp_path):
    """Of 3, 1, 0 and 0 the mean is 1 and the unbiased deviation the root of 2."""
    config = Run.of(
        "conditional_sft",
        **SECTIONS,
        eval=LoopEvalConfig(dataset="builtin:reverse_eval"),
        loop=LoopConfig.of("conditional_sft", num_iterations=1, standardize_enable=True),
    )
    done(tmp_path / "evaluate_0", evaluate_run(config, "org/first"), answers=[[0.0]])
    done(tmp_path / "iter_0/generate", generate_run(config, "org/first", 0, Share(0, 2048)), [[3.0, 1.0], [0.0, 0.0]])
    tuned = sft_run(config, "org/first", tmp_path / "iter_0/rows.jsonl", str(tmp_path / "model"))
    done(tmp_path / "iter_0/sft", tuned)
    written = [2 / 2**0.5, 0, -1 / 2**0.5, -1 / 2**0.5]
    done(tmp_path / "evaluate_1", evaluate_run(config, str(tmp_path / "model"), written[0]), answers=[[0.0]])
    assert conditional_sft.run(config, tmp_path)["loop/rows"] == 4, "the evaluation asks for the highest of them"
    assert [row["score"] for row in rows_of(tmp_path / "iter_0/rows.jsonl")] == pytest.approx(written)


@pytest.mark.notices(
    "the scores of a reward model count as right answers",
    "tasks/loop.py",
    "or self.config.reward.model_name_or_path is None:",
    "or True:",
    cases="None",
)
@pytest.mark.notices(
    "a reward model says which held-out answers are right, though there is a rule",
    "tasks/loop.py",
    'verdicts = [row["score"] for row',
    '_ = [row["score"] for row',
    cases="exact_match",
)
@pytest.mark.parametrize("rule", [None, "exact_match"])
def test_a_reward_model_scores_in_a_stage_of_its_own(tmp_path, rule):
    sections = SECTIONS | {
        "reward": RewardConfig.of("rejection_sampling", model_name_or_path="org/rm"),
        "data": replace(DATA, max_len=20_000),
    }
    config = Run.of(
        "rejection_sampling",
        **sections,
        eval=LoopEvalConfig(dataset="builtin:reverse_eval", rule=rule),
        loop=LoopConfig.of("rejection_sampling", num_iterations=1),
    )
    answered = generate_run(config, "org/first", 0, Share(0, 2048))
    assert answered.reward == RewardConfig.of("generate")
    done(tmp_path / "iter_0/generate", answered)
    scored = score_run(config, tmp_path / "iter_0/generate/generations.jsonl")
    assert (scored.data.max_len, scored.score.max_tokens_per_gpu) == (20_000, 20_000)
    assert (scored.data.input_key, scored.data.output_key) == ("prompt", "response")
    done(tmp_path / "iter_0/score", scored, [[-3.0, 7.5]], score=2.25)
    done(tmp_path / "iter_0/sft", sft_run(config, "org/first", tmp_path / "iter_0/rows.jsonl", str(tmp_path / "model")))
    for i, model in enumerate(["org/first", str(tmp_path / "model")]):
        done(tmp_path / f"evaluate_{i}", evaluate_run(config, model))
        scored = score_run(config, tmp_path / f"evaluate_{i}/generations.jsonl")
        done(tmp_path / f"evaluate_{i}_score", scored, [[float(i)], [-1.0]])
        if rule is not None:
            answers = tmp_path / f"evaluate_{i}_score/scores.jsonl"
            done(tmp_path / f"evaluate_{i}_rule", judge_run(config, answers), [[1.0], [0.75], [0.0], [float(i)]])
    metrics = rejection_sampling.run(config, tmp_path)
    assert (metrics["eval/reward"], metrics.get("eval/pass1")) == (0.0, None if rule is None else 0.75)
    assert rows_of(tmp_path / "iter_0/rows.jsonl") == [{"input": "q0", "output": "a1", "score": 7.5}]
    assert json.loads((tmp_path / "loop.json").read_text())["metrics"][0]["train/reward"] == 2.25


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        (
            "builtin:sort",
            ['data.dataset="builtin:sort_pairs"', "eval.dataset=null", "train.max_steps=null"],
        ),
        ("builtin:reverse", []),
    ],
)
@pytest.mark.notices(
    "the built-in reward model of a loop is trained on other rows than its prompts",
    "tasks/loop.py",
    'warm_start(path, "rm", prompts=config.data.prompt_dataset)',
    'warm_start(path, "rm")',
    cases="sort",
)
def test_a_built_in_reward_model_is_trained_on_pairs_of_the_tasks_of_the_prompts(tmp_path, monkeypatch, prompts, words):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    kept = warm_folder("builtin:tiny", conf_dir() / "demo" / "rm.yaml", words)
    kept.mkdir(parents=True)
    (kept / "config.json").write_text("{}")
    reward = RewardConfig.of("rejection_sampling", model_name_or_path="builtin:tiny")
    config = Run.of(
        "rejection_sampling", **SECTIONS | {"reward": reward, "data": replace(DATA, prompt_dataset=prompts)}
    )
    assert score_run(with_trained_judge(config), "answers.jsonl").reward.model_name_or_path == str(kept)


def test_an_iteration_without_anything_to_train_on_says_why(tmp_path):
    config = Run.of("rejection_sampling", **SECTIONS, loop=LoopConfig.of("rejection_sampling", min_score=1.0))
    done(tmp_path / "iter_0/generate", generate_run(config, "org/first", 0, Share(0, 1024)), [[0.5], [0.25]])
    with pytest.raises(RunError, match=r"nothing to train on; 2 prompts give no row: no response scores 1 or more"):
        rejection_sampling.run(config, tmp_path)


@pytest.mark.parametrize(
    ("loop", "data", "expected"),
    [
        ({"num_iterations": 3}, DATA, [(0, 682), (682, 683), (1365, 683)]),
        ({"num_iterations": 2}, replace(DATA, skip_samples=8, max_samples=100), [(8, 50), (58, 50)]),
        ({"num_iterations": 4, "prompts_per_iteration": 900}, DATA, [(0, 900), (900, 900), (0, 900), (900, 900)]),
        ({"num_iterations": 2, "prompts_per_iteration": 9000}, DATA, [(0, 2048), (0, 2048)]),
    ],
)
def test_each_iteration_has_its_share_of_the_prompts(loop, data, expected):
    assert shares_of(looping(data, **loop)) == [Share(*each) for each in expected]


def test_fewer_prompts_than_iterations_are_refused():
    with pytest.raises(UserError, match="only 3 prompts"):
        shares_of(looping(replace(DATA, max_samples=3), num_iterations=4))


def test_prompts_that_come_again_get_other_answers():
    config = looping(DATA)
    first, again = (generate_run(config, "m", i, Share(0, 10)).rollout for i in (0, 2))
    assert (first.seed, again.seed) == (42, 44)
    assert replace(again, seed=42) == first


def test_each_training_has_curves_of_its_own(tmp_path):
    logger = LoggerConfig(tensorboard_dir="/tb", wandb=WandbConfig(enable=True))
    run = sft_run(Run.of("rejection_sampling", logger=logger), "m", "rows.jsonl", None)
    named = apart(run, tmp_path / "my_loop", "iter_1/sft").logger
    assert named.tensorboard_dir == "/tb/my_loop/iter_1"
    assert (named.wandb.group, named.wandb.run_name) == ("my_loop", "my_loop/iter_1/sft")
