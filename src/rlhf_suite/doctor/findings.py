"""What a check says of the machine."""

from __future__ import annotations

from dataclasses import dataclass

GOOD, NOTE, FAULT = "ok", "note", "fault"
MARK = "findings of a trial: "  # begins the line of a trial that has its findings as JSON


@dataclass(frozen=True)
class Finding:
    """One line about the machine. A fault makes runs fail, a note says what limits them; both have a remedy."""

    state: str
    subject: str
    text: str
    remedy: str = ""

    def __str__(self) -> str:
        line = f"{self.state:>5}  {self.subject}: {self.text}"
        return f"{line}\n       remedy: {self.remedy}" if self.remedy else line
