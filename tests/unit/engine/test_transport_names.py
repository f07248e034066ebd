"""The transports that a configuration may name are those of the native engine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

from fabric_ray.engine.config import TransportName

TABLE = Path(__file__).parents[3] / "native/engine/src/api/transport.rs"


def test_every_transport_of_the_table_is_a_name_of_the_configuration() -> None:
    table = TABLE.read_text().partition("\ntransports! {")[2].partition("\n}")[0]
    rows = re.findall(r'\w+ = \d+, "(\w+)", (.*?);', table, re.DOTALL)
    assert len(rows) == table.count(";"), "a row has another form than this test reads"
    named = {name for name, traits in rows if "internal: true" not in traits}
    assert set(get_args(TransportName)) == named, "TransportName in fabric_ray/engine/config.py"
