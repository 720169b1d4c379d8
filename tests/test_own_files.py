"""A user's file is known with all that it imports of the user's own, and no thread sees it half imported."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from rlhf_suite import python_source
from rlhf_suite.config.declarations.data import DataConfig
from rlhf_suite.data.load import Loader
from rlhf_suite.data.row import BadRows, Row
from rlhf_suite.data.sources import Sources
from rlhf_suite.data.text_encoders import Prompt
from rlhf_suite.models.load import model_digest
from rlhf_suite.python_source import SourceError, digests, import_file, own_files
from rlhf_suite.run_folders.record import own_code


def write(folder, **files):
    """Write Python files; three underscores in a name stand for a folder."""
    for name, text in files.items():
        path = folder / f"{name.replace('___', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def names(folder, file="own.py"):
    return sorted(str(path.relative_to(folder)) for path in own_files(folder / file))


@pytest.mark.parametrize(
    "statement",
    [
        "import helper",
        "import helper as h, json",
        "from helper import f",
        "from helper import *",
        "def f(row):\n    import helper\n    return helper",
        "try:\n    import helper\nexcept ImportError:\n    helper = None",
        "from importlib import import_module\nhelper = import_module('helper')",
        "helper = __import__('helper')",
    ],
)
def test_every_way_of_importing_a_neighbour_is_followed(statement, tmp_path):
    deeper = "import own\n"
    write(tmp_path, own=f"import torch, json\n{statement}\n", helper="import deeper\n", deeper=deeper, other="")
    assert names(tmp_path) == ["deeper.py", "helper.py", "own.py"], "in any depth, and in a circle"


@pytest.mark.notices(
    "relative imports of a user's package are not followed",
    "python_source.py",
    "[str(file.parents[level - 1])] if level else folders",
    "folders",
)
def test_packages_are_followed_with_relative_imports(tmp_path):
    write(tmp_path, own="from pack.texts import clean\nimport space.inner\n", space___inner="")
    write(tmp_path, pack___first="", pack___unused="", pack___second="from .. import no\n", pack___third="")
    write(tmp_path, pack___texts="from .sub.rules import x\nfrom . import second\n")
    write(tmp_path, pack___sub___rules="from ..third import y\n")
    (tmp_path / "pack/__init__.py").write_text("from . import first\n")
    (tmp_path / "pack/sub/__init__.py").write_text("")
    assert names(tmp_path) == [
        *("own.py", "pack/__init__.py", "pack/first.py", "pack/second.py", "pack/sub/__init__.py"),
        *("pack/sub/rules.py", "pack/texts.py", "pack/third.py", "space/inner.py"),
    ]


def test_files_on_the_path_of_python_count_and_installed_ones_do_not(tmp_path, monkeypatch):
    elsewhere = write(tmp_path / "elsewhere", far="import yaml, rlhf_suite.registry\n")
    here = write(tmp_path / "here", own="import far, torch, os, math, rlhf_suite.data.row, nowhere\n")
    assert own_files(here / "own.py") == [here / "own.py"]
    monkeypatch.setattr(sys, "path", [*sys.path, str(elsewhere)])
    assert own_files(here / "own.py") == [here / "own.py", elsewhere / "far.py"]


@pytest.mark.notices(
    "what a user's file imports is not a part of its digest",
    "python_source.py",
    "return [digest(other) for other in (path, *others)]",
    "return [digest(path)]",
)
def test_a_neighbour_that_is_not_python_counts_and_says_nothing(tmp_path):
    write(tmp_path, own="import broken\n", broken="def (:\n")
    assert names(tmp_path) == ["broken.py", "own.py"]
    assert len(digests(f"{tmp_path}/own.py:f")) == 2


class Inputs:
    """An encoder that keeps the column `input`."""

    def encode(self, row: Row) -> Prompt:
        return Prompt([1], str(row.values["input"]), "", "", row.where)


def test_rows_that_a_neighbour_would_format_otherwise_are_encoded_again(tmp_path, monkeypatch):
    """Each load is that of another process: here the modules are forgotten."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    own = write(tmp_path, own="from own_words import mark\ndef f(row):\n    return {'input': mark(row['input'])}\n")
    (tmp_path / "rows.jsonl").write_text('{"input": "a"}\n')
    config = DataConfig.of("sft", row_format=f"{own}/own.py:f", dataset=f"{tmp_path}/rows.jsonl")

    def loaded():
        for name in [name for name in sys.modules if name.startswith("own_")]:
            del sys.modules[name]
        loader = Loader(Inputs(), config, 0, BadRows("skip"))
        texts = [item.text for item in loader.load(Sources(config.dataset, "train"))]
        return texts, sum(not each.name.startswith(".") for each in (tmp_path / "cache/rlhf_suite/encoded").iterdir())

    results = []
    for mark in ("1", "1", "22"):
        (tmp_path / "own_words.py").write_text(f"def mark(text):\n    return text + '{mark}'\n")
        results.append(loaded())
    assert results == [(["a1"], 1), (["a1"], 1), (["a22"], 2)]


