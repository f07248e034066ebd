"""What a worker makes of jobs as the host posts them, run on the processor."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch

from fabric_ray.kernels import structs
from tests.host_kernels import Host

LINE, HEADER, FOUND, JOBS, JOB, DEPTH = 16, 16, 8, 48, 64, 4
SUM, TO_SLOT, TO_TOTAL = 5, 1, 3
ANSWER, NODE_SUM = 3, 4
EXCHANGE, TOKEN, ELEMENTS, SLOT = 7, 2, 5, 48
NOTHING = (1 << 64) - 1


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Host:
    return Host(tmp_path_factory.mktemp("kernels"))


class Desk:
    """The memory of one worker, and slots of float32 elements."""

    def __init__(self) -> None:
        self.words = np.zeros(JOBS + DEPTH * JOB + LINE, dtype=np.uint64)
        begin = -self.words.ctypes.data % 128 // 8
        self.words = self.words[begin:]
        self.region = torch.zeros(4096, dtype=torch.uint8)
        self.of_node = torch.zeros(4, 32, dtype=torch.uint8)
        self.totals = torch.zeros(4, ELEMENTS)
        self.scratch = torch.zeros(JOB, dtype=torch.int64)

    def slot(self, at: int, kind: int, exchange: int, token: int, value: float) -> None:
        head = struct.pack("<4I", kind, exchange, token, 0)
        bytes_ = head + struct.pack(f"<{ELEMENTS}f", *[value] * ELEMENTS)
        self.region[at : at + len(bytes_)] = torch.frombuffer(bytearray(bytes_), dtype=torch.uint8)

    def sum(self, i: int, to: int, at: int, slots: list[int]) -> None:
        """Posts the ``i``th job: a sum of slots."""
        about = [at, TOKEN | len(slots) << 32]
        for slot in slots:
            about += [slot, 0]
        place = JOBS + i % DEPTH * JOB
        self.words[place : place + 5] = [SUM, 1, to, EXCHANGE, len(about)]
        self.words[place + FOUND] = NOTHING
        self.words[place + HEADER : place + HEADER + len(about)] = about
        self.words[LINE] = i + 1

    def run(self, host: Host, call: int = 1) -> None:
        """Waits until no worker has moved for a while."""
        arguments = structs.Work(
            shared=self.words.ctypes.data,
            jobs=JOBS,
            job_words=JOB,
            call=call,
            timeout_ns=1_000_000,
            depth=DEPTH,
            scratch=self.scratch.data_ptr(),
            region=self.region.data_ptr(),
            out_stride=SLOT,
            meta=16,
            elements=ELEMENTS,
            of_node=self.of_node.data_ptr(),
            of_node_stride=32,
            totals=self.totals.data_ptr(),
        )
        host.launch("moe/work.cu", "work_f32", 1, 256, arguments)

    @property
    def done(self) -> int:
        return int(self.words[2 * LINE])

    def found(self, i: int) -> list[int]:
        place = JOBS + i % DEPTH * JOB + FOUND
        return self.words[place : place + 3].tolist()


def test_sums_of_slots_that_are_the_tokens_are_made(host: Host) -> None:
    desk = Desk()
    desk.slot(0, NODE_SUM, EXCHANGE, TOKEN, 1.5)
    desk.slot(SLOT, NODE_SUM, EXCHANGE, TOKEN, 2.0)
    desk.sum(0, TO_TOTAL, 0, [0, SLOT])
    desk.run(host)
    assert desk.done == 1
    assert desk.found(0)[0] == NOTHING
    assert desk.totals[TOKEN].tolist() == [3.5] * ELEMENTS
    assert desk.totals.sum() == 3.5 * ELEMENTS


@pytest.mark.parametrize(
    "wrong",
    [
        (ANSWER, EXCHANGE, TOKEN),
        (NODE_SUM, EXCHANGE - 1, TOKEN),
        (NODE_SUM, EXCHANGE, TOKEN + 1),
    ],
    ids=["another kind", "another exchange", "another token"],
)
def test_rs_1_a_slot_that_says_something_else_is_found(
    host: Host, wrong: tuple[int, int, int]
) -> None:
    desk = Desk()
    desk.slot(0, NODE_SUM, EXCHANGE, TOKEN, 1.5)
    for at in (SLOT, 2 * SLOT):
        desk.slot(at, *wrong, 2.0)
    desk.sum(0, TO_TOTAL, 0, [0, SLOT, 2 * SLOT])
    desk.run(host)
    kind, exchange, token = wrong
    assert desk.found(0) == [1, kind | exchange << 32, token]


def test_jobs_follow_one_another_round_their_places(host: Host) -> None:
    desk = Desk()
    desk.slot(0, ANSWER, EXCHANGE, TOKEN, 0.25)
    for i in range(2 * DEPTH + 1):
        desk.sum(i, TO_SLOT, SLOT * (1 + i), [0])
        desk.run(host)
        assert desk.done == i + 1
        begin = SLOT * (1 + i)
        head = desk.region[begin : begin + 16].view(torch.int32).tolist()
        assert head == [NODE_SUM, EXCHANGE, TOKEN, 0]
        values = desk.region[begin + 16 : begin + 16 + 4 * ELEMENTS].view(torch.float32)
        assert values.tolist() == [0.25] * ELEMENTS


@pytest.mark.parametrize("ended", ["its call is over", "nothing will be posted"])
def test_rs_4_a_worker_takes_no_job_that_is_not_its_calls(host: Host, ended: str) -> None:
    desk = Desk()
    desk.slot(0, NODE_SUM, EXCHANGE, TOKEN, 1.0)
    desk.sum(0, TO_TOTAL, 0, [0])
    if ended == "its call is over":
        desk.words[0] = 4
    else:
        desk.words[LINE] = NOTHING
    desk.run(host, call=4)
    assert desk.done == 0
    assert not desk.totals.any()
    if ended == "its call is over":
        desk.run(host, call=5)
        assert desk.done == 1
