"""Calls that can't mean anything are refused by the call itself, in words, and nothing is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fabric_ray import Batch, Counter, EngineConfig, Region, RemoteRegion, TransferEngine, pages
from fabric_ray.errors import (
    InvalidArgument,
    OutOfBounds,
    PeerLost,
    ResourceError,
    TransferTimeout,
    Unreachable,
)
from tests.examples import examples


class World(NamedTuple):
    """``a`` can write to ``there``, which is ``b``'s, and to ``other``, which is ``c``'s."""

    a: TransferEngine
    b: TransferEngine
    src: Region
    there: RemoteRegion
    other: RemoteRegion
    counter: Counter
    keep: tuple[Region, ...]


@pytest.fixture
def world(open_engine: Callable[..., TransferEngine]) -> World:
    a, b, c = (open_engine(name) for name in "abc")
    inboxes = b.alloc(4096), c.alloc(4096)
    there, other = (a.import_region(r.descriptor()) for r in inboxes)
    return World(a, b, a.alloc(4096), there, other, b.counter(), inboxes)


NUMBERS = st.integers(max_value=-1) | st.integers(min_value=1 << 64)

CALLS: dict[str, Callable[[World, int], object]] = {
    "alloc": lambda w, n: w.a.alloc(n),
    "empty": lambda w, n: w.a.empty((n,), torch.float32),
    "nbytes": lambda w, n: w.a.write(w.src, w.there, n),
    "src_offset": lambda w, n: w.a.write(w.src, w.there, 1, src_offset=n),
    "dst_offset": lambda w, n: w.a.read(w.there, w.src, 1, dst_offset=n),
    "page_nbytes": lambda w, n: w.a.write_pages(
        n, w.src, pages([0], stride=1), w.there, pages([0], stride=1)
    ),
    "stride": lambda w, n: pages([0], stride=n),
    "scatter": lambda w, n: w.a.scatter(w.src, [(w.there, 0, n, 1)]),
    "batch": lambda w, n: Batch().write(w.src, w.there, n),
    "slice": lambda w, n: w.src.slice(0, n),
    "grant": lambda w, n: w.src.grant(0, n),
    "remote slice": lambda w, n: w.there.slice(n, 1),
    "descriptor slice": lambda w, n: w.keep[0].descriptor().slice(n, 1),
    "expect": lambda w, n: w.counter.expect(n),
    "plain counter": lambda w, n: w.a.plain_counter(n),
    "rail": lambda w, n: w.a.write(w.src, w.there, rail=n),
    "receive": lambda w, n: w.a.receive(print, count=n),
    "watcher": lambda w, n: w.a.watch(print).store(n),
    "file": lambda w, n: w.a.register_file("/dev/null", offset=n),
    "address": lambda w, n: w.a.register_address(n, 64),
    "address nbytes": lambda w, n: w.a.register_address(4096, n),
    "page": lambda w, n: pages([0, n], stride=8),
    "scatter offset": lambda w, n: w.a.scatter(w.src, [(w.there, n, 0, 1)]),
    "scatter nbytes": lambda w, n: Batch().scatter(w.src, [(w.there, 0, 0, n)]),
}


@pytest.mark.parametrize("call", CALLS)
@settings(max_examples=examples(25), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(n=NUMBERS)
def test_numbers_below_zero_and_beyond_64_bits(world: World, call: str, n: int) -> None:
    with pytest.raises((InvalidArgument, ResourceError)) as e:
        CALLS[call](world, n)
    if n < 0:
        assert isinstance(e.value, InvalidArgument)
    assert world.counter.value == 0


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf"), 1e30])
def test_time_outs_that_are_no_length_of_time(world: World, seconds: float) -> None:
    for call in (
        lambda: world.a.write(world.src, world.there, timeout=seconds),
        lambda: world.counter.expect(1, timeout=seconds),
        lambda: world.src.deregister(seconds),
        lambda: world.counter.expect(1).wait(seconds),
    ):
        with pytest.raises(InvalidArgument, match="length of time"):
            call()


@given(src_offset=st.integers(4097, 1 << 63), dst_offset=st.integers(0, 1 << 63))
@settings(max_examples=examples(25), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_offsets_beyond_the_end_leave_no_empty_write(
    world: World, src_offset: int, dst_offset: int
) -> None:
    a, src, there, imm = world.a, world.src, world.there, world.counter.ref
    with pytest.raises(OutOfBounds) as e:
        a.write(src, there, src_offset=src_offset, dst_offset=dst_offset, imm=imm)
    assert e.value.limit == 4096
    with pytest.raises(OutOfBounds):
        a.read(there, src, src_offset=src_offset, dst_offset=dst_offset)


def test_unequal_sides_are_called_by_their_names(world: World) -> None:
    a, src, there = world.a, world.src, world.there
    with pytest.raises(InvalidArgument, match="src has 10 bytes and dst has 4096"):
        a.write(src[:10], there)
    with pytest.raises(InvalidArgument, match="src has 4096 bytes and dst has 10"):
        a.read(there, src[:10])


def test_a_reference_counts_for_its_engine_alone(world: World) -> None:
    a, src, there, other, ref = world.a, world.src, world.there, world.other, world.counter.ref
    parts = [(there, 0, 0, 8), (other, 0, 0, 8)]
    for scatter in (a.scatter, Batch().scatter):
        for order in (parts, parts[::-1]):
            with pytest.raises(InvalidArgument, match=r"goes to c#\w+: agree on a plain integer"):
                scatter(src, order, imm=ref)
    a.scatter(src, [(there, 0, 0, 8), (there, 8, 8, 8)], imm=ref).wait(10)
    world.counter.wait(2, timeout=10)


def test_a_part_for_another_peer_than_the_groups(world: World) -> None:
    a, src, there, other = world.a, world.src, world.there, world.other
    group = a.peer_group([there.peer, other.peer])
    with pytest.raises(InvalidArgument, match=r"goes to c#\w+, the group has b#\w+ there"):
        a.scatter(src, [(other, 0, 0, 8), (there, 0, 0, 8)], group=group)


def test_the_operation_of_a_batch_that_does_not_fit_is_named(world: World) -> None:
    batch = Batch()
    batch.write(world.src, world.there, imm=world.counter.ref)
    batch.write(world.src, world.there, 8, dst_offset=4090)
    with pytest.raises(OutOfBounds, match="operation 1 of the batch") as e:
        world.a.submit(batch)
    assert (e.value.offset, e.value.nbytes, e.value.limit) == (4090, 8, 4096)
    assert world.counter.value == 0


@pytest.mark.parametrize("callback", [None, "print", 3])
def test_callbacks_that_can_not_be_called(world: World, callback: Any) -> None:
    done = world.a.write(world.src, world.there)
    for call in (world.a.receive, world.a.watch, done.add_done_callback):
        with pytest.raises(TypeError, match=f"callable, not {type(callback).__name__}"):
            call(callback)


def test_memory_that_is_none(open_engine: Callable[..., TransferEngine]) -> None:
    engine = open_engine()
    for call in (lambda: engine.alloc(0), lambda: engine.empty((-1,), torch.float32)):
        with pytest.raises(InvalidArgument):
            call()
    nothing, _ = engine.empty((0, 3), torch.float32)
    assert nothing.shape == (0, 3)
    freed = torch.zeros(8)
    freed.untyped_storage().resize_(0)
    with pytest.raises(InvalidArgument, match="was freed"):
        engine.register(freed)


@pytest.mark.parametrize(
    "indices",
    [
        range(1 << 33),
        range(1 << 40, 2 + (1 << 40)),
        [[1], [2, 3]],
        np.zeros((2, 2), int),
        [True],
        [0.5],
        ["x"],
    ],
)
def test_indices_that_are_no_pages(indices: Any) -> None:
    with pytest.raises(InvalidArgument, match="page indices"):
        pages(indices, stride=1)


def test_what_a_time_out_says_to_look_at(pair: tuple[TransferEngine, TransferEngine]) -> None:
    a, b = pair
    peer = a.peer(b.address)
    inbox = b.alloc(64)
    a.write(a.alloc(64), a.import_region(inbox.descriptor())).wait(10)
    with pytest.raises(TransferTimeout, match=r"with b#.*whether the peer's receive pool is open"):
        a.send(peer, b"hello", timeout=0.05).wait()
    with pytest.raises(TransferTimeout, match=r"2 writes are missing; they may still arrive"):
        b.counter().wait(2, timeout=0.05)


def test_every_address_that_was_tried_is_named(open_engine: Callable[..., TransferEngine]) -> None:
    gone = TransferEngine(name="gone", transport="tcp", token="t")
    descriptor = gone.alloc(64).descriptor()
    gone.close()
    a = open_engine("a", transport="tcp", token="t")
    with pytest.raises((Unreachable, PeerLost)) as e:
        a.write(a.alloc(64), a.import_region(descriptor)).wait(10)
    text = str(e.value)
    assert text.count("Connection refused") == text.count("connect to ") >= 1, text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"transport": "pigeon"}, r"transport='pigeon': .*'shm'"),
        ({"transport": "rdma"}, "transport='rdma': unknown transport.*require='rdma'"),
        ({"transport": "tpc"}, "did you mean 'tcp'"),
        ({"transports": ["tcp"]}, "no such option; did you mean transport"),
        ({"colour": "blue"}, "colour: there is no such option$"),
        ({"tcp_streams": 0, "spin": "x"}, r"tcp_streams=0: .*; spin='x': .*'always'"),
        ({"inline_bytes": 1 << 70}, "inline_bytes"),
        ({"op_timeout": float("inf")}, "op_timeout=inf"),
        ({"op_timeout": 0}, "op_timeout=0"),
        ({"spin": -1.0}, "spin=-1"),
        ({"peer_timeout": float("nan")}, "peer_timeout=nan"),
        ({"peer_timeout": 1e-9}, r"peer_timeout=1e-09: .* greater than or equal to 0\.01"),
        ({"config": {"name": "a"}}, "EngineConfig, not by a dict"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words) as e:
        TransferEngine(**options)
    assert "pydantic" not in str(e.value)


def test_a_variable_is_named_as_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    for field in EngineConfig.model_fields:
        name = "RAILS" if field == "rail_rules" else field.upper()
        monkeypatch.delenv(f"FABRIC_RAY_{name}", raising=False)
    monkeypatch.setenv("FABRIC_RAY_TCP_STREAMS", "many")
    with pytest.raises(InvalidArgument, match="FABRIC_RAY_TCP_STREAMS='many'"):
        TransferEngine()
    TransferEngine(tcp_streams=1).close()  # what an argument says is not asked of the environment
    monkeypatch.setenv("FABRIC_RAY_TCP_STREAMS", "3")
    monkeypatch.setenv("FABRIC_RAY_BIND", "127.0.0.1, ::1")
    monkeypatch.setenv("FABRIC_RAY_OP_TIMEOUT", "7")
    monkeypatch.setenv("FABRIC_RAY_TRANSPORT", "tcp")
    monkeypatch.setenv("FABRIC_RAY_SPIN", "5")
    config = EngineConfig.resolve(None, {})
    assert (config.transport, config.spin) == (("tcp",), 5)
    assert (config.tcp_streams, config.bind) == (3, ("127.0.0.1", "::1"))
    assert config.op_timeout == 7


def test_an_argument_of_another_class_names_the_call_that_makes_the_right_one(
    open_engine: Callable[..., TransferEngine],
) -> None:
    a, b = open_engine("a"), open_engine("b")
    region, source = b.alloc(64), a.alloc(64)
    offer: Any = region.descriptor()
    there, listed = a.import_region(offer), pages([0], stride=8)
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: a.write(source, offer), "a RemoteRegion, got RegionDescriptor.*import_region"),
        (lambda: a.read(offer, source), "a RemoteRegion, got RegionDescriptor.*import_region"),
        (lambda: a.scatter(source, [(offer, 0, 0, 8)], imm=3), "import_region"),
        (lambda: Batch().write(source, offer), "import_region"),
        (lambda: a.write(cast(Any, b"x"), there), "a Region, got bytes.*register"),
        (lambda: a.write_pages(8, source, cast(Any, [0]), there, listed), "pages.indices"),
        (lambda: a.send(cast(Any, b.address), b"x"), "a Peer, got EngineAddress.*engine.peer"),
        (lambda: a.peer_group([cast(Any, b.address)]), "engine.peer"),
        (lambda: a.import_region(cast(Any, region)), "RegionDescriptor, got Region.*descriptor"),
    ]
    for call, words in calls:
        with pytest.raises(TypeError, match=words):
            call()
