"""The engine's log records have their fields by name."""

from __future__ import annotations

import logging

import pytest

from fabric_ray import TransferEngine
from tests.processes import within


def test_a_record_has_its_fields(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="fabric_ray.native"):
        # A NIC that isn't there is left out, and that is said.
        TransferEngine(transport=("shm", "verbs"), nics=("no_such_nic",)).close()

        def of_verbs() -> list[logging.LogRecord]:
            told = [r for r in caplog.records if r.name == "fabric_ray.native"]
            return [r for r in told if getattr(r, "fabric", {}).get("transport") == "verbs"]

        within(10, "a record", lambda: bool(of_verbs()))
    record = of_verbs()[0]
    assert record.getMessage().startswith("transport left out; ")
    fields = record.__dict__["fabric"]
    assert set(fields) == {"transport", "why"}
    assert fields["why"] in record.getMessage()
