"""Who may look into a process, what it answers, and what the commands make of it."""

from __future__ import annotations

import json
import os
import re
import resource
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from fabric_ray import TransferEngine, errors, observe
from fabric_ray.cli.main import app
from fabric_ray.observe.client import LONGEST_QUESTION, Silent, ask_metrics, ask_records, sockets
from fabric_ray.observe.run_directory import run_dirs, socket_path, unready_path

Pair = tuple[TransferEngine, TransferEngine]


@pytest.fixture
def runs_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A run directory of its own."""
    directory = tmp_path / "run"
    monkeypatch.setenv("FABRIC_RAY_RUN_DIR", str(directory))
    yield directory
    observe.stop()


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, [*arguments])


def moved(pair: Pair, nbytes: int = 1 << 16) -> None:
    a, b = pair
    counter = b.counter()
    inbox = b.alloc(nbytes)
    there = a.import_region(inbox.descriptor())
    a.write(a.alloc(nbytes), there, imm=counter.ref).wait(10)
    counter.wait(1, timeout=10)


def test_only_its_user_can_reach_a_process(runs_in: Path) -> None:
    path = observe.serve()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(runs_in.stat().st_mode) == 0o700
    assert observe.serve() == path, "once is enough"
    observe.stop()
    assert not path.exists()


@pytest.mark.parametrize("spoil", ["others write", "a link"])
def test_a_directory_that_is_not_this_users_alone_is_refused(
    runs_in: Path, tmp_path: Path, spoil: str
) -> None:
    if spoil == "a link":
        (tmp_path / "else").mkdir(mode=0o700)
        runs_in.symlink_to(tmp_path / "else")
    else:
        runs_in.mkdir()
        runs_in.chmod(0o777)
    with pytest.raises(errors.InvalidArgument, match="must belong to this user"):
        observe.serve()


def test_a_directory_that_others_may_write_to_is_not_read(runs_in: Path) -> None:
    path = observe.serve()
    runs_in.chmod(0o777)
    for arguments in (["top", "--once"], ["trace"]):
        result = run(*arguments)
        assert result.exit_code == 2
        assert "must belong to this user" in result.stderr
    assert path.exists()


def test_a_socket_has_its_name_only_when_its_process_listens(
    runs_in: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unheard = []

    class Listener(socket.socket):
        def listen(self, backlog: int = 8, /) -> None:
            unheard.extend(sockets())
            super().listen(backlog)

    runs_in.mkdir(mode=0o700)
    own = socket_path(runs_in, os.getpid())
    unready_path(own).touch()  # left by a process of the same number
    monkeypatch.setattr(socket, "socket", Listener)
    path = observe.serve()
    assert path == own
    assert unheard == []
    assert sockets() == [path] == list(runs_in.iterdir())
    assert ask_metrics(path).pid == os.getpid()


def test_a_process_that_was_out_of_file_descriptors_answers_again(runs_in: Path) -> None:
    path = observe.serve()
    with socket.socket(socket.AF_UNIX) as first, socket.socket(socket.AF_UNIX) as second:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
        try:
            first.connect(str(path))  # its descriptor may be there already
            first.close()
            second.connect(str(path))
            time.sleep(0.2)  # if it doesn't fail in between, it has nothing to come back from
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        second.shutdown(socket.SHUT_WR)
        assert b"isn't understood" in second.recv(1 << 16)
    assert ask_metrics(path).pid == os.getpid()


def test_a_name_that_is_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    with pytest.raises(errors.InvalidArgument, match="too long for a socket"):
        observe.serve(tmp_path / ("x" * 120))


def test_a_process_tells_its_numbers_and_records(runs_in: Path, pair: Pair) -> None:
    moved(pair)
    path = observe.serve()
    metrics = ask_metrics(path)
    assert metrics.pid == os.getpid()
    assert {e.id for e in pair} <= {e.id for e in metrics.engines}
    first = ask_records(path)
    cursors = {engine.id: engine.cursor for engine in first.engines}
    again = {engine.id: engine for engine in ask_records(path, cursors).engines}
    assert again[pair[0].id].transfers == ()


@pytest.mark.parametrize(
    "question",
    [b"\n", b"{}\n", b'{"ask": "else"}\n', b'{"ask": "records", "since": 3}\n', b"\xff\x00\n"],
)
def test_what_is_no_question_is_answered_and_the_next_one_too(
    runs_in: Path, question: bytes
) -> None:
    path = observe.serve()
    with socket.socket(socket.AF_UNIX) as asker:
        asker.connect(str(path))
        asker.sendall(question)
        assert "the question isn't understood" in json.loads(asker.recv(1 << 16))["error"]
    assert ask_metrics(path).pid == os.getpid()


def test_a_question_without_end_is_cut_off(runs_in: Path) -> None:
    path = observe.serve()
    with socket.socket(socket.AF_UNIX) as asker:
        asker.connect(str(path))
        asker.sendall(b"x" * (LONGEST_QUESTION + 1))
        assert b"isn't understood" in asker.recv(1 << 16)
    assert ask_metrics(path).pid == os.getpid()


def test_a_socket_that_outlived_its_process_is_removed(runs_in: Path) -> None:
    runs_in.mkdir(mode=0o700)
    dead = runs_in / "1.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(dead))
    assert sockets() == [dead]
    with pytest.raises(Silent, match="gone"):
        ask_metrics(dead)
    assert sockets() == []


def test_a_process_without_a_runtime_directory_is_found_from_a_login_with_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Services, ``docker exec`` and batch systems set none."""
    monkeypatch.delenv("FABRIC_RAY_RUN_DIR", raising=False)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    path = observe.serve()
    try:
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
        assert path in sockets()
        assert Path(f"/run/user/{os.geteuid()}/fabric-ray") in run_dirs()
    finally:
        observe.stop()


