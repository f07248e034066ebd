"""What goes through an exchange in tests, on whatever a rank's kernels run, and what must come of
it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fabric_ray import TransferEngine
from fabric_ray.moe import AllToAll, RowPart, cast
from fabric_ray.moe.tokens import Dispatched
from tests.moe_ranks import batch
from tests.stands import Stand, Work

RANKS, EXPERTS, TOPK, HIDDEN, MAX_TOKENS = 2, 8, 3, 512, 64
BLOCK = 128
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32

#: Of each payload: what tokens are on their way, and their scales.
PAYLOADS: dict[str, tuple[torch.dtype, tuple[RowPart, ...]]] = {
    "bf16": (BF16, ()),
    "f32": (F32, ()),
    "int8": (torch.int8, (RowPart("scales", HIDDEN // BLOCK, F32),)),
    "fp8": (torch.float8_e4m3fn, (RowPart("scales", HIDDEN // BLOCK, F32),)),
    "fp8 ue8m0": (
        torch.float8_e4m3fn,
        (RowPart("scales", HIDDEN // BLOCK, torch.float8_e8m0fnu),),
    ),
    "fp8 packed ue8m0": (
        torch.float8_e4m3fn,
        (RowPart("scales", HIDDEN // BLOCK // 4, torch.int32),),
    ),
}


@dataclass(frozen=True)
class Case:
    """Tokens of two ranks, their format, and how rows are laid out."""

    name: str
    tokens: tuple[int, int] = (MAX_TOKENS, MAX_TOKENS)
    payload: str = "bf16"
    answers: torch.dtype = BF16
    hot: bool = False
    """All tokens go to one expert, among others."""
    multiple: int | None = None
    """Rows of each expert are filled up to it; if ``None`` they are as far apart as can come."""
    options: Mapping[str, Any] = field(default_factory=dict)

    def given(self, seed: int, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        """A rank's tokens, their experts and weights."""
        tokens = self.tokens[rank]
        x, idx, w = batch(1000 * seed + rank, tokens, EXPERTS, TOPK, HIDDEN)
        if self.hot:
            idx[idx == 0] = -1
            idx[:, 0] = 0
        return x, idx, w

    def sent(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Tokens as they go to experts, and their scales."""
        dtype, parts = PAYLOADS[self.payload]
        if not parts:
            return x.to(dtype), {}
        if dtype == torch.int8:
            values, scales = cast.to_int8(x, block=BLOCK)
        else:
            values, scales = cast.to_fp8(x, block=BLOCK, scales=parts[0].dtype)
        return values, {"scales": scales}

    def answered(self, x: Tensor, parts: Mapping[str, Tensor], number: Tensor) -> Tensor:
        """What experts with these numbers, ``[rows]``, answer to such tokens."""
        values = cast.back(x, parts["scales"], dtype=F32) if parts else x.float()
        each = number.view(-1, 1).float()
        return (values * (each + 1) + each).to(self.answers)

    def wanted(self, seed: int, rank: int, gone: range = range(0)) -> Tensor:
        """A rank's sums, made in one place, without the experts that are ``gone``."""
        x, idx, w = self.given(seed, rank)
        values, parts = self.sent(x)
        total = torch.zeros(x.shape)
        for k in range(TOPK):
            number = idx[:, k]
            there = number >= 0
            for expert in gone:
                there &= number != expert
            answer = self.answered(values, parts, number).float()
            total = torch.where(there[:, None], total + w[:, k : k + 1] * answer, total)
        return total.to(self.answers)


CASES: Sequence[Case] = (
    Case("bf16"),
    Case("no token", tokens=(0, 0)),
    Case("one token", tokens=(1, 1)),
    Case("some on one rank alone", tokens=(37, 0)),
    Case("a hot expert", hot=True),
    Case("int8", payload="int8"),
    Case("fp8", payload="fp8"),
    Case("fp8 ue8m0", payload="fp8 ue8m0"),
    Case("fp8 packed ue8m0", payload="fp8 packed ue8m0", answers=F32),
    Case("f32", payload="f32", answers=F32),
    Case("f16 answers", answers=F16),
    Case("filled up", tokens=(50, 64), multiple=16),
    Case("turns", options={"private_rows": 4, "shared_rows": 24}),
    Case("turns of fp8", payload="fp8", multiple=8, options={"private_rows": 0, "shared_rows": 40}),
    Case("private rows for all", options={"private_rows": MAX_TOKENS * TOPK}),
    Case("by the engine alone", options={"direct": False}),
)


class Exchange:
    """One rank's part of a case, with tensors at fixed addresses for a graph."""

    def __init__(
        self,
        engine: TransferEngine,
        case: Case,
        rank: int,
        ranks: int,
        stand: Stand,
        timeout: float,
    ) -> None:
        dtype, parts = PAYLOADS[case.payload]
        self.case, self.rank, self.stand = case, rank, stand
        self._each = ranks * MAX_TOKENS
        self.a = AllToAll(
            engine, rank=rank, ranks=ranks, experts=EXPERTS, topk=TOPK, hidden=HIDDEN,
            max_tokens=MAX_TOKENS, dtype=dtype, parts=parts, answer_dtype=case.answers,
            device=stand.device, launcher=stand.launcher, timeout=timeout, **case.options,
        )  # fmt: skip
        self._w = torch.zeros(case.tokens[rank], TOPK, device=stand.device)
        self._idx = torch.full(self._w.shape, -1, device=stand.device)
        x = torch.zeros(len(self._w), HIDDEN, dtype=BF16)
        self._x, self._parts = self._placed(x)
        self.sums = torch.zeros(x.shape, dtype=case.answers, device=stand.device)
        self._first = torch.full((1,), self.a.local_experts[0], device=stand.device)
        self._replay: Work | None = None
        self._load()

    def _placed(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        values, parts = self.case.sent(x)
        there = self.stand.device
        return values.to(there), {name: part.to(there) for name, part in parts.items()}

    def _load(self) -> None:
        """Experts run once before an exchange waits: what loads their kernels then might wait for
        the peer."""
        rows = EXPERTS // self.a.ranks * self._each
        there = self.stand.device
        dtype, parts = PAYLOADS[self.case.payload]
        counts = torch.zeros(len(self.a.local_experts), dtype=torch.int64, device=there)
        self._answers(
            Dispatched(
                x=torch.zeros(rows, HIDDEN, device=there).to(dtype),
                parts={p.name: torch.zeros(rows, p.width, device=there).to(p.dtype) for p in parts},
                counts=counts,
                starts=counts.clone(),
            )
        )
        self.stand.finish()

    def give(self, seed: int) -> None:
        x, idx, w = self.case.given(seed, self.rank)
        values, parts = self._placed(x)
        self._x.copy_(values)
        for name, part in parts.items():
            self._parts[name].copy_(part)
        self._idx.copy_(idx)
        self._w.copy_(w)

    def _answers(self, got: Dispatched) -> Tensor:
        number = self._first + got.experts().clamp(min=0)
        return self.case.answered(got.x, got.parts, number)

    def step(self) -> None:
        self.a.dispatch_send(self._x, self._idx, **self._parts)
        if self.case.multiple is None:
            got = self.a.dispatch_recv(stride=self._each)
        else:
            got = self.a.dispatch_recv(multiple=self.case.multiple)
        self.a.combine_send(self._answers(got))
        self.a.combine_recv(self._w, out=self.sums)

    def capture(self, seed: int) -> None:
        """All ranks do at a time; those on the processor have one exchange meanwhile."""
        self.give(seed)
        self._replay = self.stand.capture(self.step)

    def replay(self) -> None:
        assert self._replay is not None, "nothing was captured"
        self._replay()

    def run(self, seed: int) -> tuple[Tensor, tuple[int, ...]]:
        """The sums, and who was left out."""
        self.give(seed)
        if self._replay is None:
            self.step()
        else:
            self._replay()
        self.a.check()
        return self.sums.cpu(), self.a.left_out

    def close(self) -> None:
        self.a.close()
        self._replay = None
