"""The script that runs GPU checks gives each of them its time."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.run import LIMIT, ROOT, STAGES


@pytest.mark.parametrize("name", STAGES)
def test_the_parts_of_a_stage_fit_into_its_time_and_are_there(name: str) -> None:
    assert sum(step.seconds for step in STAGES[name]) <= LIMIT
    files = [a for step in STAGES[name] for a in step.arguments if a.startswith("tests/")]
    assert files
    assert all((ROOT / file).is_file() for file in files)


def test_every_check_belongs_to_a_stage() -> None:
    staged = {Path(a).name for steps in STAGES.values() for step in steps for a in step.arguments}
    # The last needs Ray as well, and is run by itself.
    assert {p.name for p in (ROOT / "tests/gpu").glob("test_*.py")} - staged <= {"test_rdt.py"}
