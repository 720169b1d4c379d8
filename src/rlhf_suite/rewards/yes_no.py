"""Yes or No: the two words that a judge chooses from, and the score that follows from how likely each of them is as the
first token of its reply: P(Yes) / (P(Yes) + P(No)).

Engines of the run choose between the two tokens alone, so both probabilities are known (`rl/judge_engines.py`). A
server lists the most likely tokens with their log-probabilities. A word that it does not list has a probability of at
most the least one listed, and is counted as 0 where that moves the score by at most `UNSEEN`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from rlhf_suite.foreign_text import printable
from rlhf_suite.rewards.rubric import NoVerdict

WORDS = YES, NO = ("Yes", "No")
ASKED = {"max_tokens": 1, "logprobs": True, "top_logprobs": 20}  # fields of a request; 20 is the most that is allowed
UNSEEN = 0.01  # by how much a word that is not listed may move the score
LEAST = -1e3  # of log-probabilities: e^-1000 is 0, and an integer may be too large for a float
ROUNDING = 1e-3  # by which probabilities in half precision may add up to more than 1


def share_of_yes(yes: float, no: float) -> float:
    """Return the score that follows from the probabilities of both words."""
    return yes / (yes + no)


def find_first_token(choice: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return what a server says about the first token of a reply; None if it lists no log-probabilities."""
    log_probs = choice.get("logprobs")
    content = log_probs.get("content") if isinstance(log_probs, dict) else None
    first = content[0] if isinstance(content, list) and content else None
    return first if isinstance(first, dict) and first.get("top_logprobs") else None


def read_first_token(first: Mapping[str, Any]) -> float:
    """Return the score by the list of the most likely first tokens.

    Raises:
        NoVerdict: it has neither word, lacks one that may be likely, or is not a list of log-probabilities.
    """
    listed = read_list(first["top_logprobs"])
    given = {word: [chance for token, chance in listed if token == word] for word in WORDS}
    yes, no = (math.fsum(chances) for chances in given.values())
    if not yes + no:
        tokens = printable(", ".join(json.dumps(token, ensure_ascii=False) for token, _ in listed), 200)
        raise NoVerdict(f"neither Yes nor No is among the {len(listed)} most likely first tokens: {tokens}")
    # The token that was sampled is listed also where others are more likely, so it bounds nothing.
    others = [chance for token, chance in listed if token != first.get("token")]
    left = max(0.0, 1 - math.fsum(chance for _, chance in listed))
    unseen = min([left, *others])
    for word, chances in given.items():
        if not chances and share_of_yes(unseen, yes + no) > UNSEEN:
            raise NoVerdict(f"{word} is not among the {len(listed)} most likely first tokens, and may be likely")
    return share_of_yes(yes, no)


def read_list(top: Any) -> list[tuple[str, float]]:
    """Return the tokens with their probabilities.

    Raises:
        NoVerdict: these are not probabilities of tokens.
    """
    listed = list[tuple[str, float]]()
    for entry in top if isinstance(top, list) else [top]:
        fields: dict[str, Any] = entry if isinstance(entry, dict) else {}
        token, log_prob = fields.get("token"), fields.get("logprob")
        is_number = isinstance(log_prob, int | float) and not isinstance(log_prob, bool)
        if not isinstance(token, str) or log_prob is None or not is_number or not log_prob <= ROUNDING:
            problem = printable(json.dumps(entry), 100)
            raise NoVerdict(f"the list of likely tokens has '{problem}', which is not a token with its log-probability")
        listed.append((token, math.exp(max(log_prob, LEAST))))
    if (total := math.fsum(chance for _, chance in listed)) > 1 + ROUNDING * len(listed):
        raise NoVerdict(f"the probabilities of the {len(listed)} most likely first tokens add up to {total:g}")
    return listed
