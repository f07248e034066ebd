"""What trainers send each other: the phases of a push and nothing else, from their own ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import msgspec
import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from fabric_ray import rpc
from fabric_ray.decoding import checked_msgpack
from fabric_ray.errors import DecodeError
from fabric_ray.integrations.collective_calls import PHASES
from fabric_ray.integrations.named_functions import NamedFunctions, result_type
from fabric_ray.integrations.trainer_frames import (
    ARRIVES,
    Answer,
    Call,
    Failed,
    Finished,
    Frame,
    FromFollower,
    FromLeader,
    Working,
)
from fabric_ray.integrations.trainer_links import FollowerEnd, LeaderEnd
from fabric_ray.plan import Container, DType, Leaf, Mesh, ParamMeta, Shard, Side, Tensor
from fabric_ray.plan.types import Pad, StridedShard
from fabric_ray.weights import phases
from fabric_ray.weights.calls import CallFailure
from fabric_ray.weights.conversion import Recipe
from fabric_ray.weights.quant import Cast, Fp8, Int8, Invitation
from fabric_ray.weights.replica.sides import ReplicaMeta
from fabric_ray.weights.report import (
    Changes,
    LinkReport,
    PushTarget,
    Sent,
    SourceShare,
    Span,
    Temporary,
)
from tests.processes import within

BF16 = DType.of("bfloat16")
LEAF = Leaf(Tensor("w", (6, 4), BF16), Mesh.line(2), (Shard(0),))
SIDE = Side.of(2, [Container("w", BF16, LEAF), Container("p", BF16, Pad(LEAF, (4, 4)), (8, 2))])
META = ParamMeta("w", (6, 4), BF16, (0, 1), (2,), (StridedShard(0, 3),), (3, 4), (8, 2))
RECIPE = Recipe(
    SIDE, {"w": Fp8(), "*.a": Fp8("tensor", "ue8m0"), "b": Int8(), "*": Cast("float32")}
)
INVITATION = Invitation(b"region", (b"even", b"odd"), {1: (0, 64)})
TARGET = PushTarget(1, "rollout 1", b"a", b"r", (b"c",), (0, -1), True, 2**40, inbox=b"i")
SENT = Sent(
    (Span("trainer 0", "write", 0.5, 1.0),),
    (LinkReport(0, 1, 2**33, 0.5, None),),
    {1: "lost"},
    {1: 2**64 - 1},
    Temporary(1, 2),
    {1: 2},
    {1: Changes(b"\0" * 4, 8, 2**64 - 1)},
)
MADE: list[tuple[str, tuple[Any, ...], Any]] = [
    ("source_meta", (), (1, [META], b"address")),
    ("source_meta", (), (1, b"digest", b"address")),
    ("source_meta", (), (1, ReplicaMeta(0, ("w",), (), ("w",), b"digest"), b"address")),
    ("source_side", (), SIDE),
    ("source_side", (), None),
    ("source_convert", ("s", False, RECIPE), INVITATION),
    ("source_join", ("s", {0: INVITATION, 1: INVITATION}), None),
    ("source_accept", (SourceShare("s", b"plan", ("w",), (TARGET,), delta=True), 1.5), True),
    ("source_ready", ("s",), None),
    ("source_push", ("s", 3, [TARGET], True, 1.5), SENT),
]
FUNCTIONS = NamedFunctions(PHASES)


def call(name: str, args: tuple[Any, ...]) -> Frame[Any]:
    return Frame(1, 1, Call.of(name, ("weights", *args)))


def read(data: bytes, type: Any) -> Any:
    return checked_msgpack(data, type, "a trainer's frame")


def understood(data: bytes) -> None:
    """Has a frame decoded by both ends, as far as what it says can be."""
    word = read(data, FromLeader).word
    if isinstance(word, Call):
        FUNCTIONS.named(word.function, word.args)


@pytest.mark.parametrize(("name", "args", "answer"), MADE)
def test_arguments_and_answers_of_each_phase_arrive_as_they_were(
    name: str, args: tuple[Any, ...], answer: Any
) -> None:
    word = read(call(name, args).encoded(), FromLeader).word
    assert word.name == "weights"
    assert FUNCTIONS.named(word.function, word.args) == (getattr(phases, name), list(args))
    word = read(Frame(1, 1, Answer.of(answer)).encoded(), FromFollower).word
    assert word.value(result_type(PHASES[name])) == answer
    word = read(Frame(1, 1, Failed("why", "Stale")).encoded(), FromFollower).word
    assert word.value(None) == CallFailure("why", "Stale")


def test_all_phases_of_a_source_are_among_these() -> None:
    assert {name for name, _, _ in MADE} == PHASES.keys()


FRAMES = [call(name, args).encoded() for name, args, _ in MADE] + [
    Frame(2, 3, word).encoded()
    for word in (Working("w", 1.0), Finished(1, "e", {"trainer 1": "c"}))
]
ANSWERS = [(Frame(1, 1, Answer.of(a)).encoded(), result_type(PHASES[n])) for n, _, a in MADE]
CHANGES = st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), max_size=4)


def changed(data: bytes, changes: list[tuple[int, int]], cut: int) -> bytes:
    mutated = bytearray(data)
    for at, value in changes:
        mutated[at % len(data)] = value
    return bytes(mutated[: len(data) - cut % len(data)])


@settings(deadline=None, max_examples=400)
@given(st.sampled_from(FRAMES), CHANGES, st.sampled_from([0, 0, 1, 7]) | st.integers(0, 1 << 16))
def test_a_damaged_frame_of_trainer_0_is_a_frame_or_an_error(
    data: bytes, changes: list[tuple[int, int]], cut: int
) -> None:
    with suppress(DecodeError):
        understood(changed(data, changes, cut))


@settings(deadline=None, max_examples=400)
@given(st.sampled_from(ANSWERS), CHANGES, st.sampled_from([0, 0, 1, 7]) | st.integers(0, 1 << 16))
def test_a_damaged_answer_is_an_answer_or_an_error(
    answer: tuple[bytes, Any], changes: list[tuple[int, int]], cut: int
) -> None:
    with suppress(DecodeError):
        read(changed(answer[0], changes, cut), FromFollower).word.value(answer[1])


@settings(deadline=None)
@given(st.binary(max_size=100) | st.sampled_from([b"\x91" * 100_000, b"\xdd" + b"\xff" * 4]))
def test_any_bytes_are_no_frame_or_an_error(data: bytes) -> None:
    for raw in (data, b"\x93\x01\x01\x82\xa4type\xa6answer\xa6result" + data):
        for type in (FromLeader, FromFollower):
            with suppress(DecodeError):
                read(raw, type).word.value(result_type(phases.source_meta))


@pytest.mark.parametrize(
    "frame",
    [
        Frame(0, 1, Working("w", 1.0)),
        Frame(1, -2, Working("w", 1.0)),
        Frame(1, 1, Working("w", -1.0)),
        Frame(1, 1, Working("w", float("inf"))),
        Frame(1, 1, Working("w", float("nan"))),
        Frame(1, 1, Finished(-1, None, {})),
        Frame(1, 1, Answer.of(None)),
    ],
)
def test_numbers_that_no_run_has_are_refused(frame: Frame[Any]) -> None:
    with pytest.raises(DecodeError):
        read(frame.encoded(), FromLeader)


@pytest.mark.parametrize(
    ("name", "args", "says"),
    [
        ("target_abort", ("s",), "no function that can be called"),
        ("eval", ("1",), "no function that can be called"),
        ("SOURCES", (), "no function that can be called"),
        ("source_ready", (), "takes 1 to 1 arguments, got 0"),
        ("source_ready", ("s", 1), "takes 1 to 1 arguments, got 2"),
        ("source_ready", (7,), "an argument of `source_ready`"),
    ],
)
def test_what_is_no_phase_of_a_source_or_has_other_arguments_is_refused(
    name: str, args: tuple[Any, ...], says: str
) -> None:
    with pytest.raises(DecodeError, match=says):
        understood(call(name, args).encoded())


class Ends:
    """Trainer 0's end of three, and callers that know its secret."""

    def __init__(self) -> None:
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.leader = LeaderEnd(self.store, 3, 5.0)
        self.follower = FollowerEnd(self.store, 1, 5.0)
        self.run = 0

    def stranger(self, hello: bytes) -> rpc.Channel:
        address = self.follower._address
        assert address is not None
        channel = rpc.open_channel(address.host, address.port, key=address.secret, timeout=5.0)
        channel.send(hello)
        return channel

    def arrives(self) -> Any:
        """What trainer 0 hears of rank 1, which comes to the next run."""
        self.run += 1
        link = self.follower.connect(time.monotonic() + 5.0)
        link.send(Frame(self.run, ARRIVES, Answer.of(None)).encoded(), 5.0)
        return self.hears()

    def hears(self) -> Any:
        until = time.monotonic() + 5.0
        return self.leader.collect([1], self.run, ARRIVES, until, "late")[1]


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.follower.close()
    made.leader.close()


