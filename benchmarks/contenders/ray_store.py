"""Ray's object store: put in one actor, get and copy into its own buffer in another.

The clock runs from the put to the end of the copy and so holds one actor call, which is how the
target learns of the object. Both flavours share one local Ray.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import shutil
import tempfile
import time
from typing import Any, Literal

import msgspec

from benchmarks.harness import data
from benchmarks.harness.cases import MIB, Case
from benchmarks.harness.child import Child
from benchmarks.harness.contender import ContenderError, Effort, Family, Measurement
from benchmarks.harness.pair import seconds_of
from benchmarks.harness.roles import Stamps

Flavour = Literal["numpy", "torch"]

_STORE_BYTES = 2048 * MIB
_ENV = {
    "RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


class _Host:
    """The process that runs Ray, for as long as a flavour uses it."""

    def __init__(self) -> None:
        self._users: set[str] = set()
        self._child: Child | None = None

    def ask(self, user: str, method: str, *arguments: Any) -> Any:
        if self._child is None:
            self._child = Child("benchmarks.contenders.ray_store:Driver", env=_ENV)
        self._users.add(user)
        return self._child.call(method, *arguments)

    def leave(self, user: str) -> None:
        self._users.discard(user)
        if not self._users and self._child is not None:
            self._child.close(patience=15.0)
            self._child = None


_HOST = _Host()


class RayStore:
    family: Family = "peer"
    threads = 1
    obtain = "pip install -e '.[ray]'"

    def __init__(self, flavour: Flavour) -> None:
        self.name = f"ray {flavour}"
        self._flavour = flavour

    def available(self) -> str | None:
        if importlib.util.find_spec("ray") is None:
            return "ray is not installed"
        if self._flavour == "torch" and importlib.util.find_spec("torch") is None:
            return "torch is not installed"
        return None

    def supports(self, case: Case) -> bool:
        if case.operation == "push":
            return True
        return (
            case.operation == "write"
            and case.link == "shm"
            and case.memory == "library"
            and case.temperature == "cold"
            and case.bytes >= MIB
        )

    def describe(self, case: Case) -> str:
        zero_copy = ", zero-copy tensors" if self._flavour == "torch" else ""
        pairs = "two actors into two, each: " if case.operation == "push" else ""
        return f"{pairs}put, one actor call, get and copy{zero_copy}"

    def start(self, case: Case) -> None:
        try:
            _HOST.ask(self.name, "prepare", self._own(case))
        except ContenderError:
            self.stop()
            raise

    def verify(self, case: Case) -> bool:
        self.measure(case, Effort(operations=1, samples=1))
        if fault := _HOST.ask(self.name, "check", self._own(case), 1):
            raise ContenderError(fault)
        return True

    def measure(self, case: Case, effort: Effort) -> Measurement:
        stamps: Stamps = _HOST.ask(
            self.name, "run", self._own(case), effort.operations, effort.samples
        )
        return Measurement(seconds=seconds_of(stamps, stamps.ends, effort))

    def pause(self) -> None:
        """Ray sleeps between calls; its daemons would take a stop signal for a dead node."""

    def resume(self) -> None:
        return

    def stop(self) -> None:
        _HOST.leave(self.name)

    def _own(self, case: Case) -> Case:
        """The flavour travels as the label."""
        return msgspec.structs.replace(case, label=self._flavour)


class Driver:
    """Starts Ray and pairs of actors, and passes calls on to them."""

    def __init__(self) -> None:
        self._ray: Any = importlib.import_module("ray")
        self._folder = tempfile.mkdtemp(prefix="bench-ray-")
        self._ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=_STORE_BYTES,
            _temp_dir=self._folder,
        )
        self._pairs: list[tuple[Any, Any]] = []

    def prepare(self, case: Case) -> None:
        self._use(2 if case.operation == "push" else 1)
        count = self._share(case).region
        self._get(*(end.prepare.remote(count) for pair in self._pairs for end in pair))

    def run(self, case: Case, operations: int, samples: int) -> Stamps:
        encoded = msgspec.msgpack.encode(self._share(case))
        starts: list[int] = []
        ends: list[int] = []
        for _ in range(samples):
            calls = [
                source.run.remote(target, encoded, operations) for source, target in self._pairs
            ]
            stamps = self._get(*calls)
            starts.append(min(start for start, _ in stamps))
            ends.append(max(end for _, end in stamps))
        return Stamps(starts=starts, ends=ends)

    def check(self, case: Case, operations: int) -> str | None:
        encoded = msgspec.msgpack.encode(self._share(case))
        faults = self._get(*(target.check.remote(encoded, operations) for _, target in self._pairs))
        return next((fault for fault in faults if fault), None)

    def _use(self, pairs: int) -> None:
        """Have that many pairs of actors; those of before, if as many, keep their memory."""
        if len(self._pairs) == pairs:
            return
        for end in (end for pair in self._pairs for end in pair):
            self._ray.kill(end)
        make = self._ray.remote
        self._pairs = [(make(Source).remote(), make(Target).remote()) for _ in range(pairs)]

    def _share(self, case: Case) -> Case:
        """What each pair moves."""
        if case.operation != "push":
            return case
        each = case.bytes // len(self._pairs)
        return msgspec.structs.replace(case, operation="write", bytes=each, region=each)

    def close(self) -> None:
        self._ray.shutdown()
        with contextlib.suppress(OSError):
            shutil.rmtree(self._folder)

    def _get(self, *calls: Any) -> list[Any]:
        found: list[Any] = self._ray.get(list(calls), timeout=60)
        return found


class Source:
    """The actor that puts."""

    memory: data.Bytes

    def prepare(self, count: int) -> None:
        if not hasattr(self, "memory") or self.memory.size != count:
            self.memory = data.ordinary_memory(count)
            data.fill(self.memory)
        self.moved = 0

    def run(self, target: Any, encoded: bytes, operations: int) -> tuple[int, int]:
        """Start and end of `operations` operations, monotonic nanoseconds."""
        ray: Any = importlib.import_module("ray")
        case = msgspec.msgpack.decode(encoded, type=Case)
        whole: Any = self.memory
        if case.label == "torch":
            whole = importlib.import_module("torch").from_numpy(self.memory)
        end = start = time.monotonic_ns()
        for _ in range(operations):
            at = int(data.step(case, self.moved).sources[0]) * case.bytes
            self.moved += 1
            reference = ray.put(whole[at : at + case.bytes])
            end = ray.get(target.take.remote([reference], at))
        return start, end


class Target:
    """The actor that gets, into a buffer of its own."""

    memory: data.Bytes

    def prepare(self, count: int) -> None:
        if not hasattr(self, "memory") or self.memory.size != count:
            self.memory = data.ordinary_memory(count)
        self.memory.fill(0)

    def take(self, references: list[Any], at: int) -> int:
        """Copies the object to offset `at`; returns when it was there, monotonic nanoseconds."""
        ray: Any = importlib.import_module("ray")
        found = ray.get(references[0])
        if hasattr(found, "numpy"):
            torch: Any = importlib.import_module("torch")
            torch.from_numpy(self.memory[at : at + found.nbytes]).copy_(found)
        else:
            self.memory[at : at + found.nbytes] = found
        return time.monotonic_ns()

    def check(self, encoded: bytes, operations: int) -> str | None:
        return data.fault(msgspec.msgpack.decode(encoded, type=Case), operations, self.memory)
