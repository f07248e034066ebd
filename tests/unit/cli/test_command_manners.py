"""What all commands have in common: help that teaches, JSON, exit codes, progress."""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import typer.main
from click.testing import Result
from typer.testing import CliRunner

from fabric_ray import __version__, observe
from fabric_ray.cli.console import facts, stdout
from fabric_ray.cli.ending import Code, ended_by_sigterm
from fabric_ray.cli.main import app
from fabric_ray.demo.common import sigterm_handler_kept
from fabric_ray.inference.presets import tiny
from fabric_ray.models.hf import config_to_hf

ROOT = Path(__file__).parents[3]
COMMANDS = ["doctor", "topo", "bench", "plan", "simulate", "trace", "top"]
DEMOS = ["demo weights", "demo kvcache", "demo moe"]
PROGRAM = (sys.executable, "-c", "from fabric_ray.cli.main import app; app()")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, [*arguments])


def examples(command: str) -> list[list[str]]:
    """The commands that a help text shows, each as words."""
    help_ = run(*command.split(), "--help").output.replace("\\\n", " ")
    lines = [line.strip() for line in help_.splitlines() if re.search(r"^\s+fabric-ray ", line)]
    return [shlex.split(line.split("|")[0].rstrip("& "), comments=True)[1:] for line in lines]


def parse(words: list[str]) -> None:
    """Reads a command line without running it; raises where it means nothing."""
    command: Any = typer.main.get_command(app)
    while hasattr(command, "commands"):
        command = command.commands[words[0]]
        words = words[1:]
    command.make_context(command.name, [w for w in words if w != "--help"])


def test_every_command_is_in_this_list() -> None:
    root: Any = typer.main.get_command(app)
    assert sorted(root.commands) == sorted([*COMMANDS, "demo"])
    assert sorted(f"demo {name}" for name in root.commands["demo"].commands) == sorted(DEMOS)