def test_a_continued_run_knows_that_a_neighbour_has_changed(tmp_path):
    write(tmp_path, own="import own_helper\ndef f(row):\n    return row\n", own_helper="X = 1\n")
    config = DataConfig.of("sft", row_format=f"{tmp_path}/own.py:f")
    before = own_code(config)
    assert [each.partition(" sha256:")[0] for each in before] == [f"{tmp_path}/own.py", f"{tmp_path}/own_helper.py"]
    write(tmp_path, own_helper="X = 2\n")
    assert own_code(config)[0] == before[0] and own_code(config)[1] != before[1]


@pytest.mark.notices(
    "reference log-probs outlive a change of the model's code",
    "models/load.py",
    '"*.bin", "*.py")',
    '"*.bin")',
    cases="modeling_mine",
)
@pytest.mark.notices(
    "reference log-probs outlive a change of the image processor",
    "models/load.py",
    '("*.json", "*.safetensors",',
    '("config.json", "*.safetensors",',
    cases="preprocessor",
)
@pytest.mark.parametrize(
    "name", ["config.json", "preprocessor_config.json", "model.safetensors", "pytorch_model.bin", "modeling_mine.py"]
)
def test_each_file_of_a_model_is_a_part_of_its_digest(tmp_path, name):
    (tmp_path / "config.json").write_text("{}")
    before = model_digest(str(tmp_path), "ref.model_name_or_path")
    (tmp_path / name).write_text('{"image_mean": 0.5}')
    assert model_digest(str(tmp_path), "ref.model_name_or_path") != before


class Watched:
    """A lock that tells when somebody asks for it."""

    asked = threading.Semaphore(0)

    def __init__(self):
        self.lock = threading.RLock()

    def __enter__(self):
        self.asked.release()
        self.lock.acquire()

    def __exit__(self, *_):
        self.lock.release()


class Locks(dict):
    def setdefault(self, name, _):
        return super().setdefault(name, Watched())


@pytest.mark.notices("a thread sees a user's file half imported", "python_source.py", "    with lock:", "    if True:")
def test_threads_see_a_file_only_when_it_is_whole(tmp_path, monkeypatch):
    """The first thread stops in the middle of the import until all others have asked for the file."""
    monkeypatch.setattr(python_source, "LOCKS", Locks())
    inside, go_on = threading.Event(), threading.Event()
    gate = type(sys)("own_gate")
    gate.reached = lambda: (inside.set(), go_on.wait(60))
    monkeypatch.setitem(sys.modules, "own_gate", gate)
    file = write(tmp_path, own="import own_gate\nown_gate.reached()\nwhole = True\n") / "own.py"
    with ThreadPoolExecutor(5) as pool:
        found = [pool.submit(lambda: import_file(file).whole)]
        assert inside.wait(60)
        found += [pool.submit(lambda: import_file(file).whole) for _ in range(4)]
        all_asked = all([Watched.asked.acquire(timeout=300) for _ in found])
        go_on.set()
        assert [each.result(60) for each in found] == [True] * 5 and all_asked


def test_a_file_that_fails_is_imported_anew(tmp_path):
    file = write(tmp_path, own="raise ValueError('no')\n") / "own.py"
    with pytest.raises(ValueError, match="no"):
        import_file(file)
    file.write_text("whole = True\nmore = 1\n")
    assert import_file(file).whole


@pytest.mark.notices(
    "a user's file gets the neighbour of another one", "python_source.py", "    check_neighbours(path)\n", ""
)
def test_neighbours_of_one_name_in_two_folders_are_not_taken_for_one_another(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    first = write(tmp_path / "a", agent="import own_utils\nX = own_utils.X\n", own_utils="X = 1\n") / "agent.py"
    second = (
        write(tmp_path / "b", row="from own_utils import X\nimport types\n", own_utils="X = 2\n", types="") / "row.py"
    )
    assert import_file(first).X == 1
    with pytest.raises(SourceError, match=rf"{tmp_path}/a/own_utils.py has been imported as own_utils before; rename"):
        import_file(second)
    del sys.modules["own_utils"]
    assert import_file(second).X == 2, "a neighbour with the name of a module of Python is no mistake"
    del sys.modules["own_utils"]
