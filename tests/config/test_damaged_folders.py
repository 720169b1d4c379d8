"""Run folders that are damaged, or made to do harm: each command ends with one sentence, whatever is in them."""

import json
import os
import shlex
import signal
import sys
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from report import made_run
from rlhf_suite.cli import main
from rlhf_suite.config.check.problems import Problem
from rlhf_suite.preflight.folders import for_run
from rlhf_suite.run_folders.resume import load_earlier
from rlhf_suite.run_folders.run_folder import RunFolder

pytestmark = pytest.mark.stack
pytest.importorskip("plotly", reason="plotly is not installed here: pip install plotly")
HANGS_S = 60  # after this long a command does not end
PPO = "task=ppo demo=ppo"
BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10)
)
JSON_FILES = ("status.json", "waits.json", "origins.json", "logs/actor-0.json")
FILES = (*JSON_FILES, "config.yaml", "metrics.jsonl", "timeline.jsonl", "rollouts/step_000002.parquet")
READ_BY_WHY = ("status.json", "waits.json", "logs/actor-0.json")


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    folder = made_run(tmp_path_factory.mktemp("sound") / "run", steps=3, samples=8, tokens=5, texts=("a", "b"))
    folder.waits.write_text(json.dumps({"time": 1e9, "waits": [], "main_thread": []}))
    folder.origins.write_text("{}")
    folder.timeline.write_text('{"who": "engines", "what": "generation", "begin": 1.0, "end": 2.0}\n')
    folder.logs.mkdir(exist_ok=True)
    (folder.logs / "actor-0.json").write_text(folder.waits.read_text())
    folder.mark_failed("x")
    return folder


@pytest.fixture
def run(sound, tmp_path):
    """A copy of a sound run, whose files are links to the same contents until they are replaced."""
    import shutil

    return RunFolder(Path(shutil.copytree(sound.path, tmp_path / "run")))


@contextmanager
def ending():
    """Fail if the block does not end."""

    def late(number, frame):
        raise AssertionError("the command does not end")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(HANGS_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def one_sentence(capsys, path, command, code=2):
    with ending():
        assert main([command, str(path)]) == code
    said = capsys.readouterr().err
    assert len(said.splitlines()) == (1 if code else 0) and "Traceback" not in said
    return said


def fifo(file):
    os.mkfifo(file)


def huge(file):
    file.touch()
    os.truncate(file, 1 << 42)


DAMAGES = {
    "a pipe": fifo,
    "a device without end": lambda file: file.symlink_to("/dev/zero"),
    "a link to another file": lambda file: file.symlink_to("/etc/passwd"),
    "a link to itself": lambda file: file.symlink_to(file),
    "a folder": lambda file: file.mkdir(),
    "4 TiB without contents": huge,
}


@pytest.mark.notices(
    "a pipe is opened like a file",
    "foreign_files.py",
    "    if not stat.S_ISREG(status.st_mode):",
    "    if stat.S_ISDIR(status.st_mode):",
)
@pytest.mark.notices("a link in a run folder is followed", "foreign_files.py", "(0 if follow else os.O_NOFOLLOW)", "0")
@pytest.mark.notices(
    "a huge file is read", "foreign_files.py", "    if status.st_size > limit:", "    if status.st_size < 0:"
)
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_none_is_one_sentence(run, capsys, name, damage):
    (run.path / name).unlink()
    DAMAGES[damage](run.path / name)
    if not (run.path / name).exists():
        pytest.skip("a link that leads nowhere is a file that is not there")
    if name not in READ_BY_WHY[1:]:
        assert name in one_sentence(capsys, run.path, "report")
    if name in READ_BY_WHY:
        assert name in one_sentence(capsys, run.path, "why")


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "[" * 100_000, '{"a": ' * 100_000, "\udcff"])
@pytest.mark.parametrize("name", JSON_FILES[:3])
def test_a_text_that_is_no_table_is_one_sentence(run, capsys, name, text):
    (run.path / name).write_bytes(text.encode(errors="surrogateescape"))
    command = "why" if name in READ_BY_WHY else "report"
    assert f"{name} is damaged" in one_sentence(capsys, run.path, command)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("status.json", {"state": ["done"]}),
        ("status.json", {"last_step": "3"}),
        ("status.json", {"last_step": 10**400}),
        ("status.json", {"error": {"a": 1}}),
        ("status.json", {"outputs": ["model"]}),
        ("status.json", {"metrics": {"eval/acc": "high"}}),
        ("status.json", {"resumes": 3}),
        ("status.json", {"pid": None}),
        ("waits.json", {"time": "now"}),
        ("waits.json", {"waits": [3]}),
        ("waits.json", {"waits": [{"what": "x", "who": "actor-0"}]}),
        ("waits.json", {"waits": [{"what": "x", "began": None}]}),
        ("waits.json", {"main_thread": "x"}),
    ],
)
def test_values_of_another_type_are_named(run, capsys, name, values):
    file = run.path / name
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
    said = one_sentence(capsys, run.path, "why")
    assert f"{name} is damaged: its " in said and "another type" in said