@pytest.mark.parametrize("command", [*COMMANDS, *DEMOS])
def test_help_shows_examples_that_can_be_typed(command: str) -> None:
    words = command.split()
    assert run(*words, "-h").output == run(*words, "--help").output
    shown = examples(command)
    assert len(shown) >= 2
    for words in shown:
        assert " ".join(words).startswith(command)
        parse(words)
    assert any("--json" in words for words in shown)


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param("doctor --budget 5", marks=pytest.mark.long),
        "topo",
        pytest.param("bench --sizes 4KiB --turns 1 --transports tcp", marks=pytest.mark.long),
        "plan llama-3.1-8b --trainer fsdp=8 --rollout tp=4",
        "simulate llama-3.1-8b --trainer fsdp=8 --rollout tp=4",
    ],
)
def test_json_is_one_object_and_nothing_else(arguments: str) -> None:
    done = subprocess.run(
        [*PROGRAM, *arguments.split(), "--json"], cwd=ROOT, capture_output=True, text=True
    )
    assert isinstance(json.loads(done.stdout), dict)
    assert done.stderr == ""
    if not arguments.startswith("doctor"):
        assert done.returncode == Code.DONE


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ("doctor --nics no_such_nic --budget 1 --json", Code.NO, ""),
        ("trace --id no-such-request", Code.NO, "no process shows itself"),
        ("top --once --interval 0.1", Code.NO, "no process shows itself"),
        ("topo --rules bogus", Code.IMPOSSIBLE, "isn't a rule"),
        ("bench --sizes 4kb", Code.IMPOSSIBLE, "'4kb' is no size"),
        ("bench --sizes 1GiB", Code.IMPOSSIBLE, "1073741824 bytes can't be measured"),
        ("bench --transports smoke", Code.IMPOSSIBLE, "smoke"),
        ("bench --transports file", Code.IMPOSSIBLE, "'file' can't be measured; give some of shm"),
        ("bench --resume /proc/self/status", Code.IMPOSSIBLE, "not a file of benchmark results"),
        ("bench --picture /no/such/folder/a.svg", Code.IMPOSSIBLE, "is no directory"),
        ("plan no-model --trainer fsdp=8 --rollout tp=4", Code.IMPOSSIBLE, "no-model"),
        ("plan /no/x --trainer fsdp=8 --rollout tp=4", Code.IMPOSSIBLE, "no file or directory"),
        ("simulate llama-3.1-8b --trainer x=8 --rollout tp=4", Code.IMPOSSIBLE, "x=8"),
        ("trace /no/such/file", Code.IMPOSSIBLE, "no flight records"),
        (f"trace {__file__}", Code.IMPOSSIBLE, "no flight records"),
        ("demo weights --trainers 0", Code.IMPOSSIBLE, "--trainers: got 0, expected at least 1"),
        ("demo weights --checkpoint /no/such/folder", Code.IMPOSSIBLE, "not a directory"),
        ("demo moe --address garbage", Code.IMPOSSIBLE, "no Ray cluster answers at garbage"),
        ("demo weights --address 127.0.0.1:1", Code.IMPOSSIBLE, "no Ray cluster answers at 127."),
        ("demo kvcache --clients 0", Code.IMPOSSIBLE, "--clients: got 0"),
        ("demo kvcache --model nope", Code.IMPOSSIBLE, "fabric-ray: model 'nope' is neither"),
        ("demo kvcache --prefill-tp 0", Code.IMPOSSIBLE, "--prefill-tp: got 0, expected at"),
        ("demo kvcache --decode-tp 3", Code.IMPOSSIBLE, "can't be shared evenly by 3 ranks"),
        ("demo kvcache --decode-tp 3", Code.IMPOSSIBLE, "--decode-tp: llama: the 8 heads"),
        ("demo kvcache --prefill-tp 65", Code.IMPOSSIBLE, "--prefill-tp: got 65, expected at"),
        ("demo kvcache --clients 33", Code.IMPOSSIBLE, "--clients: got 33, expected at most 32"),
        ("demo kvcache --max-tokens 0", Code.IMPOSSIBLE, "--max-tokens: got 0"),
        ("demo kvcache --max-tokens 100000", Code.IMPOSSIBLE, "expected at most 1024"),
        ("demo kvcache --seconds nan", Code.IMPOSSIBLE, "--seconds: got nan"),
        ("demo kvcache --seconds inf", Code.IMPOSSIBLE, "--seconds: got inf"),
        ("demo weights --parameters nan", Code.IMPOSSIBLE, "--parameters: got nan"),
        ("demo weights --parameters 1", Code.IMPOSSIBLE, "--parameters, --rollouts, --ep: no"),
        ("demo weights --rollouts 3 --ep 2", Code.IMPOSSIBLE, "--rollouts, --ep: "),
        ("demo moe --ranks 1", Code.IMPOSSIBLE, "--ranks: got 1, expected at least 2"),
        ("demo moe --ranks 65", Code.IMPOSSIBLE, "--ranks: got 65, expected at most 64"),
        ("demo moe --tokens 0", Code.IMPOSSIBLE, "--tokens: got 0"),
        ("demo moe --steps 0", Code.IMPOSSIBLE, "--steps: got 0"),
        ("doctor --bogus", Code.IMPOSSIBLE, "--bogus"),
        ("bogus", Code.IMPOSSIBLE, "bogus"),
    ],
)
def test_the_exit_code_says_which_kind_of_no_it_is(
    arguments: str, code: Code, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FABRIC_RAY_RUN_DIR", str(tmp_path))
    result = run(*arguments.split())
    assert result.exit_code == code
    assert words in result.stderr
    assert len(result.stderr.strip().splitlines()) <= 1
    assert isinstance(result.exception, SystemExit)
    assert code is not Code.IMPOSSIBLE or result.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("plan kimi", "missing option '--trainer'; see fabric-ray plan --help"),
        ("bogus", "no such command 'bogus'; see fabric-ray --help"),
        ("bench --bogus", "no such option: --bogus; see fabric-ray bench --help"),
        ("demo bogus", "no such command 'bogus'; see fabric-ray demo --help"),
        ("demo weights --trainers x", "; see fabric-ray demo weights --help"),
        ("demo weights --transport smoke", "; see fabric-ray demo weights --help"),
        ("top --interval 0", "; see fabric-ray top --help"),
        ("top --once --interval inf", "; see fabric-ray top --help"),
        ("doctor --budget inf", "; see fabric-ray doctor --help"),
        ("doctor --listen --wait inf", "; see fabric-ray doctor --help"),
        ("trace --id", "requires an argument; see fabric-ray trace --help"),
        ("demo weights --trainers", "requires an argument; see fabric-ray demo weights --help"),
        ("demo --bogus", "no such option: --bogus; see fabric-ray demo --help"),
        ("--bogus", "no such option: --bogus; see fabric-ray --help"),
        ("'My Model. V2? No'", "no such command 'My Model. V2? No'; see fabric-ray --help"),
    ],
)
def test_what_is_typed_wrongly_is_one_sentence_that_says_where_to_read(
    arguments: str, said: str
) -> None:
    result = CliRunner().invoke(app, shlex.split(arguments), prog_name="fabric-ray")
    assert result.exit_code == Code.IMPOSSIBLE
    assert result.stdout == ""
    assert re.fullmatch(r"fabric-ray: [^\n]+\n", result.stderr)
    assert result.stderr.endswith(said + "\n")


