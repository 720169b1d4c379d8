"""The page of a run in headless Chromium: it draws, stays inside its policy, and does what a reader asks for."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from chromium import PROGRAM, Browser
from report import made_run
from rlhf_suite.report.html import write_report, write_sweep_report
from rlhf_suite.report.sweep_data import read_sweep
from rlhf_suite.report.timeline import COLOURS
from rlhf_suite.run_folders.run_folder import RunFolder

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
COLOURS_OF_RUN = {name.replace("_", " "): COLOURS[name] for name in ("generation", "ppo_train")}
SCREENS = {"light": {}, "dark": {"dark": True}, "phone": {"width": 360, "height": 780}}


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
        "episodes": write_report([made_run(place / "episodes", steps=3, samples=8, tokens=5, turns=3).path]),
        "sweep": write_sweep_report(place, read_sweep(jobs)),
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
    [
        *(("run", part) for part in PARTS),
        *(("comparison", part) for part in ("overview", "curves", "configuration")),
        ("episodes", "samples"),
        ("sweep", "sweep"),
    ],
)
def test_every_part_is_drawn_and_fits_the_screen(browser, pages, page, part, screen):
    browser.show(pages[page], f"#{part}", **SCREENS[screen])
    browser.drawn()
    assert browser.run("document.querySelector('#tabs a[aria-current]').textContent.toLowerCase()") == part
    assert browser.run("document.getElementById('main').innerText.length") > 50
    assert browser.run("document.documentElement.scrollWidth <= innerWidth")
    cut = "[...document.querySelectorAll('.scroll, nav, .legend, .chart')].filter((each) => each.offsetParent)"
    assert browser.run(f"{cut}.every((each) => each.scrollWidth <= each.clientWidth + 1)"), "nothing is cut off"
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


@pytest.mark.notices(
    "the turns of a model are counted with those of others",
    "report/page/tokens.js",
    "1 + found.filter((each) => each.owner === MODEL).length",
    "1 + found.length",
)
def test_an_episode_is_shown_by_its_turns_in_the_colours_of_their_owners(browser, pages):
    browser.show(pages["episodes"], "#samples")
    heads = browser.run("[...document.querySelectorAll('.tokens .turn-head b')].map((each) => each.innerText)")
    assert heads == ["prompt", "model, turn 1", "tool", "model, turn 2", "tool", "model, turn 3"]
    turns = "[...document.querySelectorAll('.tokens .turn')]"
    assert browser.run(f"{turns}.map((each) => each.querySelectorAll('span').length)") == [40, 5, 6, 5, 6, 5]
    edges = browser.run(f"{turns}.map((each) => getComputedStyle(each).borderLeftColor)")
    fills = browser.run(f"{turns}.map((each) => each.querySelector('span').style.background)")
    for prompt, model, tool, *others in (edges, fills):
        assert others == [model, tool, model] and len({prompt, model, tool}) == 3
    browser.run("document.querySelector('.tokens').focus()")
    press(browser, "ArrowRight", 46)
    assert "owner tool" in browser.run("document.querySelector('.token-facts').innerText")
    head = browser.run("document.querySelectorAll('.tokens .turn-head')[1].innerText")
    assert "weights 2" in head and "sampled in 0.5 s · answered in 0.13 s" in head
    browser.show(pages["run"], "#samples")
    assert browser.run(f"{turns}.length") == 0, "a single response is not cut into turns"


def test_a_summary_is_marked_as_one(browser, pages):
    browser.show(pages["episodes"], "#samples")
    enter(browser, "Kind", "rollout")
    enter(browser, "Ended by", "compacted")
    until_shown(browser, 3)
    heads = browser.run("[...document.querySelectorAll('.tokens .turn-head b')].map((each) => each.innerText)")
    assert heads == ["prompt", "model, turn 1", "tool", "model, turn 2", "tool", "model, turn 3 (summary)"]


def test_turns_are_shown_with_their_times_and_their_calls_also_where_a_sample_has_no_tokens(browser, pages):
    browser.show(pages["episodes"], "#samples")
    for kind in ("rollout", "evaluation"):
        enter(browser, "Kind", kind)
        browser.until(f"document.querySelector('.detail h2').innerText.startsWith('{kind.capitalize()}')")
        shown = "[...document.querySelectorAll('.detail > .turn')]"
        turns = browser.run(f"{shown}.map((each) => each.innerText.split('\\n'))")
        assert [turn[0] for turn in turns] == [
            f"model, turn {number + 1} sampled in {number + 0.5} s · answered in 0.13 s" for number in range(3)
        ]
        assert turns[0][1:] == ['look_up{"page": 0, "of": "<b>"}', "0 pages of <i>it</i>"] and len(turns[2]) == 1
        assert (browser.run("document.querySelector('.tokens')") is None) == (kind == "evaluation")


def test_a_phase_has_the_same_colour_in_every_chart(browser, pages):
    browser.show(pages["run"], "#timing", height=3000)
    browser.drawn()
    data = "[...document.querySelectorAll('.plot')].flatMap((plot) => plot.data).filter((each) => each.type === 'bar')"
    phases, shares = browser.run(f"[{data}.filter((each) => each.name), {data}.filter((each) => !each.name)]")
    assert {each["name"]: each["marker"]["color"] for each in phases} == COLOURS_OF_RUN
    assert dict(zip(shares[0]["y"], shares[0]["marker"]["color"], strict=True)) == COLOURS_OF_RUN
    swatch = "[each.innerText, each.firstChild.getAttribute('style').replace('background:', '')]"
    keys = f"Object.fromEntries([...document.querySelectorAll('.key span')].map((each) => {swatch}))"
    assert browser.run(keys) == COLOURS_OF_RUN


@pytest.mark.notices(
    "equal curves are drawn once for each name", "report/page/charts.js", "? fingerprint(found) : name", "? name : name"
)
def test_equal_curves_are_one_chart_with_all_names(browser, tmp_path):
    folder = RunFolder(tmp_path)
    folder.start("it")
    rows = [{"step": at, "time": 1.0 * at, "train/reward": at / 4, "train/score": at / 4} for at in (1, 2, 3)]
    rows = [row | {"train/pass_rate": row["train/reward"], "train/kl": row["step"] / 8} for row in rows]
    rows = [row | {"reward/errors": 0.0, "reward/retries": 0.0} for row in rows]
    folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    browser.show(write_report([tmp_path]), "#curves")
    assert browser.run("[...document.querySelectorAll('.chart h3')].map((each) => each.innerText)") == [
        "train/kl", "train/pass_rate = train/reward = train/score", "reward/errors", "reward/retries"
    ]  # fmt: skip
    browser.run("location.hash = '#overview'")
    browser.until("document.querySelector('#tabs a[aria-current]').hash === '#overview'")
    titles = browser.run("[...document.querySelectorAll('.chart h3')].map((each) => each.innerText)")
    assert titles == ["reward = accuracy", "KL to the reference"]
    cells = "document.querySelector('tbody').querySelectorAll('td:first-child')"
    assert browser.run(f"[...{cells}].map((each) => each.innerText)") == ["train/kl", "train/reward = train/score"]


def test_seconds_of_a_curve_with_many_steps_lie_between_the_known_ones(browser, pages):
    browser.show(pages["run"], "#curves")
    found = browser.run("[0, 5, 10, 15, 20, 21].map((step) => secondsAt([[0, 10, 20], [0, 5, 25]], step))")
    assert found == [0, 2.5, 5, 15, 25, 25]


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


def test_on_a_phone_each_number_of_a_table_has_the_title_of_its_column(browser, pages):
    cells = "[...document.querySelector('tbody tr').children].map((each) => getComputedStyle(each, '::before').content)"
    browser.show(pages["sweep"], **SCREENS["phone"])
    assert browser.run(cells)[:3] == ['"lr "', '"runs "', '"mean "']
    browser.show(pages["run"], **SCREENS["phone"])
    assert browser.run(cells)[:2] == ["none", '"first "'], "the name of a metric is the heading of its numbers"
    browser.show(pages["run"])
    assert {*browser.run(cells)} == {"none"}


def test_a_run_is_hidden_in_the_curves(browser, pages):
    browser.show(pages["comparison"], "#curves")
    browser.drawn()
    traces = "document.querySelector('.plot').data.length"
    assert browser.run(traces) == 2
    browser.run("document.querySelector('.keys button').click()")
    browser.until(f"{traces} === 1")
