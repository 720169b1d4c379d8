"""`rlhf-suite watch`: the server gives out the page and its data alone, and the page follows the runs."""

import json
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import contextmanager
from gzip import decompress
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from chromium import PROGRAM, Browser
from report import experience_of, made_run, sampled
from rlhf_suite.api.runs import choose_runs
from rlhf_suite.cli import main
from rlhf_suite.disk import write_text
from rlhf_suite.errors import UserError
from rlhf_suite.report import html
from rlhf_suite.report.curves import rows_once, series
from rlhf_suite.report.history import History
from rlhf_suite.report.sample_files import Reader
from rlhf_suite.report.watch import Live
from rlhf_suite.rl.rollout_file import write_rollouts
from rlhf_suite.run_folders.run_folder import RunFolder

pytestmark = pytest.mark.stack
pytest.importorskip("plotly", reason="plotly is not installed here: pip install plotly")

COMMAND = [sys.executable, "-m", "rlhf_suite.cli", "watch"]


@contextmanager
def watched(*folders: Path):
    """Start the command; yield the address that it prints, and see that Ctrl-C ends it without a complaint."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([*COMMAND, *map(str, folders)], text=True, **pipes)
    line = process.stdout.readline()
    yield re.search(r"http://\S+", line)[0]
    process.send_signal(signal.SIGINT)
    _, complaints = process.communicate(timeout=120)
    assert (process.returncode, "Traceback" in complaints) == (0, False), complaints


def ask(url: str, **headers: str) -> tuple[int, bytes]:
    """Return the status and the body of an answer."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def data_in(packed: bytes) -> dict:
    """Return the data in an answer; the arrays follow them."""
    return json.loads(decompress(packed).partition(b"\n")[0])


def train_further(folder: RunFolder, step: int) -> None:
    """Write what a run writes in a step more."""
    import numpy as np

    random = np.random.default_rng(step)
    scored = sampled(random, 8, 5, step, (f"answer of step {step}",), 1)
    write_rollouts(folder.rollouts, step, scored, experience_of(random, scored))
    with folder.metrics.open("a") as file:
        file.write(json.dumps({"step": step, "time": 1e9 + step, "train/reward": 0.5, "train/new": 1.0}) + "\n")
    folder.record_step(step)


def test_the_server_gives_out_the_page_and_its_data_and_nothing_else(tmp_path):
    run = made_run(tmp_path / "run", steps=2, samples=8, tokens=5)
    with watched(run.path) as url:
        status, page = ask(url)
        assert status == 200 and b"connect-src 'self'" in page and b"generator" in page
        status, packed = ask(f"{url}data")
        data = data_in(packed)
        assert status == 200 and data["runs"] == json.loads(json.dumps(expected_of(run)))
        assert ask(f"{url}data?seen={data['version']}")[0] == 204
        root = url.rsplit("/", 2)[0]
        for path in ("", "/", "/wrong/", "/wrong/data", f"/{'x' * 16}/data"):
            assert ask(root + path)[0] == 404
        for path in ("status.json", "../status.json", "run/../status.json", "%2e%2e/status.json", "run/0/", "data/x"):
            assert ask(url + path)[0] == 404
        assert ask(url, Host="example.org")[0] == 421, "another name of this address is another web page's trick"
        assert ask(f"{url}data", Origin="http://example.org")[0] == 403


def expected_of(run: RunFolder) -> list[dict]:
    """Return the runs of the page that `rlhf-suite report` writes."""
    return html.content_of(html.choose_runs([run.path]), Reader())[0]["runs"]


@pytest.mark.notices(
    "a page that is watched shows the same for ever",
    "report/watch.py",
    "if (version := state_of(shown)) != self._version:",
    'if (version := state_of(shown)) and self._version == "":',
)
def test_data_are_those_of_a_report_that_is_written_anew(tmp_path):
    """Each file is read once, and what the page gets is what a report from nothing has."""
    run, reader = made_run(tmp_path / "run", steps=2, samples=8, tokens=5), Reader()
    live = Live(lambda: html.choose_runs([run.path]), reader, "")
    version = ""
    for step in (3, 4, 2):  # the last: a step that was run again
        train_further(run, step)
        live.end_rest()
        data = data_in(live.newer_than(version))
        assert data["runs"] == json.loads(json.dumps(expected_of(run))) and data["version"] != version
        version = data["version"]
        live.end_rest()
        assert live.newer_than(version) is None
    known = {path: reader.look(path).table for path in sorted(run.rollouts.glob("*.parquet"))}
    html.content_of(html.choose_runs([run.path]), reader)
    assert all(reader.look(path).table is table for path, table in known.items()), "nothing is read twice"


@pytest.mark.notices("a watched page is read without a rest", "report/watch.py", "REST * (time", "0 * (time")
def test_a_long_reading_is_followed_by_a_longer_rest(tmp_path):
    run, looks = made_run(tmp_path / "run", steps=2, samples=8, tokens=5), []
    live = Live(lambda: looks.append(1) or html.choose_runs([run.path]), Reader(), "")
    for _ in range(50):
        live.newer_than("")
    assert len(looks) == 1, "a first reading takes far longer than 50 questions"