def test_the_version_is_the_packages() -> None:
    assert run("--version").output.strip() == __version__


@pytest.mark.parametrize("group", [[], ["demo"]], ids=["", "demo"])
def test_who_types_nothing_gets_the_help(group: list[str]) -> None:
    result = run(*group)
    assert result.output.strip() == run(*group, "--help").output.strip()


def test_the_package_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "fabric_ray", "plan", "kimi"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == Code.IMPOSSIBLE
    assert done.stderr.startswith("fabric-ray: missing option")


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        pytest.param("fabric-ray be", {"bench"}, marks=pytest.mark.long),
        pytest.param("fabric-ray demo w", {"weights"}, marks=pytest.mark.long),
        pytest.param("fabric-ray top --i", {"--interval"}, marks=pytest.mark.long),
        ("fabric-ray demo weights --transport ", {"auto", "shm", "tcp"}),
    ],
)
def test_bash_completes_what_is_typed(typed: str, offered: set[str], tmp_path: Path) -> None:
    if shutil.which("bash") is None:
        pytest.skip("bash isn't installed")
    program = tmp_path / "fabric-ray"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m fabric_ray "$@"\n')
    program.chmod(0o755)
    words = typed.split(" ")
    script = (
        'eval "$(_FABRIC_RAY_COMPLETE=source_bash fabric-ray)"\n'
        f"COMP_WORDS=({' '.join(words)} ); COMP_CWORD={len(words) - 1}\n"
        "$(complete -p fabric-ray | sed 's/.*-F //; s/ .*//') fabric-ray\n"
        'printf "%s\\n" "${COMPREPLY[@]}"\n'
    )
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", script], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60
    )
    assert set(done.stdout.split()) == offered, done.stderr


@pytest.mark.parametrize("option", ["--out", "--dump"])
@pytest.mark.parametrize(
    ("path", "words"),
    [("/dev/full", "No space left on device"), ("/no/such/folder/a", "No such file or directory")],
)
def test_a_path_of_the_users_that_can_not_be_written_is_named_in_one_sentence(
    option: str, path: str, words: str, tmp_path: Path
) -> None:
    observe.dump(tmp_path / "ours.json")
    result = run("trace", str(tmp_path / "ours.json"), option, path)
    assert result.exit_code == Code.IMPOSSIBLE
    assert result.stderr == f"fabric-ray: {path}: {words}\n"


def test_a_picture_that_finds_no_room_is_named_in_one_sentence(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pip install '.[ray]'")
    (tmp_path / "full.svg").symlink_to("/dev/full")
    push = ["llama-3.1-8b", "--trainer", "fsdp=8", "--rollout", "tp=4"]
    result = run("plan", *push, "--picture", str(tmp_path / "full.svg"))
    assert result.exit_code == Code.IMPOSSIBLE
    last = result.stderr.splitlines()[-1]
    assert last == f"fabric-ray: {tmp_path / 'full.svg'}: No space left on device"


@pytest.mark.parametrize(
    ("arguments", "looks", "command"),
    [
        ("demo weights", "demo", "pip install 'ray>="),
        ("demo kvcache", "demo", "'ray[serve]>="),
        ("bench --picture a.svg", "picture", "pip install 'matplotlib>="),
    ],
)
def test_packages_that_are_missing_are_named_with_the_command_that_installs_them(
    arguments: str, looks: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"fabric_ray.cli.{looks}.find_spec", lambda _: None)
    result = run(*arguments.split())
    assert result.exit_code == Code.IMPOSSIBLE
    assert command in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_an_output_folder_that_takes_no_files_is_told_before_anything_runs() -> None:
    pytest.importorskip("ray", reason="pip install '.[ray]'")
    result = run("demo", "weights", "--output", "/proc/self/fdinfo")
    assert result.exit_code == Code.IMPOSSIBLE
    assert result.stderr.strip() == "fabric-ray: /proc/self/fdinfo: No such file or directory"


def test_a_program_that_is_missing_is_a_fault_of_ours_and_shown_as_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    result = run("bench", "--sizes", "4KiB", "--turns", "1", "--transports", "tcp")
    assert isinstance(result.exception, FileNotFoundError)
    assert result.exception.filename == "/no/such/python"


def test_the_documented_codes_are_those_that_there_are() -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    assert {int(code) for code in re.findall(r"^\| `(\d+)` \|", page, re.M)} == set(Code)
    assert set(re.findall(r"^\| `fabric-ray (\w+)`", page, re.M)) == {*COMMANDS, "demo"}


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param("doctor --budget 5", marks=pytest.mark.long),
        pytest.param("topo", marks=pytest.mark.long),
        pytest.param("bench --sizes 4KiB --turns 1 --transports tcp", marks=pytest.mark.long),
        pytest.param(
            "plan llama-3.1-8b --trainer fsdp=8 --rollout tp=4 --rank 1", marks=pytest.mark.long
        ),
        "plan llama-3.1-8b --trainer fsdp=8 --rollout tp=4 --json",
        "--help",
        pytest.param("demo --help", marks=pytest.mark.long),
    ],
)
def test_a_closed_pipe_ends_a_command_quietly(arguments: str) -> None:
    unread, stdout = os.pipe()
    os.close(unread)
    done = subprocess.run(
        [*PROGRAM, *arguments.split()], cwd=ROOT, stdout=stdout, stderr=subprocess.PIPE, text=True
    )
    os.close(stdout)
    assert done.stderr == ""
    assert done.returncode == Code.UNREAD


