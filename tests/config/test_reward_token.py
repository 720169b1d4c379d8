"""The token of reward servers is checked before a run, and its value is shown nowhere."""

from __future__ import annotations

import pytest

from rlhf_suite.cli import main

pytestmark = pytest.mark.stack

REWARD = "reward.rule=null reward.remote_url=http://127.0.0.1:9/x"


@pytest.mark.parametrize(
    ("token", "said"),
    [
        ("s3cret\n", "a line end at position 7 of 7"),
        ("s3\r\ncret", "a line end at position 3 of 8"),
        ("s3crét", "not visible ASCII at position 5 of 6"),
        ("s3 cret", "not visible ASCII at position 3 of 7"),
        ("s3\x1bcret", "not visible ASCII at position 3 of 7"),
    ],
)
@pytest.mark.parametrize(
    "line", [f"task=ppo {REWARD}", "task=serve_rm reward.model_name_or_path=builtin:tiny", "task=check_reward"]
)
def test_a_token_that_no_header_can_hold_is_refused_without_its_value(line, token, said, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RLHF_SUITE_REWARD_TOKEN", token)
    words = line.split()
    if words == ["task=check_reward"]:
        rows = tmp_path / "rows.jsonl"
        rows.write_text('{"prompt": "a", "label": "b"}\n')
        words += [f"data.dataset={rows}", "data.label_key=label", REWARD.split()[1]]
    assert main([*words, f"hydra.run.dir={tmp_path}/run"]) == 2
    shown = "".join(capsys.readouterr())
    assert "RLHF_SUITE_REWARD_TOKEN" in shown and said in " ".join(shown.split())
    assert "s3" not in shown and "cret" not in shown
    assert not (tmp_path / "run").exists()


def test_a_run_that_asks_no_server_does_not_care(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RLHF_SUITE_REWARD_TOKEN", "s3cret\n")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "label": "b"}\n')
    line = f"task=check_reward data.dataset={rows} data.label_key=label reward.rule=exact_match"
    assert main([*line.split(), f"hydra.run.dir={tmp_path}/run"]) == 0
