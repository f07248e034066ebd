"""The visiting doctor: connects to the doctor of another host and tests all links between them."""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from fabric_ray import __version__
from fabric_ray.doctor import line as messages
from fabric_ray.doctor.devices import nowhere, survey
from fabric_ray.doctor.examine import links
from fabric_ray.doctor.findings import Finding, Report, Speed, collected
from fabric_ray.doctor.host import STEP_S
from fabric_ray.doctor.line import End, Invitation, Line
from fabric_ray.doctor.speed import NBYTES, digest, send
from fabric_ray.doctor.writes import MORE_TIME, NOT_TRIED, Link
from fabric_ray.engine import EngineAddress, EngineConfig, TransferEngine
from fabric_ray.errors import FabricError, HandshakeError, InvalidArgument, PeerLost, Unreachable

_ANSWER_S = 2 * STEP_S
"""Seconds for an answer for which the other host takes a step of its own."""
_SAME_HOST = ("shm", "cuda_ipc")
_FIREWALL = (
    "have the firewall of that host let in the port above; to have ports that can be named, set "
    "FABRIC_RAY_PORTS=20000-20099 on both hosts; FABRIC_RAY_BIND names the address"
)


def visit(
    text: str,
    *,
    token: bytes | None = None,
    provider: str | None = None,
    nics: Sequence[str] = (),
    budget: float = 25.0,
    on_finding: Callable[[Finding], object] | None = None,
) -> Report:
    """Connects to the doctor of another host, and writes over every link in both directions.

    Args:
        text: the invitation that the other doctor printed.
        token: by default the invitation's, or ``FABRIC_RAY_TOKEN``.
        provider: libfabric provider; efa by default.
        nics: names or globs of this host's NICs; all by default.
        budget: seconds after which no further write begins. The last one takes at most a minute.
        on_finding: called with each finding at once.

    Raises:
        InvalidArgument: the text is not an invitation, or there is no token.
    """
    invitation = Invitation.read(text)
    token = token or invitation.secret or EngineConfig.resolve(None, {}).token
    if token is None:
        raise InvalidArgument(
            "FABRIC_RAY_TOKEN is set on the other host and not here; set the same token"
        )
    found = survey(nics, provider)
    findings = _Visitor(token, budget).examine(invitation, links(found, provider, nics))
    return collected(itertools.chain(nowhere(found, nics), findings), on_finding)


