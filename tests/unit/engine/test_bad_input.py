"""Bad input ends in an error that says what to do, before anything is sent."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fabric_ray import (
    CounterRef,
    EngineAddress,
    RegionDescriptor,
    TransferEngine,
    _native,
    errors,
    pages,
)
from fabric_ray.errors import (
    DecodeError,
    FabricError,
    InvalidArgument,
    OutOfBounds,
    TransportUnavailable,
)
from tests.examples import examples
from tests.on_device import on_device


@pytest.fixture
def joined(open_engine: Callable[..., TransferEngine]) -> tuple[Any, ...]:
    a, b = open_engine("a"), open_engine("b")
    src, dst = a.alloc(4096), b.alloc(4096)
    return a, b, src, dst, a.import_region(dst.descriptor())


def test_writes_of_nothing(joined: tuple[Any, ...]) -> None:
    a, _, src, _, there = joined
    with pytest.raises(InvalidArgument, match="does nothing"):
        a.write(src, there, 0)


def test_pages_that_make_no_sense(joined: tuple[Any, ...]) -> None:
    a, _, src, _, there = joined
    one, two = pages([0], stride=64), pages([0, 1], stride=64)
    with pytest.raises(InvalidArgument, match="as many indices"):
        a.write_pages(64, src, one, there, two)
    with pytest.raises(OutOfBounds):
        a.write_pages(64, src, one, there, pages([64], stride=64))


class Exported:
    """A tensor known by its DLPack face alone."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.__dlpack__ = tensor.__dlpack__
        self.__dlpack_device__ = tensor.__dlpack_device__


@pytest.mark.parametrize(
    ("make", "hint"),
    [
        (lambda: Exported(torch.empty(4, device="meta")), "host memory"),
        (lambda: np.zeros((8, 8))[:, ::2], "contiguous"),
        (lambda: torch.zeros(8, 8).t(), "contiguous"),
        (lambda: b"bytes are immutable", "read-only"),
        (lambda: np.zeros(0), "empty"),
        (lambda: torch.zeros(0), "empty"),
        (lambda: 5, "buffer protocol"),
        (lambda: torch.empty(4, device="meta"), "meta"),
    ],
)
def test_memory_that_cannot_be_registered(
    open_engine: Callable[..., TransferEngine], make: Callable[[], Any], hint: str
) -> None:
    with pytest.raises(InvalidArgument, match=hint):
        open_engine().register(make())


def test_a_counter_of_another_peer_is_refused(joined: tuple[Any, ...]) -> None:
    a, _, src, _, there = joined
    with pytest.raises(InvalidArgument, match="counter of the receiver"):
        a.write(src, there, imm=a.counter().ref)
    with pytest.raises(InvalidArgument, match="too large"):
        a.write(src, there, imm=1 << 20)
    with pytest.raises(TypeError):
        a.write(src, there, imm="x")


def test_what_stands_in_the_place_of_an_address_or_a_dtype_is_named(
    joined: tuple[Any, ...],
) -> None:
    a, b, *_ = joined
    for wrong in ("host:1234", b.address.to_bytes(), None):
        with pytest.raises(TypeError, match=rf"{type(wrong).__name__}.*from_bytes"):
            a.peer(wrong)
    with pytest.raises(TypeError, match=r"bytes.*descriptor\(\)"):
        a.open_segment(b"")
    for kind in (None, "float32", np.float32):
        with pytest.raises(InvalidArgument, match="dtype"):
            a.empty(4, kind)


def test_rs_2_what_is_required_and_missing_is_named() -> None:
    with pytest.raises(TransportUnavailable, match=r"no rdma transport.* verbs: .+; libfabric: "):
        TransferEngine(require="rdma")
    with pytest.raises(TransportUnavailable, match="not among"):
        TransferEngine(require="tcp", transport="shm")
    with pytest.raises(TransportUnavailable, match=r"192\.0\.2\.1"):
        TransferEngine(require="tcp", bind=("192.0.2.1",), token="t")


