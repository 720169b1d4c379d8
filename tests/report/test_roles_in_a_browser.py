"""The page of a run of games in headless Chromium: which role wrote what, and what each of them got."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from chromium import PROGRAM, Browser
from report import experience_of, made_run, sampled
from rlhf_suite.data.ending import Ending
from rlhf_suite.report.html import write_report
from rlhf_suite.rl.rollout_file import write_evaluation, write_rollouts
from rlhf_suite.rl.samples import ScoredTrajectories

pytestmark = [
    pytest.mark.stack,
    pytest.mark.skipif(PROGRAM is None, reason="needs chromium: apt-get install chromium"),
]
pytest.importorskip("plotly", reason="plotly is not installed here: pip install plotly")

ROLES = ("proposer", "solver")
SAID = ("what is 2 + 2?", "it is 4", "what is 3 + 3?", "it is 7")  # by the roles of two games
REWARDS = (-0.75, 0.75, 0.5, -0.5)
TURN_REWARDS = (0.0, 0.25, 0.0, -0.25)  # of the first turn of each
LIST = "[...document.querySelectorAll('.list button')]"


def said_at(number: int, step: int) -> str:
    """Return what a role wrote with the weights of a step."""
    return f"{SAID[number]} (step {step})"


def games(random: np.random.Generator, step: int) -> ScoredTrajectories:
    """Two games of one prompt, in which each role has two turns."""
    scored = sampled(random, 4, 5, step, [said_at(number, step) for number in range(4)], turns=2)
    for number, trajectory in enumerate(scored.trajectories):
        game, place = divmod(number, len(ROLES))
        trajectory.role, trajectory.sample, trajectory.group = ROLES[place], game, 0
        trajectory.ending = Ending.FINISHED
        for record in trajectory.turn_records:
            record.calls.clear()
        trajectory.turn_rewards[trajectory.turn_records[0].end - 1] = TURN_REWARDS[number]
    rewards = np.array(REWARDS, np.float32)
    extra = [{ROLES[number % 2]: reward} for number, reward in enumerate(REWARDS)]
    return replace(scored, rewards=rewards, scores=rewards, extra=extra)


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    folder = made_run(tmp_path_factory.mktemp("games") / "run", steps=1, samples=4, tokens=5, turns=2)
    folder.config.write_text("task: ppo\nagent:\n  kind: environment\n")
    random = np.random.default_rng(0)
    for step in (0, 1):
        scored = games(random, step)
        write_evaluation(folder.evaluations, step, scored)
    turn_rewards = torch.from_numpy(np.concatenate([each.turn_rewards for each in scored.trajectories]))
    experience = replace(experience_of(random, scored), turn_rewards=turn_rewards)
    write_rollouts(folder.rollouts, 1, scored, experience)
    return write_report([folder.path])


@pytest.fixture
def browser(page):
    """A browser that shows the samples, on whose page no error may happen."""
    opened = Browser()
    try:
        opened.show(page, "#samples", height=1400)
        yield opened
        assert opened.problems == []
    finally:
        opened.close()


def choose(browser: Browser, label: str, value: str, shown: int) -> None:
    """Give a filter a value, and wait until the list has so many samples."""
    labels = "[...document.querySelectorAll('.bar label')]"
    field = f"{labels}.find((each) => each.firstChild.textContent === '{label}').querySelector('select')"
    send = "field.dispatchEvent(new Event('input', {bubbles: true}))"
    browser.run(f"(() => {{ const field = {field}; field.value = '{value}'; {send}; }})()")
    browser.until(f"document.querySelector('main .note').innerText.startsWith('{shown} of ')")


def lines(browser: Browser, selector: str) -> list[str]:
    return browser.run(f"[...document.querySelectorAll('{selector}')].map((each) => each.innerText)")


@pytest.mark.notices(
    "the page shows all roles as the model",
    "report/page/tokens.js",
    'return ["prompt", role || "model",',
    'return ["prompt", "model",',
)
def test_each_role_is_shown_with_what_it_wrote_and_what_it_got(browser):
    choose(browser, "Kind", "rollout", 4)
    for number in range(4):
        said = said_at(number, 1)
        role, reward = ROLES[number % 2], f"{REWARDS[number]:g}"
        card = browser.run(f"{LIST}[{number}].innerText").split("\n")
        assert card[0] == f"rollout · step 1 · {role}" and card[1] == reward and card[-1] == said, card
        browser.run(f"{LIST}[{number}].click()")
        heading = lines(browser, ".detail h2")[0]
        assert heading == f"Rollout, step 1, sample {number // 2} of prompt 0, {role}"
        facts = dict(zip(lines(browser, ".detail .fact span"), lines(browser, ".detail .fact b"), strict=True))
        assert facts["reward"] == reward == facts[f"reward/{role}"]
        assert f"reward/{ROLES[1 - number % 2]}" not in facts, "the reward of the other role is not its own"
        assert said in lines(browser, ".detail .text-box")
        assert lines(browser, ".detail > .turn .turn-head b") == [f"{role}, turn 1", f"{role}, turn 2"]
        heads = lines(browser, ".tokens .turn-head b")
        assert heads == ["prompt", f"{role}, turn 1", "environment", f"{role}, turn 2"]
        first = lines(browser, ".tokens .turn-head")[1]
        paid = f"turn reward {TURN_REWARDS[number]:g}"
        assert (paid in first) if TURN_REWARDS[number] else ("turn reward" not in first)


def test_a_role_is_filtered_and_the_roles_of_a_prompt_are_told_apart(browser):
    choose(browser, "Kind", "rollout", 4)
    choose(browser, "Role", "solver", 2)
    assert lines(browser, ".list .text:last-child") == [said_at(1, 1), said_at(3, 1)]
    peers = lines(browser, ".detail .keys button")
    assert peers == ["0 proposer: -0.75", "0 solver: 0.75", "1 proposer: 0.5", "1 solver: -0.5"]
    browser.run("document.querySelectorAll('.detail .keys button')[2].click()")
    assert lines(browser, ".detail h2") == ["Rollout, step 1, sample 1 of prompt 0, proposer"]


@pytest.mark.notices(
    "the page compares a role with another one before training",
    "report/page/samples.js",
    'const key = (at) => [read.role(at), ...["prompt_index", "sample", "ledger"]',
    'const key = (at) => [...["prompt_index", "sample", "ledger"]',
)
def test_a_role_after_training_stands_beside_itself_before(browser):
    choose(browser, "Kind", "pairs", 4)
    for number in range(4):
        browser.run(f"{LIST}[{number}].click()")
        assert lines(browser, ".pair .text-box") == [said_at(number, 0), said_at(number, 1)]
        assert lines(browser, ".detail h2")[0].endswith(f", {ROLES[number % 2]}")
