"""task=check_reward: score a few rows, report each row and the whole batch, and use no GPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from rich.table import Table
from rich.text import Text

from rlhf_suite.config.declarations.logger import LoggerConfig
from rlhf_suite.config.declarations.reward import is_http, is_judged
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.data.row import RowError
from rlhf_suite.data.row_range import RowOrError, RowSource
from rlhf_suite.data.sources import DATASET
from rlhf_suite.errors import RunError, UserError
from rlhf_suite.foreign_text import printable
from rlhf_suite.offline.agreement import measure_agreement, measure_repetition
from rlhf_suite.offline.scores import text_sample
from rlhf_suite.rewards.base import Outcome, RewardFailure, Sample, Scored
from rlhf_suite.rewards.sources import Rewards, list_sources
from rlhf_suite.rl.scoring import REWARD_LOG
from rlhf_suite.run_folders.run_folder import RunFolder
from rlhf_suite.tracking.console import Progress
from rlhf_suite.tracking.tables import open_console

SAME = 1e-6  # scores that differ by less are equal
AGAIN = "again"  # the folder of a judge's second verdicts in the logs
AGAIN_SEED = 1  # of the second questions: other numbers of requests, and another order of ranked answers


@dataclass(frozen=True)
class Checked:
    """The outcome of a row that was scored alone by the sources `names`. `item` is None if the row is unusable."""

    where: str
    item: Sample | None
    names: list[str]
    outcome: Outcome
    seconds: float


def run(config: Run, folder: Path) -> dict[str, float]:
    """Score each row alone, then all rows as one batch; print both and return the metrics.

    Raises:
        RunError: a row has no score.
    """
    given, log, console = rows(config), RunFolder(folder).logs / REWARD_LOG, open_console()
    with closing(Rewards(config.reward, log)) as rewards:
        progress = Progress(LoggerConfig(), config.task, len(given), 0, console.is_terminal)
        checked = list[Checked]()
        with closing(progress):
            for row in score_alone(config, given, rewards):
                checked.append(row)
                progress.show_step(len(checked), {})
        items = {row.where: row.item for row in checked if row.item is not None}
        began = time.perf_counter()
        outcomes = rewards.score([*items.values()])[0] if items else []
        speed = len(items) / (time.perf_counter() - began)
    in_batch = dict(zip(items, outcomes, strict=True))
    metrics = summary(checked, speed) | measure_judge(config, log, [*items.values()], outcomes)
    console.print(table(checked))
    console.print(", ".join(f"{name} {value:.4g}" for name, value in metrics.items()), soft_wrap=True, highlight=False)
    for warning in warnings(config, checked, in_batch):
        console.print(Text(f"warning: {warning}", style="yellow"), soft_wrap=True)
    failed = failures({row.where: row.outcome for row in checked}) or failures(in_batch, " in a batch")
    if failed:
        printed = f"; the output of the reward code is in {log}" if log.exists() and log.stat().st_size else ""
        raise RunError(f"{len(failed)} of {len(checked)} rows have no score; the first is {failed[0]}{printed}")
    return metrics


def measure_judge(config: Run, log: Path, samples: Sequence[Sample], outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Return how far a judge agrees with labels, and with itself when it is asked again; nothing without a judge."""
    if not is_judged(config.reward):
        return {}
    folder = log.parent / AGAIN
    folder.mkdir(parents=True, exist_ok=True)  # a run that failed may be started again
    with closing(Rewards(config.reward, folder / log.name, seed=AGAIN_SEED)) as rewards:
        again = rewards.score(samples)[0]
    return measure_agreement(samples, outcomes) | measure_repetition(outcomes, again)


def failures(outcomes: Mapping[str, Outcome], how: str = "") -> list[str]:
    """Return `file:line: kind: reason` for every row without a score."""
    return [
        f"{where}{how}: {outcome.kind}: {outcome.reason}"
        for where, outcome in outcomes.items()
        if isinstance(outcome, RewardFailure)
    ]


def rows(config: Run) -> list[RowOrError]:
    """Return the first `data.max_samples` rows after `data.skip_samples`; raise UserError if there are none."""
    data = config.data
    assert data.dataset is not None and data.max_samples is not None
    source = RowSource(data.dataset, data.dataset_split, data.skip_samples, data.max_samples, DATASET)
    rows = [*islice(iter(source), data.skip_samples, data.skip_samples + data.max_samples)]
    if not rows:
        raise UserError(f"data.dataset={data.dataset}: no rows are left (data.skip_samples={data.skip_samples})")
    return rows


