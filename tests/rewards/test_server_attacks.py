"""Whatever a reward server answers costs its rows at most: the run goes on, with its memory and its console."""

from __future__ import annotations

import pytest
from server_attacks import ATTACKS, BEFORE, DEADLINE_S, tried

from attack_page import Section

pytestmark = pytest.mark.proof

SECTION = Section(
    "## What a reward server can do to a run",
    f"Each attack is the answer to a request for two rows, with `reward.http.timeout_s={DEADLINE_S:g}`. MiB is the "
    "growth of the memory of the process. A failed row is a normal outcome: `reward.on_error` says what happens "
    "to its group. Before: the first edition.",
    ("attack", "what limits it", "before", "after", "seconds", "MiB"),
    """Refused before a run, with exit code 2:

- A token in `RLHF_SUITE_REWARD_TOKEN` with a line end or characters other than visible ASCII. The message says at which
  position, never the value. Before, every request failed with "Illegal header value" and the token, on the console
  and in `status.json`, or the run ended in a traceback.
- `reward.remote_url` with a port such as `abc`, `99999` or `0`. Before, it was found at the first request.""",
)
MORE_MIB = 64  # what two rows may take


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_answer_of_a_server_costs_its_rows_and_no_more(section, attack):
    found = tried(attack)
    before = BEFORE.get(attack, "the same")
    section.add(attack, ATTACKS[attack][0], before, found["outcome"], found["seconds"], found["more_mib"])
    assert found["outcome"].startswith(("error: ", "timeout: ")) and "control characters" not in found["outcome"]
    assert found["more_mib"] < MORE_MIB
