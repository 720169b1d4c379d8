"""The unchanged packages tinker and tinker-cookbook against a server. They are in an environment of their own, whose
python TINKER_PYTHON names: `pip install tinker==0.38.0 tinker-cookbook[math-rl]==0.6.1`."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from train_client import serving

pytestmark = pytest.mark.proof
PYTHON = os.environ.get("TINKER_PYTHON", "")
COOKBOOK = {
    "chat_sl.train": "dataset={rows} batch_size=8 max_length=128 learning_rate=1e-3 "
    "eval_every=0 save_every=0 lora_rank=32",
    "math_rl.train": "env=arithmetic group_size=4 groups_per_batch=4 max_tokens=8 loss_fn=importance_sampling "
    "learning_rate=1e-3 eval_every=0 save_every=0 lora_rank=32",
    "preference.shorter.train": "batch_size=4 group_size=4 max_tokens=8 learning_rate=1e-3 eval_every=0",
}
LOOP = Path(__file__).with_name("tinker_loop.py")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    if not PYTHON:
        pytest.skip("TINKER_PYTHON names no environment with tinker and tinker-cookbook")
    folder = tmp_path_factory.mktemp("tinker")
    key = {"RLHF_SUITE_TRAIN_TOKEN": "tml-secret"}
    with serving(folder, "ds.lora.rank=32", "data.max_len=2048", env=key) as (_, url):
        yield url, folder


def run(server, *words, key="tml-secret"):
    """Run a program of the other environment; return what it printed."""
    url, folder = server
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "HF_HUB_OFFLINE": "1"}
    environment |= {"TINKER_API_KEY": key, "TINKER_BASE_URL": url, "COLUMNS": "200"}
    command = [PYTHON, *words]
    done = subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_the_client_trains_samples_saves_and_loads(server):
    code, said = run(server, str(LOOP))
    assert code == 0, said
    result = json.loads(said.strip().splitlines()[-1])
    assert result["losses"] == sorted(result["losses"], reverse=True)
    assert abs(result["custom"] - result["plain"]) < 1e-4 * abs(result["plain"])
    assert max(result["gap"]) < 1e-4 and result["loaded"] == result["saved"]


def test_a_client_with_another_key_is_refused(server):
    code, said = run(server, str(LOOP), key="tml-other")
    assert code != 0 and "a bearer token is needed" in said


@pytest.mark.parametrize("recipe", COOKBOOK)
def test_a_recipe_of_the_cookbook_runs_unchanged(server, recipe):
    _, folder = server
    rows = folder / "rows.jsonl"
    turns = [[("user", f"reverse {n:04d}"), ("assistant", f"{n:04d}"[::-1])] for n in range(64)]
    rows.write_text("".join(json.dumps({"messages": [{"role": r, "content": c} for r, c in t]}) + "\n" for t in turns))
    model = json.loads((folder / "run" / "server.json").read_text())["tokenizer"]
    before = json.loads((folder / "run" / "status.json").read_text())["last_step"] or 0
    words = COOKBOOK[recipe].format(rows=rows).split()
    common = f"model_name={model} renderer_name=role_colon max_steps=2 log_path={folder / recipe}".split()
    code, said = run(server, "-m", f"tinker_cookbook.recipes.{recipe}", *common, *words)
    assert code == 0 and "Training completed successfully" in said, said[-4000:]
    status = json.loads((folder / "run" / "status.json").read_text())
    assert status["last_step"] == before + 2 and status["state"] == "running"