class _Visitor:
    def __init__(self, token: bytes, budget: float) -> None:
        self._token, self._budget = token, budget
        self._end = time.monotonic() + budget

    def examine(self, invitation: Invitation, here: Sequence[Link]) -> Iterator[Finding]:
        address = EngineAddress.from_bytes(invitation.address)
        self._host = address.name
        findings: list[Finding] = []
        with TransferEngine(name=socket.gethostname(), token=self._token) as engine:
            self._line = Line(engine)
            try:
                welcome = self._connect(address)
            except (FabricError, TimeoutError) as error:
                yield self._no_answer(error)
                return
            for finding in self._all(address, welcome, here):
                findings.append(finding)
                yield finding
            try:
                self._line.send(messages.Bye(findings), STEP_S)
            except FabricError as error:
                yield Finding("goodbye", f"host {self._host}", "warn", str(error))

    def _connect(self, address: EngineAddress) -> messages.Welcome:
        own = self._line.engine.address
        # Long enough for the last write to end.
        self._line.connect(address, self._budget + 6 * STEP_S)
        hello = messages.Hello(own.to_bytes(), __version__)
        return self._line.ask(hello, messages.Welcome, STEP_S)

    def _no_answer(self, error: BaseException) -> Finding:
        remedy = (
            "`fabric-ray doctor --listen` serves one visit only: start it there again, and paste "
            f"what it prints then; if it still waits, {_FIREWALL}"
        )
        if isinstance(error, HandshakeError):
            remedy = (
                "set the same FABRIC_RAY_TOKEN on both hosts, or on neither; or install the same "
                "version, as the error says"
            )
        return Finding("handshake", f"host {self._host}", "fail", str(error), remedy)

    def _all(
        self, address: EngineAddress, welcome: messages.Welcome, here: Sequence[Link]
    ) -> Iterator[Finding]:
        subject = f"host {self._host}"
        versions = f"fabric-ray {welcome.version} there, {__version__} here"
        yield Finding("handshake", subject, "ok", f"proven with the token; {versions}")
        engine = self._line.engine
        explained = engine.explain(engine.peer(address))
        verdicts = "; ".join(
            f"{v.transport} {v.device}".rstrip() + f": {v.reason}"
            for v in explained.verdicts
            if v.transport != "file"
        )
        yield Finding(
            "path",
            f"an engine's path to {self._host}",
            "ok",
            f"{explained.transport}: {verdicts}",
        )
        same_host = explained.transport in _SAME_HOST
        for pair in _pairs(here, welcome.ends, same_host=same_host):
            if isinstance(pair, Finding):
                yield pair
            else:
                yield self._write_to_host(pair)
                yield self._write_from_host(pair)

    def _write_to_host(self, pair: _Pair) -> Finding:
        subject = pair.words(self._host)
        if time.monotonic() > self._end:
            return Finding("write", subject, "fail", NOT_TRIED, MORE_TIME)
        try:
            target = self._line.ask(messages.Open(pair.there), messages.Opened, STEP_S)
            with self._open(pair.here) as engine:
                sent = send(engine, target.region, target.counter, STEP_S)
                arrived = self._line.ask(messages.Check(), messages.Checked, _ANSWER_S).digest
        except (FabricError, TimeoutError) as error:
            return self._failed(subject, error)
        return _written(subject, sent.digest == arrived, sent.speed, sent.way)

    def _write_from_host(self, pair: _Pair) -> Finding:
        subject = pair.words(self._host, back=True)
        if time.monotonic() > self._end:
            return Finding("write", subject, "fail", NOT_TRIED, MORE_TIME)
        try:
            with self._open(pair.here) as engine:
                region, counter = engine.alloc(NBYTES), engine.counter()
                write = messages.Write(
                    pair.there, region.descriptor().to_bytes(), counter.ref.to_bytes()
                )
                wrote = self._line.ask(write, messages.Wrote, _ANSWER_S)
                counter.wait(1, timeout=STEP_S)
                arrived = digest(region)
        except (FabricError, TimeoutError) as error:
            return self._failed(subject, error)
        return _written(subject, wrote.digest == arrived, wrote.speed, wrote.way)

    def _open(self, link: Link) -> TransferEngine:
        return link.open(f"{socket.gethostname()} {link.label}", self._token, STEP_S)

    def _failed(self, subject: str, error: BaseException) -> Finding:
        remedy = _FIREWALL if isinstance(error, Unreachable | PeerLost) else ""
        return Finding("write", subject, "fail", str(error), remedy)


@dataclass(frozen=True)
class _Pair:
    here: Link
    there: End

    def words(self, host: str, *, back: bool = False) -> str:
        there = f"{self.there.transport} {self.there.nic}".rstrip()
        ends = (
            (f"{there} of {host}", self.here.label)
            if back
            else (self.here.label, f"{there} of {host}")
        )
        return " to ".join(ends)


def _pairs(
    here: Sequence[Link], there: Sequence[End], *, same_host: bool
) -> Iterator[_Pair | Finding]:
    """Pairs the NICs of each transport in order; the host with fewer repeats its NICs."""
    kinds = dict.fromkeys([e.transport for e in here] + [e.transport for e in there])
    for kind in kinds:
        if kind in _SAME_HOST and not same_host:
            continue
        local = [e for e in here if e.transport == kind]
        remote = [e for e in there if e.transport == kind]
        if not local or not remote:
            side = "here" if remote else "on the other host"
            yield Finding("rail", kind, "warn", f"it can't be used: there is none {side}")
            continue
        count = max(len(local), len(remote))
        for pair in itertools.islice(zip(itertools.cycle(local), itertools.cycle(remote)), count):
            yield _Pair(*pair)


def _written(subject: str, same: bool, speed: Speed, way: str) -> Finding:
    if not same:
        detail = "the bytes that arrived differ from the bytes that were sent"
        return Finding("write", subject, "fail", detail, speed=speed)
    detail = (
        f"{NBYTES >> 20} MiB, every byte compared; {speed.bytes_per_s / 1e9:.2f} GB/s, "
        f"{speed.latency_us:.0f} us for 8 bytes; {way}"
    )
    return Finding("write", subject, "ok", detail, speed=speed)