def test_a_row_in_a_pipe_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    words = " ".join(["mlx5_bond_0"] * 40)
    stdout().print(facts([("rails", words)]))
    assert capsys.readouterr().out == f"rails  {words}\n"


def shown_at_a_terminal(*arguments: str) -> tuple[str, str, int]:
    """What a command writes to a terminal on stderr, to a pipe on stdout, and its exit code."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [*PROGRAM, *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=theirs
    ) as process:
        os.close(theirs)
        shown = b""
        try:
            while piece := os.read(ours, 1 << 16):
                shown += piece
        except OSError:
            pass  # the other end of a terminal is closed that way
        os.close(ours)
        assert process.stdout is not None
        printed = process.stdout.read()
    return shown.decode(), printed.decode(), process.returncode


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param(
            *("plan qwen3-30b-a3b --trainer fsdp=2,ep=8 --rollout tp=8,ep=8 --json", "planning"),
            marks=pytest.mark.long,
        ),
        ("simulate llama-3.1-8b --trainer fsdp=8 --rollout tp=4 --json", "simulating"),
        pytest.param(
            *("bench --sizes 64KiB --turns 1 --json", "turn 1 of 1"), marks=pytest.mark.long
        ),
        pytest.param("doctor --budget 5 --json", "looking", marks=pytest.mark.long),
    ],
)
def test_progress_is_shown_at_a_terminal(arguments: str, words: str) -> None:
    shown, printed, _ = shown_at_a_terminal(*arguments.split())
    assert words in shown
    json.loads(printed)


def test_a_result_that_finds_no_room_ends_in_one_sentence() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*PROGRAM, "--version"], cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.stderr == "fabric-ray: stdout can't be written: No space left on device\n"
    assert done.returncode == Code.IMPOSSIBLE


def test_a_folder_that_ray_can_not_start_in_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / ("x" * 110)))
    done = run("demo", "moe", "--steps", "1")
    assert done.exit_code == Code.IMPOSSIBLE
    assert re.search("Ray can't be started here .*, RAY_TMPDIR to a short path", done.output)


def test_a_closed_stderr_is_no_reason_to_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    with pytest.raises(SystemExit) as end:
        app(["--version"])
    assert not end.value.code
    assert sys.stderr is not None
    assert not sys.stderr.isatty()
    sys.stderr.close()


def test_sigterm_ends_a_demo_as_ctrl_c_does() -> None:
    before = signal.getsignal(signal.SIGTERM)
    closed: list[signal.Signals] = []

    def run_until(number: signal.Signals) -> None:
        with ended_by_sigterm(), ExitStack() as stack:
            stack.callback(closed.append, number)
            with sigterm_handler_kept():
                # Ray leaves a handler in C++, which aborts.
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.raise_signal(number)

    with pytest.raises(typer.Exit) as end:
        run_until(signal.SIGTERM)
    assert end.value.exit_code == Code.TERMINATED
    with pytest.raises(KeyboardInterrupt):
        run_until(signal.SIGINT)
    assert closed == [signal.SIGTERM, signal.SIGINT]
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.long
def test_ctrl_c_ends_a_measurement_in_words_not_in_a_traceback() -> None:
    with subprocess.Popen(
        [*PROGRAM, "bench", "--turns", "100000"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        while len(children.read_text().split()) < 3:  # a socket, shm, tcp
            assert process.poll() is None
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == Code.INTERRUPTED
    assert "Traceback" not in stderr


def test_a_character_that_the_terminal_lacks_is_no_reason_to_fail(tmp_path: Path) -> None:
    folder = tmp_path / "größe→"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_to_hf(tiny("llama"))))
    words = ["plan", str(folder), "--trainer", "fsdp=2", "--rollout", "tp=2"]
    done = subprocess.run(
        [*PROGRAM, *words], env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert rb"gr\xf6\xdfe\u2192" in done.stdout
