"""Filters of the user's own: which prompts are sampled and which groups are trained on, in every schedule."""

from __future__ import annotations

import json
import shutil
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plain_run import run, small

from given import prompt
from rlhf_suite.config.declarations.algo import AlgoConfig
from rlhf_suite.data.trajectory import Trajectory
from rlhf_suite.errors import RunError, UserError
from rlhf_suite.registry import SourceError
from rlhf_suite.rl.filtering import Filters, History
from rlhf_suite.rl.samples import ScoredTrajectories
from rlhf_suite.tracking.metrics import read_rows

FORK = Path(__file__).parents[2] / "experiments" / "own_code" / "async_fork.py"
STEPS = 6
OWN = """
import asyncio
import threading
from pathlib import Path

def look(name):
    async def turn():
        return True
    threads = [each for each in threading.enumerate() if each.name == "plain engines"]
    loop = threads[-1]._target.__self__  # of this run, which is the newest
    is_free = asyncio.run_coroutine_threadsafe(turn(), loop).result(300)
    with Path(__file__).with_name("seen.txt").open("a") as file:
        file.write(f"{name} {is_free}\\n")

def looking_group(group):
    look("group")
    return odd(group)

def looking_prompts(candidates, generator):
    look("prompts")
    return rarest(candidates, generator)

def odd(group):
    return "odd prompt" if group.trajectories[0].prompt.index % 2 else None

def everything(group):
    return "no good"

def rarest(candidates, generator):
    order = sorted(range(len(candidates)), key=lambda i: (len(candidates[i].history), generator.random()))
    return order[: len(order) // 2]

def failing(group):
    return 1 / 0

def wrong(group):
    return False

def drawn(candidates, generator):
    return [generator.integers(len(candidates))]

def none(candidates, generator):
    return []

def beyond(candidates, generator):
    return [len(candidates)]

def texts(candidates, generator):
    return [candidate.prompt for candidate in candidates]
"""
SCHEDULES = {
    "synchronous": {},
    "ahead": {"train__async_enable": True, "train__async_queue_size": 1},
    "stream": {"train__async_enable": True, "train__async_queue_size": 2, "train__partial_rollout_enable": True},
    "stream on shared devices": {
        "train__colocate_all": True,
        "train__async_queue_size": 2,
        "train__partial_rollout_enable": True,
    },
}


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    file = tmp_path_factory.mktemp("own") / "own.py"
    file.write_text(OWN)
    return file


def flags(name: str, **more):
    """Four prompts, two a step, in six steps."""
    common = {"train__num_episodes": 3, "algo__advantage__is_correction_level": "token"}
    saved = {"ckpt__save_steps": 2, "ckpt__load_enable": True, "rollout__temperature": 1.5}
    return small(**common, **saved, **SCHEDULES[name], **more)


def rollout(folder, step):
    return pq.read_table(folder / "rollouts" / f"step_{step:06d}.parquet").to_pylist()


def prompts(folder, step) -> list[int]:
    return [s["prompt_index"] for s in rollout(folder, step) if s["sample"] == 0]


def steps(folder) -> list[dict]:
    return [row for row in read_rows(folder / "metrics.jsonl") if "train/reward" in row]


def forget_after(folder, step: int) -> None:
    """As if the run had been killed after the checkpoint of a step."""
    for later in (*(folder / "checkpoints").glob("step_*"), folder / "model"):
        if later.name > f"step_{step:06d}" or later.name == "model":
            shutil.rmtree(later)


