"""Measure KV cache transfer beside peers and floors."""

from __future__ import annotations

from typing import Annotated

import typer

from benchmarks.kvcache import transfers
from benchmarks.kvcache.load import Load
from benchmarks.kvcache.load import load as measure_load
from benchmarks.kvcache.ttft import ttft as measure_ttft
from benchmarks.kvcache.watcher import watcher as measure_watcher
from benchmarks.sheets import Json, Markdown, Output, Quick, Turns

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)


@app.command()
def ttft(
    lengths: Annotated[str, typer.Option(help="Tokens of prompts, commas between")] = "",
    turns: Turns = 5,
    chunk: Annotated[int, typer.Option(min=1, help="Tokens of a pass")] = 1024,
    threads: Annotated[int, typer.Option(min=1, help="Of torch, in each process")] = 1,
    quick: Quick = False,
    json: Json = None,
    markdown: Markdown = False,
) -> None:
    """Time to the first token, disaggregated and not, and what a layer takes."""
    chosen = lengths or ("64,128" if quick else "128,512,1024,2048,4096")
    out = Output("kvcache-ttft", json, markdown=markdown)
    out.add(
        lambda: measure_ttft(
            [int(one) for one in chosen.split(",")],
            turns,
            out.say,
            chunk_tokens=chunk,
            threads=threads,
        )
    )
    out.end()


@app.command()
def pages(
    turns: Turns = 7, quick: Quick = False, json: Json = None, markdown: Markdown = False
) -> None:
    """Pages of 32 and 64 KiB by the KV cache's path, beside the copy floor."""
    out = Output("kvcache-pages", json, markdown=markdown)
    out.add(lambda: transfers.pages(turns, out.say, quick=quick))
    out.end()


@app.command()
def r1(
    turns: Turns = 7,
    quick: Quick = False,
    peers: Annotated[bool, typer.Option(help="NIXL and Mooncake, where they are")] = True,
    json: Json = None,
    markdown: Markdown = False,
) -> None:
    """A prompt of 4096 tokens of DeepSeek-R1, beside NIXL and Mooncake."""
    out = Output("kvcache-r1", json, markdown=markdown)
    out.add(lambda: transfers.r1(turns, out.say, quick=quick, peers=peers))
    out.end()


@app.command()
def watcher(
    turns: Turns = 5,
    samples: Annotated[int, typer.Option(min=20, help="Of each way in a turn")] = 4000,
    json: Json = None,
    markdown: Markdown = False,
) -> None:
    """From a store to the watched word to the first post, with tails."""
    out = Output("kvcache-watcher", json, markdown=markdown)
    out.add(lambda: measure_watcher(turns, samples, out.say))
    out.end()


@app.command()
def load(
    requests: Annotated[int, typer.Option(min=1, help="In all")] = 3000,
    concurrent: Annotated[int, typer.Option(min=1, help="At a time")] = 1000,
    kill_every: Annotated[float, typer.Option(help="Seconds between killed prefillers")] = 10.0,
    prefillers: Annotated[int, typer.Option(min=1)] = 2,
    decoders: Annotated[int, typer.Option(min=1)] = 2,
    json: Json = None,
    markdown: Markdown = False,
) -> None:
    """Many requests at once, some cancelled, prefillers killed: all end, none wrong."""
    asked = Load(
        requests=requests,
        concurrent=concurrent,
        kill_every=kill_every,
        prefillers=prefillers,
        decoders=decoders,
    )
    out = Output("kvcache-load", json, markdown=markdown)
    out.add(lambda: measure_load(asked, out.say)[0])
    out.end()


if __name__ == "__main__":
    app()
