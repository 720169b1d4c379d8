"""Hooks of mkdocs. Links that leave docs/ become their text and path, because the site has these pages alone. A page in
several languages, such as first_run.md and first_run.zh.md, is offered in them by the menu of the theme."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

LANGUAGES = {"en": "English", "zh": "中文", "ja": "日本語"}
LINE_OF_LANGUAGES = re.compile(r"\A(?:\*\*English\*\*|\[English\]\(\S+\)) \| .*\n+")  # the menu has them

FENCE = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)
OUTSIDE = re.compile(r"\[([^\]]*)\]\(\.\./([^)#\s]+)(?:#[^)\s]*)?\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return the text of a page without links that leave docs/, and without the line of its languages; blocks of code
    stay as they are."""
    parts = FENCE.split(LINE_OF_LANGUAGES.sub("", markdown))
    return "".join(part if part.startswith("```") else OUTSIDE.sub(name_file, part) for part in parts)


def name_file(link: re.Match[str]) -> str:
    """Return the text of a link, and the file of the repository that it leads to where the text is not its name."""
    text, path = link[1], link[2]
    return text if path.endswith(text.strip("`")) else f"{text} (`{path}`)"


def on_page_context(context: Any, page: Any, config: Any, **_: Any) -> Any:
    """Give the theme the language of a page, and for its menu the addresses of the page in all its languages."""
    name, _, code = Path(page.file.src_uri).stem.partition(".")
    config.theme["language"] = code or "en"  # for the words of the theme, and for the glyphs of Chinese and Japanese
    ends = {other: "" if other == "en" else f".{other}" for other in LANGUAGES}
    there = [other for other, end in ends.items() if Path(config.docs_dir, f"{name}{end}.md").exists()]
    links = [{"name": LANGUAGES[other], "link": f"{name}{ends[other]}.html", "lang": other} for other in there]
    config.extra["alternate"] = links if len(links) > 1 else []
    return context
