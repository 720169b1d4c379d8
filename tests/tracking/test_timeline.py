"""Who was busy when: intervals of what happens once or several times at once, and the shares of a window."""

from __future__ import annotations

import json

import pytest

from rlhf_suite.tracking import timeline as of_timeline
from rlhf_suite.tracking.timeline import Activity, Timeline


class Clock:
    now = 100.0

    def time(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(of_timeline, "time", made)
    return made


def written(path) -> list[tuple[str, float, float]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [(row["what"], row["begin"], row["end"]) for row in rows]


@pytest.mark.notices(
    "each of several requests begins an interval of its own",
    "tracking/timeline.py",
    "if self.count != 1:",
    "if self.count < 1:",
)
def test_an_activity_has_one_interval_while_it_happens_at_least_once(clock, tmp_path):
    timeline = Timeline()
    requests = Activity(timeline, "engines", "generation")
    for seconds, event in ((0, requests.begin), (1, requests.begin), (2, requests.end), (4, requests.end)):
        clock.now = 100.0 + seconds
        event()
    clock.now = 110.0
    with requests:
        clock.now = 111.0
    timeline.close_window(tmp_path / "lines")
    assert written(tmp_path / "lines") == [("generation", 100.0, 104.0), ("generation", 110.0, 111.0)]


def test_a_short_pause_does_not_end_an_interval_unless_it_is_written(clock, tmp_path):
    timeline = Timeline()
    requests = Activity(timeline, "engines", "generation")
    for begin in (100.0, 101.0078125):
        clock.now = begin
        with requests:
            clock.now = begin + 1
    timeline.close_window(tmp_path / "lines")
    clock.now += 0.0078125
    with requests:
        clock.now += 1
    timeline.close_window(tmp_path / "lines")
    assert written(tmp_path / "lines") == [("generation", 100.0, 102.0078125), ("generation", 102.015625, 103.015625)]


@pytest.mark.notices(
    "the overlap is a share of the whole time",
    "tracking/timeline.py",
    "both / least} if least",
    "both / window} if least",
)
def test_the_shares_of_a_window_by_hand(clock, tmp_path):
    timeline = Timeline()
    requests = Activity(timeline, "engines", "generation")
    requests.begin()
    clock.now = 102.0
    with timeline.busy("trainer", "ppo_train"):
        clock.now = 106.0
        requests.end()
        clock.now = 107.0
    clock.now = 108.0
    shares = timeline.close_window(tmp_path / "lines")
    assert shares == {"perf/engine_idle": 0.25, "perf/trainer_idle": 1 - 5 / 8, "perf/overlap": 4 / 5}
    requests.begin()
    clock.now = 110.0
    assert timeline.close_window(tmp_path / "lines")["perf/engine_idle"] == 0
    assert len(written(tmp_path / "lines")) == 2, "an interval that is not over is not written"


def test_the_first_window_begins_with_the_run_and_not_with_the_loading_of_models(clock, tmp_path):
    timeline = Timeline()
    with timeline.busy("trainer", "make_experience"):
        clock.now = 160.0
    timeline.open_window()
    with timeline.busy("engines", "generation"):
        clock.now = 163.0
    clock.now = 164.0
    shares = timeline.close_window(tmp_path / "lines")
    assert shares == {"perf/engine_idle": 0.25, "perf/trainer_idle": 1.0}


@pytest.mark.notices(
    "what is not over when a run ends is not in the timeline",
    "tracking/timeline.py",
    "or now) for interval in intervals])",
    "or now) for interval in intervals if interval.end])",
)
def test_the_end_of_a_run_writes_what_is_left_and_what_is_not_over(clock, tmp_path):
    timeline = Timeline()
    requests = Activity(timeline, "engines", "generation")
    requests.begin()
    clock.now = 101.0
    timeline.close_window(tmp_path / "lines")
    with timeline.busy("driver", "evaluation"):
        clock.now = 103.0
    clock.now = 104.0
    timeline.close(tmp_path / "lines")
    timeline.close(tmp_path / "lines")
    assert written(tmp_path / "lines") == [("generation", 100.0, 104.0), ("evaluation", 101.0, 103.0)]


@pytest.mark.notices(
    "intervals of another process that are not over are recorded twice",
    "tracking/timeline.py",
    "                interval.begin = now\n",
    "                pass\n",
)
@pytest.mark.notices(
    "what another process did right after its report is lost",
    "tracking/timeline.py",
    "now = self.window_begin = time.time()  #",
    "now = time.time()  #",
)
def test_intervals_that_are_taken_in_parts_are_those_of_the_whole_time(clock, tmp_path):
    timeline, other = Timeline(), Timeline()
    requests = Activity(other, "engines", "generation")
    requests.begin()
    clock.now = 101.0
    timeline.add(other.drain())
    clock.now = 103.0
    requests.end()
    timeline.add(other.drain())
    requests.begin()
    clock.now = 104.0
    timeline.add(other.drain())
    assert [(each.begin, each.end) for each in timeline.intervals] == [(100.0, 101.0), (101.0, 103.0), (103.0, 104.0)]
