"""Two NIXL agents in one process: notifications, and metadata that comes late."""

from __future__ import annotations

import numpy as np
import pytest

from fabric_ray.compat.nixl import nixl_agent, notifications
from fabric_ray.compat.nixl.bindings import nixlInvalidParamError, nixlNotFoundError
from fabric_ray.compat.nixl.notifications import PartialNotifications, _Notification
from tests.processes import within

LONG = bytes(range(256)) * 4096  # of a heartbeat that names thousands of requests


@pytest.fixture(autouse=True)
def over_shm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FABRIC_RAY_TRANSPORT", "shm")


def pair() -> tuple[nixl_agent, nixl_agent]:
    """The first knows the second."""
    sender, receiver = nixl_agent("sender"), nixl_agent("receiver")
    sender.add_remote_agent(receiver.get_agent_metadata())
    return sender, receiver


def heard(agent: nixl_agent, count: int) -> list[bytes]:
    found: list[bytes] = []

    def enough() -> bool:
        found.extend(agent.get_new_notifs().get("sender", []))
        return len(found) >= count

    within(20, f"{count} notifications", enough)
    return found


def test_a_long_notification_arrives_whole() -> None:
    sender, receiver = pair()
    here, there = np.ones(64, dtype=np.uint8), np.zeros(64, dtype=np.uint8)
    for agent, array in ((sender, here), (receiver, there)):
        agent.register_memory([(array.ctypes.data, 64, 0, "")], "DRAM")
    sender.add_remote_agent(receiver.get_agent_metadata())
    sides = [sender.get_xfer_descs([(a.ctypes.data, 64, 0)], "DRAM") for a in (here, there)]
    handle = sender.initialize_xfer("WRITE", *sides, "receiver", LONG[1:])
    sender.transfer(handle)
    sender.send_notif("receiver", LONG)
    sender.send_notif("receiver", b"short")
    within(20, "the transfer", lambda: sender.check_xfer_state(handle) == "DONE")
    assert sorted(heard(receiver, 3), key=len) == [b"short", LONG[1:], LONG]
    with pytest.raises(nixlInvalidParamError, match="too long"):
        sender.send_notif("receiver", bytes((16 << 20) + 1))


def test_parts_come_in_any_order_and_those_without_the_rest_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def add(sender: str, number: int, part: int) -> bytes | None:
        said = _Notification("agent", b"%d" % part, number, part, 3)
        return partial.add(sender, said)

    monkeypatch.setattr(notifications, "_MOST_PARTS", 4)
    partial = PartialNotifications()
    assert [add("a", 1, part) for part in (2, 0)] == [None, None]
    assert [add("b", 1, part) for part in (0, 1)] == [None, None]
    assert add("a", 1, 1) == b"012"
    assert [add("c", number, 0) for number in range(3)] == [None] * 3
    assert add("b", 1, 2) is None, "the oldest was dropped"
    assert add("c", 2, 1) is None
    assert add("c", 2, 2) == b"012"


def test_an_agent_that_has_restarted_is_heard_and_its_earlier_incarnation_is_not() -> None:
    sender, receiver = pair()
    receiver.add_remote_agent(sender.get_agent_metadata())
    again = nixl_agent("sender")
    again.add_remote_agent(receiver.get_agent_metadata())
    again.send_notif("receiver", b"new")
    assert heard(receiver, 1) == [b"new"]
    receiver.add_remote_agent(again.get_agent_metadata())
    sender.send_notif("receiver", b"old")
    again.send_notif("receiver", b"new again")
    assert heard(receiver, 1) == [b"new again"]


def test_older_metadata_takes_nothing_away() -> None:
    sender, receiver = nixl_agent("sender"), nixl_agent("receiver")
    array = np.zeros(128, dtype=np.uint8)
    halves = [(array.ctypes.data + at, 64, 0, "") for at in (0, 64)]
    [first, second] = [receiver.get_reg_descs([half], "DRAM") for half in halves]
    receiver.register_memory(first)
    older = receiver.get_agent_metadata()
    receiver.register_memory(second)
    # A thread that fetches an earlier object of Ray's adds what came with that object.
    for metadata in (receiver.get_agent_metadata(), older):
        sender.add_remote_agent(metadata)
    assert sender.check_remote_metadata("receiver", second.trim())
    receiver.deregister_memory(second)
    sender.add_remote_agent(receiver.get_agent_metadata())
    assert sender.check_remote_metadata("receiver", first.trim())
    assert not sender.check_remote_metadata("receiver", second.trim())


def test_an_agent_is_not_forgotten_for_memory_that_was_deregistered_here() -> None:
    here, there = np.ones(64, dtype=np.uint8), np.zeros(64, dtype=np.uint8)
    sender, receiver = nixl_agent("sender"), nixl_agent("receiver")
    registered = sender.register_memory([(here.ctypes.data, 64, 0, "")], "DRAM")
    receiver.register_memory([(there.ctypes.data, 64, 0, "")], "DRAM")
    sender.add_remote_agent(receiver.get_agent_metadata())
    remote = sender.prep_xfer_dlist("receiver", [(there.ctypes.data, 64, 0)], "DRAM")
    stale = sender.prep_xfer_dlist("", registered.trim())
    handle = sender.make_prepped_xfer("WRITE", stale, [0], remote, [0])
    sender.deregister_memory(registered)
    for again in (handle, sender.make_prepped_xfer("WRITE", stale, [0], remote, [0])):
        with pytest.raises(nixlNotFoundError, match="local region"):
            sender.transfer(again)
    assert sender.check_remote_metadata("receiver")
    assert not there.any()
    sender.register_memory(registered)
    local = sender.prep_xfer_dlist("", registered.trim())
    handle = sender.make_prepped_xfer("WRITE", local, [0], remote, [0])
    sender.transfer(handle)
    within(20, "the transfer", lambda: sender.check_xfer_state(handle) == "DONE")
    assert there.all()
