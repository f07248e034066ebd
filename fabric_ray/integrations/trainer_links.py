"""Connections of trainers to trainer 0, which leads them: every wait has a deadline.

Collectives of a process group can't be used for this: their timeout is the group's own, it breaks
the group, and it doesn't name the rank that is stuck.
"""

from __future__ import annotations

import ipaddress
import queue
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Annotated, Any, TypeVar

import msgspec

from fabric_ray import rpc
from fabric_ray.decoding import checked_msgpack
from fabric_ray.errors import DecodeError, HandshakeError
from fabric_ray.integrations.trainer_frames import (
    ARRIVES,
    GIVES_UP,
    Call,
    Finished,
    Frame,
    FromFollower,
    Working,
)
from fabric_ray.integrations.vllm_hello import host_towards
from fabric_ray.weights.calls import CallFailure

T = TypeVar("T")

LOST = (OSError, EOFError, DecodeError)
"""What the end of a connection raises."""
ENDED = "its connection ended; see whether its process has ended, or has closed its end"
REFUSED = "its connection was closed, since what it sent can't be decoded"
_KEY = "fabric-ray/trainers/"
_LOOPBACK = "127.0.0.1"
_LOOK_S = 0.1
"""Between looks for trainers that have not connected, and for trainer 0."""
_FRAME_S = 30.0
"""For the rest of a frame that has begun to arrive."""
_CONNECT_S = 5.0
_HELLO_S = 5.0
_SENDERS = 32


class _Address(msgspec.Struct, frozen=True):
    """Where trainer 0 listens."""

    host: str
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    secret: bytes


class Link:
    """One connection."""

    def __init__(self, channel: rpc.Channel) -> None:
        self._channel = channel

    def fileno(self) -> int:
        return self._channel.fileno()

    def send(self, frame: bytes, seconds: float) -> None:
        self._channel.within(seconds)
        self._channel.send(frame)

    def has_frame(self, until: float) -> bool:
        """Whether a frame, or the end, comes before a time of ``time.monotonic()``."""
        return bool(_ready([self], max(0.0, until - time.monotonic())))

    def has_ended(self) -> bool:
        """Whether the other end has closed it; frames of before may still be unread."""
        poll = select.poll()
        poll.register(self._channel, select.POLLRDHUP)
        return bool(poll.poll(0))

    def receive(self, type: type[T]) -> T:
        """A frame that has begun to arrive.

        Raises:
            DecodeError: it is none of that type.
        """
        self._channel.within(_FRAME_S)
        return checked_msgpack(self._channel.receive(), type, "a trainer's frame")

    def close(self) -> None:
        self._channel.close()


class LeaderEnd(rpc.Server):
    """Trainer 0's end.

    Args:
        store: of the trainers' process group; tells them where this is.
        size: of the group.
        timeout: seconds that the store may take.

    Raises:
        TimeoutError: the store takes longer.
    """

    def __init__(self, store: Any, size: int, timeout: float) -> None:
        self._others = range(1, size)
        self._links: dict[int, Link] = {}
        self._lost: dict[int, str] = {}
        self._guard = threading.Lock()
        self._ended = False
        # Connections are made by threads, and used by the thread that leads.
        self._new: dict[int, Link] = {}
        secret = secrets.token_bytes(16)
        host = _host_of(store)
        super().__init__(lambda _: b"", key=secret, bind=_bound(host))
        try:
            address = msgspec.msgpack.encode(_Address(_own_address(host), self.port, secret))
            _within(timeout, lambda: store.set(_key(store, 0), address))
        except BaseException:
            self.close()
            raise

    def send(
        self, ranks: Iterable[int], frame: Frame[Call | Working | Finished], seconds: float
    ) -> None:
        """Sends a frame to trainers that are connected; :meth:`collect` names those that don't take
        it."""
        self._adopt()
        data = frame.encoded()

        def one(rank: int) -> str | None:
            try:
                self._links[rank].send(data, seconds)
            except TimeoutError:
                return f"it did not take a call within {seconds:g} s; see whether it is stuck"
            except LOST:
                return ENDED
            return None

        linked = [rank for rank in ranks if rank in self._links]
        # A trainer that is stuck takes no time from the others.
        with ThreadPoolExecutor(_SENDERS) as pool:
            for rank, cause in zip(linked, pool.map(one, linked), strict=True):
                if cause is not None:
                    self._drop(rank, cause)

    def collect(
        self,
        ranks: Iterable[int],
        run: int,
        number: int,
        deadline: float,
        late: str,
        *,
        type: Any = None,
    ) -> dict[int, Any]:
        """The answers to a call, by rank, or of trainers that come to a run; a :class:`CallFailure`
        in place of each that is lost, gives up or comes too late.

        Args:
            deadline: by ``time.monotonic()``.
            late: the cause where a trainer comes too late.
            type: of the answers.
        """
        answers, waiting = dict[int, Any](), set(ranks)
        while waiting:
            self._adopt()
            links = {self._links[rank]: rank for rank in waiting if rank in self._links}
            unlinked = waiting.difference(links.values())
            if number != ARRIVES:
                answers |= {rank: CallFailure(self._lost.get(rank, ENDED)) for rank in unlinked}
                waiting -= unlinked
                unlinked.clear()
            left = max(0.0, deadline - time.monotonic())
            ready = _ready(links, min(left, _LOOK_S) if unlinked else left)
            for rank in [rank for link, rank in links.items() if link in ready]:
                try:
                    frame = self._links[rank].receive(FromFollower)
                    if frame.run != run or frame.number not in (number, GIVES_UP):
                        continue
                    answers[rank] = frame.word.value(type)
                except LOST as error:
                    cause = f"{REFUSED}: {error}" if isinstance(error, DecodeError) else ENDED
                    self._drop(rank, cause)
                    answers[rank] = CallFailure(cause)
                waiting.discard(rank)
            if not ready and time.monotonic() >= deadline:
                return answers | dict.fromkeys(waiting, CallFailure(late))
        return answers

    def close(self) -> None:
        """Ends all connections, and takes no more."""
        super().close()
        with self._guard:
            self._ended = True
        self._adopt()
        for rank in list(self._links):
            self._drop(rank, ENDED)

    def _serve_channel(self, channel: rpc.Channel) -> None:
        channel.within(_HELLO_S)
        rank = checked_msgpack(channel.receive(), int, "a trainer's rank")
        if rank not in self._others:
            raise DecodeError(f"no other trainer has rank {rank}", what="a trainer's rank")
        with self._guard:
            if not self._ended:
                channel.keep()
                _replace(self._new, rank, Link(channel))

    def _adopt(self) -> None:
        with self._guard:
            new, self._new = self._new, {}
        for rank, link in new.items():
            if _replace(self._links, rank, link):
                self._lost.pop(rank, None)

    def _drop(self, rank: int, cause: str) -> None:
        if (link := self._links.pop(rank, None)) is not None:
            link.close()
            self._lost[rank] = cause


