"""A hook of mkdocs: links that leave docs/ become their text and path, because the site has these pages alone."""

from __future__ import annotations

import re
from typing import Any

FENCE = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)
OUTSIDE = re.compile(r"\[([^\]]*)\]\(\.\./([^)#\s]+)(?:#[^)\s]*)?\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return the text of a page without links that leave docs/; blocks of code stay as they are."""
    parts = FENCE.split(markdown)
    return "".join(part if part.startswith("```") else OUTSIDE.sub(name_file, part) for part in parts)


def name_file(link: re.Match[str]) -> str:
    """Return the text of a link, and the file of the repository that it leads to where the text is not its name."""
    text, path = link[1], link[2]
    return text if path.endswith(text.strip("`")) else f"{text} (`{path}`)"
