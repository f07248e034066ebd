"""Pushes of changes beside whole pushes, over a link of a given rate."""

from __future__ import annotations

import secrets
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

from benchmarks.push import delta_actor
from benchmarks.push.shaped import ADDRESSES, shaped_link
from fabric_ray.bench.results import Row, RowHeader, row_of_turns
from fabric_ray.weights import WeightSync
from fabric_ray.weights.calls import call_failure
from fabric_ray.weights.report import PushReport

_PROGRAM = "from benchmarks.push.delta_actor import main; main()"
_ROLES = ("trainer", "rollout")


class _Pipes:
    """Calls processes by connections."""

    def share(self, value: Any) -> Any:
        return value

    def ask(
        self,
        actors: Sequence[Connection],
        function: Callable[..., Any],
        args: Sequence[tuple[Any, ...]],
        timeout: float,
    ) -> list[Any]:
        for actor, these in zip(actors, args, strict=True):
            actor.send((function, these))
        answers = [actor.recv() for actor in actors]
        return [answer if error is None else call_failure(error) for answer, error in answers]


class _Pair:
    """One trainer and one rollout, and three controllers of both."""

    def __init__(self, connections: Sequence[Connection]) -> None:
        self.connections = connections
        self._calls = _Pipes()
        one, other = ([connection] for connection in connections)
        self.syncs = {
            name: WeightSync(one, other, name=name, delta=delta, calls=self._calls)
            for name, delta in delta_actor.NAMES.items()
        }
        self._step = 0

    def call(self, number: int, function: Callable[..., Any], *args: Any) -> Any:
        """Calls a function in the trainer (0) or the rollout (1)."""
        [answer] = self._calls.ask([self.connections[number]], function, [args], 60.0)
        return answer

    def train(self, share: float) -> None:
        self._step += 1
        self.call(0, delta_actor.train, share, self._step)

    def push(self, name: str) -> tuple[PushReport, tuple[float, float]]:
        """The report of a push, and the CPU seconds of both processes."""
        before = [self.call(number, delta_actor.spent) for number in (0, 1)]
        report = self.syncs[name].push()
        after = [self.call(number, delta_actor.spent) for number in (0, 1)]
        return report, (after[0] - before[0], after[1] - before[1])


def measure(
    layers: int, gbps: float, shares: Sequence[float], turns: int, say: Callable[[str], None]
) -> Iterator[Row]:
    """Yields a row for each share of changed elements.

    Raises:
        RuntimeError: a push of changes led to other bytes than a whole push.
    """
    with _pair(layers, gbps) as pair:
        for name in delta_actor.NAMES:
            pair.push(name)
        for share in shares:
            # The first push of changes of this share, and the pages it touches, don't count.
            yield _row(pair, share, turns, say)


def _row(pair: _Pair, share: float, turns: int, say: Callable[[str], None]) -> Row:
    seconds: dict[str, list[float]] = {name: [] for name in delta_actor.NAMES}
    details: dict[str, dict[str, float | str]] = {}
    for turn in range(turns):
        pair.train(share)
        names = list(delta_actor.NAMES)
        for name in names if turn % 2 else names[::-1]:
            report, (trainer, rollout) = pair.push(name)
            seconds[name].append(report.seconds)
            details[name] = {
                "MB": report.nbytes / 1e6,
                "of bytes": report.nbytes / report.version_nbytes,
                "trainer CPU s": trainer,
                "rollout CPU s": rollout,
                **{f"{stage} s": spent for stage, spent in report.stages.items()},
            }
            say(f"{share:.0%} changed, turn {turn + 1}: {name} {report.seconds:.3f} s")
        if wrong := pair.call(1, delta_actor.differ):
            raise RuntimeError(f"{wrong[0]} differs after a push of changes; report this bug")
    header = RowHeader(key=f"push-delta/{share:g}", unit="s")
    roles = {"changes": "ours", "chosen": "ours", "whole": "floor"}
    taken = {name: (role, seconds[name]) for name, role in roles.items()}
    for name, each in seconds.items():
        details[name]["all turns s"] = sum(each)
    return row_of_turns(header, taken, details)  # type: ignore[arg-type]


@contextmanager
def _pair(layers: int, gbps: float) -> Iterator[_Pair]:
    with shaped_link(gbps) as namespaces, tempfile.TemporaryDirectory() as folder:
        path, token = str(Path(folder, "calls")), secrets.token_hex(16)
        with Listener(path, "AF_UNIX") as listener:
            processes = [
                subprocess.Popen(
                    [
                        *f"ip netns exec {space} {sys.executable} -c".split(),
                        *(_PROGRAM, path, role, address, str(layers), token),
                    ]
                )
                for space, role, address in zip(namespaces, _ROLES, ADDRESSES, strict=True)
            ]
            connections: dict[str, Connection] = {}
            try:
                for _ in processes:
                    connection = listener.accept()
                    connections[connection.recv()] = connection
                yield _Pair([connections[role] for role in _ROLES])
            finally:
                for connection in connections.values():
                    connection.close()
                for process in processes:
                    process.terminate()
                    process.wait()
