"""How an episode ended: one word for it in code, in files of samples, and in the metrics `agent/ended/<why>`."""

from __future__ import annotations

from enum import StrEnum


class Ending(StrEnum):
    """Why an episode has no further turn of the model. Where no agent takes part, a response is an episode."""

    FINISHED = "finished"  # the model or its environment was done
    CUT = "cut"  # the last turn reached the limit of its tokens before it was complete
    FULL = "full"  # what was answered to the last turn left no room for another one
    TURNS = "turns"  # it had as many turns as agent.max_turns allows
    TIMED_OUT = "timed_out"  # the episode, or an answer of its environment, took too long
    COMPACTED = "compacted"  # of a ledger before the last: its last turn is a summary, with which the next one begins
    FAILED = "failed"  # its environment raised an error, or answered something that cannot be used

    @classmethod
    def of_response(cls, finish_reason: str) -> Ending:
        """Return how a response ended of which an engine says `stop` or `length`."""
        return cls.CUT if finish_reason == "length" else cls.FINISHED

    @property
    def finish_reason(self) -> str:
        """What an engine says of the last response: `length` if it was cut off, else `stop`."""
        return "length" if self is Ending.CUT else "stop"
