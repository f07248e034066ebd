"""Named tensors go from one process to several others, through buckets of any size."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from fabric_ray import TransferEngine
from fabric_ray.errors import DecodeError, InvalidArgument, PeerError, WeightSyncError
from fabric_ray.integrations.bucket_header import Invitation, settle
from fabric_ray.integrations.inbox import Inbox
from fabric_ray.integrations.outbox import Outbox, _Receiver

BUCKET = 4096


def tensors(version: int = 1) -> dict[str, torch.Tensor]:
    """Of all kinds: larger than a bucket, smaller, of no bytes, of no dimension, not contiguous."""
    generator = torch.Generator().manual_seed(version)
    drawn = torch.randn(60, 70, generator=generator)
    small = {f"layers.{i}.norm": drawn[i].bfloat16() for i in range(60)}
    return {
        "embed": drawn,
        "turned": drawn[:8].T,
        "scale": drawn.sum(),
        "nothing": drawn[:0],
        "bytes": torch.arange(255, dtype=torch.uint8),
        **small,
        "experts": drawn.half().repeat(4, 1).view(4, 60, 70),
    }


class Fleet:
    """A sender and receivers, each with an engine."""

    def __init__(self, receivers: int, **options: Any) -> None:
        options = {"timeout": 5.0, **options}
        whole = [TransferEngine(transport="shm") for _ in range(receivers + 1)]
        self.engine, *self.engines = whole
        self.outbox = Outbox(self.engine, BUCKET, **options)
        self.inboxes = [
            Inbox(engine, BUCKET, receiver=f"rollout {i}", **options)
            for i, engine in enumerate(self.engines)
        ]
        self.got: list[dict[str, torch.Tensor]] = []
        self.errors: list[Exception | None] = []

    def stream(
        self, weights: Any, version: int = 1, using: Callable[[int, str], None] = lambda *_: None
    ) -> None:
        """Receives in threads what is sent here; raises what the sender raises."""
        invitations = [inbox.invite() for inbox in self.inboxes]
        self.got = [{} for _ in self.inboxes]
        self.errors = [None for _ in self.inboxes]
        receiving = [
            threading.Thread(target=self._receive, args=(i, using)) for i in range(len(self.got))
        ]
        for thread in receiving:
            thread.start()
        try:
            self.send(invitations, weights, version)
        finally:
            for thread in receiving:
                thread.join(20)

    def send(self, invitations: Sequence[Invitation], weights: Any, version: int) -> None:
        self.outbox.begin(invitations, version)
        for name, tensor in weights:
            settle(self.outbox.put(name, tensor))
        settle(self.outbox.finish())

    def _receive(self, i: int, using: Callable[[int, str], None]) -> None:
        steps = self.inboxes[i].receive(self.engine.address.to_bytes())
        try:
            for step in steps:
                if isinstance(step, tuple):
                    name, tensor = step
                    using(i, name)
                    self.got[i][name] = tensor.clone()
                else:
                    settle([step])
        except Exception as error:
            self.errors[i] = error
            steps.close()

    def close(self) -> None:
        self.outbox.close()
        for inbox in self.inboxes:
            inbox.close()
        for engine in (self.engine, *self.engines):
            engine.close()


@pytest.fixture
def fleet() -> Iterator[Callable[..., Fleet]]:
    made: list[Fleet] = []

    def make(receivers: int = 2, **options: Any) -> Fleet:
        made.append(Fleet(receivers, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def same(got: dict[str, torch.Tensor], sent: dict[str, torch.Tensor]) -> bool:
    return list(got) == list(sent) and all(
        got[name].dtype == sent[name].dtype and torch.equal(got[name], sent[name]) for name in sent
    )


def test_tensors_of_all_kinds_arrive_in_order_pass_after_pass(fleet) -> None:
    each = fleet(2)
    for version in (1, 2):
        each.stream(tensors(version).items(), version)
        assert all(same(got, tensors(version)) for got in each.got)
    each.stream([])
    assert each.got == [{}, {}]


def test_a_slow_receiver_is_never_overrun(fleet) -> None:
    each = fleet(2)
    turn = threading.Event()
    each.stream(tensors().items(), using=lambda i, _: turn.wait(0.005) if i == 1 else None)
    assert all(same(got, tensors()) for got in each.got)


def test_buckets_that_overtake_each_other_are_read_in_order(fleet, monkeypatch) -> None:
    each = fleet(1)
    each.stream(tensors(1).items(), 1)
    write, held = _Receiver.write, []

    def late(receiver: Any, bucket: Any, index: int, timeout: float) -> None:
        if index == 0:
            held.append((bucket, index, timeout))
            return
        write(receiver, bucket, index, timeout)
        if held:
            time.sleep(0.1)  # the second is there by then
            write(receiver, *held.pop())
            settle(receiver.wrote(0))

    monkeypatch.setattr(_Receiver, "write", late)
    each.stream(tensors(2).items(), 2)
    assert each.errors == [None]
    assert same(each.got[0], tensors(2))


def test_received_tensors_are_views(fleet) -> None:
    each = fleet(1)
    invitation = each.inboxes[0].invite()
    each.outbox.begin([invitation])
    settle(each.outbox.put("norm", torch.ones(3)))
    sending = threading.Thread(target=lambda: settle(each.outbox.finish()))
    sending.start()
    for step in each.inboxes[0].receive(each.engine.address.to_bytes()):
        if isinstance(step, tuple):
            assert step[1]._base is not None
        else:
            settle([step])
    sending.join()


def test_a_receiver_that_fails_is_named_and_the_others_get_everything(fleet) -> None:
    each = fleet(3)

    def using(i: int, name: str) -> None:
        if i == 1 and name == "layers.9.norm":
            raise RuntimeError("out of memory")

    with pytest.raises(WeightSyncError, match=r"did not reach rollout 1: .*gave up") as caught:
        each.stream(tensors().items(), using=using)
    assert set(caught.value.failed) == {"rollout 1"}
    assert same(each.got[0], tensors())
    assert same(each.got[2], tensors())
    each.stream(tensors(2).items(), 2)
    assert all(same(got, tensors(2)) for got in each.got), "nothing of it is left behind"


def test_rs_4_receivers_that_are_stuck_are_named_and_the_others_get_everything(fleet) -> None:
    each, over = fleet(3, timeout=1.0), threading.Event()

    def using(i: int, name: str) -> None:
        if i < 2 and name == "embed":
            over.wait(20)
        if i == 2 and name == "experts":
            over.set()

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors().items():
            time.sleep(0.03)  # the other receiver begins to wait before the sender does
            yield name, tensor

    with pytest.raises(WeightSyncError) as caught:
        each.stream(gathered(), using=using)
    assert set(caught.value.failed) == {"rollout 0", "rollout 1"}
    assert same(each.got[2], tensors())


def test_rs_4_a_receiver_that_dies_is_named_soon(fleet) -> None:
    each = fleet(2, timeout=30.0)

    def using(i: int, name: str) -> None:
        if i == 1 and name == "layers.9.norm":
            each.engines[1].close()

    with pytest.raises(WeightSyncError) as caught:
        each.stream(tensors().items(), using=using)
    assert set(caught.value.failed) == {"rollout 1"}
    assert same(each.got[0], tensors())


def test_a_sender_that_fails_tells_all_receivers_why(fleet) -> None:
    each = fleet(2)

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(tensors().items())[:20]
        settle(each.outbox.fail("ValueError: NaN in experts"))
        raise ValueError("NaN in experts")

    with pytest.raises(ValueError, match="NaN"):
        each.stream(broken())
    for error in each.errors:
        assert isinstance(error, WeightSyncError)
        assert "NaN in experts" in str(error)


def test_rs_4_a_sender_that_dies_ends_the_wait(fleet) -> None:
    each = fleet(1, timeout=30.0)

    def dies() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(tensors().items())[:20]
        each.engine.close()

    with pytest.raises(Exception, match=r"closed"):
        each.stream(dies())
    assert isinstance(each.errors[0], PeerError)


def test_what_does_not_fit_is_refused_before_anything_moves(fleet) -> None:
    each = fleet(1)
    other = Inbox(each.engines[0], 2 * BUCKET, receiver="rollout 7")
    with pytest.raises(InvalidArgument, match="rollout 7 has buckets of 8192 bytes"):
        each.outbox.begin([other.invite()])
    with pytest.raises(InvalidArgument, match="bucket must be >= 4096 bytes"):
        Inbox(each.engines[0], 100, receiver="rollout 8")
    with pytest.raises(DecodeError, match="not an invitation"):
        Invitation.from_bytes(b"hello")
    each.outbox.begin([each.inboxes[0].invite()])
    with pytest.raises(InvalidArgument, match="doesn't fit any bucket"):
        settle(each.outbox.put("n" * BUCKET, torch.ones(1)))
