"""DeepEP's normal calls: each token goes once to each rank that hosts one of its experts.

It is an exchange whose experts are the ranks; which of a rank's experts a token is for, and their
weights, go with it. Ranks sum up their experts' answers, and combine adds up ranks. On several
nodes it is one for high throughput: a token goes once to each node, and one sum comes back.

Tensors may lie on a GPU. How many rows come makes the shapes of results, so that a dispatch that
makes a handle waits for that, as DeepEP's does.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fabric_ray.errors import (
    FabricError,
    HandshakeError,
    InvalidArgument,
    PeerLost,
)
from fabric_ray.kernels import Launcher
from fabric_ray.moe.all_to_all import AllToAll
from fabric_ray.moe.comm import Comm, agree
from fabric_ray.moe.deepep.event import keep
from fabric_ray.moe.deepep.parcels import SUMMED, Form
from fabric_ray.moe.deepep.ways import Handle, handle_fields
from fabric_ray.moe.exchanges import AnyExchange, Exchanges, used_by_graphs
from fabric_ray.moe.gather import Gather
from fabric_ray.moe.tokens import Dispatched

_LEAST_TOKENS = 128


@dataclass
class _Lane:
    """An exchange, and the ranks whose answers it can take."""

    exchange: AnyExchange
    handle: Handle | None = None
    taken: int = 0
    """When, counted in dispatches."""
    relied: Handle | None = None
    """By which rows were taken that a device didn't count yet."""

    @property
    def on_device(self) -> bool:
        return self.exchange.asynchronous

    @property
    def captured(self) -> bool:
        """Whether a CUDA graph has calls of the exchange."""
        return isinstance(self.exchange, AllToAll) and self.exchange.captured

    def receive(self, rows: int | None) -> Dispatched:
        """What comes; of a device, the host waits for the number of rows if it isn't known."""
        exchange = self.exchange
        if not isinstance(exchange, AllToAll) or not exchange.asynchronous:
            return exchange.dispatch_recv()
        if rows is not None:
            return exchange.dispatch_recv(counts=[rows])
        got = exchange.dispatch_recv(counts=exchange.arriving())
        # Tokens that went nowhere.
        exchange.check(wait=False)
        return got

    def answer(self, y: Tensor, dtype: torch.dtype | None) -> Tensor:
        """The sums of answers ``[rows, width]``."""
        handle, self.handle = self.handle, None
        try:
            self.exchange.combine_send(y)
        except InvalidArgument:
            # Nothing was sent, and the routes are there still.
            self.handle = handle
            raise
        return self.exchange.combine_recv(dtype=dtype)


