"""The structs that kernels of expert parallelism take, field by field as the sources have them."""

from __future__ import annotations

import ctypes

#: Formats of answers and of their sums, by torch's name.
FLOATS = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
#: Parts that a row has, at most.
MAX_PARTS = 8

_u32, _u64, _pointer = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_void_p


class Part(ctypes.Structure):
    _fields_ = (("base", _pointer), ("stride", _u64), ("width", _u32), ("each", _u32))


class Patience(ctypes.Structure):
    _fields_ = (("abort", _pointer), ("timeout_ns", _u64))


class Fifo(ctypes.Structure):
    _fields_ = (
        ("slots", _pointer),
        ("pushers", _pointer),
        ("completed", _pointer),
        ("capacity", _u64),
    )


class BeginExchange(ctypes.Structure):
    _fields_ = (
        ("patience", Patience),
        ("over", _pointer),
        ("values", _pointer),
        ("grows", _pointer),
        ("waits", _u32),
        ("tokens", _u32),
        ("given", _pointer),
        ("now", _pointer),
        ("waited", _pointer),
        ("gate", _pointer),
    )


class FetchWords(ctypes.Structure):
    _fields_ = (
        ("patience", Patience),
        ("word", _pointer),
        ("value", _pointer),
        ("waited", _pointer),
        ("gate", _pointer),
        ("from_", _pointer),
        ("to", _pointer),
        ("words", _u64),
        ("closed", _u64),
    )


class TellHost(ctypes.Structure):
    _fields_ = (
        ("fifo", Fifo),
        ("patience", Patience),
        ("command", _u64 * 2),
        ("gate", _pointer),
        ("from_", _pointer),
        ("to", _pointer),
        ("words", _u64),
        ("counter", _pointer),
        ("index", _pointer),
        ("waited", _pointer),
    )


class Routing(ctypes.Structure):
    _fields_ = (
        ("indices", _pointer),
        ("tokens", _pointer),
        ("topk", _u32),
        ("experts", _u32),
        ("ranks", _u32),
        ("max_tokens", _u32),
        ("tile_counts", _pointer),
        ("tile_faults", _pointer),
        ("counts", _pointer),
        ("starts", _pointer),
        ("first", _pointer),
        ("token_of", _pointer),
        ("row_of", _pointer),
        ("fault", _pointer),
        ("kept", _pointer),
    )


class PackRows(ctypes.Structure):
    _fields_ = (
        ("tokens", _pointer),
        ("row_of", _pointer),
        ("max_tokens", _u32),
        ("topk", _u32),
        ("out", _pointer),
        ("row_stride", _u64),
        ("parts", _u32),
        ("unused", _u32),
        ("part", Part * MAX_PARTS),
        ("first", _pointer),
        ("ways", _pointer),
        ("ranks", _u32),
    )


class Incoming(ctypes.Structure):
    _fields_ = (
        ("counts", _pointer),
        ("stride", _u64),
        ("sources", _u32),
        ("experts", _u32),
        ("multiple", _u32),
        ("each", _u32),
        ("most", _u32),
        ("room", _u32),
        ("from_", _pointer),
        ("to", _pointer),
        ("totals", _pointer),
        ("starts", _pointer),
        ("fault", _pointer),
        ("wide_totals", _pointer),
        ("wide_starts", _pointer),
        ("given", _pointer),
        ("layout", _pointer),
    )


class Places(ctypes.Structure):
    _fields_ = (
        ("from_", _pointer),
        ("to", _pointer),
        ("fault", _pointer),
        ("experts", _u32),
        ("unused", _u32),
    )


class Chunks(ctypes.Structure):
    _fields_ = (("chunk", _pointer), ("n", _pointer))


class HandOut(ctypes.Structure):
    _fields_ = (
        ("places", Places),
        ("chunks", Chunks),
        ("region", _pointer),
        ("row_stride", _u64),
        ("parts", _u32),
        ("sources", _u32),
        ("part", Part * MAX_PARTS),
        ("layout", _pointer),
        ("each", _u32),
        ("unused", _u32),
    )


class PackAnswers(ctypes.Structure):
    _fields_ = (
        ("places", Places),
        ("chunks", Chunks),
        ("answers", Part),
        ("region", _pointer),
        ("back_stride", _u64),
    )


class WeightedSum(ctypes.Structure):
    _fields_ = (
        ("answers", _pointer),
        ("answers_stride", _u64),
        ("tokens", _pointer),
        ("row_of", _pointer),
        ("max_tokens", _u32),
        ("topk", _u32),
        ("elements", _u32),
        ("ranks", _u32),
        ("first", _pointer),
        ("missing", _pointer),
        ("weights", _pointer),
        ("weights_stride", _u64),
        ("out", _pointer),
        ("out_stride", _u64),
        ("wanted", _pointer),
        ("experts", _pointer),
    )


class CastRows(ctypes.Structure):
    _fields_ = (
        ("from_", Part),
        ("to", Part),
        ("scales", Part),
        ("tokens", _u32),
        ("each", _u32),
        ("format", _u32),
        ("unused", _u32),
    )


class StepArguments(ctypes.Union):
    """What one of the steps takes."""

    _fields_ = (
        ("begin", BeginExchange),
        ("fetch", FetchWords),
        ("tell", TellHost),
        ("routing", Routing),
        ("pack", PackRows),
        ("incoming", Incoming),
        ("hand_out", HandOut),
        ("answers", PackAnswers),
        ("sum", WeightedSum),
        ("cast", CastRows),
    )

    def set(self, arguments: ctypes.Structure) -> None:
        """Copies the struct of a step."""
        ctypes.memmove(
            ctypes.addressof(self), ctypes.addressof(arguments), ctypes.sizeof(arguments)
        )


class Step(ctypes.Structure):
    _fields_ = (("kind", _u32), ("flags", _u32), ("arguments", StepArguments))


#: Steps of a launch, at most: a kernel's arguments take 4096 bytes.
MAX_STEPS = 12


class Steps(ctypes.Structure):
    _fields_ = (
        ("meeting", _pointer),
        ("n", _u32),
        ("unused", _u32),
        ("step", Step * MAX_STEPS),
    )


class Work(ctypes.Structure):
    _fields_ = (
        ("shared", _pointer),
        ("jobs", _u64),
        ("job_words", _u64),
        ("call", _u64),
        ("timeout_ns", _u64),
        ("depth", _u32),
        ("first", _u32),
        ("scratch", _pointer),
        ("region", _pointer),
        ("out_stride", _u64),
        ("meta", _u32),
        ("elements", _u32),
        ("of_node", _pointer),
        ("of_node_stride", _u64),
        ("totals", _pointer),
        ("answers", Part),
        ("parts", _u32),
        ("unused", _u32),
        ("part", Part * MAX_PARTS),
    )


#: The struct that each kernel takes, by its file and name.
ARGUMENTS: dict[str, dict[str, type[ctypes.Structure]]] = {
    "moe/work.cu": {f"work_{a}": Work for a in FLOATS.values()},
    "moe/steps.cu": dict.fromkeys(
        ("run_steps", *(f"sum_{a}_{b}" for a in FLOATS.values() for b in FLOATS.values())), Steps
    ),
}
