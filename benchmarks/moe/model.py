"""The time of an exchange, from its bytes, launches, meets and handshakes: arithmetic alone.

A time is the sum of what follows one another on the way to the result, for routes that are even
over all ranks. Every figure of a machine has its source in ``machine.py``; no figure is fitted to a
measurement of an exchange or to an aim. Nothing here has been compared with a GPU.
"""

from __future__ import annotations

from math import ceil, comb, log2

import msgspec

from benchmarks.moe.machine import (
    GPUS,
    MOVE_LOADS,
    PACK_LOADS,
    PUBLISHED,
    TERMS_AHEAD,
    THREADS,
    Gpu,
    Machine,
)
from benchmarks.moe.shape import NODES, Shape

WARPS = THREADS // 32
#: Routes that one block counts, in tiles (``fabric_ray/kernels/moe.py``).
_TILE, _FEW_TILES = 256, 4
#: Bytes that a multiprocessor hands to L2 in a cycle; assumed.
_STORE = 64
#: Of the high-throughput mode, by default (``fabric_ray/moe/throughput.py``).
WORKERS, CHUNK, RING_CHUNKS, CHANNELS = 24, 32, 4, 2
#: Bytes ahead of a token of the high-throughput mode, and for each of its experts.
_HEAD, _OF_EXPERT = 16, 8
_OFFER = 16


class Call(msgspec.Struct, frozen=True):
    """One half of an exchange, as one rank sees it."""

    launches: int
    meets: int
    """Of all blocks of a launch."""
    hbm: float
    """Bytes that kernels read and write in this GPU's memory."""
    nvlink: float
    """Bytes to ranks of this node."""
    nic: float
    """Bytes to ranks of other nodes."""
    messages: int
    """Writes and counts to one peer."""
    terms: dict[str, float]
    """Microseconds of what follows one another."""

    @property
    def us(self) -> float:
        return sum(self.terms.values())

    @property
    def bound(self) -> str:
        """The longest term."""
        return max(self.terms, key=lambda name: self.terms[name])


