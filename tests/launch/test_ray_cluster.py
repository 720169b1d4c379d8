"""The life of a run's Ray cluster: private, gone afterwards, ended by signals, never somebody else's."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
import ray

from rlhf_suite.config.declarations.launch import LaunchConfig
from rlhf_suite.errors import RunError
from rlhf_suite.launch import ray_cluster as ray_cluster_module
from rlhf_suite.launch.ray_cluster import _num_cpus, ray_cluster, resolve
from rlhf_suite.launch.stop import SIGNALS
from rlhf_suite.machine_limits import cpu_count
from rlhf_suite.polling import poll_until

CONFIG = LaunchConfig.of("ppo", device="cpu", num_cpus=1, object_store_mb=80)

DRIVER = """
import signal, sys, time
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background inherits it as ignored
from rlhf_suite.config.declarations.launch import LaunchConfig
from rlhf_suite.launch.ray_cluster import ray_cluster
from rlhf_suite.launch.stop import stoppable
import ray
config = LaunchConfig.of("ppo", device="cpu", num_cpus=1, object_store_mb=80)
try:
    with stoppable(), ray_cluster(config, Path(sys.argv[1]), slots=1):
        actor = ray.remote(num_cpus=0.2)(type("Sleeper", (), {"nap": lambda self: time.sleep(3600)})).remote()
        session = ray._private.worker._global_node.get_temp_dir_path()
        print(Path(session).parent, ray.get_runtime_context().gcs_address, flush=True)
        ray.get(actor.nap.remote())
finally:
    Path(sys.argv[1], "unwound").touch()
"""


# What another user of the machine tries on a session whose names have leaked; prints each thing that works.
ATTACKS = """
import os, socket, sys
session, logs, sockets = sys.argv[1:4]
def tried(name, attack):
    try:
        attack()
        print(name)
    except PermissionError:
        pass
tried("list", lambda: os.listdir(session))
tried("read the token", lambda: open(session + "/token").read())
tried("replace the token", lambda: os.rename(session + "/token", session + "/old"))
tried("plant a link", lambda: os.symlink("/etc/passwd", logs + "/debug_state.txt.new"))
tried("read a log", lambda: open(logs + "/raylet.out").read())
for name in ("raylet", "plasma_store"):
    tried(f"connect to {name}", lambda: socket.socket(socket.AF_UNIX).connect(f"{sockets}/{name}"))
