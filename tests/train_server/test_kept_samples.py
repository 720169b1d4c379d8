"""The samples of clients that a server keeps in files."""

from __future__ import annotations

import pyarrow.parquet as pq
import pytest

from full_disk import fill
from rlhf_suite.config.declarations.data import DataConfig
from rlhf_suite.models.load import load_tokenizer
from rlhf_suite.rl.client import as_prompt
from rlhf_suite.rl.sampling import new_ledgers
from rlhf_suite.train_server.ledgers import Drawn, Ledgers


@pytest.mark.notices(
    "a disk that is full for samples ends the server",
    "train_server/ledgers.py",
    "except (OSError, UserError, DiskError) as error:",
    "except (OSError, UserError) as error:",
)
def test_a_full_disk_loses_samples_and_neither_a_step_nor_the_server(small, capsys):
    folder = small / "rollouts"
    folder.mkdir()
    ledgers = Ledgers(folder, load_tokenizer("builtin:tiny", DataConfig.of("ppo")), 10, 0)

    def draw(name):
        ledgers.add(Drawn(new_ledgers(as_prompt([1, 2, 3], 0), 0, 1), [name], "base"))
        assert ledgers.end_step() == {}
        ledgers.files.finish()  # raises what a later request would raise

    fill(small)
    draw("lost")
    assert "step_000001.parquet was not written, so it lacks samples" in capsys.readouterr().err
    (small / "filler").unlink()
    draw("kept")
    ledgers.close()
    (file,) = folder.glob("*.parquet")
    assert file.name == "step_000002.parquet" and pq.read_table(file)["sequence_id"].to_pylist() == ["kept"]
