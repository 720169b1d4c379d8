"""No wait is without end: a call that waits has a limit, or says beside it why it needs none."""

import ast
from pathlib import Path

import rlhf_suite

SOURCE = Path(rlhf_suite.__file__).parent
WAITS = {"wait", "join", "result", "get", "acquire"}  # of conditions, threads, futures, queues, locks
REASON = "# no-limit:"
# Of the suite itself: each has a limit inside, or is a coroutine whose caller has one.
WITH_LIMITS = {
    "distributed/group.py": "the wait of a group",
    "train/trained_worker.py": "answers of a group",
    "train/evaluate.py": "metrics",
    "train/supervised.py": "metrics",
    "rl/experience.py": "answers of a group",
    "rl/model_groups.py": "answers of a group",
    "rl/reward_models.py": "answers of a group",
    "rl/teachers.py": "answers of a group or of servers, which have limits",
    "rl/update.py": "answers of a group",
    "rl/client.py": "answers of a group",
    "train_server/models.py": "answers of a group",
    "rl/weight_sync.py": "answers of a group",
    "models/sequence_parallel.py": "collectives of a rank, whose call has a limit",
    "weight_sync/sender.py": "collectives of a rank, whose call has a limit",
    "weight_sync/receiver.py": "collectives of a rank, whose call has a limit",
    "weight_sync/stream.py": "collectives of a rank, whose call has a limit",
}


def waits_without_limit(path: Path) -> list[str]:
    """Return the lines of a file on which something waits for ever."""
    text = path.read_text()
    lines, tree = text.splitlines(), ast.parse(text)
    awaited = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Await)}
    found = []
    for node in ast.walk(tree):
        is_wait = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in WAITS
        has_limit = is_wait and (node.args or node.keywords or id(node) in awaited)
        if is_wait and not has_limit and REASON not in lines[node.end_lineno - 1]:
            found.append(f"{path.relative_to(SOURCE)}:{node.lineno}: {lines[node.lineno - 1].strip()}")
        if isinstance(node, ast.Name) and node.id == "ThreadPoolExecutor" and REASON not in lines[node.lineno - 1]:
            found.append(f"{path.relative_to(SOURCE)}:{node.lineno}: its threads hold the process; see background.py")
    return found


def test_a_wait_has_a_limit_or_a_reason_and_no_pool_holds_the_process():
    files = [path for path in SOURCE.rglob("*.py") if str(path.relative_to(SOURCE)) not in WITH_LIMITS]
    assert [line for path in files for line in waits_without_limit(path)] == []
