"""The doctor that comes to one of another host, and tries every link between the two, both ways."""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from fabric_ray import __version__
from fabric_ray.doctor import line as said
from fabric_ray.doctor.devices import nowhere, survey
from fabric_ray.doctor.examine import links
from fabric_ray.doctor.findings import Finding, Report, Speed
from fabric_ray.doctor.host import STEP_S
from fabric_ray.doctor.line import End, Invitation, Line
from fabric_ray.doctor.speed import NBYTES, digest, send
from fabric_ray.doctor.writes import MORE_TIME, NOT_TRIED, Link
from fabric_ray.engine import EngineAddress, EngineConfig, TransferEngine
from fabric_ray.errors import FabricError, HandshakeError, InvalidArgument, PeerLost, Unreachable

_ANSWER_S = 2 * STEP_S
"""Seconds for an answer that takes the other a step of its own."""
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
    """Shakes hands with the doctor of another host, and writes over every link to and from it.

    Args:
        text: the invitation that the other doctor printed.
        token: by default that in the invitation, or ``FABRIC_RAY_TOKEN``.
        provider: of libfabric, instead of efa.
        nics: of this host only these, by name or glob.
        budget: seconds in which writes are begun. What has begun by then has its own time, at most
            a minute.
        on_finding: called with each finding as it is made.

    Raises:
        InvalidArgument: the text is no invitation, or there is no token.
    """
    began = time.monotonic()
    invitation = Invitation.read(text)
    token = token or invitation.secret or EngineConfig.resolve(None, {}).token
    if token is None:
        raise InvalidArgument(
            "the other host has a FABRIC_RAY_TOKEN, which isn't in its text; set the same here"
        )
    found = survey(nics, provider)
    visitor = _Visitor(token, budget)
    findings = []
    for finding in itertools.chain(
        nowhere(found, nics), visitor.examine(invitation, links(found, provider, nics))
    ):
        findings.append(finding)
        if on_finding is not None:
            on_finding(finding)
    return Report(tuple(findings), time.monotonic() - began)


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
                welcome = self._shake_hands(address)
            except (FabricError, TimeoutError) as error:
                yield self._no_answer(error)
                return
            for finding in self._all(address, welcome, here):
                findings.append(finding)
                yield finding
            try:
                self._line.say(said.Bye(findings), STEP_S)
            except FabricError as error:
                yield Finding("goodbye", f"host {self._host}", "warn", str(error))

    def _shake_hands(self, address: EngineAddress) -> said.Welcome:
        own = self._line.engine.address
        # Then the last write has had its time.
        self._line.dial(address, self._budget + 6 * STEP_S)
        return self._line.ask(said.Hello(own.to_bytes(), __version__), said.Welcome, STEP_S)

    def _no_answer(self, error: BaseException) -> Finding:
        remedy = f"if it waits there still, {_FIREWALL}"
        if isinstance(error, HandshakeError):
            remedy = (
                "set the same FABRIC_RAY_TOKEN on both hosts, or on neither; or install the same "
                "version, as the error says"
            )
        elif "refused" in str(error):
            remedy = (
                "it waits for one visit only: start `fabric-ray doctor --listen` there again, and "
                "paste what it prints then"
            )
        return Finding("handshake", f"host {self._host}", "fail", str(error), remedy)

    def _all(
        self, address: EngineAddress, welcome: said.Welcome, here: Sequence[Link]
    ) -> Iterator[Finding]:
        subject = f"host {self._host}"
        versions = f"fabric-ray {welcome.version} there, {__version__} here"
        yield Finding("handshake", subject, "ok", f"proven with the token; {versions}")
        engine = self._line.engine
        explained = engine.explain(engine.peer(address))
        ways = "; ".join(
            f"{v.transport} {v.device}".rstrip() + f": {v.reason}"
            for v in explained.verdicts
            if v.transport != "file"
        )
        yield Finding(
            "way", f"an engine's way to {self._host}", "ok", f"{explained.transport}: {ways}"
        )
        near = explained.transport in _SAME_HOST
        for pair in _pairs(here, welcome.ends, near=near):
            if isinstance(pair, Finding):
                yield pair
            else:
                yield self._there(pair)
                yield self._back(pair)

    def _there(self, pair: _Pair) -> Finding:
        subject = pair.words(self._host)
        if time.monotonic() > self._end:
            return Finding("write", subject, "fail", NOT_TRIED, MORE_TIME)
        try:
            lent = self._line.ask(said.Open(pair.there), said.Opened, STEP_S)
            with self._open(pair.here) as engine:
                sent = send(engine, lent.region, lent.counter, STEP_S)
                arrived = self._line.ask(said.Check(), said.Checked, _ANSWER_S).digest
        except (FabricError, TimeoutError) as error:
            return self._failed(subject, error)
        return _written(subject, sent.digest == arrived, sent.speed, sent.way)

    def _back(self, pair: _Pair) -> Finding:
        subject = pair.words(self._host, back=True)
        if time.monotonic() > self._end:
            return Finding("write", subject, "fail", NOT_TRIED, MORE_TIME)
        try:
            with self._open(pair.here) as engine:
                region, counter = engine.alloc(NBYTES), engine.counter()
                lent = region.descriptor().to_bytes(), counter.ref.to_bytes()
                wrote = self._line.ask(said.Write(pair.there, *lent), said.Wrote, _ANSWER_S)
                counter.wait(1, timeout=STEP_S)
                arrived = digest(region)
        except (FabricError, TimeoutError) as error:
            return self._failed(subject, error)
        return _written(subject, wrote.digest == arrived, wrote.speed, wrote.way)

    def _open(self, link: Link) -> TransferEngine:
        return link.open(f"{socket.gethostname()} {link.label}", self._token, STEP_S)

    def _failed(self, subject: str, error: BaseException) -> Finding:
        unreached = isinstance(error, Unreachable | PeerLost) or "no transport reaches" in str(
            error
        )
        remedy = _FIREWALL if unreached else ""
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


def _pairs(here: Sequence[Link], there: Sequence[End], *, near: bool) -> Iterator[_Pair | Finding]:
    """Rail by rail: NICs of one transport in their order, those of the shorter side again."""
    kinds = dict.fromkeys([e.transport for e in here] + [e.transport for e in there])
    for kind in kinds:
        if kind in _SAME_HOST and not near:
            continue
        ours = [e for e in here if e.transport == kind]
        theirs = [e for e in there if e.transport == kind]
        if not ours or not theirs:
            side = "here" if theirs else "on the other host"
            yield Finding("rail", kind, "warn", f"it can't be used: there is none {side}")
            continue
        count = max(len(ours), len(theirs))
        for pair in itertools.islice(zip(itertools.cycle(ours), itertools.cycle(theirs)), count):
            yield _Pair(*pair)


def _written(subject: str, same: bool, speed: Speed, way: str) -> Finding:
    if not same:
        detail = "the bytes that arrived are not those that were sent"
        return Finding("write", subject, "fail", detail, speed=speed)
    detail = (
        f"{NBYTES >> 20} MiB, every byte compared; {speed.bytes_per_s / 1e9:.2f} GB/s, "
        f"{speed.latency_us:.0f} us for 8 bytes; {way}"
    )
    return Finding("write", subject, "ok", detail, speed=speed)
