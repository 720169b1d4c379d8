"""What others say to the model is cut where it is too long: to agent.max_feedback_tokens, and by agent.cut_to_fit to
the room that is left in a ledger. A mark stands at the end of a text that was cut. Its tokens are of the environment,
like those of the text, so they are never trained on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlhf_suite.data.messages import Message
from rlhf_suite.data.render import tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MARK = " [...]"  # stands at the end of a text that was cut
TOKEN = 128  # characters of the longest tokens: what has more of them for each token of the room is not even tokenised


@dataclass(frozen=True)
class Limits:
    """What ends a turn beside its end-of-sequence token, and the room for tokens."""

    max_len: int  # data.max_len: tokens of a ledger
    max_new_tokens: int | None = None  # rollout.max_new_tokens: all that follows the first prompt
    max_feedback_tokens: int | None = None  # of what an environment says after one turn; more is cut off
    cut_to_fit: int | None = None  # tokens that a cut leaves for what follows; None: what does not fit is not cut

    def room(self, prompt_tokens: int, total: int) -> int:
        """Return how many tokens fit after `total` tokens, the first `prompt_tokens` of which are the prompt."""
        return min(self.max_len, prompt_tokens + (self.max_new_tokens or self.max_len)) - total


@dataclass(frozen=True)
class Cutter:
    """Cuts texts for one tokenizer."""

    tokenizer: PreTrainedTokenizerBase
    limits: Limits

    def cut(self, text: str, limit: int | None = None) -> str:
        """Return a text of an environment, cut to `limit` tokens (None: agent.max_feedback_tokens)."""
        limit = self.limits.max_feedback_tokens if limit is None else limit
        ids = tokens(self.tokenizer, text)
        if limit is None or len(ids) <= limit:
            return text
        kept, mark = limit - len(tokens(self.tokenizer, MARK)), MARK
        if kept < 1:  # no room to say that it was cut
            kept, mark = limit, ""
        return str(self.tokenizer.decode(ids[:kept])).rstrip("\N{REPLACEMENT CHARACTER}") + mark

    def cut_all(self, answers: Sequence[Message]) -> list[Message]:
        """Return messages whose texts share agent.max_feedback_tokens equally."""
        limit = self.limits.max_feedback_tokens
        share = None if limit is None else max(1, limit // max(1, len(answers)))
        return [{**message, "content": self.cut_content(message["content"], share)} for message in answers]

    def cut_content(self, content: Any, limit: int | None) -> Any:
        """Return the content of a message, a text or a list of items, with its texts cut; its images stay."""
        if content is None or isinstance(content, str):
            return None if content is None else self.cut(content, limit)
        return [{**item, "text": self.cut(item["text"], limit)} if "text" in item else item for item in content]

    def fit(self, texts: Sequence[str], room: int, encode: Callable[[list[str]], list[int] | None]) -> list[str]:
        """Return texts that were cut until `agent.cut_to_fit` tokens are left of `room` after them, the longest ones
        first. They stay as they are without that flag, and where that is not enough.

        Args:
            texts: what others said after a turn.
            room: tokens that fit into the ledger after that turn.
            encode: returns all tokens that would be appended for such texts; None if they cannot be.
        """
        keep, most = self.limits.cut_to_fit, TOKEN * max(room, 1)
        if keep is None or not texts:
            return list(texts)
        whole = [text if len(text) <= most else text[:most] + MARK for text in texts]
        shown, ids = list(whole), encode(whole)
        least = len(tokens(self.tokenizer, MARK)) + 1
        while ids is not None and (excess := len(ids) + keep - room) > 0:
            sizes = [len(tokens(self.tokenizer, text)) for text in shown]
            longest = max(range(len(sizes)), key=sizes.__getitem__)
            cut = self.cut(whole[longest], max(sizes[longest] - excess, least))
            if len(cut) >= len(shown[longest]):
                return whole
            shown[longest] = cut
            ids = encode(shown)
        return shown

    def fit_messages(
        self, answers: Sequence[Message], room: int, encode: Callable[[list[Message]], list[int] | None]
    ) -> list[Message]:
        """Do with the texts of messages what `fit` does with texts. Messages with images stay as they are."""
        places = [place for place, message in enumerate(answers) if isinstance(message["content"], str)]

        def with_texts(texts: Sequence[str]) -> list[Message]:
            shown = list(answers)
            for place, text in zip(places, texts, strict=True):
                shown[place] = {**answers[place], "content": text}
            return shown

        texts = [str(answers[place]["content"]) for place in places]
        return with_texts(self.fit(texts, room, lambda given: encode(with_texts(given))))
