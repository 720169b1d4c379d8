"""Teachers other than a model of the run, on the real stack: a server of vLLM's, and the policy itself with another
prompt. What the run adds to advantages is compared with what transformers says of the same tokens."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import urllib.request

import jobs
import numpy as np
import pytest
from test_on_policy_distillation import NO_REWARD, log_probs

from rlhf_suite.engines.start import engine_env
from rlhf_suite.models.load import tokenizer_of
from rlhf_suite.polling import poll_until

FLAG = "actor.model_name_or_path"
SMALL = [word for word in jobs.SMALL if not word.startswith("eval.")]
TAUGHT = [*SMALL, *NO_REWARD, "experiment=on_policy_distill", "rollout.temperature=1", "train.max_steps=1"]


@pytest.fixture(scope="module")
def server(baseline, tmp_path_factory):
    """The address of vLLM's own server with the model that reinforcement made."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = (tmp_path_factory.mktemp("server") / "server.log").open("w")
    words = ["--model", str(baseline / "model"), "--port", str(port), "--host", "127.0.0.1", "--dtype", "float32"]
    words += ["--max-model-len", "128", "--enforce-eager", "--kv-cache-memory-bytes", str(64 << 20)]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words]
    process = subprocess.Popen(command, env=os.environ | engine_env("cpu"), stdout=log, stderr=log)

    def answers() -> bool:
        assert process.poll() is None, log.name
        try:
            return urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1).status == 200
        except OSError:
            return False

    try:
        assert poll_until(answers, 180), log.name
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait(60)


def gaps(samples, student, teacher, prompts=None):
    """log p of the teacher less that of the student of each sampled token, [N], and the advantages of these."""
    mask = [np.array(row["mask"], bool) for row in samples]
    ids = [list(row["ids"]) for row in samples]
    own = log_probs(student, ids)[np.concatenate(mask)]
    read, places = ids, mask
    if prompts is not None:
        read = [[*prompt, *np.array(row)[place]] for prompt, row, place in zip(prompts, ids, mask, strict=True)]
        places = [np.arange(len(row)) >= len(prompt) for prompt, row in zip(prompts, read, strict=True)]
    theirs = log_probs(teacher, read)[np.concatenate(places)]
    advantages = np.concatenate([np.array(row["advantages"])[place] for row, place in zip(samples, mask, strict=True)])
    return (theirs - own).clip(-10, 10), advantages


@pytest.mark.proof
def test_a_teacher_behind_a_server_of_vllm_says_what_it_would_say_in_the_run(runs, warm, baseline, server):
    folder = runs / "served_teacher"
    jobs.run(folder, [*TAUGHT, f"{FLAG}={warm}", "teacher.kind=endpoint", f"teacher.remote_url={server}"])
    found, advantages = gaps(jobs.rollout(folder, 1), warm, baseline / "model")
    assert np.abs(found).max() > 0.01
    assert advantages == pytest.approx(found, abs=2e-5)
    assert {log.stem for log in (folder / "logs").glob("*.log")} == {"actor-0", "engine-0"}


@pytest.mark.proof
def test_the_policy_teaches_itself_with_the_answer_in_its_prompt(runs, warm, tmp_path):
    """Half of the rows have a prompt for the teacher; in the others the policy and its teacher are one."""
    rows = [{"input": f"reverse {n} =", "label": str(n)[::-1]} for n in range(1000, 1008)]
    for row in rows[::2]:
        row["hint"] = f"{row['label']} reverse"
    for row in rows[1::2]:
        row["hint"] = None
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = runs / "own_teacher"
    words = [f"{FLAG}={warm}", "teacher.kind=policy", f"data.prompt_dataset={file}", "data.teacher_prompt_key=hint"]
    jobs.run(folder, [*TAUGHT, *words])
    samples, tokenizer = jobs.rollout(folder, 1), tokenizer_of(str(warm), str(warm), FLAG)
    hints = {row["input"]: row["hint"] for row in rows}
    prompts = []
    for row in samples:
        own = [id for id, is_model in zip(row["ids"], row["mask"], strict=True) if not is_model]
        hint = hints[row["prompt"]]
        lead = own[: len(own) - len(tokenizer.encode(row["prompt"], add_special_tokens=False))]
        prompts.append(own if hint is None else [*lead, *tokenizer.encode(hint, add_special_tokens=False)])
    found, advantages = gaps(samples, warm, warm, prompts)
    assert advantages == pytest.approx(found, abs=2e-5) and np.abs(found).max() > 0.1
    metrics = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])
    assert metrics["train/teacher_kl"] == pytest.approx(-found.mean(), abs=1e-5)


@pytest.mark.proof
def test_the_average_of_the_policy_teaches_it_beside_rewards(runs, warm):
    """At the start policy and average are one. What a shorter run leaves are the two of the step after it."""
    words = [*SMALL, f"{FLAG}={warm}", "algo.advantage.estimator=rloo", "algo.kl.init_coef=0", "algo.distill.coef=0.5"]
    words += ["teacher.kind=average", "train.enable_ema=true", "train.ema_beta=0.5", "actor.lr_warmup_ratio=0"]
    words += ["eval.dataset=null", "eval.steps=-1"]
    for steps in (2, 3):
        jobs.run(runs / f"average_{steps}", [*words, f"train.max_steps={steps}"])
    shorter, rows = runs / "average_2", jobs.train_rows(runs / "average_3")
    assert rows[0]["train/teacher_kl"] == pytest.approx(0, abs=1e-6)
    found, _ = gaps(jobs.rollout(runs / "average_3", 3), shorter / "model", shorter / "model_ema")
    assert np.abs(found).max() > 1e-3
    assert rows[2]["train/teacher_kl"] == pytest.approx(-found.mean(), abs=1e-5)
