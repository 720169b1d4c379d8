"""Evaluations that go on while the next step trains."""

from __future__ import annotations

import asyncio

import plain_run
import pyarrow.parquet as pq
import pytest
from plain_run import run, small
from schedule_runs import FLAGS, STEPS, assert_same_run, steps

from rlhf_suite.errors import RunError
from rlhf_suite.models.load import load_tokenizer
from rlhf_suite.polling import poll_until
from rlhf_suite.rl.evaluation import Evaluator
from rlhf_suite.rl.prompts import load_prompts
from rlhf_suite.rl.update import Updater
from rlhf_suite.tracking.metrics import read_rows

pytestmark = pytest.mark.stack


EVALUATED = FLAGS | {
    "ckpt__save_steps": -1,
    "eval__dataset": "builtin:reverse_eval",
    "eval__steps": 1,
    "eval__max_samples": 2,
    "eval__n_samples_per_prompt": 2,
    "eval__temperature": 0.7,
    "train__async_enable": True,
}
STREAM = {"train__async_queue_size": 2, "train__partial_rollout_enable": True}


def evaluated_while_trained(world, folder, config) -> list[tuple[int, int, bool]]:
    """Run with evaluations that wait until the policy has trained the next step. Return of each evaluation between two
    steps its step, the version of the engine at its end, and whether that step was trained."""
    update, evaluate, trained, found = Updater.update, Evaluator.evaluate, [], []

    def counted(*arguments):
        metrics = update(*arguments)
        trained.append(arguments)
        return metrics

    def late(evaluator, step):
        goes_on = 0 < step < STEPS and poll_until(lambda: len(trained) > step, 300 if config.ckpt.save_steps < 0 else 1)
        metrics = evaluate(evaluator, step)
        if 0 < step < STEPS:
            found.append((step, evaluator.sampler.engines.version, goes_on))
        return metrics

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Updater, "update", counted)
        patch.setattr(Evaluator, "evaluate", late)
        run(world, folder, config)
    return found


@pytest.mark.notices(
    "the policy waits for the evaluation of its weights",
    "config/plan/run_plan.py",
    "overlaps_evaluation=overlaps and not evaluation_decides",
    "overlaps_evaluation=False",
)
@pytest.mark.notices(
    "the engines get the weights of the next step while they are evaluated",
    "rl/pipeline.py",
    "                self.finish_evaluation()\n        sync_metrics",
    "                pass\n        sync_metrics",
)
@pytest.mark.parametrize("stream", [{}, STREAM])
def test_the_policy_trains_while_its_weights_are_evaluated(ranks, tmp_path, stream):
    (found,) = ranks(1).call(evaluated_while_trained, tmp_path, small(**EVALUATED | stream))
    assert found == [(step, step, True) for step in range(1, STEPS)]


def evaluations(folder) -> list[dict]:
    """Return the rows of all evaluations, without times."""
    rows = [row for row in read_rows(folder / "metrics.jsonl") if "eval/pass1" in row]
    return [{name: row[name] for name in row if name == "step" or name.startswith("eval/")} for row in rows]


@pytest.mark.notices(
    "a step trains before the evaluation on which a checkpoint depends",
    "config/plan/run_plan.py",
    "overlaps_evaluation=overlaps and not evaluation_decides",
    "overlaps_evaluation=overlaps",
)
def test_evaluations_beside_training_give_the_numbers_of_those_before_it(ranks, tmp_path):
    beside, before = tmp_path / "beside", tmp_path / "before"
    ranks(1).call(run, beside, small(**EVALUATED))
    (found,) = ranks(1).call(evaluated_while_trained, before, small(**EVALUATED | {"ckpt__save_steps": 4}))
    assert found == [(step, step, False) for step in range(1, STEPS)], "a checkpoint may depend on them"
    assert_same_run(beside, before)
    assert evaluations(beside) == evaluations(before)
    assert [row["step"] for row in evaluations(beside)] == [*range(STEPS + 1)]
    for step in range(STEPS + 1):
        one, other = (pq.read_table(folder / f"evaluations/step_{step:06d}.parquet") for folder in (beside, before))
        assert one.equals(other)