class FollowerEnd:
    """Another trainer's end.

    Args:
        store: of the trainers' process group.
        rank: of this trainer.
        timeout: seconds that the store may take.

    Raises:
        TimeoutError: the store takes longer.
    """

    def __init__(self, store: Any, rank: int, timeout: float) -> None:
        self._store, self._rank = store, rank
        self._key = _within(timeout, lambda: _key(store, rank))
        self._address: _Address | None = None
        self._link: Link | None = None

    def connect(self, until: float) -> Link:
        """The connection to trainer 0, which is made anew when it was lost.

        Args:
            until: by ``time.monotonic()``.

        Raises:
            TimeoutError: trainer 0 did not listen in time.
            OSError: it listens no more.
        """
        while self._link is None:
            self._address = self._address or self._found(until)
            if self._address is not None:
                self._link = self._connected(self._address)
            if self._link is None:
                if time.monotonic() > until:
                    raise TimeoutError
                time.sleep(_LOOK_S)
        return self._link

    def close(self) -> None:
        """Ends the connection."""
        if self._link is not None:
            self._link.close()
            self._link = None

    def _found(self, until: float) -> _Address | None:
        def look() -> bytes | None:
            return self._store.get(self._key) if self._store.check([self._key]) else None

        data = _within(max(_LOOK_S, until - time.monotonic()), look)
        return None if data is None else checked_msgpack(data, _Address, "an address")

    def _connected(self, address: _Address) -> Link | None:
        hosts = dict.fromkeys((address.host, _host_of(self._store) or _LOOPBACK, _LOOPBACK))
        refused = 0
        for host in hosts:
            try:
                channel = rpc.open_channel(
                    host, address.port, key=address.secret, timeout=_CONNECT_S
                )
                channel.send(msgspec.msgpack.encode(self._rank))
                return Link(channel)
            except (ConnectionRefusedError, HandshakeError):
                refused += 1
            except LOST:
                pass
        if refused == len(hosts):
            raise ConnectionRefusedError("trainer 0 has closed its end")
        return None


def _replace(links: dict[int, Link], rank: int, link: Link) -> bool:
    """Puts a connection in a rank's place, or closes it where the rank's own has not ended."""
    old = links.get(rank)
    if old is not None and not old.has_ended():
        link.close()
        return False
    if old is not None:
        old.close()
    links[rank] = link
    return True


def store_of(group: Any) -> Any:
    """The store of a process group; ``None`` is the process's first."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_process_group_store(group or distributed_c10d._get_default_group())


def _key(store: Any, rank: int) -> str:
    """Names the next end that a rank makes, and those that the other ranks make with it."""
    return f"{_KEY}{store.add(f'{_KEY}made by {rank}', 1)}"


def _within(seconds: float, call: Callable[[], T]) -> T:
    """Makes a call of a store. Its client waits without limit for a host that is stopped."""
    answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put((call(), None))
        except Exception as error:
            answers.put((None, error))

    threading.Thread(target=run, name="fabric-store", daemon=True).start()
    try:
        value, error = answers.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"the store did not answer within {seconds:g} s") from None
    if error is not None:
        raise error
    result: T = value
    return result


def _ready(links: Iterable[Link], seconds: float) -> list[Any]:
    """Those of the connections at which there is something to read, or the end."""
    given: list[Any] = list(links)
    return wait(given, seconds)


def _host_of(store: Any) -> str | None:
    """Of a store's server, as this process reaches it."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "host", None)


def _bound(host: str | None) -> list[str]:
    """Where to listen: on loopback if the store does, or else everywhere."""
    with suppress(ValueError):
        if host and (host == "localhost" or ipaddress.ip_address(host).is_loopback):
            return [host]
    return []


def _own_address(host: str | None) -> str:
    """This host's address, as those reach it that reach ``host``."""
    with suppress(OSError):
        return host_towards(host or socket.gethostname())
    return _LOOPBACK