def ended(channel: rpc.Channel) -> bool:
    channel.within(5.0)
    try:
        channel.receive()
    except (EOFError, ConnectionResetError):
        return True
    return False


@pytest.mark.parametrize("rank", [0, 3, -1, 2**63, "1", None])
def test_a_caller_that_is_no_other_rank_is_refused(ends: Ends, rank: object) -> None:
    assert ends.arrives() is None
    assert ended(ends.stranger(msgspec.msgpack.encode(rank)))
    assert ends.arrives() is None


def test_a_ranks_place_is_taken_by_no_other_and_again_by_its_own(ends: Ends) -> None:
    assert ends.arrives() is None
    stranger = ends.stranger(msgspec.msgpack.encode(1))
    within(5.0, "the connection", lambda: ends.leader._new)
    stranger.send(Frame(ends.run + 1, ARRIVES, Failed("a stranger's word")).encoded())
    assert ends.arrives() is None
    assert ended(stranger)
    ends.follower.close()
    ends.follower.connect(time.monotonic() + 5.0)
    within(5.0, "the rank's own", lambda: ends.leader._new)
    assert ends.arrives() is None


def test_a_place_is_taken_by_the_first_of_two_that_come_before_a_run(ends: Ends) -> None:
    assert ends.arrives() is None
    first = ends.stranger(msgspec.msgpack.encode(2))
    within(5.0, "the connection", lambda: ends.leader._new)
    taken = dict(ends.leader._new)
    assert ended(ends.stranger(msgspec.msgpack.encode(2)))
    assert ends.leader._new == taken
    first.close()


def test_a_trainer_that_sends_what_is_no_frame_is_named_with_the_cause(ends: Ends) -> None:
    assert ends.arrives() is None
    ends.run += 1
    link = ends.follower.connect(time.monotonic() + 5.0)
    link.send(b"\x80\x04K\x01.", 5.0)
    heard = ends.hears()
    assert "can't be decoded: not a trainer's frame" in heard.cause
    assert link.has_frame(time.monotonic() + 5.0)
    with pytest.raises((EOFError, ConnectionResetError)):
        link.receive(FromLeader)
    link.close()


def test_an_answer_of_another_type_is_named_with_the_cause(ends: Ends) -> None:
    assert ends.arrives() is None
    link = ends.follower.connect(time.monotonic() + 5.0)
    link.send(Frame(ends.run, 1, Answer.of(["x"])).encoded(), 5.0)
    until = time.monotonic() + 5.0
    heard = ends.leader.collect([1], ends.run, 1, until, "late", type=bool)[1]
    assert "Expected `bool`" in heard.cause
