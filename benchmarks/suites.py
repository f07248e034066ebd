"""Suites by name: which cases a user's question turns into."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import msgspec

from benchmarks.harness.cases import KIB, MIB, REGION, WINDOW, Case, Link

# 4096 tokens of DeepSeek-R1: 61 layers, 32 pages of 128 tokens, 576 values of 2 bytes a token.
R1_LAYERS, R1_PAGES, R1_TOKENS, R1_WIDTH = 61, 32, 128, 576
R1_LABEL = "deepseek-r1-4k"

_LINKS: tuple[Link, ...] = ("shm", "tcp")
_NIC_LINKS: tuple[Link, ...] = ("tcp", "shm")


def write(quick: bool) -> Iterator[Case]:
    """Single writes of 4 KiB to 256 MiB, cold and hot, over shared memory and over TCP."""
    few = (4 * KIB, MIB)
    cold = (4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 32 * MIB, 256 * MIB)
    hot = {"shm": (4 * KIB, 64 * KIB, 256 * KIB, MIB), "tcp": (64 * KIB, MIB)}
    region = 64 * MIB if quick else REGION
    for link in _LINKS:
        for size in few if quick else cold:
            yield Case("write", "write", link, bytes=size, region=region)
        for size in few if quick else hot[link]:
            yield Case("write", "write", link, bytes=size, region=region, temperature="hot")
    for size in () if quick else (MIB, 32 * MIB):
        yield Case("write", "write", "shm", bytes=size, memory="ordinary")


def pages(quick: bool) -> Iterator[Case]:
    """Shuffled pages in one call: into library memory, over TCP, and into ordinary memory."""
    sizes = (KIB, 16 * KIB) if quick else (KIB, 8 * KIB, 16 * KIB, 64 * KIB)
    shared: dict[str, Any] = {"region": 64 * MIB if quick else REGION}
    for count, page in product((1024,) if quick else (1024, 4096), sizes):
        yield Case("pages", "pages", "shm", bytes=page, pages=count, **shared)
    for page in sizes:
        yield Case("pages", "pages", "shm", bytes=page, pages=1024, memory="ordinary", **shared)
    for page in sizes:
        yield Case("pages", "pages", "tcp", bytes=page, pages=1024, **shared)


def latency(quick: bool) -> Iterator[Case]:
    """An 8-byte counted write into a receiver that waits, by every way of waiting."""
    more = () if quick else ("callback-native", "callback-python", "asyncio")
    for link, waiter in product(_LINKS, ("spin-native", "poll-python", "parked", *more)):
        yield _small("latency", link, waiter=waiter)


def rate(quick: bool) -> Iterator[Case]:
    """Small counted writes per second from one thread, with as many in flight as one likes."""
    for link, language in product(_LINKS, ("native", "python")):
        yield _small("rate", link, language=language)


def _small(suite: str, link: Link, **more: Any) -> Case:
    operation = "latency" if "waiter" in more else "rate"
    return Case(suite, operation, link, bytes=8, temperature="hot", region=64 * KIB, **more)


def nics(quick: bool) -> Iterator[Case]:
    """Writes with 64 in flight, over the providers that libfabric has without a NIC.

    The memory is that of 64 writes, which `fi_rma_bw` walks through, too (cold; before 1.19 it
    stays on the first, hot).
    """
    for link, size in product(_NIC_LINKS, (64 * KIB, MIB) if quick else (64 * KIB, MIB, 4 * MIB)):
        case = Case("nics", "window", link, bytes=size, region=WINDOW * size)
        yield case
        if not quick:
            yield msgspec.structs.replace(case, temperature="hot")


def tent(quick: bool) -> Iterator[Case]:
    """What TENT's evaluation moves: blocks of 4 KiB to 64 MiB from two threads, a prompt's KV
    cache. Over one link, where no policy has a choice; over unequal rails see `rails`."""
    blocks = (4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
    for link in _NIC_LINKS:
        for size in blocks[:5:2] if quick else blocks:
            region = max(64 * MIB, 8 * size) if quick else 8 * blocks[-1]
            yield Case("tent", "flight", link, bytes=size, window=8, submitters=2, region=region)
        if not quick:
            yield _r1("tent", link)


def _r1(suite: str, link: Link, aim: str = "") -> Case:
    count, size = R1_LAYERS * R1_PAGES, R1_TOKENS * R1_WIDTH * 2
    shared: dict[str, Any] = {"region": count * size, "label": R1_LABEL, "aim": aim}
    return Case(suite, "pages", link, bytes=size, pages=count, **shared)


def healing(quick: bool) -> Iterator[Case]:
    """What retry and health cost where nothing fails: 64 writes in flight, with and without."""
    shared: dict[str, Any] = {"name_prefix": "fabric-rust"}
    for link, size in product(_NIC_LINKS, (KIB, 64 * KIB) if quick else (KIB, 64 * KIB, MIB)):
        yield Case("healing", "flight", link, bytes=size, region=WINDOW * size, **shared)


def kv(quick: bool) -> Iterator[Case]:
    """1024 pages of 32 and 64 KiB by the KV cache's path, and a prompt of DeepSeek-R1."""
    count, region = (64, 16 * MIB) if quick else (1024, REGION)
    for link, size in product(_LINKS, (32 * KIB, 64 * KIB)):
        aim = "0.9 of floor" if link == "shm" else ""
        yield Case("kv", "pages", link, bytes=size, pages=count, region=region, aim=aim)
    for link in _LINKS[:1] if quick else _LINKS:
        yield _r1("kv", link, "ahead of peers")


def observe(quick: bool) -> Iterator[Case]:
    """What the flight recorder costs, from the smallest write to the largest; two of them are
    left out of a quick run."""
    shared: dict[str, Any] = {"aim": "0.99 of floor", "name_prefix": "recorder"}
    for link in _LINKS:
        yield _small("observe", link, waiter="spin-native", **shared)
        for label in ("", "batch"):
            yield _small("observe", link, language="native", label=label, **shared)
        shared["region"] = 64 * MIB
        yield Case("observe", "pages", link, bytes=16 * KIB, pages=64, **shared)
        for size in () if quick else (64 * KIB, 8 * MIB):
            yield Case("observe", "write", link, bytes=size, **shared)
        del shared["region"]


_EVERY = (write, pages, latency, rate, nics, tent, healing, kv, observe)
SUITES: dict[str, Callable[[bool], Iterator[Case]]] = {suite.__name__: suite for suite in _EVERY}
"""In the order in which a run takes them; True asks for the few cases that `--quick` runs."""
DEFAULT = tuple(SUITES)[:7]
"""Those that a run takes if it is asked for none."""