@pytest.mark.notices(
    "aliases count as one value",
    "foreign_files.py",
    "            sizes[-1] += anchors.get(event.anchor, 1)",
    "            sizes[-1] += 1",
)
@pytest.mark.notices(
    "tags in YAML are read",
    "foreign_files.py",
    '        if getattr(event, "tag", None) is not None:',
    '        if getattr(event, "tag", None) == "!":',
)
@pytest.mark.parametrize(
    ("text", "said"),
    [
        (BOMB, "more than 20,000 values"),
        ("[" * 10_000, "levels"),
        ("a: !!python/object/apply:os.system ['true']", "config.yaml:1: the tag"),
        ("a: 1\nb: !include /etc/passwd", "config.yaml:2: the tag"),
        ("a: [", "is not valid YAML"),
        ("- a\n- b", "does not hold a table of flags"),
        ("a: " + "1" * 10_000, "is not valid YAML"),
    ],
)
def test_yaml_that_grows_or_has_tags_is_one_sentence(run, capsys, text, said):
    run.config.write_text(text)
    assert said in one_sentence(capsys, run.path, "report")
    with ending():
        assert main(["--config", str(run.config), "explain=true"]) == 2
    assert said.replace("a table of flags", "a table") in capsys.readouterr().err
    with ending():
        problem = load_earlier(run.config)
    assert isinstance(problem, Problem) and said in problem.what


@pytest.mark.parametrize("keep", [0, 4, 100, 2000])
def test_a_cut_parquet_is_one_sentence(run, capsys, keep):
    file = run.rollouts / "step_000002.parquet"
    file.write_bytes(file.read_bytes()[:keep])
    assert f"{file} is damaged or cut off" in one_sentence(capsys, run.path, "report")


@pytest.mark.notices(
    "columns of another type are read",
    "report/sample_files.py",
    "            if place >= 0 and not is_kind(schema.field(place).type):",
    "            if place >= 0 and is_kind is None:",
)
@pytest.mark.parametrize(
    ("column", "values", "said"),
    [
        ("prompt", pa.array([1] * 8), "its column prompt does not hold texts"),
        ("reward", pa.array(["x"] * 8), "its column reward does not hold numbers"),
        ("owner", pa.array([1] * 8), "its column owner does not hold lists of numbers"),
        ("response", None, "it has no column response"),
    ],
)
def test_a_parquet_with_other_columns_is_one_sentence(run, capsys, column, values, said):
    file = run.rollouts / "step_000002.parquet"
    table = pq.read_table(file)
    place = table.column_names.index(column)
    pq.write_table(table.remove_column(place) if values is None else table.set_column(place, column, values), file)
    assert said in one_sentence(capsys, run.path, "report")


@pytest.mark.notices(
    "a file of samples with a foreign name ends a report",
    "report/sample_files.py",
    "list_samples_files(place).items()",
    "enumerate(place.glob('step_*.parquet'))",
)
def test_a_file_of_samples_with_another_name_is_left_out(run, capsys):
    (run.rollouts / "step_x.parquet").write_bytes(b"x")
    one_sentence(capsys, run.path, "report", code=0)


def test_numbers_and_rows_of_other_tools_are_left_out(run, capsys):
    with run.metrics.open("a") as file:
        file.write('{"step": 4, "train/reward": NaN, "train/loss": Infinity, "train/kl": 1e999, "train/x": "y"}\n')
        file.write('{"step": true}\n{"step": 5, "train/reward": [1], "time": "now"}\n[1]\n' + "[" * 100_000 + "\n")
    with run.timeline.open("a") as file:
        file.write('{"who": 3, "what": [], "begin": "x", "end": {}}\n[]\n{"who": "engines"}\nnull\n')
    one_sentence(capsys, run.path, "report", code=0)


def test_a_model_that_this_version_does_not_have_ends_no_report(run, capsys):
    text = run.config.read_text()
    run.config.write_text(text.replace("model_name_or_path: ", "model_name_or_path: builtin:gone #", 1))
    run.record_model("actor", run.path / "nowhere")
    one_sentence(capsys, run.path, "report", code=0)


def test_a_tokenizer_that_cannot_be_read_ends_no_report(run, capsys):
    run.model.mkdir()
    os.mkfifo(run.model / "tokenizer.json")
    one_sentence(capsys, run.path, "report", code=0)


@pytest.mark.parametrize("name", ["status.json", "run.lock", "summary.json"])
@pytest.mark.parametrize("damage", ["a pipe", "a device without end", "4 TiB without contents"])
def test_a_run_is_not_continued_in_a_damaged_folder(run, checked, name, damage):
    (run.path / name).unlink(missing_ok=True)
    DAMAGES[damage](run.path / name)
    with ending():
        problem = for_run(checked(f"{PPO} ckpt.load_enable=true run_dir={shlex.quote(str(run.path))}"))
    assert isinstance(problem, Problem) and name in problem.what


def test_a_damaged_sweep_is_one_sentence(tmp_path, capsys):
    for text in ("[3]", '[{"number": "1"}]', '[{"number": 1}]', '{"a": 1}', "["):
        (tmp_path / "summary.json").write_text(text)
        with ending():
            assert main(["sweep", "status", str(tmp_path)]) == 2
        said = capsys.readouterr().err
        assert "summary.json is damaged" in said and len(said.splitlines()) == 1
