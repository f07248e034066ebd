"""Peers of other versions: neighbours connect, others are refused and both ends get the reason."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import pytest

from fabric_ray import RegionDescriptor, TransferEngine
from fabric_ray._native import stretched_token
from fabric_ray.errors import HandshakeError
from tests.integration.strangers import (
    BY_TOKEN,
    HANDSHAKE,
    NAME,
    TRANSPORTS,
    Door,
    Stranger,
    hello,
    mac,
    sealed,
    tcp_port,
)
from tests.processes import within

TOKEN = b"t"
VERSION = 1
"""That this build speaks."""

over_both = pytest.mark.parametrize(
    ("server", "transport"), [(name, name) for name in TRANSPORTS], indirect=["server"]
)


@pytest.fixture
def server(
    request: pytest.FixtureRequest, open_engine: Callable[..., TransferEngine]
) -> TransferEngine:
    return open_engine("server", transport=request.param, token=TOKEN, bind=("127.0.0.1",))


def knock(server: TransferEngine, transport: str) -> Stranger:
    return Stranger(transport, server.address.id, tcp_port() if transport == "tcp" else 0)


@over_both
@pytest.mark.parametrize("offered", [(VERSION - 1, VERSION), (VERSION, VERSION + 1)])
def test_a_peer_of_a_neighbouring_version_is_welcomed_at_the_version_that_both_speak(
    server: TransferEngine, transport: str, offered: tuple[int, int]
) -> None:
    come_in(server, transport, hello(server.address.id, protocol=offered))


@over_both
def test_a_peer_with_a_transport_that_is_unknown_here_is_welcomed(
    server: TransferEngine, transport: str
) -> None:
    endpoints = ((200, b"of a later release"), (0, b""))
    come_in(server, transport, hello(server.address.id, endpoints=endpoints))


def come_in(server: TransferEngine, transport: str, said: bytes) -> None:
    """A handshake to its end, begun by these words."""
    stranger = knock(server, transport)
    stranger.say(said)
    welcome = stranger.hear_message()
    body = welcome[10:]
    kind, version, acceptor = body[0], body[1], body[2:18]
    assert (kind, version, acceptor.hex()) == (1, VERSION, server.address.id)
    assert body[-1] == BY_TOKEN, "there is nothing after the nonce but what it proves itself by"
    key = stretched_token(TOKEN)
    proof, answer = (mac(key, role, said, welcome) for role in (b"initiator", b"acceptor"))
    stranger.say(sealed(b"FRhs", b"\x02" + proof, HANDSHAKE))
    assert stranger.hear_message() == sealed(b"FRhs", b"\x03" + answer, HANDSHAKE), "not accepted"
    stranger.socket.close()


def test_explain_tells_which_version_a_link_speaks(
    pair: tuple[TransferEngine, TransferEngine],
) -> None:
    a, b = pair
    src, dst = a.alloc(8), b.alloc(8)
    there = a.import_region(dst.descriptor())
    a.write(src, there).wait(10)
    (used,) = [v for v in a.explain(there.peer).verdicts if v.chosen]
    assert f"; wire version {VERSION}; " in used.reason


@over_both
def test_a_peer_of_a_version_far_away_is_told_so_and_so_is_the_log(
    server: TransferEngine, transport: str, caplog: pytest.LogCaptureFixture
) -> None:
    far = VERSION + 2
    words = (f"{far} is spoken by x#00000000, {VERSION} by server#", "upgrade the older side")
    with caplog.at_level(logging.WARNING, logger="fabric_ray.native"):
        stranger = knock(server, transport)
        stranger.say(hello(server.address.id, protocol=(far, far)))
        heard = stranger.hear_to_the_end().decode(errors="replace")
        within(5, "a warning", lambda: "no common protocol version" in caplog.text)
    for word in ("no common protocol version", *words):
        assert word in heard
        assert word in caplog.text


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("refusal", "no common protocol version: 3 is spoken by x"),
        ("welcome", f"protocol version 3 was chosen, {VERSION} was offered; upgrade"),
    ],
)
def test_a_caller_of_a_peer_of_a_distant_version_gets_the_reason(
    transport: str, answer: str, words: str, open_engine: Callable[..., TransferEngine]
) -> None:
    engine = open_engine("caller", transport=transport, token=TOKEN)
    with Door(transport) as door:
        reason = b"no common protocol version: 3 is spoken by x"
        message = {
            "refusal": b"\x04" + b"\x00" + bytes([len(reason)]) + reason,
            "welcome": b"\x01\x03" + door.id + NAME + b"\x00" + bytes(32) + bytes([BY_TOKEN]),
        }[answer]
        heard: list[bytes] = []
        answering = threading.Thread(
            target=lambda: heard.append(door.answer(sealed(b"FRhs", message, HANDSHAKE)))
        )
        answering.start()
        there = engine.import_region(RegionDescriptor.from_bytes(door.region(8)))
        with pytest.raises(HandshakeError, match=words):
            engine.write(engine.alloc(8), there).wait(10)
        answering.join(10)
    # The end that chose a version that was not offered gets the error; the end that refused knows.
    assert (words.encode() in heard[0]) == (answer == "welcome")