class Normal:
    """One rank's normal calls.

    Ranks agree on how many tokens they have at most before each dispatch that makes a handle, and
    buffers grow with it; with ``max_tokens`` that is settled, and nothing is gathered. All tensors
    lie on one device, for forms that differ are exchanges that all ranks make together. No call
    goes on without a rank that was lost unless exchanges shrink; over several nodes none does.
    """

    def __init__(
        self,
        exchanges: Exchanges,
        max_tokens: int | None,
        ranks_per_node: int | None = None,
        launcher: Launcher | None = None,
        workers: int = 24,
    ) -> None:
        self._exchanges = exchanges
        self._launcher, self._workers = launcher, workers
        self.ranks_per_node = ranks_per_node or exchanges.comm.size()
        """All, if they are on one node."""
        self.gather = Gather(exchanges)
        self._fixed = max_tokens
        self._room = max_tokens or 0
        self._over_nodes = self.ranks_per_node < exchanges.comm.size()
        self._device: torch.device | None = None
        self._lanes: dict[Form, list[_Lane]] = {}
        self._in_graphs: list[_Lane] = []
        """With less room than lanes have by now."""
        self._counts: dict[int, AllToAll] = {}
        self._taken = 0
        self._last: AnyExchange | None = None
        """The exchange that was sent to last."""

    @property
    def comm(self) -> Comm:
        return self._exchanges.comm

    def reserve(self, tokens: int | FabricError, form: Form | None) -> int:
        """Makes room for as many tokens as any rank has; how many may come here at most.

        Raises:
            InvalidArgument: more than ``max_tokens``; or another device.
            HandshakeError: another rank has tokens of another kind, or failed.
        """
        if form is not None:
            tokens = self._elsewhere(form.device) or tokens
        if self._fixed is not None:
            if isinstance(tokens, FabricError):
                raise tokens
            if tokens > self._fixed:
                raise InvalidArgument(
                    f"{tokens} tokens, and max_tokens is {self._fixed}; send fewer at a time"
                )
            return self._fixed * self.comm.size()
        mine = tokens if isinstance(tokens, FabricError) else _said(tokens, form)
        said = [_heard(one) for one in agree(self.gather, mine) if one is not None]
        kinds = {kind for _, kind in said}
        if len(kinds) > 1:
            raise HandshakeError(f"ranks dispatch different tokens: {sorted(kinds)}", peer="")
        most = max(tokens for tokens, _ in said)
        # Also for a first dispatch in which no rank has tokens.
        if most > self._room or not self._room:
            self._renew(max(_LEAST_TOKENS, 1 << (most - 1).bit_length()))
        return sum(tokens for tokens, _ in said)

    def restart(self) -> None:
        """Begins anew after ranks came back, on all ranks together; handles are good still. Only
        exchanges of CUDA graphs stay: a rank that was left out may have others than the rest."""
        lanes = [*(lane for lanes in self._lanes.values() for lane in lanes), *self._in_graphs]
        there = [lane for lane in lanes if self._exchanges.has(lane.exchange)]
        for lane in lanes:
            lane.handle = lane.relied = None
        self._in_graphs = [lane for lane in there if self._is_in_graphs(lane)]
        gone = [lane.exchange for lane in there if not self._is_in_graphs(lane)]
        gone += [one for one in self._counts.values() if self._exchanges.has(one)]
        self._lanes.clear()
        self._counts.clear()
        self._room = self._fixed or 0
        if self._exchanges.gather is not self.gather:
            self.gather = Gather(self._exchanges)
        for one in gone:
            one.expect_departures()
        if gone:
            # As in _forget; some ranks may be masked still.
            self.comm.all_gather(b"")
            self._exchanges.forget(gone)

    def _is_in_graphs(self, lane: _Lane) -> bool:
        """Whether graphs of any rank have calls of a lane."""
        exchange = lane.exchange
        return isinstance(exchange, AllToAll) and self._exchanges.is_in_graphs(exchange)

    def _forget(self, gone: Sequence[AnyExchange]) -> None:
        """Closes exchanges, on all ranks together."""
        for one in gone:
            one.expect_departures()
        # No rank leaves while another one would log it as lost.
        agree(self.gather, b"")
        self._exchanges.forget(gone)

    def grow(self, max_tokens: int) -> None:
        """Raises ``max_tokens``, on all ranks together."""
        if max_tokens > self._room:
            self._renew(max_tokens)
            self._fixed = max_tokens

    def _renew(self, room: int) -> None:
        """Room for so many tokens of a rank, in other exchanges. Those of CUDA graphs stay: their
        replays give zeros without them.

        Raises:
            Unsupported: some ranks' graphs have calls of an exchange, and the others, which take
                part in replays by calls, would make these in another one. All ranks raise it.
        """
        old = [lane for lanes in self._lanes.values() for lane in lanes]
        said = agree(self.gather, bytes(lane.captured for lane in old)) if old else []
        if len({one for one in said if one is not None}) > 1:
            raise used_by_graphs([r for r, one in enumerate(said) if one and any(one)])
        if old:
            self._forget([lane.exchange for lane in old if not lane.captured])
        self._in_graphs += [lane for lane in old if lane.captured]
        self._lanes.clear()
        self._room = room

    def send(
        self,
        form: Form,
        x: Tensor,
        parts: dict[str, Tensor],
        ranks_of: Tensor,
        handle: Handle | None = None,
        in_rank: Tensor | None = None,
    ) -> tuple[Dispatched, Handle]:
        """Dispatches tokens, and keeps the exchange for their answers. ``in_rank`` goes into the
        handle that is made.

        Raises:
            PeerLost: a rank was lost that was here when the handle was made. The exchange is over
                by then, so that ranks which hear of the loss later stay in step.
        """
        lane = self._lane(form)
        self._last = lane.exchange
        gone = self._follow(lane)
        lane.exchange.dispatch_send(x, ranks_of, **parts)
        # A handle may be used on another stream than its own, and let go of there.
        keep(ranks_of)
        got = lane.receive(None if handle is None else handle.rows)
        self._exchanges.check_whole(lane.exchange)
        if handle is not None:
            self._check_ways(handle, lane, len(got.x))
        if handle is None:
            origin = got.parts["origin"][:, 0] if form.origin else None
            fields: Sequence[Tensor] = ()
            if in_rank is not None:
                fields = handle_fields(
                    in_rank, origin, self.comm.rank(), self._room, self.ranks_per_node
                )
            handle = Handle.made(fields, ranks_of, len(got.x), form.topk, gone)
        lane.handle = handle
        return got, handle

    def read(self, values: Tensor) -> list[int]:
        """Values of what the last :meth:`send` took; waits for a device.

        Raises:
            PeerLost: a device lost a rank meanwhile.
        """
        found: list[int] = values.tolist()
        # The host knew when it received. What it met since is another call's.
        if self._last is not None and self._last.asynchronous:
            self._exchanges.check_whole(self._last)
        return found

    def number(self, tokens: int, device: torch.device) -> Tensor:
        """This rank's tokens by number among all ranks', from 1: int32 ``[tokens, 1]``. The number
        of tokens was reserved."""
        first = self.comm.rank() * self._room + 1
        return torch.arange(first, first + tokens, dtype=torch.int32, device=device)[:, None]

    def counted(self, per_expert: Tensor) -> list[int]:
        """Tokens of each local expert, of what each rank has for all experts ``[experts]``.

        Raises:
            PeerLost: a rank was lost.
        """
        ranks = self.comm.size()
        local = len(per_expert) // ranks
        if local not in self._counts:
            self._counts[local] = self._exchanges.make(
                experts=ranks,
                topk=1,
                hidden=local,
                max_tokens=ranks,
                dtype=torch.int32,
                private_rows=1,
            )
        exchange = self._counts[local]
        self._exchanges.follow(exchange)
        to_each = torch.arange(ranks, dtype=torch.int64, device="cpu")[:, None]
        exchange.dispatch_send(per_expert.cpu().to(torch.int32).view(ranks, local), to_each)
        total = exchange.dispatch_recv().x.sum(0)
        self._exchanges.check_whole(exchange)
        return [int(n) for n in total]

    def receive(self, handle: Handle, y: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Adds up the ranks' answers ``[rows, width]`` to a handle's tokens.

        Routes lie ready after a dispatch with the handle, once. Otherwise they are made again by a
        dispatch of zeros.

        Raises:
            PeerLost: as :meth:`send`, when ways are made again.
        """
        for form, lanes in list(self._lanes.items()):
            for lane in lanes:
                if lane.handle is handle and (form.hidden, form.answers) == (y.shape[1], y.dtype):
                    return self._answered(lane, y[: handle.rows], dtype)
        if y.dtype not in SUMMED:
            raise InvalidArgument(f"answers of {y.dtype} can't be summed; use one of {[*SUMMED]}")
        form = Form(y.shape[1], y.dtype, handle.ranks_of.shape[1], device=y.device)
        nothing = y.new_zeros(handle.tokens, y.shape[1])
        lane = self._lane(form)
        self._follow(lane)
        lane.exchange.dispatch_send(nothing, handle.ranks_of)
        keep(handle.ranks_of)
        self._check_ways(handle, lane, len(lane.receive(handle.rows).x))
        return self._answered(lane, y[: handle.rows], dtype)

    def _answered(self, lane: _Lane, y: Tensor, dtype: torch.dtype | None) -> Tensor:
        sums = lane.answer(y, dtype)
        self._exchanges.check_whole(lane.exchange)
        return sums

    def check(self) -> None:
        """As :meth:`AllToAll.check`, of all exchanges.

        Raises:
            PeerLost: a rank was lost without which sums are incomplete, or in whose place a handle
                has rows.
        """
        for lanes in [*self._lanes.values(), self._in_graphs]:  # others may make more meanwhile
            for lane in lanes:
                lane.exchange.check()
                relied, lane.relied = lane.relied, None
                if relied is not None:
                    self._check_here_with(relied)
        self._exchanges.check_whole()

    def _lane(self, form: Form) -> _Lane:
        """A free exchange, or a second one, or the one that was taken longer ago: every rank
        takes the same, for all make the same calls."""
        if (wrong := self._elsewhere(form.device)) is not None:
            raise wrong
        if self._over_nodes:
            self._check_all_here()
        self._exchanges.check_whole()
        self._device = form.device
        lanes = self._lanes.setdefault(form, [])
        lane = next((lane for lane in lanes if lane.handle is None), None)
        if lane is None and len(lanes) < 2:
            lane = _Lane(self._make(form))
            lanes.append(lane)
        lane = lane or min(lanes, key=lambda one: one.taken)
        self._taken += 1
        lane.taken, lane.handle = self._taken, None
        return lane

    def _elsewhere(self, device: torch.device) -> InvalidArgument | None:
        if self._device in (None, device):
            return None
        return InvalidArgument(
            f"tensors lie on {device}, and those of earlier calls on {self._device}; move them "
            "there, or make another buffer on all ranks"
        )

    def _follow(self, lane: _Lane) -> frozenset[int]:
        """Ranks that take no part any more. A rank that one exchange lost is masked in all others,
        so that their rows have the same places."""
        if isinstance(lane.exchange, AllToAll):
            return self._exchanges.follow(lane.exchange)
        return frozenset(self._exchanges.masked)

    def _check_ways(self, handle: Handle, lane: _Lane, rows: int) -> None:
        """That what came lies where a handle has it; a device says so later."""
        self._check_here_with(handle, lane.exchange)
        if lane.on_device:
            lane.relied = handle
        elif rows != handle.rows:
            raise InvalidArgument(
                f"{rows} rows came, and the handle has {handle.rows}; give the same dispatch's "
                "handle on all ranks"
            )

    def _check_here_with(self, handle: Handle, received: AnyExchange | None = None) -> None:
        for rank, cause in self._exchanges.lacking(received).items():
            if rank not in handle.gone:
                raise PeerLost(
                    f"rank {rank} was here when the handle was made, and takes no part any more: "
                    f"{cause}; its rows are missing, dispatch without the handle",
                    peer=f"rank {rank}",
                )

    def _check_all_here(self) -> None:
        # DeepEP's calls have no place to say whose answers sums over several nodes are without.
        for rank, cause in self._exchanges.masked.items():
            raise PeerLost(
                f"rank {rank} takes no part any more: {cause}; make a new buffer of the ranks "
                "that are left",
                peer=f"rank {rank}",
            )

    def _make(self, form: Form) -> AnyExchange:
        shape: dict[str, Any] = {
            "experts": self.comm.size(),
            "topk": form.width,
            "hidden": form.hidden,
            "max_tokens": self._room,
            "dtype": form.dtype,
            "parts": form.parts,
            "answer_dtype": form.answers,
            "device": form.device,
            "launcher": self._launcher,
        }
        if self.ranks_per_node == self.comm.size():
            return self._exchanges.make(**shape)
        return self._exchanges.make_throughput(
            ranks_per_node=self.ranks_per_node, workers=self._workers, **shape
        )


def _said(tokens: int, form: Form | None) -> bytes:
    return struct.pack("<q", tokens) + repr(form).encode()


def _heard(value: bytes) -> tuple[int, str]:
    if len(value) < 8:
        raise HandshakeError("a rank said nothing of its tokens; run the same release", peer="")
    return struct.unpack_from("<q", value)[0], value[8:].decode(errors="replace")
