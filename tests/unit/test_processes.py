"""Other processes of tests see what this one sees at their start."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection

import pytest

from tests.processes import Other

AT_IMPORT = os.environ.get("FABRIC_RAY_TEST_WORD")


def tell(connection: Connection) -> None:
    connection.send((AT_IMPORT, os.environ.get("FABRIC_RAY_TEST_WORD")))


def test_each_process_has_the_environment_of_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    for word in ("first", "second"):
        monkeypatch.setenv("FABRIC_RAY_TEST_WORD", word)
        with Other(tell) as other:
            assert other.hear() == (word, word)
