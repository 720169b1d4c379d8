"""Whole supervised runs with images in a file: packed, padded and in any micro-batches they give the same numbers."""

from __future__ import annotations

import base64
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlhf_suite.data import builtin
from small_runs import column, small_run

pytestmark = pytest.mark.stack

FEW = "train.batch_size=16 eval.dataset=null eval.steps=-1 logger.progress=false launch.device=cpu "
SFT = f"task=sft demo=sft_images train.max_steps=3 {FEW} "
WHOLE = f"{SFT} train.micro_batch_size=16 "
DPO = f"task=dpo demo=dpo_images {FEW} "


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Rows with images in every file: as `datasets` stores them, as paths, as base64, and as preferences."""
    folder = tmp_path_factory.mktemp("rows")
    made = builtin.rows("builtin:digits", "data.dataset")[:64]
    images = [{"bytes": row["image"], "path": None} for row in made]
    plain = {name: [row[name] for row in made] for name in ("input", "output")}
    pq.write_table(pa.table(plain | {"image": images}), folder / "images.parquet")
    for number, row in enumerate(made):
        (folder / f"{number}.png").write_bytes(row["image"])
    for name, values in {
        "paths": [[f"{number}.png"] for number in range(len(made))],
        "base64": [base64.b64encode(row["image"]).decode() for row in made],
    }.items():
        lines = [
            json.dumps({"input": row["input"], "output": row["output"], "image": value})
            for row, value in zip(made, values, strict=True)
        ]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    return folder


def losses(metrics) -> list[float]:
    return [*column(metrics, "train/gpt_loss"), *column(metrics, "train/loss"), *column(metrics, "train/grad_norm")]


@pytest.fixture(scope="module")
def whole(ranks, rows, tmp_path_factory):
    line = f"{SFT} data.dataset={rows}/images.parquet train.micro_batch_size=16"
    return losses(ranks(1).call(small_run, tmp_path_factory.mktemp("whole") / "run", line)[0])


@pytest.mark.parametrize(
    "words",
    [
        "data.dataset={}/images.parquet train.micro_batch_size=4",
        "data.dataset={}/images.parquet train.micro_batch_size=16 ds.packing_samples=false",
        "data.dataset={}/paths.jsonl train.micro_batch_size=16",
        "data.dataset={}/base64.jsonl train.micro_batch_size=16 train.dynamic_batch_enable=true "
        "train.max_tokens_per_gpu=100",
    ],
)
def test_no_layout_and_no_form_of_the_file_changes_a_number(ranks, rows, whole, words, tmp_path):
    found = losses(ranks(1).call(small_run, tmp_path / "run", SFT + words.format(rows))[0])
    assert len(found) == 6 and found == pytest.approx(whole, rel=2e-5)
    assert whole[0] > whole[2], "it learns"


@pytest.mark.parametrize("stage", [1, *(pytest.param(stage, marks=pytest.mark.proof) for stage in (2, 3))])
def test_a_rank_without_an_image_takes_part(ranks, rows, tmp_path, stage):
    """Of two rows only one has an image: one of the two ranks has none."""
    made = builtin.rows("builtin:digits", "data.dataset")[:2]
    lines = [{"input": row["input"], "output": row["output"], "image": None} for row in made]
    lines[1]["image"] = base64.b64encode(made[1]["image"]).decode()
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
    line = f"{SFT} data.dataset={tmp_path}/rows.jsonl train.micro_batch_size=1 ds.zero_stage={stage}".replace(
        "batch_size=16", "batch_size=2"
    )
    alone = ranks(1).call(small_run, tmp_path / "alone", line.replace(f"zero_stage={stage}", "zero_stage=0"))[0]
    shared = ranks(1).call(small_run, tmp_path / "shared", f"{line} actor.num_gpus_per_node=2")[0]
    assert losses(shared) == pytest.approx(losses(alone), rel=1e-4)


def test_preferences_about_images_are_learned_in_any_layout(ranks, tmp_path):
    line = f"{DPO} train.max_steps=4 data.max_samples=64 "
    packed = ranks(1).call(small_run, tmp_path / "packed", f"{line} train.micro_batch_size=16")[0]
    words = f"{line} train.micro_batch_size=2 ds.packing_samples=false"
    padded = ranks(1).call(small_run, tmp_path / "padded", words)[0]
    assert losses(packed) == pytest.approx(losses(padded), rel=1e-4)
    assert column(packed, "train/loss")[0] == pytest.approx(0.6931, abs=1e-3)
    assert column(packed, "train/loss")[-1] < 0.69


@pytest.mark.proof
@pytest.mark.parametrize("split", ["train.micro_batch_size=8", "train.micro_batch_size=2 ds.packing_samples=false"])
def test_preferences_about_images_on_partitioned_ranks_are_those_of_one_rank(ranks, tmp_path, split):
    """Policy and reference are both partitioned by ZeRO-3."""
    line = f"{DPO} train.max_steps=4 data.max_samples=64 "
    alone = ranks(1).call(small_run, tmp_path / "alone", f"{line} train.micro_batch_size=16 ds.zero_stage=0")[0]
    words = f"{line} {split} ds.zero_stage=3 actor.num_gpus_per_node=2"
    shared = ranks(1).call(small_run, tmp_path / "shared", words)[0]
    assert losses(shared) == pytest.approx(losses(alone), rel=1e-4)


def test_reference_log_probs_on_disk_are_those_of_their_images(ranks, rows, tmp_path, monkeypatch):
    """Rows that differ in their images alone are other rows."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    line = f"{DPO} train.max_steps=2 data.max_samples=16 train.micro_batch_size=16 ref.cache_enable=true "
    made = builtin.rows("builtin:digits_pairs", "data.dataset")[:16]
    found = []
    for shift in (0, 1):
        images = [made[(number + shift) % 16]["image"] for number in range(16)]
        table = {name: [row[name] for row in made] for name in ("prompt", "chosen", "rejected")} | {"image": images}
        pq.write_table(pa.table(table), tmp_path / f"{shift}.parquet")
        words = line + f"data.dataset={tmp_path}/{shift}.parquet"
        found.append(losses(ranks(1).call(small_run, tmp_path / f"run{shift}", words)[0]))
        plain = words.replace("ref.cache_enable=true", "")
        assert found[-1] == pytest.approx(
            losses(ranks(1).call(small_run, tmp_path / f"plain{shift}", plain)[0]), rel=1e-4
        )
    assert found[0] != pytest.approx(found[1], rel=1e-4)


