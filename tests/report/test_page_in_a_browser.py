"""The page of a run in headless Chromium: it draws, stays inside its policy, and does what a reader asks for."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from chromium import PROGRAM, Browser
from report import made_run
from rlhf_suite.report.html import write_report, write_sweep_report
from rlhf_suite.report.sweep_data import swept

pytestmark = [
    pytest.mark.stack,
    pytest.mark.skipif(PROGRAM is None, reason="needs chromium: apt-get install chromium"),
]
pytest.importorskip("plotly", reason="plotly is not installed here: pip install plotly")

HOSTILE = (
    "<img src=x onerror=\"document.title='taken'\">",
    "</script><script>document.title='taken'</script>",
    "Quokka",
)
PARTS = ("overview", "curves", "timing", "samples", "configuration")
SCREENS = {"light": {}, "dark": {"dark": True}, "phone": {"width": 390, "height": 844}}


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, Path]:
    """The pages of a run with hostile texts, of two runs, and of a sweep."""
    place = tmp_path_factory.mktemp("pages")
    folders = [made_run(place / name, steps=3, samples=18, tokens=12, texts=HOSTILE).path for name in ("one", "two")]
    jobs = [
        (number, folder, [f"actor.adam.lr=1e-{number + 3}", "train.seed=1"]) for number, folder in enumerate(folders)
    ]
    return {
        "run": write_report(folders[:1]),
        "comparison": write_report(folders, place / "comparison.html"),
        "sweep": write_sweep_report(place, swept(jobs)),
    }


@pytest.fixture(scope="module")
def browser():
    opened = Browser()
    yield opened
    opened.close()


@pytest.fixture(autouse=True)
def no_problems(browser):
    """Every test ends without an error on the page, and without a request beyond the file."""
    yield
    problems, browser.problems = browser.problems, []
    requests, browser.requests = browser.requests, []
    assert problems == []
    assert [url for url in requests if not url.startswith(("file:", "about:", "data:", "blob:"))] == []


@pytest.mark.parametrize("screen", SCREENS)
@pytest.mark.parametrize(
    ("page", "part"),
    [*(("run", part) for part in PARTS), ("comparison", "overview"), ("comparison", "curves"), ("sweep", "sweep")],
)
def test_every_part_is_drawn_and_fits_the_screen(browser, pages, page, part, screen):
    browser.show(pages[page], f"#{part}", **SCREENS[screen])
    browser.drawn()
    assert browser.run("document.querySelector('#tabs a[aria-current]').textContent.toLowerCase()") == part
    assert browser.run("document.getElementById('main').innerText.length") > 50
    assert browser.run("document.documentElement.scrollWidth <= innerWidth")
    shifts = "new Promise((done) => new PerformanceObserver((list) => done(list.getEntries().reduce("
    shifts += "(sum, entry) => sum + entry.value, 0))).observe({type: 'layout-shift', buffered: true}) || "
    shifts += "requestAnimationFrame(() => requestAnimationFrame(() => done(0))))"
    assert browser.run(shifts) < 0.05, "nothing jumps while the page is drawn"


def test_the_page_follows_the_colour_scheme(browser, pages):
    backs = []
    for dark in (False, True):
        browser.show(pages["run"], dark=dark)
        backs.append(browser.run("getComputedStyle(document.body).backgroundColor"))
    assert backs == ["rgb(255, 255, 255)", "rgb(17, 21, 28)"]


def test_what_a_model_wrote_stays_text(browser, pages):
    browser.show(pages["run"], "#samples")
    for at, text in enumerate(HOSTILE):
        browser.run(f"document.querySelectorAll('.list button')[{at}].click()")
        assert text in browser.run("document.querySelector('.detail').innerText")
    assert browser.run("document.title") == "one"
    assert browser.run("document.querySelectorAll('main img, main script').length") == 0


def test_the_policy_stops_other_scripts_and_every_request(browser, pages):
    browser.show(pages["run"])
    assert browser.run("fetch('http://127.0.0.1:9/').then(() => 'sent', () => 'refused')") == "refused"
    browser.run(
        "(() => { const made = document.createElement('script'); made.textContent = \"document.title = 'taken'\";"
        " document.body.append(made); })()"
    )
    assert browser.run("document.title") == "one"
    assert len(browser.problems) >= 2 and all("Content Security Policy" in problem for problem in browser.problems)
    browser.problems.clear()


def enter(browser, label: str, value: str) -> None:
    """Give a field of the filters a value, as a reader would."""
    labels = "[...document.querySelectorAll('.bar label')]"
    field = f"{labels}.find((each) => each.firstChild.textContent === '{label}').querySelector('input, select')"
    send = "field.dispatchEvent(new Event('input', {bubbles: true}))"
    browser.run(f"(() => {{ const field = {field}; field.value = '{value}'; {send}; }})()")


def press(browser, key: str, times: int = 1) -> None:
    """Press a key while an element has the focus."""
    event = f"new KeyboardEvent('keydown', {{key: '{key}', bubbles: true}})"
    browser.run(f"for (let at = 0; at < {times}; at++) document.activeElement.dispatchEvent({event})")


def until_shown(browser, number: int) -> None:
    """Wait until the list has so many samples: the page waits for the end of what is typed."""
    browser.until(f"document.querySelector('main .note').innerText.startsWith('{number} of ')")


def test_samples_are_searched_filtered_and_ordered(browser, pages):
    browser.show(pages["run"], "#samples")
    until_shown(browser, 5 * 18)
    enter(browser, "Text", "QUOKKA")
    until_shown(browser, 5 * 6)
    enter(browser, "Step", "2")
    until_shown(browser, 6)
    enter(browser, "Text", "")
    until_shown(browser, 18)
    rewards = "[...document.querySelectorAll('.list .first b')].map((each) => Number(each.innerText))"
    expected = sorted(browser.run(rewards), reverse=True)
    enter(browser, "Order", "reward down")
    browser.until(f"{rewards}.join() === '{','.join(f'{reward:g}' for reward in expected)}'")
    enter(browser, "Reward from", "0.5")
    until_shown(browser, sum(reward >= 0.5 for reward in expected))
    enter(browser, "Text", "nothing has this")
    until_shown(browser, 0)
    assert browser.run("document.querySelector('.detail').innerText") == "No sample fits."


def test_pairs_stand_beside_each_other(browser, pages):
    browser.show(pages["run"], "#samples")
    enter(browser, "Kind", "pairs")
    until_shown(browser, 18)
    titles = browser.run("[...document.querySelectorAll('.pair h3')].map((each) => each.innerText.split(',')[0])")
    assert titles == ["Before (step 0)", "After (step 3)"]


def test_tokens_are_coloured_and_say_their_numbers(browser, pages):
    browser.show(pages["run"], "#samples")
    tokens = "[...document.querySelectorAll('.tokens span')]"
    assert browser.run(f"{tokens}.length") == 40 + 12
    channels = browser.run("[...document.querySelectorAll('.detail .bar option')].map((each) => each.value)")
    assert {"advantage", "engine - trainer", "log-prob", "owner", "weight version"} <= {*channels}
    for channel in channels:
        enter(browser, "Colour of the tokens", channel)
        coloured = browser.run(f"{tokens}.filter((each) => each.style.background).length")
        assert coloured == (52 if channel == "owner" else 12), channel
    browser.run("document.querySelector('.tokens').focus()")
    press(browser, "ArrowRight", 41)
    said = browser.run("document.querySelector('.token-facts').innerText")
    assert "token 40 " in said and "owner model" in said and "advantage " in said and "weight version 2" in said


def test_the_list_is_walked_through_by_keys(browser, pages):
    browser.show(pages["run"], "#samples")
    browser.run("document.querySelector('.list button').focus()")
    for key in ("ArrowDown", "ArrowDown", "ArrowUp"):
        press(browser, key)
    assert browser.run("document.querySelector('.list [aria-current]').dataset.at") == browser.run(
        "document.querySelectorAll('.list button')[1].dataset.at"
    )


def test_on_a_phone_a_sample_takes_the_place_of_the_list(browser, pages):
    browser.show(pages["run"], "#samples", **SCREENS["phone"])
    visible = "['.list', '.detail'].map((name) => document.querySelector(name).offsetParent !== null)"
    assert browser.run(visible) == [True, False]
    browser.run("document.querySelectorAll('.list button')[1].click()")
    assert browser.run(visible) == [False, True]
    browser.run("document.querySelector('.back').click()")
    assert browser.run(visible) == [True, False]


def test_a_table_is_sorted_by_the_column_that_is_clicked(browser, pages):
    browser.show(pages["sweep"])
    column = "[...document.querySelectorAll('tbody td:first-child')].map((each) => each.innerText)"
    click = "document.querySelector('thead th button').click()"
    browser.run(click)
    assert browser.run(column) == ["1e-4", "1e-3"]
    browser.run(click)
    assert browser.run(column) == ["1e-3", "1e-4"]


def test_a_run_is_hidden_in_the_curves(browser, pages):
    browser.show(pages["comparison"], "#curves")
    browser.drawn()
    traces = "document.querySelector('.plot').data.length"
    assert browser.run(traces) == 2
    browser.run("document.querySelector('.keys button').click()")
    browser.until(f"{traces} === 1")
