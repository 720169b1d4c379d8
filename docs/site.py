"""Hooks of mkdocs. The site has the pages of docs/, README.md as about.md, and the pages of the examples with their
pictures. Links to other files of the repository become their text and path. A page in several languages, such as
first_run.md and first_run.zh.md, is offered in them by the menu of the theme."""

from __future__ import annotations

import re
from functools import partial
from os.path import normpath, relpath
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LANGUAGES = {"en": "English", "zh": "中文", "ja": "日本語"}
LINE_OF_LANGUAGES = re.compile(r"\A(?:\*\*English\*\*|\[English\]\(\S+\)) \| .*\n+")  # the menu has them
ENDS = {code: "" if code == "en" else f".{code}" for code in LANGUAGES}
READMES = {f"README{end}.md": f"about{end}.md" for end in ENDS.values()}

SHIM = '<script src="https://unpkg.com/iframe-worker/shim"></script>'
FENCE = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[([^\]]*)\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")


def shown_files() -> dict[str, str]:
    """Return the files outside of docs/ that the site shows: their paths in the repository, and on the site."""
    examples = (path for kind in ("README.md", "*.png") for path in ROOT.glob(f"experiments/**/{kind}"))
    paths = (str(path.relative_to(ROOT)) for path in examples)
    return READMES | {path: path for path in paths}


def on_files(files: Any, config: Any, **_: Any) -> Any:
    """Add the files outside of docs/. The pages of the examples are reached from the gallery, not by the navigation."""
    from mkdocs.structure.files import File, InclusionLevel

    for path, place in shown_files().items():
        level = InclusionLevel.NOT_IN_NAV if path not in READMES else InclusionLevel.INCLUDED
        files.append(File.generated(config, place, abs_src_path=str(ROOT / path), inclusion=level))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the text of a page with links within the site, and without the line of its languages; blocks of code stay
    as they are."""
    parts = FENCE.split(LINE_OF_LANGUAGES.sub("", markdown))
    change = partial(lead_within_site, page.file.src_uri)
    return "".join(part if part.startswith("```") else LINK.sub(change, part) for part in parts)


def lead_within_site(page: str, link: re.Match[str]) -> str:
    """Return a link of a page of the site so that it leads to a page of the site; one that leaves the site as its text,
    with the file of the repository that it leads to where the text is not its name."""
    source = next((path for path, place in READMES.items() if place == page), page)
    is_outside = source in READMES or page.startswith("experiments/")
    folder = Path(source if is_outside else f"docs/{page}").parent
    text, path, part = link[1], normpath(folder / link[2]), link[3] or ""
    place = path.removeprefix("docs/") if path.startswith("docs/") else shown_files().get(path)
    if place is not None:
        return f"[{text}]({relpath(place, Path(page).parent)}{part})"
    return text if path.endswith(text.strip("`")) else f"{text} (`{path}`)"


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Return the content of a page; that of the reference of flags has a class, for its tables on phones. The search
    shows flags first, and proofs, which name every flag somewhere, last."""
    is_flags = page.file.src_uri.startswith("flags/")
    if is_flags or (page.ancestors and page.ancestors[-1].title == "Proofs"):
        page.meta["search"] = {"boost": 3 if is_flags else 0.1}
    return f'<div class="flags">{html}</div>' if is_flags else html


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Return a page whose search needs no network: the theme takes from one what worker.js does."""
    here = relpath("worker.js", Path(page.file.dest_uri).parent)
    return output.replace(SHIM, f'<script src="{here}"></script>')


def on_page_context(context: Any, page: Any, config: Any, **_: Any) -> Any:
    """Give the theme the language of a page, and for its menu the addresses of the page in all its languages."""
    name, _, code = page.file.src_uri.removesuffix(".md").partition(".")
    config.theme["language"] = code or "en"  # for the words of the theme, and for the glyphs of Chinese and Japanese
    there = [code for code, end in ENDS.items() if Path(config.docs_dir, f"{name}{end}.md").exists() or name == "about"]
    links = [{"name": LANGUAGES[other], "link": f"{name}{ENDS[other]}.html", "lang": other} for other in there]
    config.extra["alternate"] = links if len(links) > 1 else []
    return context