@pytest.mark.notices(
    "a group that a filter objects to is trained on",
    "rl/rollout.py",
    "else self.filters.objection(scored.samples)",
    "else None",
)
@pytest.mark.parametrize("name", SCHEDULES)
def test_groups_that_a_filter_objects_to_are_counted_by_reason_and_others_take_their_place(ranks, own, tmp_path, name):
    ranks(1).call(run, tmp_path, flags(name, algo__group_filter=f"{own}:odd"))
    for step in range(1, STEPS + 1):
        assert len(prompts(tmp_path, step)) == 2 and not any(prompt % 2 for prompt in prompts(tmp_path, step))
    counted = sum(row.get("rollout/left_out/odd_prompt", 0) for row in steps(tmp_path))
    assert counted >= STEPS
    if name.startswith("stream"):
        lines = (tmp_path / "rollouts/rejected.jsonl").read_text().splitlines()
        assert {json.loads(line)["reason"] for line in lines} == {"odd prompt"} and len(lines) >= counted


@pytest.mark.notices(
    "prompts that were not chosen count as outstanding",
    "rl/slots.py",
    "return self.num_taken + len(self.running) + len(self.scoring) + len(self.ready)",
    "return self.next - self.num_rejected",
    cases="stream",
    limit_s=60,
)
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_filter_of_prompts_sees_what_earlier_groups_scored(ranks, own, tmp_path, name):
    """Two of four prompts each round, those that were sampled least: each prompt comes about as often."""
    more = {"algo__prompt_filter": f"{own}:rarest", "rollout__vllm_generate_batch_size": 4}
    ranks(1).call(run, tmp_path, flags(name, **more))
    trained = [prompts(tmp_path, step) for step in range(1, STEPS + 1)]
    assert [len(each) for each in trained] == [2] * STEPS
    times = np.bincount([*chain.from_iterable(trained)], minlength=4)
    if name == "synchronous":
        assert times.tolist() == [3, 3, 3, 3]
        assert [row["rollout/prompts_not_chosen"] for row in steps(tmp_path)] == [2] * STEPS
    else:
        assert times.min() >= 2, "without a history some prompt would come once or never"


@pytest.mark.parametrize("name", ["synchronous", "ahead"])
def test_a_run_that_was_stopped_chooses_the_same_prompts(ranks, own, tmp_path, name):
    more = {"algo__prompt_filter": f"{FORK}:mopps", "algo__group_filter": f"{own}:odd"}
    more |= {"rollout__vllm_generate_batch_size": 3}
    ranks(1).call(run, tmp_path / "whole", flags(name, **more))
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    forget_after(tmp_path / "again", 2)
    ranks(1).call(run, tmp_path / "again", flags(name, **more))
    for step in range(1, STEPS + 1):
        assert rollout(tmp_path / "whole", step) == rollout(tmp_path / "again", step)
    weights = [(tmp_path / each / "model/model.safetensors").read_bytes() for each in ("whole", "again")]
    assert weights[0] == weights[1]


@pytest.mark.notices(
    "a stream forgets the scores when it continues",
    "rl/rollout_tasks.py",
    "self.history = History.load(folder) if order.has_rows_of(state) else History()",
    "self.history = History()",
)
def test_a_stream_that_was_stopped_goes_on_with_its_record_of_scores(ranks, own, tmp_path):
    more = {"algo__prompt_filter": f"{own}:rarest", "rollout__vllm_generate_batch_size": 4}
    ranks(1).call(run, tmp_path, flags("stream", **more))
    forget_after(tmp_path, 4)
    saved = tmp_path / "checkpoints/step_000004/samples"
    state, before = json.loads((saved / "slots.json").read_text()), History.load(saved).scores
    known = sum(len(groups) for groups in before.values())
    assert known == 8 + len(state["ready"]), "the groups of four steps, and those that wait"
    assert state["next"] == 2 * (known + len(state["running"]) + len(state["waiting"])), "half of them are chosen"
    ranks(1).call(run, tmp_path, flags("stream", **more))
    assert [len(prompts(tmp_path, step)) for step in range(1, STEPS + 1)] == [2] * STEPS
    after = History.load(tmp_path / "checkpoints/step_000006/samples").scores
    assert all(after[prompt][: len(groups)] == groups for prompt, groups in before.items())