def test_a_folder_of_runs_has_one_page_for_all_and_one_of_each(tmp_path, capsys):
    runs = [made_run(tmp_path / "day" / name, steps=2, samples=8, tokens=5) for name in ("one", "two")]
    (tmp_path / "day" / "notes").mkdir()
    with watched(tmp_path) as url:
        data = data_in(ask(f"{url}data")[1])
        assert [run["name"] for run in data["runs"]] == ["one", "two"] and data["title"] == tmp_path.name
        for link, run in zip(data["links"], runs, strict=True):
            (own,) = data_in(ask(f"{url}{link}data")[1])["runs"]
            assert own["folder"] == str(run.path)
    assert main(["report", str(tmp_path)]) == 0 and (tmp_path / "report.html").exists()
    assert main(["watch", str(tmp_path / "day" / "notes")]) == 2
    assert "is not the folder of a run" in capsys.readouterr().err
    for words in ([], ["--port"], ["--port", "70000", str(tmp_path)], ["--colour", str(tmp_path)]):
        assert main(["watch", *words]) == 2


def test_of_many_runs_the_latest_are_shown(tmp_path, monkeypatch):
    monkeypatch.setattr("rlhf_suite.api.runs.MOST", 2)
    for name in ("c", "a", "b"):
        RunFolder(tmp_path / name).start("x")
    assert [*choose_runs([tmp_path]).names] == ["a", "b"]
    with pytest.raises(UserError, match="is not the folder of a run"):
        choose_runs([tmp_path / "none"])


@pytest.mark.skipif(PROGRAM is None, reason="needs chromium: apt-get install chromium")
def test_the_page_follows_a_run_and_keeps_what_the_reader_has_done(tmp_path):
    run = made_run(tmp_path / "run", steps=3, samples=16, tokens=12)
    browser = Browser()
    try:
        with watched(run.path) as url:
            browser.show(url, "#curves", height=300)
            browser.drawn()
            search = "document.querySelector('input[type=search]')"
            browser.run(f"{search}.value = 'train'; {search}.dispatchEvent(new Event('input', {{bubbles: true}}))")
            browser.run(f"{search}.focus(); {search}.setSelectionRange(1, 3); scrollTo(0, 40)")
            assert browser.run("scrollY") == 40
            browser.run("window.plotBefore = document.querySelector('.plot'); 0")
            train_further(run, 4)
            browser.until("document.querySelector('main').innerText.includes('train/new')")
            selection = f"{search}.selectionStart, {search}.selectionEnd"
            kept = browser.run(f"[{search}.value, document.activeElement === {search}, {selection}]")
            assert kept == ["train", True, 1, 3]
            assert browser.run("scrollY") == 40, "nothing jumps"
            assert browser.run("[...document.querySelectorAll('.plot')].includes(plotBefore)"), "drawn in place"
            browser.until("plotBefore.data[0].x.at(-1) === 4")
            browser.run("location.hash = '#samples'")
            browser.until("document.querySelector('.list button')")
            browser.run("document.querySelectorAll('.list button')[3].click()")
            detail = browser.run("document.querySelector('.detail').innerText")
            train_further(run, 5)
            browser.until("document.querySelector('.newer')")
            assert browser.run("document.querySelector('.detail').innerText") == detail, "what is read stays"
            browser.run("document.querySelector('.newer').click()")
            browser.until("document.querySelector('main').innerText.includes('answer of step 5')")
            assert browser.run("document.querySelector('.detail').innerText") == detail
            assert browser.problems == []
        browser.until("'lost' in document.getElementById('live').dataset")
        assert "does not answer" in browser.run("document.getElementById('live').innerText")
    finally:
        browser.close()


@pytest.mark.notices(
    "rows of metrics are read again and again",
    "report/history.py",
    "read_numbered_rows(self._path, self._position)",
    "read_numbered_rows(self._path)",
)
def test_metrics_are_read_once_and_are_those_of_a_file_that_is_read_anew(tmp_path):
    """Rows out of order, in parts, cut off, of steps that are run again, and in a file that another one replaced."""
    path = tmp_path / "metrics.jsonl"
    history = History(path)
    rows = [
        {"step": step, "time": 1e9 + number, "train/loss": step / 8, "timing/step_total": 1.0}
        for number, step in enumerate((1, 2, 3, 2, 3, 4))
    ]
    rows += [{"step": 3, "time": 2e9, "eval/pass1": 0.5, "timing/step_total": 0.25}, {"step": 5, "train/loss": None}]
    whole = "".join(json.dumps(row) + "\n" for row in rows)
    for size in [*range(0, len(whole), 37), len(whole)]:
        path.write_text(whole[:size])
        history.read()
        assert {name: [*points] for name, points in history.curves.items()} == series(path)
    assert series(path)["train/loss"] == [(step, step / 8) for step in (1, 2, 3, 4)]
    assert series(path)["timing/step_total"] == [(1, 1.0), (2, 1.0), (3, 1.25), (4, 1.0)]
    assert history.times == [(row["step"], row["time"]) for row in rows_once(path) if "time" in row]
    path.write_text(whole.replace('"train/loss": 0.125', '"train/loss": 0.625'))
    history.read()
    assert history.curves["train/loss"][0] == (1, 0.125), "what was read is not read again"
    write_text(path, whole.replace("0.25", "0.75"))
    history.read()
    assert {name: [*points] for name, points in history.curves.items()} == series(path)
