"""The page of a run: what is in the file, without a browser; `test_page_in_a_browser.py` opens it."""

import base64
import hashlib
import json
import re
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from pages import Page
from report import made_run
from rlhf_suite.cli import execute, main
from rlhf_suite.config.declarations.logger import LoggerConfig
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.report import html
from rlhf_suite.report.run_data import curve
from rlhf_suite.report.sample_data import UNKNOWN, Arrays, Texts, histogram, shares, token_parts
from rlhf_suite.report.sample_files import SampleFile
from rlhf_suite.report.timeline import COLOURS
from rlhf_suite.run_folders.run_folder import RunFolder

pytestmark = pytest.mark.stack
pytest.importorskip("plotly", reason="plotly is not installed here: pip install plotly")

HOSTILE = (
    "</script><script>document.title = 'taken'</script>",
    "<img src=x onerror=\"document.title='taken'\">",
    "--><!--<script>",
    "\x1b[2J\u202egnp.exe\x00",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> RunFolder:
    return made_run(tmp_path_factory.mktemp("page") / "run", steps=3, samples=16, tokens=5, texts=HOSTILE)


@pytest.fixture(scope="module")
def page(run) -> Page:
    assert main(["report", str(run.path)]) == 0
    return Page(run.path / "report.html")


def test_the_page_holds_the_metrics_and_the_state_of_the_run(page):
    (run,) = page.runs
    assert run["name"] == "run" and run["task"] == "ppo" and run["unit"] == "RL step"
    assert run["status"]["state"] == "done" and run["status"]["last_step"] == 3
    assert run["metrics"]["timing/generation"] == [[1, 2, 3], [2.0, 2.0, 2.0]]
    (passed,) = (row for row in run["headlines"] if row["name"] == "eval/pass1")
    steps, values = run["metrics"]["eval/pass1"]
    assert (passed["best"], passed["at"]) == max(zip(values, steps, strict=True))
    assert ["rollout.batch_size", "8", "1024", ""] in run["config"]


def test_the_page_holds_every_sample_with_its_numbers(page, run):
    samples = page.runs[0]["samples"]
    assert samples["total"] == samples["count"] == 5 * 16
    reward = page.array(samples["numbers"]["reward"])
    steps, kinds = (page.array(samples["columns"][name]) for name in ("step", "kind"))
    file = pq.read_table(run.rollouts / "step_000002.parquet")
    assert reward[(steps == 2) & (kinds == 0)].tolist() == file["reward"].to_pylist()
    assert np.array_equal(page.array(samples["numbers"]["length"])[kinds == 0], np.full(48, 5))
    assert np.isnan(page.array(samples["numbers"]["length"])[kinds == 1]).all(), "evaluations have no tokens"
    counts = {tuple(each) for each in zip(*(samples["histogram"][name] for name in ("kinds", "steps")), strict=True)}
    assert counts == {("rollout", 1), ("rollout", 2), ("rollout", 3), ("evaluation", 0), ("evaluation", 3)}
    assert all(sum(each) == 16 for each in samples["histogram"]["counts"])


def test_the_tokens_of_a_page_are_those_of_the_file(page, run):
    samples = page.runs[0]["samples"]
    tokens, steps = samples["tokens"], page.array(samples["columns"]["step"])
    file = pq.read_table(run.rollouts / "step_000003.parquet")
    shown = page.array(tokens["samples"])
    place = next(place for place, sample in enumerate(shown) if steps[sample] == 3)  # the first sample of step 3
    begin, end = page.array(tokens["starts"])[place : place + 2]
    assert [tokens["vocabulary"][number] for number in page.array(tokens["ids"])[begin:end]] == [
        f"[{number}]" for number in file["ids"][0].as_py()
    ], "the made up run has no tokenizer"
    assert page.array(tokens["owner"])[begin:end].tolist() == file["owner"][0].as_py()
    assert page.array(tokens["version"])[begin:end].tolist() == file["weight_version"][0].as_py()
    for name, expected in (
        ("advantage", np.array(file["advantages"][0].as_py())),
        ("engine - trainer", np.subtract(file["engine_log_probs"][0].as_py(), file["old_log_probs"][0].as_py())),
    ):
        channel = tokens["channels"][name]
        whole = page.array(channel)[begin:end]
        written = np.array(file["mask"][0].as_py()) > 0
        assert (whole[~written] == UNKNOWN).all()
        np.testing.assert_allclose(whole[written] * channel["scale"], expected[written], atol=channel["scale"])


def test_every_file_gets_the_same_room_for_tokens(run):
    """A sample has 5 tokens by the model and 40 others, so it takes 5 + 45 // 8 = 10; the evaluation has no tokens."""
    files = [run.evaluations / "step_000000.parquet", *sorted(run.rollouts.glob("*.parquet"))]
    parts = [*token_parts([pq.read_table(file) for file in files], limit=65)]
    assert [rows.tolist() for rows, _, _ in parts] == [[16, 17, 32, 33, 48, 49]]
    assert all(lengths.tolist() == [45] * 6 and len(columns["ids"]) == 6 * 45 for _, columns, lengths in parts)


def test_what_a_model_wrote_is_in_no_tag_and_ends_no_block(page):
    assert [found.get("id") for tag, found in page.tags if tag == "script"] == ["library", "data", "arrays", None]
    assert not [found for tag, found in page.tags if tag == "img" or any(name.startswith("on") for name in found)]
    texts = page.runs[0]["samples"]["texts"]
    assert HOSTILE[0] in texts and HOSTILE[1] in texts
    assert "\\x1b[2J\\u202egnp.exe\\x00" in texts, "what acts on a reader is written as escapes"


def test_the_policy_allows_the_scripts_of_the_page_and_no_network(page):
    rules = dict(rule.strip().split(" ", 1) for rule in page.policy.split(";"))
    assert rules["default-src"] == "'none'" and rules["base-uri"] == rules["form-action"] == "'none'"
    assert rules.keys() == {"default-src", "script-src", "style-src", "img-src", "base-uri", "form-action"}
    scripts = page.blocks["script"].encode(), page.unpacked("library")
    digests = [f"'sha256-{base64.b64encode(hashlib.sha256(each).digest()).decode()}'" for each in scripts]
    assert rules["script-src"].split() == digests
    assert not [found for _, found in page.tags if "src" in found or found.get("href", "#")[0] != "#"]
    assert b"plotly.js v" in scripts[1][:100]


def test_no_script_makes_html_of_text():
    made = "".join(path.read_text() for path in html.PARTS.glob("*.js"))
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacent|document\.write|DOMParser|eval\(|Function\(", made)


def test_the_same_folder_gives_the_same_page(page, run, tmp_path):
    assert main(["report", str(run.path), "-o", str(tmp_path / "again.html")]) == 0
    assert (tmp_path / "again.html").read_bytes() == (run.path / "report.html").read_bytes()


def test_a_run_that_was_killed_is_said_to_be_killed(run, tmp_path):
    folder = RunFolder(tmp_path / "killed")
    folder.start("it")
    folder.status_file.write_text(json.dumps(folder.status() | {"pid": 2**22 + 1}))
    folder.timeline.write_text('{"who": "engines", "what": "gener')
    assert main(["report", str(folder.path)]) == 0
    (shown,) = Page(folder.path / "report.html").runs
    assert shown["status"]["state"] == "killed" and shown["samples"] is None and shown["metrics"] == {}


def test_a_run_writes_its_page_unless_the_flag_says_otherwise(tmp_path):
    folder = RunFolder(tmp_path)
    folder.start("it")
    silent = Run.of("sft", logger=LoggerConfig(report=False))
    assert execute.page(silent, folder) == [] and not (tmp_path / "report.html").exists()
    assert execute.page(Run.of("sft"), folder) == [f"Report: {tmp_path / 'report.html'}"]
    assert Page(tmp_path / "report.html").runs[0]["status"]["state"] == "running"
    assert execute.page(Run.of("generate"), folder) == [], "it trains nothing"


def test_what_is_wrong_with_a_page_is_said_and_fails_nothing(tmp_path):
    folder = RunFolder(tmp_path)
    folder.start("it")
    folder.config.write_text("[no table")
    (said,) = execute.page(Run.of("sft"), folder)
    assert said.startswith("report.html was not written: ")


def test_a_run_that_fails_has_a_page_with_the_reason_and_who_set_its_flags(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"input": "a", "output": "b"}\n')
    words = ["task=sft", "demo=sft", f"data.dataset={tmp_path / 'rows.jsonl'}", "data.max_len=2"]
    assert main([*words, f"run_dir={tmp_path / 'run'}"]) == 2
    (run,) = Page(tmp_path / "run" / "report.html").runs
    assert run["status"]["state"] == "failed" and "data.max_len" in run["status"]["error"]
    setters = {key: who for key, _, _, who in run["config"] if who}
    assert setters["data.max_len"] == "command line" and setters["data.output_key"] == "demo/sft.yaml"


@pytest.mark.notices(
    "a page shows the password in a URL", "report/run_data.py", "            printable(text)\n", "            text\n"
)
def test_a_url_is_shown_without_its_password(tmp_path):
    folder = RunFolder(tmp_path)
    folder.start("it")
    folder.config.write_text("task: ppo\nreward:\n  remote_url: http://me:word@host:1/score\n")
    html.write_report([tmp_path])
    shown = Page(tmp_path / "report.html").runs[0]["config"]
    assert ["reward.remote_url", "http://<password>@host:1/score", "null", ""] in shown


@pytest.mark.notices(
    "the clock of a page counts the hours in which the run was stopped",
    "report/run_data.py",
    "seconds += max(0.0, now - begin)",
    "seconds += max(0.0, now - min(before, now))",
)
def test_the_clock_stands_still_while_a_run_is_stopped(tmp_path):
    """It was continued 5 hours after step 2, and reached step 3 after 4 s."""
    folder = RunFolder(tmp_path)
    folder.start("it")
    folder.record_resume(2, tmp_path / "checkpoint", {})
    resumed = folder.starts()[-1]
    times = {1: -18_004.0, 2: -18_002.0, 3: 4.0, 4: 6.0}
    rows = [{"step": step, "time": resumed + time, "train/reward": 0.5} for step, time in times.items()]
    folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    html.write_report([tmp_path])
    (run,) = Page(tmp_path / "report.html").runs
    assert run["clock"] == [[1, 2, 3, 4], [0.0, 2.0, 6.0, 8.0]]


def test_the_page_knows_the_colour_of_each_phase_and_who_answers_the_model(page, tmp_path):
    run = page.runs[0]
    assert run["colours"] == {name: COLOURS[name] for name in ("generation", "ppo_train")}
    assert run["agents"] == {"": ""}
    folder = RunFolder(tmp_path)
    folder.start("it")
    saved = {"task": "ppo", "agent": {"kind": "tools", "sources": {"games.v2": {"kind": "environment"}}}}
    folder.config.write_text(json.dumps(saved))
    html.write_report([tmp_path])
    assert Page(tmp_path / "report.html").runs[0]["agents"] == {"": "tools", "games.v2": "environment"}


@pytest.mark.notices(
    "a page lists flags of models that a run lacks", "report/run_data.py", "if key not in idle", "if key"
)
@pytest.mark.parametrize(("estimator", "has_critic"), [("rloo", False), ("gae", True)])
def test_flags_of_models_that_the_run_lacks_are_not_shown(estimator, has_critic, tmp_path):
    folder = RunFolder(tmp_path)
    folder.start("it")
    saved = {"task": "ppo", "algo": {"advantage": {"estimator": estimator}}, "critic": {"adam": {"lr": 0.1}}}
    folder.config.write_text(json.dumps(saved))
    html.write_report([tmp_path])
    (run,) = Page(tmp_path / "report.html").runs
    assert ("critic.adam.lr" in {key for key, *_ in run["config"]}) == has_critic
    assert run["unread"] == (0 if has_critic else 1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "usage: rlhf-suite report"),
        (["{}"], "is not the folder of a run"),
        (["--what"], "usage: rlhf-suite report"),
    ],
)
def test_a_wrong_command_line_says_what_is_wrong(words, said, tmp_path, capsys):
    assert main(["report", *(word.format(tmp_path) for word in words)]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.notices(
    "a long curve ends before its last point",
    "report/run_data.py",
    "points[(len(points) - 1) % stride :: stride]",
    "points[::stride]",
)
def test_a_long_curve_keeps_its_last_point():
    points = [(step, step / 8) for step in range(1, 12)]
    assert curve(points, 4) == [[2, 5, 8, 11], [0.25, 0.625, 1.0, 1.375]]
    assert curve(points, 11) == [[*range(1, 12)], [value for _, value in points]]


def test_shares_are_fair_and_use_what_others_leave():
    assert shares([5, 100, 100], 45) == [5, 20, 20]
    assert shares([100, 5, 10], 200) == [100, 5, 10]
    assert shares([3, 3, 3], 2) == [0, 1, 1]
    assert shares([], 5) == []


def test_only_the_longest_texts_are_cut():
    texts = Texts()
    assert [texts.add(text) for text in ("short", "long" * 10, "short", None)] == [0, 1, 0, 2]
    assert texts.shorten(15) == ["short", "longlonglo... (40 characters)", ""]


def test_numbers_of_16_bits_are_near_and_know_what_is_missing():
    arrays = Arrays()
    arrays.add(np.zeros(3, "<u2"))
    place = arrays.add_numbers(np.array([0.5, -2.0, np.nan]))
    assert place["offset"] == 8, "arrays begin at multiples of four bytes"
    values = np.frombuffer(b"".join(arrays.parts), "<i2", 3, place["offset"])
    assert values[2] == UNKNOWN and np.allclose(values[:2] * place["scale"], [0.5, -2.0], atol=1e-4)


def test_a_file_of_someone_else_is_not_replaced(run, page, tmp_path, capsys):
    """A page of the suite is."""
    theirs, ours = tmp_path / "theirs.html", tmp_path / "ours.html"
    theirs.write_text("<html>months of notes</html>")
    assert main(["report", str(run.path), "-o", str(theirs)]) == 2
    assert "is not a page of this suite" in capsys.readouterr().err
    assert theirs.read_text() == "<html>months of notes</html>"
    assert [main(["report", str(run.path), "-o", str(ours)]) for _ in range(2)] == [0, 0]


@pytest.mark.notices(
    "texts that only some files of samples have are left out of the page",
    "report/sample_data.py",
    "if holds_text and name not in known",
    "if holds_text and name in known",
)
def test_the_page_shows_texts_that_a_reward_has_added(tmp_path):
    """A judge of the user's own may write its reasons into a column; files of before have none."""
    folder = made_run(tmp_path / "judged", steps=2, samples=8, tokens=5)
    file = folder.rollouts / "step_000002.parquet"
    table = pq.read_table(file)
    reasons = [f"reason {number}" for number in range(len(table))]
    pq.write_table(table.append_column("judge_reason", [reasons]), file)
    html.write_report([folder.path])
    page = Page(folder.path / "report.html")
    samples = page.runs[0]["samples"]
    assert samples["others"] == ["judge_reason"]
    texts = [samples["texts"][code] for code in page.array(samples["columns"]["judge_reason"])]
    steps = page.array(samples["columns"]["step"]).tolist()
    kinds = page.array(samples["columns"]["kind"]).tolist()
    judged = [text for text, step, kind in zip(texts, steps, kinds, strict=True) if (step, kind) == (2, 0)]
    assert judged == reasons and not any(text for text in texts if text not in reasons)


def test_rewards_that_nobody_knows_have_no_place_in_the_histogram():
    files = [SampleFile("rollout", step, Path("x"), 2, 2) for step in (1, 2)]
    found = histogram(files, [np.full(2, np.nan), np.array([0.0, 1.0])])
    assert found["steps"] == [2] and sum(found["counts"][0]) == 2
    assert histogram(files[:1], [np.full(2, np.nan)])["counts"] == []
