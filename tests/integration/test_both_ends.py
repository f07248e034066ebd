"""Two processes, each with its own records: one command shows a transfer from both ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from fabric_ray import TransferEngine, observe
from tests.processes import Other

COMMAND = (sys.executable, "-c", "from fabric_ray.cli.main import app; app()")
WRITES = 20


def receiver(connection: Connection, transport: str) -> None:
    """Gets as many writes as it is told of, under the name that it is told."""
    # A fork of one that has imported the library doesn't show itself by its environment alone.
    observe.serve()
    with TransferEngine(name="receiver", transport=transport) as engine:
        inbox, counter = engine.alloc(1 << 20), engine.counter()
        connection.send((inbox.descriptor(), counter.ref))
        while (name := connection.recv()) is not None:
            with observe.span(name):
                waits = counter.expect(1)
            connection.send("waiting")
            waits.wait(30)
            connection.send("counted")


def command(*arguments: str) -> dict[str, Any]:
    done = subprocess.run([*COMMAND, *arguments], check=True, capture_output=True, timeout=60)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_every_write_is_seen_from_both_ends_in_one_order(
    transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FABRIC_RAY_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("FABRIC_RAY_OBSERVE", "1")
    observe.serve()
    try:
        with Other(receiver, transport) as other, TransferEngine(transport=transport) as engine:
            descriptor, arrivals = other.hear()
            there, src = engine.import_region(descriptor), engine.alloc(1 << 20)
            for i in range(WRITES):
                assert other.ask(f"request {i}") == "waiting"
                engine.write(src, there, imm=arrivals).wait(30)
                assert other.hear() == "counted"
            told = command("trace", "--json")
            story = command("trace", "--id", "request 7", "--json")
            top = command("top", "--once", "--json", "--interval", "0.1")
            other.say(None)
    finally:
        observe.stop()
    assert told["processes"] == 2
    writes = [f for f in told["flights"] if f["op"] == "write"]
    assert len(writes) == WRITES
    for flight in writes:
        received = flight["received"]
        assert received["exact"]
        assert received["at"]["name"] == "receiver"
        assert received["at"]["pid"] != os.getpid() == flight["writer"]["pid"]
        # What the receiver saw is later than what caused it.
        assert flight["queued"] <= flight["posted"] <= received["last"] <= received["delivered"]
    # The writer named nothing: the receiver's name leads to it, by the counter.
    [flight] = story["flights"]
    assert flight["id"] == writes[7]["id"]
    names = {e["engine"] for e in top["engines"]}
    assert "receiver" in names
