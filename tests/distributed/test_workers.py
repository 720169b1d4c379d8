"""Worker groups on a real Ray cluster: results, and what a user reads when an actor dies, hangs or raises."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import ray

from rlhf_suite.config.declarations.launch import LaunchConfig
from rlhf_suite.distributed.mesh import Rank
from rlhf_suite.distributed.worker import Worker
from rlhf_suite.distributed.workers import GroupOptions, WorkerGroup
from rlhf_suite.errors import RunError, UserError
from rlhf_suite.launch.allocator import find_jemalloc
from rlhf_suite.launch.placement import Slot
from rlhf_suite.launch.ray_cluster import ray_cluster
from rlhf_suite.polling import poll_until
from rlhf_suite.waits import open_waits, sign_of_life

NAP_S = 3600.0  # longer than any test may take


def listeners() -> set[str]:
    """The addresses at which this process listens."""
    connections = psutil.Process().net_connections(kind="inet")
    return {each.laddr.ip.removeprefix("::ffff:") for each in connections if each.status == psutil.CONN_LISTEN}


class Pupil(Worker):
    """Does as it is told."""

    def __init__(self, rank: Rank, told: str = "") -> None:
        super().__init__(rank)
        if told == "raise in constructor":
            raise ValueError("the model is not there")
        if told.startswith("meet in "):
            folder = Path(told.removeprefix("meet in "))
            (folder / str(os.getpid())).touch()
            assert poll_until(lambda: len(list(folder.iterdir())) == 2, 60)
        self.told = told

    def environment(self, *names: str) -> list[str]:
        return [os.environ[name] for name in names]

    def add(self, shard: int, more: int = 0) -> int:
        return shard + more + self.rank.number

    def pid(self) -> int:
        return os.getpid()

    def has_jemalloc(self) -> bool:
        return "libjemalloc" in Path("/proc/self/maps").read_text()

    def say_and_sleep(self, seconds: float) -> None:
        print(f"rank {self.rank.number} starts its nap")
        os.write(2, b"and a library says so on stderr\n")
        time.sleep(seconds)

    def train(self, steps: int) -> int:
        """Take a second for each step, and say that it is done."""
        for _ in range(steps):
            time.sleep(1)
            sign_of_life()
        return steps

    def sleep_unless_first(self, seconds: float) -> None:
        time.sleep(seconds if self.rank.number else 0.0)

    def mistake(self) -> None:
        raise UserError("actor.adam.lr=-1: must be positive")

    def lose_peer(self) -> None:
        """Rank 1 dies; rank 0 sees its connection break before Ray has seen the death."""
        if self.rank.number == 1:
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        raise ConnectionError("connection closed by peer")

    def listens_at(self) -> set[str]:
        from rlhf_suite.train.strategy import join_world

        join_world(self.rank).barrier()
        return listeners()

    def fail(self) -> None:
        raise ArithmeticError(f"bad number on {self.rank.number}")


def call(pupils: WorkerGroup, method: str, *args, activity: str | None = None) -> list:
    """Call a method of every rank and wait for the answers."""
    return pupils.wait(pupils.start(method, *args), activity or f"pupil.{method}")


@pytest.fixture(scope="module", autouse=True)
def cluster(tmp_path_factory):
    with ray_cluster(
        LaunchConfig.of("ppo", device="cpu", num_cpus=2, object_store_mb=80), tmp_path_factory.mktemp("run"), slots=4
    ):
        yield


def started(folder: Path, *args, ranks=2, timeout_s=60.0, sequence=1) -> WorkerGroup:
    """Ranks whose logs are in a folder."""
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]  # Pupil is in this file
    env = {"SCHOOL": "open", "PYTHONPATH": os.pathsep.join(paths)}
    return WorkerGroup(
        Pupil, "pupil", [Slot(0.25)] * ranks, GroupOptions("cpu", folder, timeout_s, env, sequence), args
    )


@pytest.fixture(scope="module")
def pupils(tmp_path_factory):
    """Two ranks for the tests that leave them as they were."""
    made = started(tmp_path_factory.mktemp("pupils"))
    yield made
    made.kill()


@pytest.fixture
def group(tmp_path):
    made = []

    def make(*args, **options) -> WorkerGroup:
        made.append(started(tmp_path, *args, **options))
        return made[-1]

    yield make
    for each in made:
        each.kill()


@pytest.mark.skipif(find_jemalloc() is None, reason="the package of Ray has no jemalloc here")
def test_ranks_on_a_cpu_have_the_allocator_that_keeps_freed_tensors(pupils):
    assert pupils.wait(pupils.start("has_jemalloc"), "reading") == [True, True]


def test_every_rank_answers_in_order(pupils):
    assert call(pupils, "add", 10, 5) == [15, 16]
    assert pupils.wait(pupils.start_sharded("add", [100, 200], 1), "adding") == [101, 202]
    large = ray.put(1000)
    assert call(pupils, "add", large) == [1000, 1001]


def test_ranks_that_split_the_tokens_of_a_batch_get_the_same_part_and_count_as_one(group):
    pupils = group(ranks=4, sequence=2)
    answers = pupils.wait(pupils.start_sharded("add", [100, 200], 1), "adding")  # each adds its number
    assert answers == [101, 102, 203, 204]
    assert pupils.mesh.one_per_part(answers) == [101, 203]


def test_ranks_know_how_to_meet(pupils):
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SCHOOL")
    first, second = call(pupils, "environment", *names)
    assert (first[0], second[0]) == ("0", "1")
    assert first[1:] == second[1:]
    assert first[1:4] == ["2", "0", "127.0.0.1"]
    assert int(first[4]) > 0
    assert first[5] == "open"


def test_ranks_on_one_machine_listen_on_the_loopback_address_alone(pupils):
    assert set().union(*call(pupils, "listens_at")) == {"127.0.0.1"}


def test_groups_start_at_the_same_time(group, tmp_path):
    (tmp_path / "meeting").mkdir()
    for each in [group(f"meet in {tmp_path / 'meeting'}", ranks=1) for _ in range(2)]:
        each.ready()


@pytest.mark.timeout(180)
def test_a_killed_actor_is_noticed_while_its_peer_is_busy(group, tmp_path):
    pupils = group()
    pids = call(pupils, "pid")
    refs = pupils.start("say_and_sleep", NAP_S)
    logs = [tmp_path / f"pupil-{rank}.log" for rank in range(2)]
    assert poll_until(lambda: all("library" in log.read_text() for log in logs), 60)
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(RunError) as caught:
        pupils.wait(refs, "the policy update of step 3")
    message = str(caught.value)
    assert "pupil-1 died during the policy update of step 3" in message
    assert "rank 1 starts its nap" in message
    assert "and a library says so on stderr" in message
    assert "rank 0" not in message


@pytest.mark.notices(
    "a peer's echo is reported instead of the death",
    "launch/wait.py",
    "next((failure for failure in failures if _is_cause(failure[1])), failures[0])",
    "failures[0]",
)
def test_the_death_is_reported_not_its_echo_in_the_peers(group):
    with pytest.raises(RunError, match="pupil-1 died during") as caught:
        call(group(), "lose_peer", activity="a collective")
    assert "connection closed" not in str(caught.value)


def test_a_hung_actor_is_an_open_wait_meets_the_deadline_and_shows_where_it_hangs(group):
    pupils = group(timeout_s=12.0)
    pupils.ready()
    with ThreadPoolExecutor(1) as thread, pytest.raises(RunError) as caught:
        asked = thread.submit(call, pupils, "say_and_sleep", NAP_S, activity="a long nap")
        named = [("a long nap", ["pupil-0", "pupil-1"])]
        assert poll_until(lambda: [(wait.what, wait.who) for wait in open_waits()] == named, 60)
        asked.result()
    assert open_waits() == []
    message = str(caught.value)
    assert message.startswith("no answer within 12 s (launch.timeout_s) from pupil-0, pupil-1, waiting for a long nap")
    assert "in say_and_sleep" in message


@pytest.mark.proof
def test_an_actor_that_shows_signs_of_life_may_take_longer_than_the_limit(group):
    pupils = group(timeout_s=10.0)
    pupils.ready()
    assert call(pupils, "train", 25) == [25, 25]
    assert "Timeout" not in pupils.members[0].log.read_text(), "no stacks of a call that goes on"


@pytest.mark.notices(
    "the log of the first actor is quoted, whoever hangs",
    "launch/wait.py",
    "raise _make_late_error([member[ref] for ref in pending], wait.what, timeout_s)",
    "raise _make_late_error(list(member.values()), wait.what, timeout_s)",
)
@pytest.mark.notices(
    "a wait names those who have answered too",
    "launch/wait.py",
    "wait.who = names_of([member[ref] for ref in pending])",
    "wait.who = names_of(list(member.values()))",
)
def test_a_wait_is_for_those_who_have_not_answered(group):
    pupils = group(timeout_s=12.0)
    pupils.ready()
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(call, pupils, "sleep_unless_first", NAP_S, activity="a nap of one")
        named = [("a nap of one", ["pupil-1"])]
        assert poll_until(lambda: [(wait.what, wait.who) for wait in open_waits()] == named, 60)
        with pytest.raises(RunError, match=r"within 12 s \(launch.timeout_s\) from pupil-1, waiting for a nap of one"):
            asked.result()


def test_a_constructor_that_raises_is_named(group):
    pupils = group("raise in constructor")
    expected = r"pupil-[01] failed during the start of pupil: ValueError: the model is not there"
    with pytest.raises(RunError, match=expected) as caught:
        pupils.ready()
    assert "test_workers.py" in str(caught.value)
    with pytest.raises(RunError, match=expected):  # whoever calls without waiting for the start learns the same
        call(pupils, "pid")


def test_a_users_mistake_comes_through_as_itself(pupils):
    with pytest.raises(UserError) as caught:
        call(pupils, "mistake")
    assert str(caught.value) == "actor.adam.lr=-1: must be positive"


def test_any_other_error_has_the_actors_name_phase_and_traceback(pupils):
    with pytest.raises(RunError) as caught:
        call(pupils, "fail")
    lines = str(caught.value).splitlines()
    assert lines[0] in {f"pupil-{i} failed during pupil.fail: ArithmeticError: bad number on {i}" for i in (0, 1)}
    assert any('test_workers.py", line' in line and line.endswith("in fail") for line in lines)
    assert lines[-1].startswith("its log: ")


def test_a_killed_group_is_gone(group):
    pupils = group()
    pids = call(pupils, "pid")
    pupils.kill()
    assert poll_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 300)
