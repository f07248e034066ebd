"""The kernels of expert parallelism: what native/moe's kernels do on the processor, on a device.

All tensors are on one device. Sizes that change from step to step are read there (``tokens``,
chunks), and grids are those of the largest, so that every call can be captured into a CUDA graph:
no call allocates or waits. Whether what came in made sense is a word on the device, too, which
:meth:`Routing.check` and :meth:`Placement.check` read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fabric_ray.errors import InvalidArgument
from fabric_ray.kernels import structs
from fabric_ray.kernels.launch import Launcher
from fabric_ray.kernels.moe_tables import TILE, MoeSizes, Placement, Routing
from fabric_ray.kernels.steps import StepKind, Steps
from fabric_ray.kernels.structs import FLOATS, MAX_PARTS
from fabric_ray.tensors import check_memory

if TYPE_CHECKING:
    from torch import Tensor

ALIGN = 16
_E8M0 = 2
#: In a chunk's place: it is an address, and not an offset in the region.
STORED = 1 << 62
#: So few tiles are counted by one block, which then needs to wait for no other.
_FEW_TILES = 4
#: Blocks that go round rows, at most: a few for each multiprocessor of the largest GPU.
_BLOCKS = 2048
#: Rows that a block copies at a time, one by each warp of a GPU.
_ROWS = 8


class MoeKernels:
    """The kernels, for exchanges of one size.

    Args:
        launcher: :class:`~fabric_ray.kernels.Device`; or what collects their steps.
    """

    def __init__(self, launcher: Launcher | Steps, sizes: MoeSizes) -> None:
        self.sizes = sizes
        self._steps = launcher if isinstance(launcher, Steps) else Steps(launcher)

    def route(self, indices: Tensor, tokens: Tensor, into: Routing) -> None:
        """Which row goes where: :meth:`count`, then :meth:`order`.

        Args:
            indices: int64 ``[max_tokens or fewer, topk]``, the experts of each token; -1 for none.
            tokens: int32 ``[1]``, how many of them there are now.
        """
        self.count(indices, tokens, into)
        self.order(indices, tokens, into)

    def count(self, indices: Tensor, tokens: Tensor, into: Routing) -> None:
        """How many rows there are for each expert, and whether all can be; of ``into`` all but
        ``token_of`` and ``row_of``."""
        arguments, blocks = self._routing(indices, tokens, into)
        self._steps.run(StepKind.COUNT_ROUTES, arguments, blocks)
        self._steps.run(StepKind.SUM_ROUTES, arguments)

    def order(
        self, indices: Tensor, tokens: Tensor, into: Routing, *, kept: Tensor | None = None
    ) -> None:
        """The place of each row, after :meth:`count` with the same arguments; ``kept`` takes the
        indices of the tokens."""
        arguments, blocks = self._routing(indices, tokens, into)
        if kept is not None:
            _expect("kept", kept, "int64", tuple(indices.shape))
            arguments.kept = kept.data_ptr()
        self._steps.run(StepKind.PLACE_ROUTES, arguments, blocks)

    def _routing(
        self, indices: Tensor, tokens: Tensor, into: Routing
    ) -> tuple[structs.Routing, int]:
        sizes = self.sizes
        room = indices.shape[0]
        _expect("indices", indices, "int64", (room, sizes.topk))
        if room > sizes.max_tokens:
            raise InvalidArgument(f"indices of {room} tokens; max_tokens is {sizes.max_tokens}")
        arguments = structs.Routing(
            indices.data_ptr(),
            _one("tokens", tokens),
            sizes.topk,
            sizes.experts,
            sizes.ranks,
            room,
            into.tile_counts.data_ptr(),
            into.tile_faults.data_ptr(),
            into.counts.data_ptr(),
            into.starts.data_ptr(),
            into.first.data_ptr(),
            into.token_of.data_ptr(),
            into.row_of.data_ptr(),
            into.fault.data_ptr(),
        )
        tiles = -(-room * sizes.topk // TILE)
        return arguments, 1 if tiles <= _FEW_TILES else tiles

    def pack(
        self,
        parts: Sequence[Tensor],
        tokens: Tensor,
        routing: Routing,
        out: Tensor,
        *,
        ways: Tensor | None = None,
    ) -> None:
        """Tokens to where they are sent from: the parts of a row behind one another.

        Args:
            parts: ``[max_tokens or fewer, width]`` each, of any dtype.
            tokens: as for :meth:`route`.
            out: uint8 ``[max_tokens * topk, row stride]``; a row's bytes, and what fills up to 16.
            ways: int64 ``[1 + 2 * ranks]``: to how many ranks rows go straight, and of each rank
                an address and how many of its first rows go there; all others go to ``out``.
        """
        given = [_part(f"part {i}", part) for i, part in enumerate(parts)]
        _room_for("out", out, self.sizes.out_rows, sum(part.width for part in given))
        arguments = structs.PackRows(
            _one("tokens", tokens),
            routing.row_of.data_ptr(),
            min((part.shape[0] for part in parts), default=0),
            self.sizes.topk,
            out.data_ptr(),
            out.stride(0),
            *_parts(given),
            routing.first.data_ptr(),
            None if ways is None else _ways(ways, self.sizes.ranks),
            self.sizes.ranks,
        )
        blocks = min(arguments.max_tokens, _BLOCKS)
        self._steps.run(StepKind.PACK_ROWS, arguments, max(2, blocks))

    def place(
        self,
        incoming: Tensor,
        into: Placement,
        *,
        room: int,
        multiple: int = 1,
        stride: int | None = None,
        counts: Tensor | None = None,
        starts: Tensor | None = None,
        given: Tensor | None = None,
        layout: Tensor | None = None,
    ) -> None:
        """Where the rows of all sources go.

        Args:
            incoming: int32 ``[ranks, local experts]``, each source's rows for each local expert, at
                any distance; zeros for one that is left out. What a peer says is checked.
            room: rows that what is handed out to has.
            multiple: each expert's rows are filled up to a multiple, for a grouped GEMM.
            stride: each expert's rows begin at a multiple of this instead, for a batched GEMM.
            counts: int64 ``[local experts]``, takes the rows of each.
            starts: int64 ``[local experts]``, takes the first row of each.
            given: int32 ``[local experts]``, takes the rows of each.
            layout: int64 ``[local experts, ranks]``, takes the rows of each source and, in the
                upper half, the first of them among the expert's; 0 for none. With ``stride``.
        """
        sizes = self.sizes
        local = sizes.local_experts
        _expect("incoming", incoming, "int32", (sizes.ranks, local), rows_apart=True)
        for name, value in (("multiple", multiple), ("stride", stride), ("room", room or 1)):
            if value is not None and not 0 < value < 1 << 31:
                raise InvalidArgument(f"{name} is {value}; give at least 1")
        arguments = structs.Incoming(
            incoming.data_ptr(),
            incoming.stride(0),
            sizes.ranks,
            local,
            multiple,
            stride or 0,
            sizes.pair_rows,
            room,
            into.origins.data_ptr(),
            into.targets.data_ptr(),
            into.counts.data_ptr(),
            into.starts.data_ptr(),
            into.fault.data_ptr(),
        )
        takes = (
            ("wide_totals", counts, "int64", (local,)),
            ("wide_starts", starts, "int64", (local,)),
            ("given", given, "int32", (local,)),
            ("layout", layout, "int64", (local, sizes.ranks)),
        )
        for name, tensor, dtype, shape in takes:
            if tensor is not None:
                _expect(name, tensor, dtype, shape)
                setattr(arguments, name, tensor.data_ptr())
        if layout is not None and stride is None:
            raise InvalidArgument("a layout needs a stride; give one")
        self._steps.run(StepKind.PLACE_ROWS, arguments)

    def hand_out(
        self,
        placement: Placement,
        chunks: Tensor,
        count: Tensor,
        region: Tensor,
        row_stride: int,
        parts: Sequence[Tensor],
        *,
        layout: Tensor | None = None,
        stride: int | None = None,
    ) -> None:
        """Rows that came to their experts; zeros for those that won't.

        Args:
            chunks: int64 ``[most, 3]``, of :meth:`Chunk.table`.
            count: int32 ``[1]``, how many of them there are now.
            region: uint8, what the chunks lie in.
            row_stride: bytes from one row to the next there, a multiple of 16.
            parts: ``[room, width]`` each, of any dtype; or ``[local experts, rows, width]`` of one
                or four bytes with each element's rows behind one another.
            layout: as for :meth:`place`; loses rows that won't come.
            stride: as for :meth:`place`; with ``layout``.
        """
        given = [_part(f"part {i}", part, columns=True) for i, part in enumerate(parts)]
        _stride("row_stride", row_stride, sum(part.width for part in given))
        arguments = structs.HandOut(
            placement.places(),
            _chunks(chunks, count),
            region.data_ptr(),
            row_stride,
            *_parts(given),
        )
        arguments.sources = self.sizes.ranks
        if layout is not None:
            arguments.layout, arguments.each = layout.data_ptr(), stride or 1
        self._steps.run(StepKind.HAND_OUT, arguments, self._rows(chunks))

    def pack_answers(
        self,
        placement: Placement,
        chunks: Tensor,
        count: Tensor,
        answers: Tensor,
        region: Tensor,
        back_stride: int,
    ) -> None:
        """The experts' answers to where they are sent from, in the order in which rows came.

        Args:
            answers: ``[room, elements]``.
            chunks: as for :meth:`hand_out`, where answers go. With ``STORED`` in it, a place is an
                address at the peer.
            count: as for :meth:`hand_out`.
            region: as for :meth:`hand_out`.
            back_stride: bytes from one answer to the next there, a multiple of 16.
        """
        given = _part("answers", answers)
        _stride("back_stride", back_stride, given.width)
        arguments = structs.PackAnswers(
            placement.places(), _chunks(chunks, count), given, region.data_ptr(), back_stride
        )
        self._steps.run(StepKind.PACK_ANSWERS, arguments, self._rows(chunks))

    def sum(
        self,
        answers: Tensor,
        tokens: Tensor,
        routing: Routing,
        out: Tensor,
        *,
        weights: Tensor | None = None,
        missing: Tensor | None = None,
        wanted: Tensor | None = None,
    ) -> None:
        """For each token the sum of the answers to its rows, in float32 and in its experts' order.

        Args:
            answers: ``[max_tokens * topk, elements]``, in the order of rows; float32, bfloat16 or
                float16.
            tokens: as for :meth:`route`.
            out: ``[max_tokens or fewer, elements]``, of any of the three.
            weights: float32 ``[max_tokens or fewer, topk]``; one each if ``None``.
            missing: uint8 ``[ranks]``, not zero for those whose answers don't come.
            wanted: ``[max_tokens or fewer, topk]``, the answers that are summed: bool; or int64,
                those that aren't negative.
        """
        sizes = self.sizes
        kinds = [FLOATS.get(_dtype(tensor)) for tensor in (answers, out)]
        if None in kinds or answers.shape[1:] != out.shape[1:]:
            raise InvalidArgument(
                f"answers of {answers.dtype} {tuple(answers.shape)} can't be summed to {out.dtype} "
                f"{tuple(out.shape)}; use rows of one length, of {', '.join(FLOATS)}"
            )
        given, room = _part("answers", answers), _part("out", out)
        rows = [out.shape[0], sizes.max_tokens]
        weighted: tuple[int | None, int] = (None, 0)
        if weights is not None:
            _expect("weights", weights, "float32", (weights.shape[0], sizes.topk), rows_apart=True)
            weighted = (weights.data_ptr(), weights.stride(0) * 4)
            rows.append(weights.shape[0])
        if missing is not None:
            _expect("missing", missing, "uint8", (sizes.ranks,))
        arguments = structs.WeightedSum(
            given.base,
            given.stride,
            _one("tokens", tokens),
            routing.row_of.data_ptr(),
            min(rows),
            sizes.topk,
            answers.shape[1],
            sizes.ranks,
            routing.first.data_ptr(),
            None if missing is None else missing.data_ptr(),
            *weighted,
            room.base,
            room.stride,
        )
        if wanted is not None:
            _expect("wanted", wanted, _dtype(wanted), (wanted.shape[0], sizes.topk))
            name = "wanted" if _dtype(wanted) == "bool" else "experts"
            setattr(arguments, name, wanted.data_ptr())
            arguments.max_tokens = min(arguments.max_tokens, wanted.shape[0])
        blocks = max(2, min(min(rows), _BLOCKS))
        kernel = f"sum_{kinds[0]}_{kinds[1]}"
        self._steps.run(StepKind.SUM_ANSWERS, arguments, blocks, kernel=kernel)

    def cast(
        self,
        x: Tensor,
        into: tuple[Tensor, Tensor],
        *,
        block: int,
        powers_of_two: bool = False,
        beside: bool = False,
    ) -> None:
        """Casts tokens as :func:`fabric_ray.moe.cast.to_fp8` does.

        Args:
            x: bfloat16 ``[tokens, hidden]``.
            into: takes the tokens, float8_e4m3fn ``[tokens or more, hidden]``, and their scales,
                ``[tokens or more, hidden / block]`` of float32 or float8_e8m0fnu, or a quarter as
                many of int32.
            block: elements that share a scale.
            powers_of_two: as for ``to_fp8``.
            beside: it needs nothing of what is collected before it.
        """
        values, scales = into
        if _dtype(x) != "bfloat16":
            raise InvalidArgument(f"tokens are {x.dtype}; give bfloat16")
        wide = scales.shape[1] * (4 if _dtype(scales) == "int32" else 1)
        if values.shape[1] != x.shape[1] or wide * block != x.shape[1]:
            raise InvalidArgument(
                f"tokens {tuple(x.shape)} in blocks of {block} don't go into "
                f"{tuple(values.shape)} and scales {tuple(scales.shape)}"
            )
        scaled = int(powers_of_two) if _dtype(scales) == "float32" else _E8M0
        parts = (_part("x", x), _part("values", values), _part("scales", scales))
        arguments = structs.CastRows(*parts, x.shape[0], block, scaled)
        blocks = max(2, min(-(-x.shape[0] * wide // _ROWS), _BLOCKS))
        self._steps.run(StepKind.CAST_ROWS, arguments, blocks, beside=beside)

    def _rows(self, chunks: Tensor) -> int:
        """Blocks for the rows of chunks."""
        return max(2, min(-(-self.sizes.pair_rows * chunks.shape[0] // _ROWS), _BLOCKS))


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _expect(
    name: str, tensor: Tensor, dtype: str, shape: tuple[int, ...], *, rows_apart: bool = False
) -> None:
    check_memory(name, tensor)
    packed = _elements_adjoin(tensor) if rows_apart else tensor.is_contiguous()
    if _dtype(tensor) != dtype or tuple(tensor.shape) != shape or not packed:
        raise InvalidArgument(
            f"{name} are {tensor.dtype} {tuple(tensor.shape)}; give {dtype} {shape}, contiguous"
        )


def _one(name: str, tensor: Tensor) -> int:
    _expect(name, tensor, "int32", (1,))
    return tensor.data_ptr()


def _part(name: str, tensor: Tensor, *, columns: bool = False) -> structs.Part:
    check_memory(name, tensor)
    if columns and tensor.ndim == 3:
        return _by_columns(name, tensor)
    if tensor.ndim != 2:
        raise InvalidArgument(f"{name} of {tuple(tensor.shape)}: give [rows, elements]")
    (rows, width), size = tensor.shape, tensor.element_size()
    # Strides along which there is nothing to go may be anything.
    stride = tensor.stride(0) if rows > 1 else width
    if stride < width or not _elements_adjoin(tensor):
        raise InvalidArgument(f"{name} of {tuple(tensor.shape)}: give rows of contiguous elements")
    return structs.Part(tensor.data_ptr(), stride * size, width * size)


def _by_columns(name: str, tensor: Tensor) -> structs.Part:
    (_, rows, width), size = tensor.shape, tensor.element_size()
    if size not in (1, 4) or not tensor.transpose(1, 2).is_contiguous():
        raise InvalidArgument(
            f"{name} of {tensor.dtype} {tuple(tensor.shape)}: give elements of one or four bytes, "
            "and each one's rows behind one another"
        )
    return structs.Part(tensor.data_ptr(), size, width * size, rows)


def _elements_adjoin(tensor: Tensor) -> bool:
    return tensor.shape[-1] <= 1 or tensor.shape[0] == 0 or tensor.stride(-1) == 1


def _parts(given: Sequence[structs.Part]) -> tuple[object, ...]:
    if not 1 <= len(given) <= MAX_PARTS:
        raise InvalidArgument(f"{len(given)} parts; give 1 to {MAX_PARTS}")
    return (len(given), 0, (structs.Part * MAX_PARTS)(*given))


def _room_for(name: str, tensor: Tensor, rows: int, width: int) -> None:
    if _dtype(tensor) != "uint8" or tensor.ndim != 2 or tensor.shape[0] < rows:
        raise InvalidArgument(f"{name}: give uint8 of at least {rows} rows")
    _stride(f"the stride of {name}", tensor.stride(0), width)
    if tensor.shape[1] < width:
        raise InvalidArgument(f"{name} has rows of {tensor.shape[1]} bytes; {width} are needed")


def _stride(name: str, nbytes: int, width: int) -> None:
    if nbytes % ALIGN or nbytes < width:
        raise InvalidArgument(f"{name} is {nbytes}; give {width} or more, a multiple of {ALIGN}")


def _chunks(chunks: Tensor, count: Tensor) -> structs.Chunks:
    _expect("chunks", chunks, "int64", (chunks.shape[0], 3))
    return structs.Chunks(chunks.data_ptr(), _one("count", count))


def _ways(ways: Tensor, ranks: int) -> int:
    _expect("ways", ways, "int64", (1 + 2 * ranks,))
    return ways.data_ptr()