def score_alone(config: Run, given: Sequence[RowOrError], rewards: Rewards) -> Iterator[Checked]:
    """Score the rows one at a time, or all together where a judge ranks them. Without a column of responses the label
    is scored as the response."""
    read = [(row, read_item(config, row)) for row in given]
    ranked: Iterator[Outcome] = iter(())
    is_ranked, began = ranks(config), time.perf_counter()
    if is_ranked:
        ranked = iter(rewards.score([item for _, item in read if isinstance(item, Sample)])[0])
    share = (time.perf_counter() - began) / max(1, len(read))
    for row, item in read:
        if isinstance(item, RowError):
            yield Checked(item.where, None, [], RewardFailure(item.reason, "error"), 0.0)
            continue
        began = time.perf_counter()
        outcome = next(ranked) if is_ranked else rewards.score([item])[0][0]
        seconds = share if is_ranked else time.perf_counter() - began
        names = [source.name for source in rewards.sources if source.takes(item.datasource)]
        yield Checked(row.where, item, names, outcome, seconds)


def ranks(config: Run) -> bool:
    """Return whether a judge compares the answers to a prompt with each other."""
    return config.reward.judge.mode == "rank" and is_judged(config.reward)


def read_item(config: Run, row: RowOrError) -> Sample | RowError:
    """Return what the reward is asked about a row, or why it cannot be scored."""
    if isinstance(row, RowError):
        return row
    try:
        return text_sample(row, config.data, config.data.output_key)
    except RowError as error:
        return error


def table(checked: Sequence[Checked]) -> Table:
    """Return a table with a line for each row and, with several sources, the score of each source."""
    result = Table("row", "datasource", "score or reason", "seconds")
    for row in checked:
        result.add_row(
            Text(printable(row.where), overflow="fold"),
            Text(printable(row.item.datasource) if row.item else ""),
            Text(outcome_text(row.outcome, row.names), style="red" if isinstance(row.outcome, RewardFailure) else ""),
            f"{row.seconds:.3g}",
        )
    return result


def outcome_text(outcome: Outcome, names: Sequence[str]) -> str:
    """Return the score with the score of each source, or the reason why there is none."""
    if isinstance(outcome, RewardFailure):
        return f"{outcome.kind}: {printable(outcome.reason, keep_lines=True)}"
    parts = [f"{name} {outcome.extra[f'{name}/mean']:.4g}" for name in names if name]
    return f"{outcome.reward:.4g}" + (f" ({', '.join(parts)})" if parts else "")


def summary(checked: Sequence[Checked], speed: float) -> dict[str, float]:
    """Return counts and statistics of the scores. `speed` is in rows per second of the whole batch, as in training."""
    scores = [row.outcome.reward for row in checked if isinstance(row.outcome, Scored)]
    kinds = [row.outcome.kind for row in checked if isinstance(row.outcome, RewardFailure)]
    counts = {"rows": len(checked), "errors": kinds.count("error"), "timeouts": kinds.count("timeout")}
    counts["retries"] = sum(row.outcome.retries for row in checked)
    result = {name: float(value) for name, value in counts.items()}
    if scores:
        result |= {"score_mean": statistics.fmean(scores), "score_min": min(scores), "score_max": max(scores)}
        result |= {"score_std": statistics.pstdev(scores)}
    return result | {"rows_per_s": speed}


def warnings(config: Run, checked: Sequence[Checked], in_batch: Mapping[str, Outcome]) -> Iterator[str]:
    """Yield what is not a failure, but probably a mistake or useless for training."""
    known = [row.outcome for row in checked if isinstance(row.outcome, Scored)]
    scores = [scored.reward for scored in known]
    full = [scored for scored in known if scored.score >= 1 - SAME]
    if config.data.output_key is None and len(full) < len(known):
        less = f"{len(known) - len(full)} of {len(known)} labels"
        yield f"{less} do not get full marks (a score of 1) as their own answer"
    elif config.data.output_key is not None and len(scores) > 1 and max(scores) - min(scores) < SAME:
        yield f"all scores are {scores[0]:.4g}: a model cannot learn from such rows"
    items = [row.item for row in checked if row.item is not None]
    asks_servers = any(is_http(source.remote_url) for source in list_sources(config.reward).values())
    if asks_servers and items and all(item.query == item.prompt + item.response for item in items):
        yield (
            "no response has an end-of-sequence token at its end, as finished ones have in rollouts; a reward model "
            "on a server scores them as if they were cut off. Set data.response_end to this token"
        )
    pairs = [(row.outcome, in_batch.get(row.where)) for row in checked]
    differ = [
        a for a, b in pairs if isinstance(a, Scored) and isinstance(b, Scored) and abs(a.reward - b.reward) > SAME
    ]
    if differ:
        yield f"{len(differ)} rows score differently in a batch than alone; a score must not depend on other rows"
