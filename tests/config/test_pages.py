"""The pages name files, tests and links that exist."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlhf_suite.config.check.names import SECRETS
from rlhf_suite.config.declarations.runs import flags_of

ROOT = Path(__file__).parents[2]
QUOTING = "faults_measured.md"  # it quotes messages about flags that do not exist
GENERATED = ("flags.md", "mutations.md")  # test_docs.py and tests/benchmarks/test_mutations.py check these
PAGES = [
    ROOT / "README.md",
    ROOT / "README.zh.md",
    ROOT / "README.ja.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    ROOT / "AGENTS.md",
    ROOT / "llms.txt",
    *sorted(ROOT.glob("*/README.md")),
    *sorted(ROOT.glob("experiments/**/*/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
WRITTEN = [page for page in PAGES if page.name not in GENERATED and page.parent.name != "flags"]
FOLDERS = ("src", "tests", "docs", "conf", "benchmarks", "experiments", "docker")
# `path/to/` and `presets/` stand for folders of the reader.
FILE = re.compile(r"(?<![\w/.<-])(?!path/to/|presets/)((?:\w+/)+\w+\.(?:py|md|yaml|svg|png))\b")
TEST = re.compile(r"`(test_\w+)`")
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")
BLOCK = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def files() -> set[str]:
    """The files of the project, by their paths from the root."""
    found = {path.name for path in ROOT.iterdir() if path.is_file()}
    return found | {str(path.relative_to(ROOT)) for folder in FOLDERS for path in (ROOT / folder).rglob("*.*")}


def missing_files(text: str, known: set[str]) -> set[str]:
    """Names of files in the text that are neither a path from the root nor the end of one."""
    return {name for name in FILE.findall(text) if not any(f"/{path}".endswith(f"/{name}") for path in known)}


def text_of(page: Path) -> str:
    """Return a page, without the recipes of CONTRIBUTING.md, which make files and flags of their own."""
    text = page.read_text()
    before, recipes, behind = text.partition("Five recipes follow.")
    return before + "## Glossary" + behind.partition("## Glossary")[2] if recipes else text


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.name)
def test_the_files_that_a_page_names_exist(page):
    assert missing_files(text_of(page), files()) == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_links_of_a_page_lead_somewhere(page):
    links = LINK.findall(BLOCK.sub("", page.read_text()))
    assert [file for file, _ in links if not (page.parent / file).exists()] == []
    assert [
        f"{file}#{part}" for file, part in links if part and part not in parts(page.parent / (file or page.name))
    ] == []


def parts(page: Path) -> set[str]:
    """The names by which links lead to the headings of a page, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", BLOCK.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_tests_that_pages_name_exist():
    defined = {
        name for path in (ROOT / "tests").rglob("*.py") for name in re.findall(r"def (test_\w+)", path.read_text())
    }
    named = {name for page in PAGES for name in TEST.findall(page.read_text())}
    assert named - defined == set()


VARIABLE = re.compile(r"\bRLHF_SUITE_[A-Z_]+\b")
FLAG = re.compile(r"(?<![\w./-])([a-z]\w*(?:\.\w+)+)(?![\w/(.])")
FILES = (".py", ".md", ".json", ".yaml", ".ipynb")


def test_the_variables_that_pages_name_are_read():
    code = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    read = {*VARIABLE.findall(code)}
    assert {page.name: names for page in PAGES if (names := {*VARIABLE.findall(page.read_text())} - read)} == {}


@pytest.mark.parametrize("page", [page for page in WRITTEN if page.name != QUOTING], ids=lambda page: page.name)
def test_the_flags_that_a_page_names_exist(page):
    flags = flags_of(None)
    sections = {key.partition(".")[0] for key in flags if "." in key}
    named = {name for name in FLAG.findall(text_of(page)) if not name.endswith(FILES)}
    unknown = {name for name in named - {*flags} - {*SECRETS} if name.partition(".")[0] in sections}
    of_messages = {"eval.top_p"}  # "where there is one"
    assert {name for name in unknown - of_messages if not any(key.startswith(f"{name}.") for key in flags)} == set()


def test_a_file_that_does_not_exist_is_noticed():
    assert missing_files("see `rl/pipeline.py` and `rl/wiring.py`", files()) == {"rl/wiring.py"}


LONGEST_README = 1200  # words


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().split()) <= LONGEST_README


def test_every_page_is_in_the_navigation_of_the_site():
    named = re.findall(r"([\w./]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert [name for name in named if name.startswith("about")] == ["about.md", "about.zh.md", "about.ja.md"]  # README
    named = [name for name in named if not name.startswith("about")]
    docs = ROOT / "docs"
    assert sorted(named) == sorted(str(page.relative_to(docs)) for page in docs.rglob("*.md"))


LONGEST_PAGE = 1500  # words, of a page that is read from its beginning to its end


def test_pages_that_are_read_from_their_beginning_are_short():
    """Those of Learn and How-to. Pages of Reference and Proofs are searched, and may be of any length."""
    parts = dict(re.findall(r"^  - ([\w-]+):\n((?:      .*\n)+)", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    pages = re.findall(r"(\w+\.md)$", parts["Learn"] + parts["How-to"], re.MULTILINE)
    assert {page for page in pages if len((ROOT / "docs" / page).read_text().split()) > LONGEST_PAGE} == set()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("see [real data](../experiments/real_data/README.md#a)", "see [real data](experiments/real_data/README.md#a)"),
        ("see [`run.py`](../run.py) and [data](data.md)", "see `run.py` and [data](data.md)"),
        ("```\n[a](../b)\n```\n[a](../b)", "```\n[a](../b)\n```\na (`b`)"),
    ],
)
def test_links_to_files_outside_of_the_site_become_their_paths(text, shown):
    assert site_text("data.md", text) == shown


def test_a_page_in_a_folder_of_the_site_leads_to_the_pages_above_it():
    assert site_text("flags/data.md", "[a](../data.md) and [b](../../run.py)") == "[a](../data.md) and b (`run.py`)"


def test_readme_and_the_pages_of_examples_are_pages_of_the_site():
    assert site_text("index.md", "[what it promises](../README.md#status)") == "[what it promises](about.md#status)"
    assert site_text("about.md", "![a page](docs/report.png) [first run](docs/first_run.md)") == (
        "![a page](report.png) [first run](first_run.md)"
    )
    recipe, page = "experiments/recipes/ppo_8b/README.md", "docs/benchmarks.md"
    assert site_text("gallery.md", f"[ppo_8b](../{recipe})") == f"[ppo_8b]({recipe})"
    assert site_text(recipe, f"[a](../../../{page}) [curve](curve.png) [code](recipe.yaml)") == (
        "[a](../../../benchmarks.md) [curve](curve.png) code (`experiments/recipes/ppo_8b/recipe.yaml`)"
    )


def site_text(page: str, text: str) -> str:
    """Return what the hook of the site makes of the text of a page, which is named by its path below docs/."""
    hook = runpy.run_path(str(ROOT / "docs" / "site.py"))
    return hook["on_page_markdown"](text, page=SimpleNamespace(file=SimpleNamespace(src_uri=page)))
