"""Measure the KV cache beside engines that aren't disaggregated, NIXL, and plain signals."""

from __future__ import annotations

from typing import Annotated

import typer

from benchmarks.kvcache.load import Load, Outcomes, row
from benchmarks.kvcache.load import load as measure_load
from benchmarks.kvcache.ttft import ttft as measure_ttft
from benchmarks.kvcache.watcher import watcher as measure_watcher
from fabric_ray.bench.record import Quick, Resume, Turns, recorded
from fabric_ray.bench.results import ContenderError

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)


@app.command()
def ttft(
    lengths: Annotated[str, typer.Option(help="Tokens of prompts, commas between")] = "",
    turns: Turns = 5,
    chunk: Annotated[int, typer.Option(min=1, help="Tokens of a pass")] = 1024,
    threads: Annotated[int, typer.Option(min=1, help="Of torch, in each process")] = 1,
    quick: Quick = False,
    resume: Resume = None,
) -> None:
    """Time to the first token, disaggregated and not, and what a layer takes."""
    chosen = lengths or ("64,128" if quick else "128,512,1024,2048,4096")
    tokens = [int(one) for one in chosen.split(",")]
    with recorded("kvcache-ttft", resume) as results:
        measure_ttft(tokens, turns, results, chunk_tokens=chunk, threads=threads)


@app.command()
def watcher(
    turns: Turns = 5,
    samples: Annotated[int, typer.Option(min=20, help="Of each way in a turn")] = 4000,
    resume: Resume = None,
) -> None:
    """From a store to the watched word to the first post, with tails."""
    with recorded("kvcache-watcher", resume) as results:
        measure_watcher(turns, samples, results)


@app.command()
def load(
    requests: Annotated[int, typer.Option(min=1, help="In all")] = 3000,
    concurrent: Annotated[int, typer.Option(min=1, help="At a time")] = 1000,
    kill_every: Annotated[float, typer.Option(help="Seconds between killed prefillers")] = 10.0,
    prefillers: Annotated[int, typer.Option(min=1)] = 2,
    decoders: Annotated[int, typer.Option(min=1)] = 2,
    resume: Resume = None,
) -> None:
    """Many requests at once, some cancelled, prefillers killed: all end, none wrong."""
    asked = Load(
        requests=requests,
        concurrent=concurrent,
        kill_every=kill_every,
        prefillers=prefillers,
        decoders=decoders,
    )
    outcomes = Outcomes()
    with recorded("kvcache-load", resume) as results:
        try:
            measure_load(asked, outcomes, results.say)
        finally:
            if outcomes.seconds:
                results.add(row(asked, outcomes))


@app.command()
def vllm(
    lengths: Annotated[str, typer.Option(help="Tokens of prompts, commas between")] = "",
    concurrent: Annotated[str, typer.Option(help="Requests at a time, commas between")] = "",
    turns: Turns = 7,
    tokens: Annotated[int, typer.Option(min=1, help="Of each answer")] = 16,
    requests: Annotated[int, typer.Option(min=1, help="Of a turn, at least")] = 10,
    idle: Annotated[float, typer.Option(min=1.0, help="Seconds of a turn without any")] = 5.0,
    pairs: Annotated[str, typer.Option(help="Connectors, commas between")] = "fabric-ray,nixl",
    quick: Quick = False,
    resume: Resume = None,
) -> None:
    """vLLM servers on CPUs: a plain one, pairs by this project's connector, pairs by NIXL's."""
    from benchmarks.kvcache.vllm import loads, measure
    from benchmarks.kvcache.vllm_setups import NIXL, OURS, absent, block_bytes, serving, versions
    from tests.adapters.vllm import servers

    wanted = loads(
        _numbers(
            lengths or ("64" if quick else "64,512,1500"), "--lengths", servers.CONTEXT - tokens
        ),
        _numbers(concurrent or ("1,4" if quick else "1,16"), "--concurrent", 64),
        requests,
    )
    named = pairs.split(",")
    if unknown := set(named) - {OURS, NIXL}:
        raise typer.BadParameter(
            f"got {', '.join(sorted(unknown))}, expected {OURS}, {NIXL} or both",
            param_hint="--pairs",
        )
    if servers.MISSING is not None:
        raise typer.BadParameter(servers.MISSING)
    try:
        found = versions()
    except ContenderError as error:
        raise typer.BadParameter(str(error)) from error
    options = {**found, "turns": str(turns), "tokens": str(tokens)}
    with recorded("kvcache-vllm", resume, options=options, absent=absent(list(found))) as results:
        results.say("starting servers, which takes minutes")
        with serving([name for name in named if name == OURS or name in found]) as ways:
            measure(
                ways,
                wanted,
                turns,
                results,
                tokens=tokens,
                block_bytes=block_bytes(),
                idle=idle,
            )


def _numbers(text: str, option: str, most: int) -> list[int]:
    try:
        found = [int(one) for one in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 < one <= most for one in found):
        raise typer.BadParameter(
            f"got {text!r}, expected numbers from 1 to {most} with commas between",
            param_hint=option,
        )
    return found


if __name__ == "__main__":
    app()
