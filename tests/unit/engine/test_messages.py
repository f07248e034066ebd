"""The stream of messages, and how it ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from queue import SimpleQueue

from fabric_ray import TransferEngine
from fabric_ray.engine import Message


async def test_messages_end_with_the_engine(
    pair: tuple[TransferEngine, TransferEngine],
) -> None:
    a, b = pair
    heard: list[bytes] = []

    async def listen() -> None:
        async for message in b.messages():
            assert message.sender == a.id
            heard.append(bytes(message.data))

    listener = asyncio.create_task(listen())
    await asyncio.sleep(0)
    for text in (b"one", b"two"):
        await a.send(a.peer(b.address), text)
    b.close()
    await asyncio.wait_for(listener, 10)
    assert heard == [b"one", b"two"]
    assert b.closed


def test_a_sender_over_one_transport_keeps_out_none_over_another(
    open_engine: Callable[..., TransferEngine],
) -> None:
    receiver = open_engine("receiver", transport=["shm", "tcp"])
    many, few = open_engine("many", transport="shm"), open_engine("few", transport="tcp")
    came: SimpleQueue[Message] = SimpleQueue()
    receiver.receive(came.put, count=1, max_nbytes=64)
    peers = {engine: engine.peer(receiver.address) for engine in (many, few)}
    for engine, peer in peers.items():  # connects
        engine.send(peer, b"m").wait(60)
        came.get(timeout=60)
    many.send(peers[many], b"m").wait(60)
    held = came.get(timeout=60)
    sent = [few.send(peers[few], b"m"), *(many.send(peers[many], b"m") for _ in range(200))]
    time.sleep(0.5)  # there is no room, and messages of both lie ready
    del held
    senders = []
    for _ in sent:
        message = came.get(timeout=60)
        senders.append(message.sender)
        time.sleep(0.001)  # the next ones lie ready
        del message
    for transfer in sent:
        transfer.wait(60)
    assert senders.index(few.id) < 20