CONTAINED = """
import os, socket, sys
socket.sethostname(sys.argv[1])
from fabric_ray import TransferEngine, observe
with TransferEngine():
    observe.serve()
    print(os.getpid(), flush=True)
    sys.stdin.read()
"""
ALONE = ("unshare", "--uts", "--pid", "--fork", "--mount-proc")


def test_processes_of_one_number_in_two_containers_are_both_shown(runs_in: Path) -> None:
    if subprocess.run([*ALONE, "true"], capture_output=True).returncode != 0:
        pytest.skip("this user may not make PID namespaces")
    pipe = subprocess.PIPE
    with ExitStack() as ends:
        for host in ("one", "other"):
            command = [*ALONE, sys.executable, "-c", CONTAINED, host]
            process = ends.enter_context(subprocess.Popen(command, stdin=pipe, stdout=pipe))
            assert process.stdin
            assert process.stdout
            ends.callback(process.stdin.close)
            assert process.stdout.readline() == b"1\n"
        shown = [ask_metrics(path) for path in sockets()]
        assert [process.pid for process in shown] == [1, 1]
        assert {process.host for process in shown} == {"one", "other"}
        names = {engine.name for process in shown for engine in process.engines}
        assert names == {"engine-one-1", "engine-other-1"}
    assert sockets() == []


