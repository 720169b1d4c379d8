"""Compaction: a conversation that comes near its limit goes on from a summary that the model itself writes.

    first ledger   prompt, turn, answer, ..., turn, answer + agent.compact_prompt, summary
    next ledger    prompt + summary, turn, answer, ...

The summary is a turn like any other: its tokens are sampled, and trained on where they were sampled. In the next ledger
it is a text of the user, which is encoded again and belongs to the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlhf_suite.agents.session import Session
from rlhf_suite.config.declarations.agent import AgentConfig
from rlhf_suite.data.ending import Ending
from rlhf_suite.data.messages import Message, add_text
from rlhf_suite.errors import UserError

if TYPE_CHECKING:
    from rlhf_suite.agents.bridge import Bridge

HEAD = "The earlier turns of this conversation were left out. This is a summary of them:"


@dataclass(frozen=True)
class Compaction:
    """When an agent asks for a summary, and how."""

    at_tokens: int  # of a ledger, with the answer that stands after its last turn
    prompt: str  # how the user asks for a summary
    max_tokens: int  # of a summary

    @classmethod
    def of(cls, config: AgentConfig) -> Compaction | None:
        """Return the compaction of an agent; None if it has none."""
        if config.compact_at_tokens is None or not config.reads("compact_at_tokens"):
            return None
        return cls(config.compact_at_tokens, config.compact_prompt, config.compact_max_tokens)

    def is_due(self, session: Session, answers: Sequence[Message]) -> bool:
        """Return whether the next turn is a summary, because the ledger is long with these answers to the last one. A
        conversation that began with raw text has none."""
        return session.branches[0].ends[0][0] > 1 and length_with(session, answers) >= self.at_tokens

    async def write_summary(self, session: Session) -> tuple[Ending | None, int]:
        """Let the model write the summary that it was asked for, and begin a ledger with it. Return why the episode
        ends, None if another turn follows, and the number of tokens of the summary."""
        summary = await session.reply(max_new_tokens=self.max_tokens, counts=False)
        if summary.is_cut:
            return Ending.CUT, len(summary.ids)
        session.latest.ledger.ending = Ending.COMPACTED
        fits = begin_again(session, f"{HEAD}\n\n{summary.content.strip()}")
        return None if fits else Ending.FULL, len(summary.ids)

    def check(self, bridge: Bridge, max_len: int, max_feedback_tokens: int | None, roles: Sequence[str]) -> None:
        """Check that an answer, the request and a summary fit after `at_tokens`, and that the chat template lets the
        user speak after the messages of `roles`.

        Raises:
            UserError: they do not.
        """
        if "tool" in roles:
            bridge.check(["request"])
        request = len(bridge.prompt([{"role": "user", "content": self.prompt}]))
        needed = self.max_tokens + (max_feedback_tokens or 0) + request
        if self.at_tokens + needed > max_len:
            raise UserError(
                f"agent.compact_at_tokens={self.at_tokens} leaves {max_len - self.at_tokens} of data.max_len={max_len} "
                f"tokens, and an answer, agent.compact_prompt ({request} tokens) and a summary take up to {needed}: "
                f"write at most {max_len - needed}, lower agent.compact_max_tokens or agent.max_feedback_tokens, or "
                "raise data.max_len"
            )


def length_with(session: Session, answers: Sequence[Message]) -> int:
    """Return how many tokens the prompt of the next turn has with these answers to the last one."""
    branch, (placed, files) = session.open, session.place_images(session.cutter.cut_all(answers))
    if session.renders_history:
        return len(session.bridge.prompt([*branch.messages, *placed], branch.tools))
    ids = session.bridge.after(int(branch.ledger.ids[-1]), placed, branch.tools) or ()
    return len(branch.ledger.ids) + len(session.expand_images(ids, files)[0])


def begin_again(session: Session, text: str) -> bool:
    """Continue in a new ledger, which begins with the first prompt of the session and a text of the user after it.
    Return whether a turn fits."""
    first = session.branches[0]
    messages = add_text(first.messages[: first.ends[0][0] - 1], text)
    files = [image.data for image in first.ledger.images if image.start < first.prompt_tokens]
    messages, files = session.place_images(messages, files)
    ids, images = session.expand_images(session.bridge.prompt(messages, first.tools), files)
    return session.fork(ids, messages, first.tools, images)
