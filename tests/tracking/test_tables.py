"""Tables on consoles of any width: names of flags stay whole."""

from __future__ import annotations

import pytest

from rlhf_suite.cli.app import main
from rlhf_suite.run_folders.sweep_folder import Job, Sweep
from rlhf_suite.tracking.tables import column_widths, least_width


def test_columns_share_the_room_that_flags_leave():
    cells = [("flag", "value"), ("actor.adam.lr", "a long text of many words")]
    assert column_widths(cells, 10) == [13, 5]
    assert column_widths(cells, 30) == [13, 10]
    assert column_widths(cells, 99) == [13, 25]


@pytest.mark.notices(
    "a flag in a table is broken as any word", "tracking/tables.py", "return flag.end() + 1 if", "return BREAKABLE if"
)
@pytest.mark.parametrize(
    ("word", "width"),
    [
        ("actor.adam.lr", 13),
        ("actor.adam.lr=9.162378216443626e-05", 35),
        ("algo/advantage=reinforce_baseline", 33),
        ("data.dataset=/a/very/long/path/to/rows.jsonl", 13),
        ("/a/very/long/path/to/rows.jsonl", 12),
        ("demo/rejection_sampling.yaml", 12),
        ("openrlhf.cli.train_ppo-and-more-words", 12),
        ("sum", 3),
    ],
)
def test_a_word_needs_room_for_the_flag_in_it(word, width):
    assert least_width(word) == width


@pytest.mark.notices(
    "columns of a table end at the edge of a narrow console",
    "tracking/tables.py",
    "console.width = max(console.width, sum(widths) + 3 * len(widths) + 1)",
    "pass",
)
@pytest.mark.parametrize("width", ["20", "60", "80", "200"])
def test_the_table_of_a_sweep_breaks_no_flag(width, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", width)
    words = [
        ["actor.gradient_checkpointing_enable=true", "rollout.n_samples_per_prompt=8", f"data.dataset={tmp_path}/rows"],
        ["actor.gradient_checkpointing_enable=false", "rollout.n_samples_per_prompt=16", "data.dataset=other"],
    ]
    Sweep(tmp_path, [Job(number, each, str(tmp_path / str(number)), each) for number, each in enumerate(words)]).save()
    assert main(["sweep", "status", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert all(word in printed for each in words for word in each[:2])
    assert "data.dataset=" in printed and "\u2026" not in printed
