"""`task=check_reward`: every row is told, a failing one fails the run, and what cannot be learned from is named."""

from __future__ import annotations

import json
import re

import pytest

from judge_server import JudgeServer, completion, quoted, verdict
from rlhf_suite.cli import main
from rlhf_suite.run_folders.run_folder import RunFolder

pytestmark = pytest.mark.stack  # a file of rewards scores in a process of its own
FILE = """
def reward_func(queries, prompts, labels):
    if "bad" in queries[0]:
        raise ValueError("no such answer")
    return [float(query.endswith(label)) for query, label in zip(queries, labels)]
"""
OF_A_BATCH = "def reward_func(queries, prompts, labels): return [float(len(queries))] * len(queries)"


@pytest.fixture
def check(tmp_path, capsys):
    """Run the task on rows with a .py file or flags; the exit code, what was printed and the metrics."""

    def run(rows, *flags, file=FILE):
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (tmp_path / "my_reward.py").write_text(file)
        given = flags if any("reward." in flag for flag in flags) else (f"reward.remote_url={tmp_path}/my_reward.py",)
        rest = [flag for flag in flags if flag not in given]
        line = ["task=check_reward", f"data.dataset={tmp_path}/rows.jsonl", "data.label_key=label", *given, *rest]
        folder = tmp_path / f"run{len([*tmp_path.glob('run*')])}"
        code = main([*line, f"hydra.run.dir={folder}"])
        found = capsys.readouterr()
        return code, " ".join((found.out + found.err).split()), RunFolder(folder).status()["metrics"]

    return run


def row(prompt, answer, label="4"):
    return {"prompt": prompt, "answer": answer, "label": label}


def test_scores_are_told_with_their_spread(check):
    code, text, metrics = check([row("a", "4"), row("b", "5"), row("c", "4"), row("d", "4")], "data.output_key=answer")
    assert code == 0
    assert "warning" not in text
    expected = {"rows": 4, "errors": 0, "timeouts": 0, "score_mean": 0.75, "score_min": 0, "score_max": 1}
    assert {name: metrics[name] for name in expected} == expected
    assert metrics["score_std"] == pytest.approx(3**0.5 / 4)


def test_a_row_without_a_score_fails_the_run_and_is_named(check):
    code, text, _ = check([row("a", "4"), row("b", "bad"), row("c", "5"), {"prompt": "d"}], "data.output_key=answer")
    assert code == 1
    assert "2 of 4 rows have no score" in text
    assert "rows.jsonl:2: error: my_reward.py:4: ValueError: no such answer" in text
    assert "errors 2" in text


def test_equal_scores_are_warned_of(check):
    code, text, _ = check([row("a", "5"), row("b", "6")], "data.output_key=answer")
    assert code == 0
    assert "warning: all scores are 0" in text


def test_without_answers_the_label_is_to_get_full_marks(check):
    assert "warning" not in check([row("a", "", "4"), row("b", "", "x")], "reward.rule=exact_match")[1]
    code, text, metrics = check([row("a", "", "4"), row("b", "", "<think>")], "reward.rule=format")
    assert (code, metrics["score_mean"]) == (0, 0)
    assert "2 of 2 labels do not get full marks" in text


def test_a_file_that_looks_at_the_whole_batch_is_warned_of(check):
    text = check([row("a", "4"), row("b", "5")], "data.output_key=answer", file=OF_A_BATCH)[1]
    assert "2 rows score differently in a batch than alone" in text


def test_several_sources_are_told_one_by_one(check):
    sources = "reward.sources={right: {rule: exact_match}, short: {rule: length, weight: 0.5}}"
    code, text, metrics = check([row("a", "4"), row("b", "5")], sources, "data.output_key=answer")
    assert (code, metrics["score_mean"]) == (0, 1.0)
    assert "1.5 (right 1, short 1)" in text
    assert "0.5 (right 0, short 1)" in text


def test_what_rows_and_rewards_hold_does_not_act_on_the_console(check):
    file = "def reward_func(queries, prompts, labels): raise ValueError('\\x1b[2J[/red]' + 'x' * 3_000_000)"
    rows = [row("a", "4") | {"datasource": "[/bold]\x1b[31m"}]
    code, text, _ = check(rows, "data.output_key=answer", file=file)
    assert code == 1
    assert text.isprintable() and len(text) < 10_000
    assert r"\x1b[2J[/red]xxx" in text


OF_COLUMNS = """
def reward_func(queries, prompts, labels, columns):
    assert set(columns) == {"weight", "tests"} and columns["tests"] == [{"in": [1, None]}] * len(labels)
    return [float(query.endswith(label)) * weight for query, label, weight in zip(queries, labels, columns["weight"])]
"""