@pytest.mark.parametrize("cls", [EngineAddress, RegionDescriptor, CounterRef])
@settings(max_examples=examples(200), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=300), at=st.integers(0, 10_000), flip=st.integers(1, 255))
def test_garbage_and_damage_are_decode_errors(
    cls: Any, data: bytes, at: int, flip: int, honest: dict[Any, bytes]
) -> None:
    with pytest.raises(DecodeError):
        cls.from_bytes(data)
    good = honest[cls]
    with pytest.raises(DecodeError):
        cls.from_bytes(good[: at % len(good)])
    bad = bytearray(good)
    bad[at % len(good)] ^= flip
    with pytest.raises(DecodeError):
        cls.from_bytes(bytes(bad))
    with pytest.raises(DecodeError):
        cls.from_bytes(good + b"x")


@pytest.fixture(scope="module")
def honest() -> dict[Any, bytes]:
    with TransferEngine(name="honest") as engine:
        return {
            EngineAddress: engine.address.to_bytes(),
            RegionDescriptor: engine.alloc(100).descriptor().to_bytes(),
            CounterRef: engine.counter().ref.to_bytes(),
        }


def test_every_error_pickles_and_says_what_to_do() -> None:
    classes = [getattr(errors, name) for name in errors.__all__]
    assert all(issubclass(c, FabricError) for c in classes)
    for cls in classes:
        e = pickle.loads(pickle.dumps(cls("what failed; what to do", peer="p")))
        assert type(e) is cls
        assert str(e) == "what failed; what to do"
        assert e.peer == "p"


FIELDS: dict[str, set[str]] = {
    "Cancelled": {"operation"},
    "DecodeError": {"what"},
    "EngineClosed": set(),
    "ForkedEngine": set(),
    "HandshakeError": {"peer"},
    "InvalidArgument": set(),
    "NotQuiesced": {"what", "after"},
    "OutOfBounds": {"what", "offset", "nbytes", "limit"},
    "PeerLost": {"peer", "transport", "nic", "errno", "rail", "incarnation"},
    "RailLost": {"peer", "transport", "nic", "errno", "rail", "incarnation"},
    "Refused": {"peer", "operation"},
    "ResourceError": {"call"},
    "Stale": {"what"},
    "StorageError": {"peer", "operation"},
    "TransferTimeout": {"operation", "peer", "missing", "after", "quiesced"},
    "TransportUnavailable": set(),
    "Unreachable": {"peer"},
}


def test_every_error_of_the_engine_names_its_peer_and_what_to_do() -> None:
    """The core's own list: a kind that is added there is raised here."""
    found = _native._one_of_each_error()
    assert {type(e).__name__ for e in found} == set(FIELDS)
    for error in found:
        assert isinstance(error, FabricError)
        name, text = type(error).__name__, str(error)
        assert set(error.fields) == FIELDS[name], name
        _, _, remedy = text.rpartition("; ")
        assert remedy != text, f"{name} doesn't say what to do: {text}"
        assert text[0].islower()
        assert not text.endswith(".")
        told = [
            error.fields[key] for key in ("peer", "nic", "operation", "call") if key in error.fields
        ]
        assert all(word in text for word in told), f"{name} keeps back one of {told}: {text}"
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again), again.fields) == (type(error), text, error.fields)


def test_memory_of_a_gpu_of_rocm_is_not_taken_for_the_host_s(
    open_engine: Callable[..., TransferEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")
    with pytest.raises(InvalidArgument, match="cuda:0 of ROCm can't be registered"):
        open_engine().register(on_device(torch.zeros(16)))


def test_registered_memory_cannot_be_freed_by_resizing(
    open_engine: Callable[..., TransferEngine],
) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(1 << 16, dtype=torch.bfloat16)
    region = open_engine().register(tensor)
    for resize in (lambda: tensor.untyped_storage().resize_(0), lambda: tensor.resize_(1 << 20)):
        with pytest.raises(RuntimeError, match="not resizable"):
            resize()
    # Rebinding is fine: the region keeps what it had.
    tensor.data = torch.ones(3, dtype=torch.bfloat16)
    assert region.nbytes == 1 << 17
    assert not region.numpy().any()


@pytest.mark.parametrize("options", [{"bind": ("0.0.0.0",)}, {"bind": ("127.0.0.1", "::")}])
def test_without_a_token_an_engine_listens_on_loopback_only(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="same token"):
        TransferEngine(**options)
    with pytest.raises(InvalidArgument, match="empty token"):
        TransferEngine(token=b"")
    TransferEngine(token=b"secret", **options).close()
