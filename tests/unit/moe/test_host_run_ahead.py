"""Calls on GPUs whose streams run late and in any order (:mod:`tests.queued_streams`): no event is
missing, no memory is reused in flight, and no call waits for a device that needn't."""

from __future__ import annotations

import gc
import inspect
import textwrap
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fabric_ray import TransferEngine
from fabric_ray.moe import AllToAll, all_to_all, device_memory, nixl_ep
from fabric_ray.moe.deepep import Buffer, EventOverlap
from fabric_ray.moe.deepep.event import Streams
from fabric_ray.moe.device import DeviceSteps
from fabric_ray.moe.layer import ParallelExperts
from tests.examples import by_turns
from tests.host_kernels import Host
from tests.moe_ranks import Expert, ThreadComm, batch, expert, on_ranks, rank_of, unsharded
from tests.queued_streams import HostWaits, QueuedGpus, Wait
from tests.queued_tensors import OnQueuedGpus, wrapped

RANKS, EXPERTS, TOPK, HIDDEN, TOKENS = 2, 4, 2, 256, 6
Run = Callable[..., list[Any]]


@pytest.fixture
def run(host: Host, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs what is given on each rank, in a thread with a GPU, streams in the order of a seed."""

    def of_seed(work: Callable[[ThreadComm, QueuedGpus], Any], seed: int) -> list[Any]:
        gpus = QueuedGpus(RANKS, host, seed)
        gpus.install(monkeypatch)

        def room_on(engine: Any, nbytes: int, device: torch.device) -> Any:
            memory, region = engine.empty(nbytes, torch.uint8)
            return wrapped(memory, gpus.of(device), region), region

        def on_gpu(comm: ThreadComm) -> Any:
            comm.stack.enter_context(gpus.may_wait(Wait.DEVICE))
            with OnQueuedGpus(gpus), torch.cuda.device(comm.rank()), gpus.may_wait(Wait.NOTHING):
                try:
                    return work(comm, gpus)
                except BaseException as error:
                    forget(error)
                    comm.joined.clear()
                    raise

        def settle(*of: Any) -> None:
            with gpus.may_wait(Wait.DEVICE):  # as it says
                settled(*of)

        monkeypatch.setattr(all_to_all, "room_on", room_on)
        monkeypatch.setattr(device_memory, "settle", settle)
        monkeypatch.setattr(device_memory, "_KEPT_FOR_GRAPHS", [])
        # What is collected waits for GPUs: not in their own threads.
        gc.disable()
        try:
            return on_ranks(RANKS, on_gpu)
        finally:
            gc.collect()
            gc.enable()
            gpus.close()

    settled = device_memory.settle
    return of_seed


SEEDS = (2, *range(3, 8), 1, 0)
HOW = ("on the current stream", "hook", "async")


def forget(error: BaseException | None) -> None:
    """Lets go of the exchanges in the frames of an error."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


def given(seed: int, device: torch.device) -> list[torch.Tensor]:
    return [t.to(device) for t in batch(seed, TOKENS, EXPERTS, TOPK, HIDDEN)]


def answered(a: AllToAll, x: torch.Tensor) -> torch.Tensor:
    each = RANKS * TOKENS
    return torch.cat([expert(e, x[i * each :][:each]) for i, e in enumerate(a.local_experts)])


def exchanged(a: AllToAll, x: torch.Tensor, idx: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    a.dispatch_send(x, idx)
    got = a.dispatch_recv(stride=RANKS * TOKENS)
    a.combine_send(answered(a, got.x))
    return a.combine_recv(w)


def wanted(seed: int) -> torch.Tensor:
    return unsharded(*batch(seed, TOKENS, EXPERTS, TOPK, HIDDEN))


def made(comm: ThreadComm, gpus: QueuedGpus) -> AllToAll:
    sizes = {"experts": EXPERTS, "topk": TOPK, "hidden": HIDDEN, "max_tokens": TOKENS}
    gpu = gpus.gpus[comm.rank()]
    with gpus.may_wait(Wait.DEVICE):
        return rank_of(AllToAll, comm, device=gpu.device, launcher=gpu, **sizes)


def given_batches(comm: ThreadComm, gpus: QueuedGpus, count: int) -> list[list[torch.Tensor]]:
    with gpus.may_wait(Wait.STREAM):
        here = torch.device("cuda", comm.rank())
        return [given(10 * i + comm.rank(), here) for i in range(count)]


def read(gpus: QueuedGpus, sums: list[torch.Tensor], checked: list[Any]) -> list[torch.Tensor]:
    with gpus.may_wait(Wait.DEVICE):
        for one in checked:
            one.check()
        return [one.cpu() for one in sums]


def check(results: list[list[torch.Tensor]], count: int) -> None:
    """The sums of :func:`given_batches`, on all ranks."""
    for rank, sums in enumerate(results):
        assert len(sums) == count
        for i, one in enumerate(sums):
            assert torch.equal(one, wanted(10 * i + rank)), f"batch {i} of rank {rank}"


@pytest.mark.parametrize("seed", by_turns(SEEDS))
def test_exchanges_in_turn(run: Run, seed: int) -> None:
    def work(comm: ThreadComm, gpus: QueuedGpus) -> list[torch.Tensor]:
        a = made(comm, gpus)
        batches = given_batches(comm, gpus, 3)
        return read(gpus, [exchanged(a, *one) for one in batches], [a])

    check(run(work, seed), 3)


@pytest.mark.parametrize("seed", by_turns(SEEDS))
def test_two_exchanges_on_two_streams(run: Run, seed: int) -> None:
    """And tokens and sums change streams by events."""

    def work(comm: ThreadComm, gpus: QueuedGpus) -> list[torch.Tensor]:
        both = [made(comm, gpus) for _ in range(2)]
        streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
        batches = given_batches(comm, gpus, 4)
        sums = []
        for i, one in enumerate(batches):
            turn = i % 2
            streams[turn].wait_stream(streams[1 - turn])
            with torch.cuda.stream(streams[turn]):
                # Of the other stream's tensors, in memory of this one.
                mine = [t.clone() for t in one]
                sums.append(exchanged(both[turn], *mine) * 1)
        streams[0].wait_stream(streams[1])
        return read(gpus, sums, both)

    check(run(work, seed), 4)


def rounds(
    comm: ThreadComm,
    how: str,
    buffer: Any,
    batches: list[list[torch.Tensor]],
    room: int = EXPERTS,
) -> list[torch.Tensor]:
    """Low-latency calls, whose tensors are let go of as soon as they may be."""
    options = {"async_finish": how == "async", "return_recv_hook": how == "hook"}
    beside, sums = torch.cuda.Stream(), []

    def received(event: EventOverlap, hook: Callable[[], None] | None) -> None:
        if hook is not None:
            with torch.cuda.stream(beside):
                hook()
            torch.cuda.current_stream().wait_stream(beside)
        event.current_stream_wait()

    for x, idx, w in batches:
        rows, _, handle, event, hook = buffer.low_latency_dispatch(
            x.clone(), idx.clone(), TOKENS, room, use_fp8=False, **options
        )
        received(event, hook)
        local = range(comm.rank() * 2, comm.rank() * 2 + 2)
        y = torch.stack([expert(e, rows[i]) for i, e in enumerate(local)])
        del rows
        out, event, hook = buffer.low_latency_combine(y, idx.clone(), w.clone(), handle, **options)
        del y
        received(event, hook)
        sums.append(out * 1)
    return sums


def buffer_of(comm: ThreadComm, gpus: QueuedGpus, **options: Any) -> Buffer:
    engine = comm.stack.enter_context(TransferEngine(name=f"rank-{comm.rank()}", transport="shm"))
    launcher = gpus.gpus[comm.rank()]
    buffer = Buffer(comm=comm, engine=engine, launcher=launcher, timeout=30.0, **options)
    comm.joined.append(buffer)
    return buffer


@pytest.mark.parametrize(("how", "seed"), by_turns(HOW, SEEDS))
def test_low_latency_calls(run: Run, how: str, seed: int) -> None:
    check(run(low_latency(how), seed), 3)


def low_latency(how: str) -> Callable[[ThreadComm, QueuedGpus], list[torch.Tensor]]:
    def work(comm: ThreadComm, gpus: QueuedGpus) -> list[torch.Tensor]:
        buffer = buffer_of(comm, gpus, low_latency_mode=True)
        batches = given_batches(comm, gpus, 3)
        with gpus.may_wait(Wait.DEVICE):  # the first ones make the exchanges
            rounds(comm, how, buffer, batches[:1])
            buffer.check()
        sums = rounds(comm, how, buffer, batches)
        return read(gpus, sums, [buffer])

    return work


@pytest.mark.parametrize(("how", "seed"), by_turns(HOW, SEEDS))
def test_captured_low_latency_calls(run: Run, how: str, seed: int) -> None:
    check(run(captured(how), seed), 2)


def captured(how: str) -> Callable[[ThreadComm, QueuedGpus], list[torch.Tensor]]:
    def work(comm: ThreadComm, gpus: QueuedGpus) -> list[torch.Tensor]:
        buffer = buffer_of(comm, gpus, low_latency_mode=True)
        batches = given_batches(comm, gpus, 2)
        with gpus.may_wait(Wait.DEVICE):
            here = [torch.zeros_like(t) for t in batches[0]]
            for _ in range(2):
                rounds(comm, how, buffer, batches[:1])
            buffer.check()
        comm.all_gather(b"")
        with gpus.capture() as graph:
            [out] = rounds(comm, how, buffer, [here])
        comm.all_gather(b"")
        sums = []
        for one in batches:
            for into, fresh in zip(here, one, strict=True):
                into.copy_(fresh)
            graph.replay()
            sums.append(out.clone())
        return read(gpus, sums, [buffer])

    return work


@pytest.mark.parametrize(("how", "seed"), by_turns(HOW, SEEDS))
def test_results_with_room_for_more_ranks(run: Run, how: str, seed: int) -> None:
    store = dist.HashStore()

    def work(comm: ThreadComm, gpus: QueuedGpus) -> list[torch.Tensor]:
        launcher = gpus.gpus[comm.rank()]
        buffer = nixl_ep.Buffer(rank=comm.rank(), tcp_store_group=store, launcher=launcher)
        comm.joined.append(buffer)
        batches = given_batches(comm, gpus, 3)
        with gpus.may_wait(Wait.DEVICE):
            buffer.update_memory_buffers(RANKS + 1, EXPERTS // RANKS, 0)
            buffer.connect_ranks(range(RANKS))
            rounds(comm, how, buffer, batches[:1], EXPERTS + EXPERTS // RANKS)
        sums = rounds(comm, how, buffer, batches, EXPERTS + EXPERTS // RANKS)
        return read(gpus, sums, [])

    check(run(work, seed), 3)


@pytest.mark.parametrize("seed", by_turns(SEEDS))
def test_layers(run: Run, seed: int) -> None:
    def work(comm: ThreadComm, gpus: QueuedGpus) -> list[torch.Tensor]:
        layer = ParallelExperts(made(comm, gpus), Expert, max_tokens=TOKENS)
        batches = given_batches(comm, gpus, 3)
        with torch.no_grad():
            sums = [layer(*one) for one in batches]
        return read(gpus, sums, [layer.exchange])

    check(run(work, seed), 3)


@pytest.mark.parametrize("seed", by_turns(SEEDS))
def test_normal_calls(run: Run, seed: int) -> None:
    """They wait for the number of rows, on their stream alone."""

    def work(comm: ThreadComm, gpus: QueuedGpus) -> list[torch.Tensor]:
        buffer = buffer_of(comm, gpus)
        [(x, idx, w)] = given_batches(comm, gpus, 1)
        with gpus.may_wait(Wait.DEVICE):
            for _ in range(2):  # dispatches alternate between two exchanges
                normal(comm, buffer, x, idx, w)
        side = torch.cuda.Stream()
        with gpus.may_wait(Wait.STREAM):
            event = Buffer.capture()
            with torch.cuda.stream(side):
                out, event = normal(comm, buffer, x, idx, w, event)
            event.current_stream_wait()
            out.record_stream(torch.cuda.current_stream())
        return read(gpus, [out.to(torch.bfloat16)], [buffer])

    check(run(work, seed), 1)


def normal(
    comm: ThreadComm,
    buffer: Buffer,
    x: torch.Tensor,
    idx: torch.Tensor,
    w: torch.Tensor,
    event: EventOverlap | None = None,
) -> tuple[torch.Tensor, EventOverlap]:
    asks = {"async_finish": True, "allocate_on_comm_stream": event is not None}
    y, handle = experts_answered(comm, buffer, x, idx, w, event)
    out, _, event = buffer.combine(y, handle, previous_event=Buffer.capture(), **asks)
    return out, event


def experts_answered(
    comm: ThreadComm,
    buffer: Buffer,
    x: torch.Tensor,
    idx: torch.Tensor,
    w: torch.Tensor,
    event: EventOverlap | None = None,
) -> tuple[torch.Tensor, Any]:
    """This rank's answers to a normal dispatch, and its handle."""
    asks = {"async_finish": True, "allocate_on_comm_stream": event is not None}
    per_rank, _, per_expert, in_rank, event = buffer.get_dispatch_layout(
        idx, EXPERTS, previous_event=event, **asks
    )
    rows, local, weights, _, handle, event = buffer.dispatch(
        x, None, per_rank, None, in_rank, per_expert, idx, w, previous_event=event, **asks
    )
    event.current_stream_wait()
    y = torch.zeros(rows.shape, dtype=torch.float32, device=rows.device)
    for k in range(TOPK):
        for e in range(2):
            made = expert(comm.rank() * 2 + e, rows).float() * weights[:, k, None]
            y += torch.where(local[:, k, None] == e, made, 0.0)
    return y, handle


@pytest.mark.parametrize(("zero_copy", "seed"), by_turns([False, True], SEEDS))
def test_what_a_combine_beside_reads_may_be_let_go_of(run: Run, zero_copy: bool, seed: int) -> None:
    """The handle and the memory for answers are the current stream's. A second combine makes the
    handle's routes again."""

    def work(comm: ThreadComm, gpus: QueuedGpus) -> list[torch.Tensor]:
        buffer = buffer_of(comm, gpus, low_latency_mode=True)
        [(x, idx, w)] = given_batches(comm, gpus, 1)
        sums = []
        for beside in (False, True):
            with gpus.may_wait(Wait.STREAM if beside else Wait.DEVICE):
                rows, _, handle, *_ = buffer.low_latency_dispatch(
                    x, idx, TOKENS, EXPERTS, use_fp8=False
                )
                y = torch.stack([expert(comm.rank() * 2 + e, rows[e]) for e in range(2)])
                if zero_copy:
                    buffer.get_next_low_latency_combine_buffer(handle).copy_(y)
                    y = torch.zeros_like(y)
                    options = {"zero_copy": True}
                else:
                    buffer.low_latency_combine(y, idx, w, handle)
                    options = {}
                out, event, _ = buffer.low_latency_combine(
                    y, idx, w, handle, async_finish=beside, **options
                )
                del handle
                event.current_stream_wait()
                sums.append(out * 1)
        return read(gpus, sums, [buffer])

    for rank, sums in enumerate(run(work, seed)):
        assert all(torch.equal(one, wanted(rank)) for one in sums)


def broken(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, right: str, wrong: str = "pass"
) -> None:
    """Puts a fault into a method's source."""
    method = inspect.unwrap(getattr(owner, name))
    source = textwrap.dedent(inspect.getsource(method))
    assert source.count(right) == 1, "the method has no such text any more"
    scope: dict[str, Any] = {}
    code = "from __future__ import annotations\n" + source.replace(right, wrong)
    exec(code, {**method.__globals__}, scope)
    monkeypatch.setattr(owner, name, scope[name])


def found(run: Run, work: Callable[..., Any], count: int, kind: type[Exception]) -> bool:
    """Whether an order shows a fault."""
    for seed in (1, 2, 0):
        try:
            check(run(work, seed), count)
        except kind:
            return True
    return False


@pytest.mark.parametrize(
    ("owner", "name", "right"),
    [
        pytest.param(
            Streams,
            "run_beside",
            "stream.wait_stream(torch.cuda.current_stream(device))",
            id="no wait for tokens",
            marks=pytest.mark.long,
        ),
        pytest.param(
            Streams,
            "run_beside",
            "found.event = last.event",
            id="no event",
            marks=pytest.mark.long,
        ),
        pytest.param(
            Streams,
            "run_beside",
            "tensor.record_stream(stream)",
            id="tokens freed in flight",
            marks=pytest.mark.long,
        ),
        pytest.param(
            Buffer,
            "_run",
            "keep(*(result.memory if isinstance(result, low_latency.Received) else (result,)))",
            id="results freed in flight",
        ),
    ],
)
def test_an_order_that_is_missing_shows_as_wrong_bits(
    run: Run, owner: type, name: str, right: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch, owner, name, right)
    assert found(run, low_latency("async"), 3, AssertionError)


@pytest.mark.parametrize(
    ("waits", "work"),
    by_turns(
        ["assert wanted.max() >= 0", "wanted.tolist()", "torch.cuda.synchronize(self._device)"],
        [captured, low_latency],
    ),
)
def test_a_wait_of_the_host_is_refused(
    run: Run, waits: str, work: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = "wanted = wanted.contiguous()"
    broken(monkeypatch, DeviceSteps, "combine_recv", right, f"{right}; {waits}")
    assert found(run, work(HOW[0]), 3, HostWaits)