@pytest.mark.notices(
    "prompts of other rows have the scores of those that had their numbers",
    "rl/rollout_tasks.py",
    "if order.has_rows_of(state) else History()",
    "",
)
def test_a_run_that_continues_with_other_rows_knows_no_scores_of_them(ranks, own, tmp_path):
    more = {"algo__prompt_filter": f"{own}:rarest", "rollout__vllm_generate_batch_size": 4}
    ranks(1).call(run, tmp_path, flags("synchronous", **more))
    forget_after(tmp_path, 4)
    others = tmp_path / "others.jsonl"
    others.write_text(
        "".join(json.dumps({"input": f"reverse {n} =", "label": f"{n}"[::-1]}) + "\n" for n in range(12, 16))
    )
    more |= {"data__prompt_dataset": str(others), "ckpt__allow_changes": ["data.prompt_dataset"]}
    ranks(1).call(run, tmp_path, flags("synchronous", **more))
    after = History.load(tmp_path / "checkpoints/step_000006/samples").scores
    assert sum(len(groups) for groups in after.values()) == 4, "two prompts of each of the two steps since"


def test_while_a_filter_thinks_the_tasks_of_a_run_go_on(ranks, own, tmp_path):
    """Each of them looks whether their loop is free."""
    more = {"algo__prompt_filter": f"{own}:looking_prompts", "algo__group_filter": f"{own}:looking_group"}
    ranks(1).call(run, tmp_path, flags("stream", **more, rollout__vllm_generate_batch_size=4))
    seen = set(Path(own).with_name("seen.txt").read_text().splitlines())
    assert seen == {"group True", "prompts True"}


def failing_run(world, folder, config) -> tuple[str, str]:
    try:
        run(world, folder, config)
    except (RunError, UserError) as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("function", ["failing", "everything"])
def test_a_filter_that_fails_or_objects_to_everything_ends_the_run(ranks, own, tmp_path, name, function):
    (kind, said), *_ = ranks(1).call(failing_run, tmp_path, flags(name, algo__group_filter=f"{own}:{function}"))
    wanted = {
        "failing": ("UserError", f"algo.group_filter={own}:failing raised ZeroDivisionError"),
        "everything": ("RunError", "algo.group_filter"),
    }[function]
    assert kind == wanted[0] and wanted[1] in said
    if function == "everything" and not name.startswith("stream"):
        assert "no_good: 20" in said


def one_group(scores) -> ScoredTrajectories:
    trajectories = [Trajectory.start(prompt(5), 0, sample) for sample in range(len(scores))]
    values, texts = np.array(scores, np.float32), [""] * len(scores)
    return ScoredTrajectories(trajectories, values, values, texts, texts, [{}] * len(scores))


@pytest.mark.notices(
    "a filter of prompts draws the same numbers each round",
    "rl/filtering.py",
    "[self.seed, PROMPTS, number]",
    "[self.seed, PROMPTS, 0]",
)
def test_the_random_numbers_of_a_filter_of_prompts_depend_on_the_seed_and_the_round_alone(own):
    prompts = [prompt()] * 100
    filters = [Filters(AlgoConfig.of("ppo", prompt_filter=f"{own}:drawn"), prompts, seed) for seed in (0, 0, 1)]
    first, same, other = ([each.choose(range(100), History(), number) for number in range(8)] for each in filters)
    assert first == same != other and len({tuple(places) for places in first}) > 1


@pytest.mark.parametrize("function", ["none", "beyond", "texts"])
def test_a_filter_of_prompts_returns_places_of_candidates(own, function):
    filters = Filters(AlgoConfig.of("ppo", prompt_filter=f"{own}:{function}"), [prompt()] * 3, 0)
    with pytest.raises(UserError, match="return places of one or more of the 3 candidates"):
        filters.choose([0, 1, 2], History(), 0)


def test_a_filter_of_groups_returns_a_reason_or_none(own):
    with pytest.raises(UserError, match="returned False; return a reason in a few words, or None"):
        Filters(AlgoConfig.of("ppo", group_filter=f"{own}:wrong"), [], 0).objection(one_group([0, 1]))


