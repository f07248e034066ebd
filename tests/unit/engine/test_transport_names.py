"""The transports that a configuration may name and pages list are those of the native engine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

from fabric_ray.engine.config import TransportName

ROOT = Path(__file__).parents[3]
TABLE = ROOT / "native/engine/src/api/transport.rs"


def test_every_transport_of_the_table_is_a_name_of_the_configuration() -> None:
    table = TABLE.read_text().partition("\ntransports! {")[2].partition("\n}")[0]
    rows = re.findall(r'\w+ = \d+, "(\w+)", (.*?);', table, re.DOTALL)
    assert len(rows) == table.count(";"), "a row has another form than this test reads"
    named = {name for name, traits in rows if "internal: true" not in traits}
    assert set(get_args(TransportName)) == named, "TransportName in fabric_ray/engine/config.py"


def test_pages_that_list_transports_have_each() -> None:
    names = {*get_args(TransportName), "sim"}
    concepts = (ROOT / "docs/concepts.md").read_text()
    rows = concepts.partition("\n| Transport |")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", rows, re.MULTILINE)) == names, "table of transports"
    layer = concepts.partition("\n| transport | ")[2].partition(" | ")[0]
    assert set(re.findall(r"`(\w+)`", layer)) == names, "row of layers"
    engine = "native/engine/src/transport"
    lines = (ROOT / "ARCHITECTURE.md").read_text().splitlines()
    drawn = next(line for line in lines if line.endswith(engine) and "shm" in line)
    assert set(drawn.removesuffix(engine).split()) == names, "map of ARCHITECTURE.md"
