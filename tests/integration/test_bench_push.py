"""The benchmark of updates of vLLM's servers: what needs none of them."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.push.memory import Mark
from benchmarks.push.vllm_updates import BACKENDS, check, details, reason, try_backends
from fabric_ray import TransferEngine
from fabric_ray.bench.record import Results
from fabric_ray.bench.results import ContenderError
from fabric_ray.bench.results import load as read
from fabric_ray.bench.table import print_report

REGION = 64 << 20


def test_other_tokens_fail_an_update() -> None:
    check([[1, 2], [3, 4]], [[1, 2], [3, 4]])
    with pytest.raises(ContenderError, match="1 of 2 prompts got other tokens"):
        check([[1, 2], [3, 5]], [[1, 2], [3, 4]])


def test_details_are_of_all_turns_and_memory_is_the_most_of_any() -> None:
    turn = {"paused": 0.1, "moved": 2e9, "trainer": 5e6, "worker": 9e6, "open": 1.0}
    found = details([turn, {**turn, "paused": 0.3, "trainer": 7e6, "worker": 8e6}])
    assert found["paused s"] == "0.20 (0.10 to 0.30)"
    assert (found["moved GB"], found["trainer MB"], found["worker MB"]) == (2, 7, 9)


@pytest.mark.parametrize(
    ("error", "log", "expected"),
    [
        ("HTTPError: 500", " WARNING OSError: x\nERROR ValueError: a\nIOError: b", "ValueError: a"),
        ("RuntimeError: no NCCL", "INFO started", "RuntimeError: no NCCL"),
        ("refuse took more than 90 s\nmore", "", "refuse took more than 90 s"),
    ],
)
def test_a_refusal_is_one_line_with_the_cause(error: str, log: str, expected: str) -> None:
    assert reason(error, log) == expected


def test_back_ends_that_were_tried_before_an_interruption_are_kept(tmp_path: Path) -> None:
    tried = iter(["no GPU", "no NCCL"])

    def refusal(backend: str) -> str:
        if (why := next(tried, None)) is None:
            raise KeyboardInterrupt
        return why

    results = Results(tmp_path / "run.jsonl", {}, [])
    with pytest.raises(KeyboardInterrupt):
        try_backends(results, refusal)
    [row] = read(tmp_path / "run.jsonl").rows
    assert not row.complete
    assert [failed.reason for failed in row.failures] == ["no GPU", "no NCCL"]
    console = Console(width=400, file=StringIO())
    again = Results(tmp_path / "run.jsonl", {}, [])
    try_backends(again, lambda backend: f"{backend} needs a GPU")
    report = read(tmp_path / "run.jsonl")
    assert report.rows[0].complete
    print_report(report, console)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(f"vllm {name}: {name} needs a GPU" in shown for name in BACKENDS)


def test_memory_that_a_process_has_mapped_counts_where_that_is_asked() -> None:
    with TransferEngine(name="measured") as engine:
        mark = Mark()
        region = engine.alloc(REGION)
        without, _ = mark.peak()
        counted, _ = mark.peak(mapped=True)
        assert counted - without >= REGION == region.nbytes