def routes_nbytes(shape: Shape) -> int:
    """A block of routes: four words, and one for each expert of the peer."""
    return 4 * (4 + shape.experts // shape.ranks)


def pair_nbytes(shape: Shape, rows: float) -> tuple[float, float]:
    """Bytes from one rank to another with ``rows`` for it, and of its answers back, blocks
    included."""
    sent = routes_nbytes(shape) + rows * _aligned(shape.row_nbytes)
    offer = _OFFER if rows > shape.private_rows else 0
    return sent, offer + rows * _aligned(shape.back_nbytes)


def messages(shape: Shape, rows: float) -> int:
    """Writes and counts of a dispatch from one rank to another: routes, rows, a fence, the other
    rows and the offer for them. A combine has one."""
    return 3 + 2 * (rows > shape.private_rows)


def spread(experts: int, topk: int, groups: int) -> float:
    """How likely a token has an expert in one of so many equal groups."""
    return 1 - comb(experts - experts // groups, topk) / comb(experts, topk)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 16) * 16


def meets(shape: Shape) -> tuple[int, int, int, int]:
    """Meets of the four launches: ``dispatch_send`` and ``_recv``, ``combine_send`` and
    ``_recv``. Casts, and the ways of rows, come beside other steps."""
    return (5 if shape.rows > _TILE * _FEW_TILES else 2), 2, 2, 2


def direct(
    shape: Shape, m: Machine, *, casts: bool = True, rows: float | None = None
) -> tuple[Call, Call]:
    """Dispatch and combine in four launches, direct stores within a node. ``rows`` of a rank are
    fewer than its routes where some routes are none."""
    rows = rows or shape.rows
    pair, near = rows / shape.ranks, min(shape.ranks, m.per_node) - 1
    far = shape.ranks - 1 - near
    row, back = _aligned(shape.row_nbytes), _aligned(shape.back_nbytes)
    stored = min(pair, shape.private_rows)
    later = pair - stored
    all_meets = meets(shape)
    l2, hbm = m.cost("l2 cycles"), m.cost("hbm cycles")
    meet, tell, word, host = (m.cost(name) for name in ("meet", "tell", "word", "host"))

    route = _route(shape, m)
    # Beside routes and what follows from them; each warp has one block of elements at a time: they
    # are read, their largest is found by five shuffles, and they are read again. Eight ways of L1's
    # length for that are assumed.
    blocks_of = ceil(shape.tokens * shape.scales / (m.gpu.sms * WARPS))
    cast = blocks_of * (hbm + 8 * m.cost("l1 cycles")) if casts else 0.0
    begin = m.cost("launch") + word
    told = begin + route + tell
    ways = told + host + word
    tiles = ceil(shape.rows / _TILE)
    ordered = told + ceil(tiles / (1 if tiles <= _FEW_TILES else m.gpu.sms)) * 2 * l2
    ready = max(ordered, ways, begin + cast)
    packed = _pack(shape, m, rows, near * stored * row)
    first = ready + (all_meets[0] - 1) * meet + packed + m.cost("peer fence") + meet + tell
    # Rows of this node beyond the private ones: the engine copies them.
    offers = told + host + shape.ranks * m.cost("post") + 2 * (m.cost("nic") + host)
    copied = 0.0
    if near and later:
        calls = near * m.cost("copy call")
        copied = calls + m.cost("copy") + max(0.0, near * later * row / m.nvlink - calls)
    if far:
        posts = 2 * far * m.cost("post")
        wire = posts + far * pair * row / m.nic + m.cost("nic")
    else:
        wire = near * m.cost("shm")
    sent = max(first + host, offers if later else 0.0)
    gathered = ceil(rows / (m.gpu.sms * WARPS)) * (4 * l2 + log2(2 * shape.ranks) * l2)
    chunks = (2 * (shape.ranks - 1) + 1) * 1.5 * m.cost("l1 cycles")
    handed = gathered + chunks + m.stream(rows * row * 2, MOVE_LOADS)
    dispatch = Call(
        2,
        sum(all_meets[:2]),
        hbm=shape.tokens * shape.hidden * (2 + 1 + 1) + rows * row * 3,
        nvlink=near * pair * row,
        nic=far * pair_nbytes(shape, pair)[0],
        messages=messages(shape, pair),
        terms={
            "launch and last exchange": begin,
            "routes counted and told": route + tell,
            "tables and casts": ready - told,
            "pack and NVLink stores": first - ready,
            "offers awaited": sent - first,
            **_longer({"copies by the engine": copied, "NIC": wire}),
            "host and word": 2 * host + word,
            "hand out": handed + 2 * meet + tell,
        },
    )
    moved = max(
        m.stream(rows * back, MOVE_LOADS), near * pair * back / m.nvlink, rows * back / m.hbm
    )
    back_wire = near * m.cost("shm")
    if far:
        back_wire = far * m.cost("post") + far * pair * back / m.nic + m.cost("nic")
    summed = ceil(shape.tokens / m.gpu.sms) * (
        4 * l2 + ceil(shape.back_nbytes / 16 / THREADS) * hbm
    )
    summed = max(summed, m.stream(rows * back, MOVE_LOADS))
    combine = Call(
        2,
        sum(all_meets[2:]),
        hbm=rows * back * 3 + shape.tokens * back,
        nvlink=near * pair * back,
        nic=far * pair_nbytes(shape, pair)[1],
        messages=1,
        terms={
            "launch": m.cost("launch"),
            "room asked for": tell + host + word,
            "answers packed and stored": gathered + moved + m.cost("peer fence") + 2 * meet + tell,
            "NIC": host + back_wire,
            "host and word": 2 * host + word,
            "sum": summed + 2 * meet + tell,
        },
    )
    return dispatch, combine


def normal(shape: Shape, m: Machine) -> tuple[Call, Call]:
    """DeepEP's normal calls within a node: each token once to each rank that has an expert of it;
    ranks are the experts of an exchange."""
    rows = shape.tokens * shape.ranks * spread(shape.experts, shape.topk, shape.ranks)
    sizes = msgspec.structs.replace(shape, experts=shape.ranks)
    dispatch, combine = direct(sizes, m, casts=False, rows=rows)
    # Sizes are agreed on before, and the number of rows is read back after it.
    around = 4 * m.cost("shm") + 2 * m.cost("host") + m.cost("word")
    terms = {"sizes agreed on, rows read back": around} | dispatch.terms
    return msgspec.structs.replace(dispatch, terms=terms), combine


def two_nodes(shape: Shape, m: Machine, workers: int = WORKERS) -> tuple[Call, Call]:
    """The high-throughput mode: stages that run side by side, of which the slowest takes the time,
    behind one chunk's way through all of them."""
    node, rank = (spread(shape.experts, shape.topk, n) for n in (NODES, shape.ranks))
    tokens, per_node = shape.tokens, shape.ranks // NODES
    meta = _HEAD + _OF_EXPERT * shape.topk
    row, back = _aligned(shape.row_nbytes) + meta, _aligned(shape.back_nbytes) + _HEAD
    out = tokens * node * (NODES - 1)
    come = tokens * shape.ranks * rank
    hbm, l2 = m.cost("hbm cycles"), m.cost("l2 cycles")
    stored = shape.topk / shape.ranks / rank * row / _STORE / m.gpu.ghz / 1e3

    def each(latency: float, nbytes: float) -> float:
        """A token of a block whose warps have one each: waiting for it, or reading it."""
        return max(latency / WARPS, nbytes / _STORE / m.gpu.ghz / 1e3)

    # Parts of a token follow one another: its values, and its scales.
    units = ceil(shape.row_nbytes / 16 / 32)
    packed = each((_rounds(units, MOVE_LOADS) + 1) * hbm + l2, row)
    taken = each((_rounds(units, PACK_LOADS) + 1) * hbm + l2, row) + stored
    units = ceil(shape.back_nbytes / 16 / 32)
    terms = {
        "answers": shape.topk / shape.ranks / rank,
        "node sums": per_node * rank / node,
        "sums": NODES,
    }
    sums = {
        name: each(units * ceil(n / TERMS_AHEAD) * (hbm + l2), n * back)
        for name, n in terms.items()
    }
    passing = tokens * node * NODES
    flat = {"answers": come, "node sums": passing, "sums": tokens}
    job = m.cost("word") + m.cost("tell") + m.cost("host")

    def jobs(n: float) -> float:
        """Microseconds of the host's thread; a job of a chunk, and a look for it."""
        return 2 * n / CHUNK * m.cost("host")

    def stage(
        nbytes: float,
        token: float,
        to_nic: float,
        to_node: float,
        work: float,
        host: float,
        hops: int,
    ) -> dict[str, float]:
        """The stages, and one chunk's way over so many hops."""
        way = CHUNK * token + CHUNK * nbytes / m.nic + m.cost("nic") + 3 * job
        ring = CHANNELS * RING_CHUNKS * CHUNK * nbytes / way
        return {
            "first chunk": m.cost("launch") + hops * way,
            **_longer({
                "NIC": to_nic / m.nic,
                "NVLink": to_node / m.nvlink,
                "rings": to_nic / min(ring, m.nic),
                "workers": work / workers,
                "host's jobs": host,
            }),
        }  # fmt: skip

    near = tokens * rank * (per_node - 1) * NODES
    dispatch = Call(
        2, 0,
        hbm=tokens * row * 2 + come * row + shape.rows * row,
        nvlink=near * row, nic=out * row, messages=ceil(out / CHUNK),
        terms=stage(row, packed, out * row, near * row, passing * packed + come * taken,
                    jobs(passing + come), 2),
    )  # fmt: skip
    work = sum(sums[name] * flat[name] for name in sums)
    combine = Call(
        2, 0,
        hbm=(shape.rows + come + 2 * passing) * back + tokens * 4 * shape.hidden * 2,
        nvlink=near * back, nic=out * back, messages=ceil(out / CHUNK),
        terms=stage(back, sums["node sums"], out * back, near * back, work,
                    jobs(sum(flat.values())), 3),
    )  # fmt: skip
    return dispatch, combine


def _rounds(units: int, loads: int) -> int:
    """Times that a thread waits for loads: so many at a time, then half as many for the rest."""
    return units // loads + (units % loads).bit_count()


def _longer(terms: dict[str, float]) -> dict[str, float]:
    """The longest of what runs side by side."""
    name = max(terms, key=lambda name: terms[name])
    return {name: terms[name]}


def _route(shape: Shape, m: Machine) -> float:
    """Rows for each expert counted and summed."""
    tiles = ceil(shape.rows / _TILE)
    tile = m.cost("hbm cycles") + shape.topk * m.cost("l1 cycles") + _TILE * m.cost("scan cycles")
    # A few tiles are one block's; many are all blocks', which meet twice.
    counted = (
        tiles * tile if tiles <= _FEW_TILES else ceil(tiles / m.gpu.sms) * tile + 2 * m.cost("meet")
    )
    return counted + (4 + tiles / 8) * m.cost("l2 cycles")


def _pack(shape: Shape, m: Machine, rows: float, to_peers: float) -> float:
    """A block has one token at a time, and stores it for each of its experts."""
    row = _aligned(shape.row_nbytes)
    stores = rows / shape.tokens * row / _STORE / m.gpu.ghz / 1e3
    at_once = THREADS * PACK_LOADS * 16
    each = (3 + log2(shape.ranks)) * m.cost("l2 cycles") + ceil(row / at_once) * m.cost(
        "hbm cycles"
    )
    here = (rows * row - to_peers + shape.tokens * row) / m.hbm
    return max(ceil(shape.tokens / m.gpu.sms) * (each + stores), here, to_peers / m.nvlink)


class Prediction(msgspec.Struct, frozen=True):
    """A case on a GPU, from its best to its worst."""

    case: str
    gpu: str
    dispatch: tuple[Call, Call]
    combine: tuple[Call, Call]


CASES = {
    **{f"ll {n}": Shape(ranks=n, tokens=128) for n in (8, 16, 32, 64)},
    "normal 8": Shape(ranks=8, tokens=4096),
    "nodes 16": Shape(ranks=16, tokens=4096),
}


def predict(case: str, gpu: Gpu, shape: Shape | None = None, workers: int = WORKERS) -> Prediction:
    """A case of :data:`CASES`, or another shape in its place."""
    kind, given = case.split()[0], shape or CASES[case]
    both = []
    for at in (0.0, 1.0):
        machine = Machine(gpu, at)
        if kind == "nodes":
            both.append(two_nodes(given, machine, workers))
        else:
            both.append(normal(given, machine) if kind == "normal" else direct(given, machine))
    (best, worst) = both
    return Prediction(case, gpu.name, (best[0], worst[0]), (best[1], worst[1]))


def table() -> list[str]:
    """The predictions, dispatch / combine in microseconds, beside what others published."""
    lines = ["| exchange | H100 | A100 | bound by | published |", "|---|---|---|---|---|"]
    names = {"ll": "128 tokens, EP", "normal": "4096 tokens, EP", "nodes": "4096, two nodes, EP"}
    for case in CASES:
        kind, ranks = case.split()
        on = [predict(case, gpu) for gpu in GPUS]
        times = [
            " / ".join(
                f"{best.us:.0f} to {worst.us:.0f}" for best, worst in (p.dispatch, p.combine)
            )
            for p in on
        ]
        bound = " / ".join(half[1].bound for half in (on[0].dispatch, on[0].combine))
        said = [
            f"{row.who} {row.dispatch:g} / {row.combine:g}".replace("nan", "-")
            for row in PUBLISHED
            if row.case == case
        ]
        lines.append(
            f"| {names[kind]}{ranks} | {' | '.join(times)} | {bound} | {'; '.join(said)} |"
        )
    return lines
