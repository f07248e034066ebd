"""The structs that kernels of expert parallelism take, field by field as the sources have them."""

from __future__ import annotations

import ctypes

#: Formats of answers and of their sums, by torch's name.
FLOATS = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
#: Parts that a row has, at most.
MAX_PARTS = 8

_u32, _u64, _pointer = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_void_p


class Part(ctypes.Structure):
    _fields_ = (("base", _pointer), ("stride", _u64), ("width", _u32), ("unused", _u32))


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
        ("unused", _u32),
        ("part", Part * MAX_PARTS),
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
    "moe/routes.cu": dict.fromkeys(("count_routes", "sum_routes", "place_routes"), Routing),
    "moe/pack.cu": {"pack_rows": PackRows},
    "moe/placing.cu": {"place_rows": Incoming},
    "moe/move.cu": {"hand_out": HandOut, "pack_answers": PackAnswers},
    "moe/work.cu": {f"work_{a}": Work for a in FLOATS.values()},
    "moe/sum.cu": {f"sum_{a}_{b}": WeightedSum for a in FLOATS.values() for b in FLOATS.values()},
}