def run_with_a_failing_evaluation(world, folder, config) -> str:
    evaluate = Evaluator.evaluate

    def failing(evaluator, step):
        if step == 2:
            raise RunError("no answer")
        return evaluate(evaluator, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Evaluator, "evaluate", failing)
        try:
            run(world, folder, config)
        except RunError as error:
            return str(error)
    return "it did not end"


def test_an_evaluation_that_fails_beside_a_step_ends_the_run_with_that_step(ranks, tmp_path):
    (said,) = ranks(1).call(run_with_a_failing_evaluation, tmp_path, small(**EVALUATED))
    assert said == "no answer"
    assert len(steps(tmp_path)) == 2


# A judge that needs as long for an evaluation as the next rollout takes to be scored.
JUDGE = """
import time
from pathlib import Path

HERE = Path(__file__).parent
HELD_OUT = set((HERE / "held_out.txt").read_text().splitlines())

def reward_func(queries, prompts, labels):
    if prompts[0] not in HELD_OUT:
        with (HERE / "scored.txt").open("a") as file:
            file.writelines("x\\n" for _ in queries)
        return [float(len(query)) for query in queries]
    with (HERE / "evaluated.txt").open("a") as file:
        file.writelines("x\\n" for _ in queries)
    step = (lines("evaluated.txt") - 1) // SAMPLES
    ends = time.monotonic() + 120
    while 0 < step < STEPS and lines("scored.txt") < min(4 * (step + 2), 4 * STEPS):
        assert time.monotonic() < ends, "the next rollout is not scored"
        time.sleep(0.01)
    return [1.0] * len(queries)

def lines(name):
    path = HERE / name
    return len(path.read_text().splitlines()) if path.exists() else 0
"""


def run_with_a_slow_judge(world, folder, config) -> None:
    """Run with an engine that begins no rollout before the judge has begun the evaluation before."""
    generate, asked = plain_run.PlainEngines.generate, []

    async def late(engines, request):
        if request.sampling.temperature == config.rollout.temperature:
            asked.append(request)
            step, judged = (len(asked) - 1) // 4, folder / "evaluated.txt"
            before = (step - 1) * held_out_samples(config)
            while step > 1 and not (judged.exists() and len(judged.read_text().splitlines()) > before):
                await asyncio.sleep(0.01)
        return await generate(engines, request)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plain_run.PlainEngines, "generate", late)
        run(world, folder / "run", config)


@pytest.mark.notices(
    "an evaluation and rollouts share the processes of rewards",
    "rl/build.py",
    "beside = rewards.beside() if",
    "beside = rewards if",
)
def test_a_slow_judge_of_an_evaluation_does_not_hold_up_the_scores_of_rollouts(ranks, tmp_path):
    flags = EVALUATED | {
        "eval__temperature": 0.9,
        "reward__rule": None,
        "reward__remote_url": str(tmp_path / "judge.py"),
    }
    config = small(**flags | {"reward__stop_properly_penalty_coef": None})
    judge = JUDGE.replace("STEPS", str(STEPS)).replace("SAMPLES", str(held_out_samples(config)))
    (tmp_path / "judge.py").write_text(judge)
    (tmp_path / "held_out.txt").write_text("\n".join(held_out_prompts(config)))
    ranks(1).call(run_with_a_slow_judge, tmp_path, config)
    assert [row["step"] for row in evaluations(tmp_path / "run")] == [*range(STEPS + 1)]
    assert len(steps(tmp_path / "run")) == STEPS


def held_out_samples(config) -> int:
    return config.eval.max_samples * config.eval.n_samples_per_prompt


def held_out_prompts(config) -> list[str]:
    tokenizer = load_tokenizer(config.actor.model_name_or_path, config.data)
    prompts = load_prompts(config.data, config.eval, config.train.seed, tokenizer, False)
    assert not {each.text for each in prompts.train} & {each.text for each in prompts.held_out}
    return [each.text for each in prompts.held_out]