def test_further_columns_are_handed_to_the_reward_function(check):
    rows = [row("a", "4") | {"weight": weight, "tests": {"in": [1, None]}} for weight in (0.25, 0.5)]
    flags = ("data.output_key=answer", "data.reward_columns=[weight,tests]")
    code, text, metrics = check(rows, *flags, file=OF_COLUMNS)
    assert code == 0, text
    assert (metrics["score_min"], metrics["score_max"]) == (0.25, 0.5)
    code, text, _ = check(rows, *flags)  # a function without the argument
    assert code == 1
    assert "data.reward_columns is set, but reward_func has no argument named columns" in text
    code, text, _ = check(rows, "data.output_key=answer", "data.reward_columns=[weight,test]", file=OF_COLUMNS)
    assert code == 2
    assert "has no column 'test'" in text


@pytest.mark.notices(
    "a judge is compared with its own verdicts in the cache",
    "tasks/check_reward.py",
    "Rewards(config.reward, folder / log.name, seed=AGAIN_SEED)",
    "Rewards(config.reward, log, seed=AGAIN_SEED)",
)
def test_a_judge_is_compared_with_labelled_pairs_and_with_itself(check, tmp_path):
    seen = []

    def answer(body):
        response = quoted(body)[0]
        seen.append(response)
        return verdict(body, score=len(response) + seen.count(response) * (response == "aaaa"))

    server = JudgeServer(answer)
    (tmp_path / "rubric.md").write_text("How long is it?\n{response}")
    rows = [row("p", "a", "0"), row("p", "aa", "1"), row("q", "aaa", "1"), row("q", "aaaa", "0")]
    flags = [f"reward.rubric={tmp_path}/rubric.md", f"reward.judge.url={server.base}", "reward.judge.model=m"]
    code, text, metrics = check(rows, "data.output_key=answer", *flags)
    server.close()
    assert code == 0 and len(seen) == 8
    expected = {"pairs": 2, "pair_accuracy": 0.5, "pair_ties": 0, "no_verdict": 0, "self_agreement": 0.75}
    assert {name: metrics[name] for name in expected} == expected
    assert metrics["self_difference"] == pytest.approx(0.1 / 4)
    assert "pair_accuracy 0.5" in text


def test_a_judge_is_asked_again_in_the_folder_of_a_run_that_failed(check, tmp_path):
    record = RunFolder(tmp_path / "run1")
    record.start("a")
    record.mark_failed("no verdict")
    (record.logs / "again").mkdir(parents=True)
    (tmp_path / "rubric.md").write_text("How long is it?\n{response}")
    server = JudgeServer(lambda body: verdict(body, score=1))
    flags = [f"reward.rubric={tmp_path}/rubric.md", f"reward.judge.url={server.base}", "reward.judge.model=m"]
    code, text, metrics = check([row("p", "a", "0"), row("p", "aa", "1")], "data.output_key=answer", *flags)
    server.close()
    assert code == 0 and metrics["self_agreement"] == 1, text


def test_a_judge_that_ranks_is_compared_with_labels_and_one_that_prefers_a_place_disagrees_with_itself(check, tmp_path):
    def ranked(body, order):
        number = re.search(r"^RANKING (\w+) ", body["messages"][0]["content"], re.MULTILINE)[1]
        text = body["messages"][1]["content"]
        shown = re.findall(rf"^BEGIN {number} \d+\n(.*?)\nEND", text, re.MULTILINE)
        places = sorted(range(1, len(shown) + 1), key=lambda place: order(shown[place - 1], place))
        return 200, completion(f"RANKING {number} {json.dumps(places)}")

    (tmp_path / "rubric.md").write_text("Which is the longest?\n{prompt}\n{response}")
    rows = [row(prompt, "a" * length, str(length)) for prompt in "pqrstu" for length in (1, 3, 2)]
    found = []
    for order in (lambda answer, place: -len(answer), lambda answer, place: place):
        server = JudgeServer(lambda body, order=order: ranked(body, order))
        flags = [f"reward.rubric={tmp_path}/rubric.md", f"reward.judge.url={server.base}", "reward.judge.model=m"]
        code, text, metrics = check(
            rows, "data.output_key=answer", "reward.judge.mode=rank", "data.max_samples=18", *flags
        )
        server.close()
        assert code == 0 and len(server.seen) == 12, text
        assert "score differently in a batch" not in text
        found.append(metrics)
    honest, biased = found
    assert (honest["pairs"], honest["pair_accuracy"], honest["self_agreement"]) == (18, 1.0, 1.0)
    assert biased["self_agreement"] < 0.8 and biased["pair_accuracy"] < 0.9