def test_a_child_by_fork_leaves_its_parents_socket_alone(runs_in: Path) -> None:
    path = observe.serve()
    program = (
        "import os, sys\n"
        "from fabric_ray import TransferEngine, errors, observe\n"
        "engine = TransferEngine()\n"
        "path = observe.serve()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    assert observe.metrics().engines == ()\n"
        "    try:\n"
        "        engine.records()\n"
        "        os._exit(2)\n"
        "    except errors.ForkedEngine:\n"
        "        pass\n"
        "    observe.stop()\n"
        "    own = observe.serve()\n"
        "    assert own != path and own.exists()\n"
        "    observe.stop()\n"
        "    os._exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "from fabric_ray.observe.client import ask_metrics\n"
        "assert ask_metrics(path).pid == os.getpid()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr.decode()
    assert path.exists()


def test_a_forked_child_waits_for_no_lock_of_its_parent(runs_in: Path) -> None:
    program = (
        "import os, signal, threading\n"
        "from fabric_ray import observe\n"
        "from fabric_ray.observe import serving, spans\n"
        "held = threading.Event()\n"
        "def hold():\n"
        "    with serving._lock, spans._lock:\n"
        "        held.set()\n"
        "        threading.Event().wait()\n"
        "threading.Thread(target=hold, daemon=True).start()\n"
        "held.wait()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    signal.alarm(20)\n"
        "    with observe.span('a request'):\n"
        "        observe.serve()\n"
        "    observe.stop()\n"
        "    os._exit(0)\n"
        "os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 255)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr.decode()


def test_top_shows_engines_and_their_peers(runs_in: Path, pair: Pair) -> None:
    moved(pair)
    observe.serve()
    result = run("top", "--once", "--json", "--interval", "0.1")
    assert result.exit_code == 0
    engines = {e["engine_id"]: e for e in json.loads(result.stdout)["engines"]}
    [peer] = [p for p in engines[pair[0].id]["peers"] if p["peer_id"] == pair[1].id]
    assert (peer["state"], peer["health"]) == ("up", "ok")
    shown = run("top", "--once", "--interval", "0.1").output
    assert "ok" in shown


def test_trace_shows_both_ends_and_writes_what_perfetto_opens(
    runs_in: Path, tmp_path: Path, pair: Pair
) -> None:
    with observe.span("request 1"):
        moved(pair)
    moved(pair)
    observe.serve()
    out, dump = tmp_path / "trace.json", tmp_path / "records.json"
    result = run("trace", "--json", "--out", str(out), "--dump", str(dump))
    assert result.exit_code == 0
    ours = [f for f in json.loads(result.stdout)["flights"] if f["writer"]["engine"] == pair[0].id]
    writes = [f for f in ours if f["op"] == "write"]
    assert [f["received"]["at"]["engine"] for f in writes] == [pair[1].id] * 2
    phases = {e["ph"] for e in json.loads(out.read_text())["traceEvents"]}
    assert {"X", "s", "f", "M"} <= phases
    # One request, from the file.
    story = json.loads(run("trace", str(dump), "--id", "request 1", "--json").stdout)["flights"]
    assert [f["id"] for f in story if f["op"] == "write"] == [writes[0]["id"]]
    assert "seen from both ends" in run("trace", str(dump)).output


def test_tables_keep_headings_and_numbers_whole_at_80_columns(
    runs_in: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    observe.serve()
    names = (f"{role}-with-a-name-of-40-characters-{'x' * 7}" for role in ("a", "b"))
    with TransferEngine(name=next(names)) as a, TransferEngine(name=next(names)) as b:
        moved((a, b))
        monkeypatch.setenv("COLUMNS", "80")
        top = run("top", "--once", "--interval", "0.1").output
        trace = run("trace").output
    assert max(map(len, (top + trace).splitlines())) <= 80
    for heading in ("health", "link", "out/s", "slices/s", "in flight", "waiting"):
        assert heading in top
    for heading in ("bytes", "queue", "post", "wire", "counted", "delivered"):
        assert heading in trace
    # A number and its unit stay on one line.
    assert re.search(r"\d (us|ms) +\S", trace)
    assert not re.search(r"^\s*(us|ms|bytes|.B)\b", trace, re.MULTILINE)


def test_a_request_without_a_record_is_reported(runs_in: Path, pair: Pair) -> None:
    moved(pair)
    observe.serve()
    result = run("trace", "--id", "another user's")
    assert result.exit_code == 1
    assert "nothing is recorded of" in result.stderr


@pytest.mark.parametrize(
    ("value", "shown"), [("1", True), ("on", True), ("0", False), ("", False), ("False", False)]
)
def test_the_environment_has_a_process_show_itself(runs_in: Path, value: str, shown: bool) -> None:
    program = (
        "import fabric_ray\n"
        "from fabric_ray.observe.client import sockets\n"
        "assert sockets() == []\n"
        "with fabric_ray.TransferEngine():\n"
        "    print(len(sockets()))\n"
    )
    env = os.environ | {"FABRIC_RAY_OBSERVE": value}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode().strip() == str(int(shown))
    assert sockets() == []
