"""Hooks of mkdocs. Links that leave docs/ become their text and path, because the site has these pages alone. A page in
several languages, such as first_run.md and first_run.zh.md, is offered in them by the menu of the theme."""

from __future__ import annotations

import re
from functools import partial
from os.path import normpath
from pathlib import Path
from typing import Any

LANGUAGES = {"en": "English", "zh": "中文", "ja": "日本語"}
LINE_OF_LANGUAGES = re.compile(r"\A(?:\*\*English\*\*|\[English\]\(\S+\)) \| .*\n+")  # the menu has them

FENCE = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)
UPWARDS = re.compile(r"\[([^\]]*)\]\((\.\./[^)#\s]+)(?:#[^)\s]*)?\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the text of a page without links that leave docs/, and without the line of its languages; blocks of code
    stay as they are."""
    parts = FENCE.split(LINE_OF_LANGUAGES.sub("", markdown))
    change = partial(name_file, Path("docs", page.file.src_uri).parent)
    return "".join(part if part.startswith("```") else UPWARDS.sub(change, part) for part in parts)


def name_file(folder: Path, link: re.Match[str]) -> str:
    """Return a link of a page in `folder`; one that leaves docs/ as its text, with the file of the repository that it
    leads to where the text is not its name."""
    text, path = link[1], normpath(folder / link[2])
    if path.startswith("docs/"):
        return link[0]
    return text if path.endswith(text.strip("`")) else f"{text} (`{path}`)"


def on_page_context(context: Any, page: Any, config: Any, **_: Any) -> Any:
    """Give the theme the language of a page, and for its menu the addresses of the page in all its languages."""
    name, _, code = page.file.src_uri.removesuffix(".md").partition(".")
    config.theme["language"] = code or "en"  # for the words of the theme, and for the glyphs of Chinese and Japanese
    ends = {other: "" if other == "en" else f".{other}" for other in LANGUAGES}
    there = [other for other, end in ends.items() if Path(config.docs_dir, f"{name}{end}.md").exists()]
    links = [{"name": LANGUAGES[other], "link": f"{name}{ends[other]}.html", "lang": other} for other in there]
    config.extra["alternate"] = links if len(links) > 1 else []
    return context