"""


def ray_children(process: psutil.Process) -> list[psutil.Process]:
    return process.children(recursive=True)


def start_driver(folder: Path) -> tuple[subprocess.Popen, Path, str]:
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, str(folder)], stdout=subprocess.PIPE, text=True)
    session, address = driver.stdout.readline().split()
    return driver, Path(session), address


@pytest.mark.notices(
    "a signal after the cluster of Ray has ended kills a run that is writing its last files",
    "launch/ray_cluster.py",
    "    with block_signals():\n        ray.shutdown()",
    "    if True:\n        ray.shutdown()",
)
def test_signals_are_handled_behind_a_cluster_as_before_it(tmp_path):
    """Ray leaves SIGTERM to the system, which ends a process that is still writing its last files."""
    code = """if True:
        import signal, sys
        from pathlib import Path
        from rlhf_suite.config.declarations.launch import LaunchConfig
        from rlhf_suite.launch.ray_cluster import ray_cluster
        from rlhf_suite.launch.stop import SIGNALS, Stopped, stoppable
        config = LaunchConfig.of("ppo", device="cpu", num_cpus=1, object_store_mb=80)
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)  # under nohup one of them is ignored
            try:
                with stoppable():
                    with ray_cluster(config, Path(sys.argv[1]), slots=1):
                        pass
                    signal.raise_signal(number)  # to the main thread: another one that took it would not wake it
                    raise AssertionError("nobody has heard the signal")
            except Stopped as stop:
                print(stop)
    """
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    said = [f"stopped by {number.name}" for number in SIGNALS]
    assert ended.stdout.splitlines() == said, (ended.returncode, ended.stderr)


def test_nothing_is_left_of_a_private_cluster(tmp_path):
    shared_memory = set(Path("/dev/shm").glob("*"))
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONBREAKPOINT"}
    others = set(ray_children(psutil.Process()))  # of other tests' fixtures
    with ray_cluster(CONFIG, tmp_path, slots=1):
        started = [process for process in ray_children(psutil.Process()) if process not in others]
        session = Path(ray._private.worker._global_node.get_temp_dir_path()).parent
        listening = {
            connection.laddr.ip.removeprefix("::ffff:")
            for process in started
            for connection in process.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        }
        assert session.parent == Path(tempfile.gettempdir())
        assert session.stat().st_mode & 0o077 == 0
        assert (session / "token").stat().st_mode & 0o077 == 0
    assert started
    assert listening == {"127.0.0.1"}
    _, alive = psutil.wait_procs(started, timeout=300)
    assert alive == []
    assert not session.exists()
    assert not [path for path in set(Path("/dev/shm").glob("*")) - shared_memory if "plasma" in path.name]
    assert {name: value for name, value in os.environ.items() if name != "PYTHONBREAKPOINT"} == environ  # Ray's own


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, -signal.SIGINT)])
def test_a_signal_to_the_driver_unwinds_it_and_ends_the_cluster(tmp_path, number, code):
    driver, session, _ = start_driver(tmp_path)
    started = ray_children(psutil.Process(driver.pid))
    driver.send_signal(number)
    status = driver.wait(300)
    assert status == code
    assert (tmp_path / "unwound").exists()
    _, alive = psutil.wait_procs(started, timeout=300)
    assert alive == []
    assert not session.exists()


def late(monkeypatch, times: int) -> list[int]:
    """Have the daemons of Ray be late so many times; return the list to which each start appends its object store."""
    begin, seen = ray.init, []

    def init(**settings):
        seen.append(settings["object_store_memory"])
        if len(seen) <= times:
            raise Exception("The current node timed out during startup.")
        return begin(**settings)

    monkeypatch.setattr(ray, "init", init)
    return seen


@pytest.mark.notices(
    "a Ray cluster whose daemons are late is given up at once", "launch/ray_cluster.py", "TRIES = 3", "TRIES = 1"
)
def test_a_cluster_whose_daemons_are_late_is_started_again(tmp_path, monkeypatch):
    with tempfile.TemporaryDirectory(dir="/tmp") as root:  # other tests make clusters in the usual folder meanwhile
        monkeypatch.setattr(tempfile, "tempdir", root)
        seen = late(monkeypatch, 1)
        with ray_cluster(CONFIG, tmp_path, slots=1):
            assert len(seen) == 2 and ray.cluster_resources()["CPU"] == 1
            assert len([*Path(root).glob("rs-*")]) == 1, "nothing is left of the first try"


def test_a_machine_on_which_ray_is_always_late_is_named(tmp_path, monkeypatch):
    seen = late(monkeypatch, 99)
    with pytest.raises(RunError, match="within 30 s, 3 times"), ray_cluster(CONFIG, tmp_path, slots=1):
        pass
    assert len(seen) == 3


@pytest.mark.skipif(os.getuid() != 0 or shutil.which("setpriv") is None, reason="only root may act as another user")
def test_another_user_reaches_neither_token_nor_logs_nor_sockets(tmp_path):
    with ray_cluster(CONFIG, tmp_path, slots=1):
        node = ray._private.worker._global_node
        session, logs = str(Path(node.get_temp_dir_path()).parent), node.get_logs_dir_path()
        paths = [session, logs, node.get_sockets_dir_path()]
        assert [Path(session, "token").exists(), Path(logs, "raylet.out").exists()] == [True, True]
        nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "/usr/bin/env", "python3"]
        attack = subprocess.run([*nobody, "-c", ATTACKS, *paths], capture_output=True, text=True, cwd="/", check=False)
        assert (attack.returncode, attack.stdout) == (0, ""), attack.stderr


def test_a_killed_driver_leaves_neither_process_nor_folder(tmp_path):
    driver, session, _ = start_driver(tmp_path)
    started = ray_children(psutil.Process(driver.pid))
    assert any("raylet" in process.name() for process in started)
    driver.kill()
    driver.wait()
    _, alive = psutil.wait_procs(started, timeout=300)
    assert alive == []
    assert not session.exists()


def test_a_foreign_cluster_is_not_joined(tmp_path, monkeypatch):
    driver, _, address = start_driver(tmp_path)
    try:
        monkeypatch.setenv("RAY_ADDRESS", address)
        with ray_cluster(CONFIG, tmp_path, slots=1):
            assert ray.get_runtime_context().gcs_address != address
    finally:
        driver.terminate()
        driver.wait(300)


def test_an_address_without_a_cluster_is_named(tmp_path):
    with (
        pytest.raises(RunError, match=r"launch\.ray_address=127\.0\.0\.1:9"),
        ray_cluster(LaunchConfig.of("ppo", device="cpu", ray_address="127.0.0.1:9"), tmp_path, slots=1),
    ):
        pass


@contextmanager
def listener_that_never_speaks():
    """The address of a socket that accepts every connection, and a list of these."""
    taken = []

    def accept() -> None:
        with suppress(OSError):  # it is closed
            while True:
                taken.append(server.accept())

    with socket.create_server(("", 0)) as server:  # Ray takes another address of this machine for 127.0.0.1
        threading.Thread(target=accept, daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}", taken


def test_what_accepts_connections_and_never_speaks_ends_the_run(tmp_path, monkeypatch):
    """Ray would ask it for seven minutes, in which no signal is answered."""
    monkeypatch.setattr(ray_cluster_module, "ANSWER_S", 2.0)
    with listener_that_never_speaks() as (address, taken):
        with (
            pytest.raises(RunError, match=rf"launch\.ray_address={address}: .* did not speak as Ray does within 2 s"),
            ray_cluster(LaunchConfig.of("ppo", device="cpu", ray_address=address), tmp_path, slots=1),
        ):
            pass
        assert poll_until(lambda: len(taken) > 1, 300), "the first connection is that of the suite, the next Ray's"


def test_cpu_slots_grow_with_the_actors_unless_they_are_set(tmp_path):
    many = 4 * (os.cpu_count() or 1) + 4
    with ray_cluster(LaunchConfig.of("ppo", device="cpu", object_store_mb=80), tmp_path, slots=many):
        assert ray.cluster_resources()["CPU"] == many / 4
        assert "GPU" not in ray.cluster_resources()


@pytest.mark.notices(
    "actors that share CPU cores have fewer slots than they need",
    "launch/ray_cluster.py",
    "math.ceil(slots * CPUS_PER_DEVICE)",
    "int(slots * CPUS_PER_DEVICE)",
)
def test_the_last_actor_has_a_slot_though_it_fills_no_core():
    cores = cpu_count()
    assert [_num_cpus(LaunchConfig.of("ppo"), 4 * cores + more) for more in (0, 1, 4, 5)] == [
        cores, cores + 1, cores + 1, cores + 2
    ]  # fmt: skip


def test_ray_is_given_the_number_of_a_host_so_that_no_name_server_is_asked():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert resolve(f"localhost:{port}") == resolve(f"127.0.0.1:{port}") == f"127.0.0.1:{port}"
    assert resolve("auto") == "auto"
    with pytest.raises(ValueError, match="protocol in front; write host:port"):
        resolve("ray://localhost:10001")


@pytest.mark.notices(
    "nothing is said of a name server that does not answer",
    "launch/ray_cluster.py",
    '    except TimeoutError:\n        raise TimeoutError(f"neither',
    '    except ZeroDivisionError:\n        raise TimeoutError(f"neither',
)
def test_a_name_server_that_does_not_answer_is_the_reason_of_the_error(tmp_path, monkeypatch):
    answers = threading.Event()
    monkeypatch.setattr(ray_cluster_module, "CONNECT_S", 0.1)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *asked, **options: answers.wait(300) and [])
    joined = LaunchConfig.of("ppo", device="cpu", ray_address="head:6379")
    with (
        pytest.raises(RunError, match=r"answers there \(neither a name server nor the host has answered within 0\.1 s"),
        ray_cluster(joined, tmp_path, slots=1),
    ):
        pass
    answers.set()


@pytest.mark.parametrize(
    ("address", "mode", "warns"),
    [("10.0.0.1:6379", "disabled", True), ("10.0.0.1:6379", "token", False), ("127.0.0.1:6379", "disabled", False)],
)
def test_a_cluster_without_a_token_is_warned_of_unless_only_this_machine_reaches_it(address, mode, warns):
    code = f"from rlhf_suite.launch.ray_cluster import describe_open_door as d; print(d({address!r}))"
    variables = os.environ | {"RAY_AUTH_MODE": mode}
    said = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True)
    assert said.stdout.startswith(f"Warning: the Ray cluster at {address} asks for no token" if warns else "None")