def test_a_row_whose_image_is_missing_is_named(ranks, rows, tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"input": "x", "output": "1", "image": "nowhere.png"}\n')
    line = f"{SFT} data.dataset={tmp_path}/bad.jsonl data.on_bad_row=stop train.micro_batch_size=1"
    with pytest.raises(AssertionError, match=r"bad.jsonl:1: column 'image': an image file does not exist"):
        ranks(1).call(small_run, tmp_path / "run", line)


def test_a_trained_model_is_a_whole_folder(ranks, rows, tmp_path):
    line = (
        f"{WHOLE} data.dataset={rows}/images.parquet actor.freeze_visual_encoder=true ckpt.output_dir={tmp_path}/model"
    )
    ranks(1).call(small_run, tmp_path / "run", line)
    assert (tmp_path / "model" / "processor_config.json").is_file()
    again = f"{WHOLE} data.dataset={rows}/images.parquet actor.model_name_or_path={tmp_path}/model"
    assert losses(ranks(1).call(small_run, tmp_path / "again", again)[0])


@pytest.mark.proof
def test_scores_of_answers_about_images_are_learned_in_any_layout(ranks, tmp_path):
    line = f"{DPO} train.max_steps=4 data.max_samples=64 ".replace("task=dpo", "task=rm")
    packed = ranks(1).call(small_run, tmp_path / "packed", f"{line} train.micro_batch_size=16")[0]
    words = f"{line} train.micro_batch_size=2 ds.packing_samples=false"
    padded = ranks(1).call(small_run, tmp_path / "padded", words)[0]
    assert losses(packed) == pytest.approx(losses(padded), rel=1e-4) and len(losses(packed)) == 8
