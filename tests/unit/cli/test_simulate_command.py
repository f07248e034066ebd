"""``fabric-ray simulate``: what a push takes on a virtual clock, and what it takes it for."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import Result
from typer.testing import CliRunner

from fabric_ray.cli import options
from fabric_ray.cli.main import app
from fabric_ray.cli.published import NEMO, PUBLISHED, RDT, RDT_PULL, published
from fabric_ray.models import config_to_hf
from fabric_ray.weights.forecast import forecast
from fabric_ray.weights.simulation import STAGES, Cluster, Costs, Setting, Simulated, simulate
from tests.unit.models.small_models import SMALL

PAGE = Path(__file__).parents[3] / "docs" / "simulate.md"
LLAMA = ("llama-3.1-8b", "--trainer", "fsdp=4", "--rollout", "tp=2,engines=2")
FREE = "h2d=0,gather=0,fuse=0,quantise=0,submit=0,request=0"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["simulate", *arguments], env={"COLUMNS": "200"})


def said(*arguments: str) -> dict[str, Any]:
    done = run(*arguments, "--json")
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    assert sum(found["critical"].values()) == pytest.approx(found["seconds"])
    assert found["ratio"] >= 1
    assert found["peak_nbytes"] <= found["watermark"]
    return found


@pytest.fixture
def experts(tmp_path: Path) -> str:
    """A small model with experts, as a Hugging Face checkpoint describes it."""
    (tmp_path / "config.json").write_text(json.dumps(config_to_hf(SMALL["qwen3_moe"])))
    return str(tmp_path)


def test_without_costs_a_push_takes_its_bytes_over_the_busiest_nic() -> None:
    told = said(*LLAMA, "--costs", FREE)
    assert told["ratio"] < 1.02
    assert told["critical"]["write"] == pytest.approx(told["seconds"])
    assert told["peak_nbytes"] == 0
    slower = said(*LLAMA, "--costs", FREE, "--gbps", "100")
    assert slower["seconds"] == pytest.approx(4 * told["seconds"], rel=0.01)
    faster = said(*LLAMA, "--costs", FREE, "--nics", "2")
    assert faster["floor_seconds"] == told["floor_seconds"] / 2
    assert faster["seconds"] < 0.7 * told["seconds"]


def test_every_request_of_the_plan_is_posted_once() -> None:
    push = options.push(*LLAMA[:1], LLAMA[2], LLAMA[4], "fp8:128x128")
    plan, _ = forecast(push)
    told = simulate(push, plan, Setting())
    requests = sum(plan.expected_pages(rank) for rank in plan.ranks("target"))
    assert told.requests * len(plan.ranks("source")) == pytest.approx(requests)


def test_gathering_takes_time_and_memory(experts: str) -> None:
    ends = (experts, "--trainer", "fsdp=4,ep=2", "--rollout", "tp=2,ep=2", "--dtype", "fp8:channel")
    shards, whole = said(*ends), said(*ends, "--gather")
    assert shards["busy"]["gather"] == shards["busy"]["fuse"] == 0
    assert whole["seconds"] > 2 * shards["seconds"]
    assert whole["peak_nbytes"] > 2 * shards["peak_nbytes"]
    # A layer's experts are gathered together.
    costs = Costs()
    each = costs.gather * costs.gathers
    assert whole["busy"]["gather"] == pytest.approx(whole["tensors"] * each)
    assert whole["tensors"] < 40


def test_published_times_stand_beside_the_simulated() -> None:
    row = next(row for row in PUBLISHED if row.model == "moonlight-16b-a3b")
    ends = (row.model, "--trainer", row.trainer, "--rollout", row.rollout)
    done = run(*ends)
    assert done.exit_code == 0, done.output
    assert "RDMA 1,073 ms, NCCL 1,482 ms (miles" in done.stdout
    assert "times the floor" in done.stdout
    other = options.push(row.model, row.trainer, row.rollout, "float32")
    assert published(other) is None
    assert all(published(options.push(*row[:4])) == row for row in PUBLISHED)


@pytest.mark.long
def test_the_page_has_the_published_pushes_of_other_engines() -> None:
    rows = [
        [cell.strip().strip("`") for cell in line.strip("|").split("|")]
        for line in PAGE.read_text().splitlines()
        if re.match(r"\| \S+ \| `(megatron|fsdp)", line)
    ]
    known = [row for row in PUBLISHED if row.source in (RDT, RDT_PULL, NEMO)]
    assert {(*row[:3], "bfloat16") for row in rows} == {row[:4] for row in known}
    for model, trainer, rollout, times, *_ in rows:
        row = next(row for row in known if row[:3] == (model, trainer, rollout))
        own = [ms for means, ms in row.milliseconds.items() if means != "NCCL"]
        assert re.findall(r"[\d,]+(?= (?:to|ms))", times) == [f"{ms:,.0f}" for ms in own]
    # The other rows take longer and run the same code.
    model, trainer, rollout, _, floor, simulated, _ = next(r for r in rows if ",ep=4,e" in r[2])
    told = said(model, "--trainer", trainer, "--rollout", rollout, "--costs", "h2d=0")
    found = [told[name] * 1e3 for name in ("floor_seconds", "seconds")]
    assert [f"{ms:,.0f} ms" for ms in found] == [floor, simulated]


def test_a_plot_shows_how_the_time_depends(experts: str, tmp_path: Path) -> None:
    plot = tmp_path / "time.html"
    ends = (experts, "--trainer", "fsdp=2", "--rollout", "tp=2,ep=2")
    done = run(*ends, "--sensitivity", str(plot))
    assert done.exit_code == 0, done.output
    data = plot.read_bytes()
    assert ElementTree.fromstring(data[data.index(b"<svg") :]).tag.endswith("svg")
    for text in (b"whole tensors are gathered", b"watermark, MiB", b"floor"):
        assert text in data


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--costs", "h2d=slow"], "'h2d=slow' is no cost; give us for some of h2d, gather"),
        (["--costs", "nothing=1"], "'nothing=1' is no cost"),
        (["--nics", "5"], "invalid value for '--nics'"),
        (["--gbps", "0"], "invalid value for '--gbps'"),
        (["--gbps", "1e-300"], "invalid value for '--gbps'"),
        (["--gbps", "nan"], "--gbps"),
        (["--latency", "nan"], "--latency"),
        (["--latency", "inf"], "invalid value for '--latency'"),
        (["--page", "nan"], "--page"),
        (["--page", "1025"], "invalid value for '--page'"),
        (["--page", "0.001"], "writes, expected at most 10,000,000; give "),
        (["--watermark", "inf"], "invalid value for '--watermark'"),
        (["--watermark", "0"], "invalid value for '--watermark'"),
        (["--watermark", "1"], "expected at most the watermark of 1048576; raise the watermark"),
        (["--sensitivity", "plot.gif"], "--sensitivity plot.gif: give a name that ends in .svg"),
        (["--trainer", "ddp:dp=8"], "'ddp' is no kind of trainer"),
    ],
)
def test_what_means_nothing_is_refused(arguments: list[str], text: str) -> None:
    done = run(*LLAMA, *arguments)
    assert done.exit_code == 2
    assert text in done.output


def test_what_the_page_shows_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = re.findall(r"^fabric-ray simulate (llama.*)$", PAGE.read_text(), re.MULTILINE)
    assert len(shown) > 2
    monkeypatch.chdir(tmp_path)
    for command in shown:
        # A plot is sixteen of them; the test above has one.
        arguments = shlex.split(command.partition(" --sensitivity")[0])
        assert run(*arguments).exit_code == 0, command


def test_what_is_left_out_of_a_plot_is_only_what_cannot_be() -> None:
    from fabric_ray.cli.sensitivity import points

    push = options.push(*LLAMA[:1], LLAMA[2], LLAMA[4], "bfloat16")
    plan, _ = forecast(push)
    settings = [(w, Setting(watermark=w << 20, cluster=Cluster(page=16 << 20))) for w in (64, 1024)]
    found = points(push, plan, settings)
    assert [at for at, _ in found] == [1024]
    assert isinstance(found[0][1], Simulated)
    assert {*found[0][1].critical} == {*STAGES}
