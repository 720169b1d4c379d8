"""The runs that a loop consists of: which prompts, seeds and temperatures each has."""

from __future__ import annotations

import pytest

from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.plan.loop_stages import Share, dpo_run, evaluate_run, generate_run, judge_run, score_run, sft_run
from rlhf_suite.config.rules.check_run import check
from rlhf_suite.preflight.inspections import rewards
from rlhf_suite.preflight.inspections.named_files import inspect_named
from rlhf_suite.sandbox.jail import Offer


@pytest.fixture
def loop() -> Run:
    run = Run.of("rejection_sampling")
    run.data.prompt_dataset, run.data.prompt_split = "prompts", "train"
    run.data.skip_samples, run.data.max_samples, run.data.max_len = 7, 100, 5000
    run.eval.dataset, run.eval.split, run.eval.max_samples = "held out", "test", 30
    run.rollout.temperature, run.rollout.seed = 0.7, 5
    return run


@pytest.mark.notices(
    "each iteration of a loop draws the same answers",
    "config/plan/loop_stages.py",
    "seed=run.rollout.seed + iteration",
    "seed=run.rollout.seed",
)
def test_an_iteration_answers_its_share_of_the_prompts_with_numbers_of_its_own(loop):
    first, second = (generate_run(loop, "model", number, Share(7 + 40 * number, 40)) for number in (0, 1))
    assert [(run.data.skip_samples, run.data.max_samples) for run in (first, second)] == [(7, 40), (47, 40)]
    assert (first.data.prompt_dataset, first.rollout.temperature, first.rollout.n_samples_per_prompt) == (
        "prompts",
        0.7,
        8,
    )
    assert (first.rollout.seed, second.rollout.seed) == (5, 6)
    assert loop.rollout.seed == 5


@pytest.mark.notices(
    "a loop evaluates with the temperature of its training",
    "config/plan/loop_stages.py",
    ", temperature=held_out.temperature",
    "",
)
@pytest.mark.notices(
    "a loop evaluates on as many rows as it trains on",
    "config/plan/loop_stages.py",
    "max_samples=held_out.max_samples",
    "max_samples=run.data.max_samples",
)
@pytest.mark.notices(
    "a loop evaluates after the rows that training skips", "config/plan/loop_stages.py", "skip_samples=0,", ""
)
def test_an_evaluation_answers_the_held_out_prompts_once_and_greedily(loop):
    run = evaluate_run(loop, "model")
    assert (run.data.prompt_dataset, run.data.prompt_split) == ("held out", "test")
    assert (run.data.skip_samples, run.data.max_samples) == (0, 30)
    assert (run.rollout.temperature, run.rollout.n_samples_per_prompt) == (0.0, 1)


def test_an_evaluation_may_sample_several_answers(loop):
    loop.eval.temperature, loop.eval.n_samples_per_prompt = 1.0, 4
    run = evaluate_run(loop, "model")
    assert (run.rollout.temperature, run.rollout.n_samples_per_prompt) == (1.0, 4)


def test_a_rule_judges_held_out_answers_by_itself_whatever_the_reward_is(loop):
    loop.reward.model_name_or_path, loop.reward.normalize_enable, loop.eval.rule = "org/rm", True, "exact_match"
    run = judge_run(loop, "answers.jsonl")
    assert list(check(run, ())) == []
    assert (run.reward.rule, run.reward.model_name_or_path, run.data.dataset) == ("exact_match", None, "answers.jsonl")
    assert (run.data.input_key, run.data.output_key, run.data.label_key) == ("prompt", "response", "label")


def test_a_rule_of_held_out_answers_that_compares_needs_a_label(loop):
    loop.eval.rule = "exact_match"
    assert "eval.label_key" in {problem.key for problem in check(loop, ())}
    loop.eval.label_key = "answer"
    assert "eval.label_key" not in {problem.key for problem in check(loop, ())}
    loop.eval.label_key, loop.eval.rule = None, "format"
    assert "eval.label_key" not in {problem.key for problem in check(loop, ())}


def test_a_rule_of_held_out_answers_reads_the_flags_of_rules_and_needs_what_rules_need(loop, tmp_path, monkeypatch):
    loop.reward.model_name_or_path, loop.reward.rules.math_boxed, loop.data.label_key = "org/rm", True, "answer"
    unread = "reward.rules.math_boxed"
    assert unread in {problem.key for problem in check(loop, [unread])}
    loop.eval.rule = "math"
    assert unread not in {problem.key for problem in check(loop, [unread])}
    assert judge_run(loop, "answers.jsonl").reward.rules.math_boxed
    loop.eval.rule = "code"
    monkeypatch.setattr(rewards, "offer", lambda: Offer(None, ("namespaces",)))
    assert {problem.key for problem in rewards.programs_have_a_jail(loop, tmp_path)} == {"eval.rule"}


def test_only_a_model_that_learns_rewards_is_asked_for_one(loop):
    assert generate_run(loop, "model", 0, Share(0, 1)).data.target_reward is None
    assert generate_run(loop, "model", 0, Share(0, 1), target=0.5).data.target_reward == 0.5
    assert sft_run(loop, "model", "rows.jsonl", None).data.reward_key is None
    assert sft_run(Run.of("conditional_sft"), "model", "rows.jsonl", None).data.reward_key == "score"


def test_all_rows_that_a_loop_wrote_are_trained_on(loop):
    run = sft_run(loop, "model", "rows.jsonl", "out")
    assert (run.data.dataset, run.data.max_samples, run.data.max_len) == ("rows.jsonl", None, 5000)
    assert (run.actor.model_name_or_path, run.ckpt.output_dir) == ("model", "out")


def test_the_reference_of_an_iteration_is_the_one_that_it_is_given():
    run = dpo_run(Run.of("iterative_dpo"), ("model", "first"), "rows.jsonl", None)
    assert (run.actor.model_name_or_path, run.ref.model_name_or_path) == ("model", "first")
    assert (run.data.prompt_key, run.data.chosen_key, run.data.rejected_key) == ("input", "chosen", "rejected")


def test_the_stage_of_scores_has_room_for_the_longest_answer(loop):
    assert score_run(loop, "answers.jsonl").score.max_tokens_per_gpu >= 5000


def test_a_loop_names_the_columns_of_its_held_out_prompts_as_its_flags_do(loop, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "a", "label": "b"}\n')
    loop.data.prompt_dataset, loop.data.input_key, loop.data.label_key = "builtin:reverse", "text", "label"
    loop.eval.dataset = str(rows)
    assert keys_of_columns(loop) == {"data.input_key"}
    loop.eval.input_key = "prompt"
    assert keys_of_columns(loop) == {"eval.input_key"}
    loop.eval.input_key, loop.eval.label_key = "question", "answer"
    assert keys_of_columns(loop) == {"eval.label_key"}
    loop.eval.label_key = "label"
    assert keys_of_columns(loop) == set()


def keys_of_columns(run: Run) -> set[str]:
    """The flags of columns that a run is refused for."""
    return {problem.key for problem in inspect_named(run) if "column" in problem.what or "eval." in problem.key}


def test_a_fixed_reference_needs_a_loss_with_one():
    run = Run.of("iterative_dpo")
    run.data.prompt_dataset, run.algo.loss, run.loop.fixed_reference_enable = "builtin:reverse", "simpo", True
    (problem,) = (one for one in check(run, ()) if "reference" in one.what)
    assert problem.key == "loop.fixed_reference_enable"
    assert problem.what.endswith("but it is simpo: this loss has no reference")
    assert problem.fix.startswith("write algo.loss=") and problem.fix.endswith(", or loop.fixed_reference_enable=false")
