"""The Chinese and Japanese pages have the blocks, headings, links, names and numbers of the English ones, so that a
change of the one is a failure until the others have it too."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
SITE = runpy.run_path(str(ROOT / "docs" / "site.py"))
LANGUAGES = SITE["LANGUAGES"]
TRANSLATIONS = [code for code in LANGUAGES if code != "en"]
NAVIGATION = (ROOT / "mkdocs.yml").read_text()
ENGLISH_ONLY = re.compile(
    r"agents_\w+\.md|gallery\.md"
)  # the pages that follow that of agents, and the list of examples
BLOCK = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
NAME = re.compile(r"`[^`]+`|\bdocs/\w+\.md")  # what stays as it is in a text
LINK = re.compile(r"\]\(([^)#\s]*)(#[^)\s]+)?\)")


def pages_below(heading: str) -> list[str]:
    """The pages in a part of the site's navigation."""
    part = re.search(rf"^  - {heading}:\n((?:      .*\n)+)", NAVIGATION, re.MULTILINE)
    return re.findall(r"([\w.]+\.md)$", part[1], re.MULTILINE) if part else []


LEARN = [name for name in pages_below("Learn") if not ENGLISH_ONLY.fullmatch(name)]
ENGLISH = [ROOT / "README.md", *(ROOT / "docs" / name for name in LEARN)]


def in_language(page: Path, code: str) -> Path:
    """The place of an English page in a language."""
    return page if code == "en" else page.with_suffix(f".{code}.md")


def parts_of(text: str, page: Path, code: str) -> dict[str, list]:
    """What the text of an English page has in every language. Places in pages that are translated lose their names,
    which are headings."""
    prose = BLOCK.sub("", text)
    links = [(file.replace(f".{code}.md", ".md"), anchor) for file, anchor in LINK.findall(prose)]
    return {
        "blocks": BLOCK.findall(text),
        "levels of headings": re.findall(r"^#+(?= )", prose, re.MULTILINE),
        "pictures": re.findall(r"!\[[^\]]*\]\(([^)]+)\)", prose),
        "columns of tables": [line.count("|") for line in prose.splitlines() if line.startswith("|")],
        "links": sorted(
            file + (anchor and "#" if not file or in_language(page.parent / file, code).exists() else anchor)
            for file, anchor in links
        ),
        "names": sorted(" ".join(name.split()) for name in NAME.findall(LINK.sub("]", prose))),
        "numbers": sorted(re.findall(r"(?<![\w.])\d+(?:\.\d+)*", prose)),
    }


def body(page: Path, code: str) -> str:
    """The text of a page without the lines that say in which languages there is one, and which of them counts."""
    lines = in_language(page, code).read_text().splitlines()
    return "\n".join([*lines[1:4], *lines[4 if code == "en" else 5 :]])


@pytest.mark.parametrize("code", TRANSLATIONS)
@pytest.mark.parametrize("page", ENGLISH, ids=lambda page: page.name)
def test_a_translation_has_what_the_english_page_has(page, code):
    english, other = (parts_of(body(page, language), page, code) for language in ("en", code))
    assert other == english


@pytest.mark.parametrize("code", TRANSLATIONS)
@pytest.mark.parametrize("page", ENGLISH, ids=lambda page: page.name)
def test_a_translation_leads_to_translations(page, code):
    leads = {file for file, _ in LINK.findall(body(page, code)) if file.endswith(".md")}
    assert {
        file for file in leads if f".{code}." not in file and in_language(page.parent / file, code).exists()
    } == set()


@pytest.mark.parametrize("page", ENGLISH, ids=lambda page: page.name)
def test_a_page_begins_with_its_languages(page):
    for code in LANGUAGES:
        lines = in_language(page, code).read_text().splitlines()
        names = [
            f"**{name}**" if code == other else f"[{name}]({in_language(page, other).name})"
            for other, name in LANGUAGES.items()
        ]
        assert lines[0] == " | ".join(names)
        assert code == "en" or (lines[4].startswith("> ") and f"]({page.name})" in lines[4])  # which of them counts


def test_the_site_has_every_translation_in_the_order_of_the_english_pages():
    for code in TRANSLATIONS:
        assert pages_below(LANGUAGES[code]) == [in_language(Path(name), code).name for name in ("about.md", *LEARN)]


@pytest.mark.parametrize(
    ("page", "language", "links"),
    [
        ("first_run.md", "en", ["first_run.html", "first_run.zh.html", "first_run.ja.html"]),
        ("first_run.ja.md", "ja", ["first_run.html", "first_run.zh.html", "first_run.ja.html"]),
        ("flags.md", "en", []),
        ("flags/data.md", "en", []),
        ("about.zh.md", "zh", ["about.html", "about.zh.html", "about.ja.html"]),
    ],
)
def test_the_site_offers_a_page_in_its_languages(page, language, links):
    config = SimpleNamespace(theme={}, extra={}, docs_dir=str(ROOT / "docs"))
    SITE["on_page_context"]({}, page=SimpleNamespace(file=SimpleNamespace(src_uri=page)), config=config, nav=None)
    assert config.theme == {"language": language}
    assert [link["link"] for link in config.extra["alternate"]] == links


@pytest.mark.parametrize(
    ("page", "part", "boost"),
    [("flags/train.md", "Reference", 3), ("mutations.md", "Proofs", 0.1), ("rl.md", "How-to", None)],
)
def test_the_search_shows_flags_first_and_proofs_last(page, part, boost):
    shown = SimpleNamespace(
        file=SimpleNamespace(src_uri=page), ancestors=[SimpleNamespace(title=part)], meta=dict[str, dict]()
    )
    SITE["on_page_content"]("<p>text</p>", page=shown)
    assert shown.meta.get("search", {}).get("boost") == boost


def test_the_site_leaves_out_the_line_of_languages():
    text = (ROOT / "docs" / "first_run.zh.md").read_text()
    page = SimpleNamespace(file=SimpleNamespace(src_uri="first_run.zh.md"))
    assert SITE["on_page_markdown"](text, page=page).startswith("# ")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("train.batch_size=64 is", ["train", "batch_size", "64", "is"]),
        ("每个 token 的权重", ["每", "个", "token", "的", "权", "重"]),
        ("重みとトークン、rank", ["重", "み", "と", "トークン", "rank"]),
    ],
)
def test_the_search_of_the_site_finds_words(text, words):
    separator = re.search(r"^      separator: '(.*)'$", NAVIGATION, re.MULTILINE)
    assert separator and [word for word in re.split(separator[1], text, flags=re.ASCII) if word] == words


@pytest.mark.parametrize(
    ("part", "english", "other"),
    [
        ("blocks", "```bash\npwd # here\n```\n", "```bash\npwd # hier\n```\n"),
        ("levels of headings", "# A\n\n## B\n", "# A\n\nB\n"),
        ("pictures", "![a](a.png)\n", "![a](b.png)\n"),
        ("columns of tables", "| a | b |\n", "| a |\n"),
        ("links", "[a](rl.md#ppo)\n", "[a](rl.md)\n"),
        ("names", "`train.seed`\n", "`train.sed`\n"),
        ("names", "see docs/rl.md\n", "see docs/rewards.md\n"),
        ("numbers", "11 s\n", "12 s\n"),
    ],
)
def test_a_difference_is_noticed(part, english, other):
    page = ROOT / "docs" / "a.md"
    assert parts_of(english, page, "zh")[part] != parts_of(other, page, "zh")[part]
