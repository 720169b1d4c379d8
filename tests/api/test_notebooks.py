"""Notebooks: those of experiments/ run, a run shows itself while it goes on, and an interrupted one resumes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlhf_suite.polling import poll_until
from rlhf_suite.run_folders.run_folder import RunFolder

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytestmark = pytest.mark.stack
ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "experiments" / "notebooks").glob("*.ipynb"))
SHORT = "rs.run('sft', demo='sft', train={'max_steps': 3}, eval={'dataset': None, 'steps': -1})"
LONG = "rs.run('sft', demo='sft', run_dir='run', train={'max_epochs': 60}, logger={'progress': False})"
MISTAKEN = "rs.run('sft', demo='sft', train={'max_stepz': 3})"
START_S = 120.0


def executed(book, folder):
    """The notebook with the outputs of its cells."""
    client = nbclient.NotebookClient(book, timeout=500, kernel_name="python3", resources={"metadata": {"path": folder}})
    return client.execute()


@pytest.mark.proof
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_notebooks_run(path, tmp_path):
    book = executed(nbformat.read(path, as_version=4), str(tmp_path))
    shown = [html for cell in book.cells for html in pages(cell)]
    assert any("done, step" in html and "image/png" in html for html in shown)


def pages(cell):
    """What a cell shows as HTML at its end."""
    return [output["data"].get("text/html", "") for output in cell.get("outputs", []) if "data" in output]


def test_notebooks_are_kept_without_outputs():
    assert NOTEBOOKS
    for path in NOTEBOOKS:
        cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
        assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)


def test_a_run_shows_itself_while_it_goes_on(tmp_path):
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(f"import rlhf_suite as rs\nrun = {SHORT}")])
    updates = []
    client = nbclient.NotebookClient(
        book, timeout=500, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    process = client.process_message

    def watch(message, cell, index):
        if message["msg_type"] == "update_display_data":
            updates.append(message["content"]["data"]["text/html"])
        return process(message, cell, index)

    client.process_message = watch
    client.execute()
    (cell,) = book.cells
    assert [output["output_type"] for output in cell.outputs] == ["display_data"]  # nothing else is printed
    assert "running, step" in "".join(updates) and "done, step 3" in updates[-1]
    assert "train/gpt_loss" in updates[-1] and pages(cell) == [updates[-1]]


def test_a_mistake_is_shown_without_a_traceback(tmp_path):
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(f"import rlhf_suite as rs\n{MISTAKEN}")])
    with pytest.raises(nbclient.exceptions.CellExecutionError):
        executed(book, str(tmp_path))
    (output,) = book.cells[0].outputs
    first, problem, fix = output["traceback"]
    assert first == "ConfigurationError: 1 problem in the configuration:"
    assert (problem.strip(), "train.max_steps" in fix) == ("train.max_stepz: task=sft has no such flag", True)


@pytest.mark.proof
def test_an_interrupted_cell_leaves_a_run_that_resumes(tmp_path):
    manager, client = start_kernel(tmp_path)
    try:
        client.execute(f"import rlhf_suite as rs\n{LONG}")
        metrics = RunFolder(tmp_path / "run").metrics
        assert poll_until(lambda: metrics.exists() and "train/" in metrics.read_text(), START_S, 0.1)
        manager.interrupt_kernel()
        reply = client.get_shell_msg(timeout=START_S)["content"]
        assert (reply["status"], reply["ename"]) == ("error", "KeyboardInterrupt")
        status = RunFolder(tmp_path / "run").status()
        step = status["last_step"]
        assert status["state"] == "stopped" and 0 < step < 3840
        again = LONG.replace("'max_epochs': 60", f"'max_epochs': 60, 'max_steps': {step + 2}")
        client.execute(f"run = {again[:-1]}, ckpt={{'load_enable': True, 'allow_changes': ['train.max_steps']}})")
        reply = client.get_shell_msg(timeout=START_S)["content"]
        assert reply["status"] == "ok", reply
        assert RunFolder(tmp_path / "run").status()["last_step"] == step + 2
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def start_kernel(folder):
    from jupyter_client.manager import start_new_kernel

    return start_new_kernel(kernel_name="python3", cwd=str(folder))
