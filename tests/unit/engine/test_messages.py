"""The stream of messages, and how it ends."""

from __future__ import annotations

import asyncio

from fabric_ray import TransferEngine


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