def test_a_filter_that_cannot_be_imported_says_why(tmp_path):
    (tmp_path / "bad.py").write_text("raise RuntimeError('no such thing')\ndef mine(group): ...")
    with pytest.raises(SourceError, match="importing it raised RuntimeError: no such thing"):
        Filters(AlgoConfig.of("ppo", group_filter=f"{tmp_path}/bad.py:mine"), [], 0)


def test_without_a_filter_of_prompts_no_scores_are_kept(own):
    history = History()
    Filters(AlgoConfig.of("ppo", group_filter=f"{own}:odd"), [], 0).observe(one_group([0, 1]), history)
    assert history == History()
    Filters(AlgoConfig.of("ppo", prompt_filter=f"{own}:rarest"), [], 0).observe(one_group([0, 1]), history)
    assert history.scores == {5: ((0.0, 1.0),)}


@pytest.mark.notices(
    "a copied record of scores grows with the original",
    "rl/filtering.py",
    "return History(self.scores.copy())",
    "return self",
)
@given(st.lists(st.tuples(st.integers(0, 4), st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=1, max_size=3))))
def test_what_a_checkpoint_has_of_scores_does_not_change_with_later_groups(groups):
    history, snapshots = History(), list[tuple[History, History, str]]()
    for number, (prompt_index, scores) in enumerate(groups):
        history.add(prompt_index, tuple(scores))
        snapshots.append((history.copy(), history.of([0, 1, number]), repr(history.scores)))
    for (snapshot, part, now), size in zip(snapshots, range(1, len(groups) + 1), strict=True):
        assert repr(snapshot.scores) == now and sum(map(len, snapshot.scores.values())) == size
        assert part.scores == {index: snapshot.scores[index] for index in part.scores}


def test_a_snapshot_shares_the_scores_of_all_prompts_and_is_saved_as_it_is(tmp_path):
    history = History({5: ((0.0, 1.0),), 2: ((0.25,),)})
    copied = history.copy()
    history.add(5, (1.0, 1.0))
    assert history.scores[5] == ((0.0, 1.0), (1.0, 1.0))
    assert copied.scores[2] is history.scores[2]
    copied.save(tmp_path)
    assert History.load(tmp_path) == copied == History({5: ((0.0, 1.0),), 2: ((0.25,),)})


COMMANDS = FORK.read_text().replace("\\\n", "").splitlines()
EXAMPLES = [line.split()[3:] for line in COMMANDS if line.startswith("    python run.py")]


@pytest.mark.parametrize("words", EXAMPLES, ids=lambda words: words[0].rpartition(":")[2])
def test_every_example_trains(ranks, tmp_path, words):
    """As its page says, but for the number of candidates: there are four prompts. The model never ends a response by
    itself, so the filter of long ones leaves all of them out."""
    given = dict(word.replace("experiments/own_code/async_fork.py", str(FORK)).split("=") for word in words)
    types = {"algo.advantage.gamma": float, "rollout.vllm_generate_batch_size": int}
    values = {key: types.get(key, str)(value) for key, value in given.items()}
    if "rollout.vllm_generate_batch_size" in values:
        values["rollout.vllm_generate_batch_size"] = 4
    more = {key.replace(".", "__"): value for key, value in values.items()}
    lengths = {"rollout__max_new_tokens": 12, "reward__rules__length_limit": 10}  # so that rewards differ
    config = flags("synchronous", **{"algo__kl__init_coef": 0.01} | lengths | more)
    if "too_long" in words[0]:
        assert "(most_responses_are_cut: 20)" in ranks(1).call(failing_run, tmp_path, config)[0][1]
        return
    ranks(1).call(run, tmp_path, config)
    rows = steps(tmp_path)
    assert len(rows) == STEPS and len(EXAMPLES) == 8
    assert all(np.isfinite(row["train/policy_loss"]) and row["train/actor_grad_norm"] > 0 for row in rows)
