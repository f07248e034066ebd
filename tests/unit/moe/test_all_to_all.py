"""Exchanges of tokens between experts, against sums made without any."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

from fabric_ray import TransferEngine, errors
from fabric_ray.moe import AllToAll, RowPart
from tests.moe_ranks import batch, expert, layer, unsharded
from tests.unit.moe.moe_ranks import joined, on_each


def group(ranks: int, **options: Any) -> AbstractContextManager[list[AllToAll]]:
    return joined([None] * ranks, **options)


def test_answers_come_one_by_one_where_they_are_wanted() -> None:
    with group(2, experts=4, topk=3, hidden=8, max_tokens=6) as alls:

        def work(a: AllToAll) -> None:
            x, idx, w = batch(a.rank, 6, 4, 3, 8)
            a.dispatch_send(x, idx)
            got = a.dispatch_recv()
            y = torch.zeros(len(got.x), 8, dtype=torch.bfloat16)
            for local, number in enumerate(a.local_experts):
                y[got.of(local)] = expert(number, got.x[got.of(local)])
            a.combine_send(y)
            answers = a.combine_answers()
            for t in range(6):
                for k in range(3):
                    e = int(idx[t, k])
                    want = torch.zeros_like(x[t]) if e < 0 else expert(e, x[t])
                    assert torch.equal(answers[t, k], want)
            assert torch.equal(a.combine_recv(w), unsharded(x, idx, w))

        on_each(alls, work)


def test_a_rank_that_was_forgotten_gets_no_zeros_in_silence() -> None:
    shape: dict[str, Any] = {"ranks": 3, "experts": 3, "topk": 1, "hidden": 8, "max_tokens": 4}
    engines = [TransferEngine() for _ in range(3)]
    try:
        alls = [AllToAll(engine, rank=rank, **shape) for rank, engine in enumerate(engines)]
        x, idx, _ = batch(0, 4, 3, 1, 8)
        with pytest.raises(errors.InvalidArgument, match="rank 1 is not connected"):
            alls[0].dispatch_send(x, idx)
        descriptors = [a.descriptor() for a in alls]
        alls[0].connect(descriptors[:2])
        with pytest.raises(errors.InvalidArgument, match=r"rank 2 is.* all 3 ranks"):
            alls[0].dispatch_send(x, idx)
        alls[0].admit(descriptors[2])
        alls[0].dispatch_send(x, idx)
        alls[1].connect([descriptors[0], None, None])
        alls[1].dispatch_send(x, idx)
    finally:
        for engine in engines:
            engine.close()


def test_what_does_not_fit_is_refused_with_what_to_do() -> None:
    with group(1, experts=4, topk=2, hidden=8, max_tokens=4) as [a]:
        x, idx, w = batch(0, 4, 4, 2, 8)
        for args, words in [
            ((x.float(), idx), "bfloat16"),
            ((x[:, :4], idx), r"\[rows, 8\]"),
            ((x[:2], idx), "one row for each"),
            ((x, idx.float()), "integers"),
            ((torch.cat([x, x]), torch.cat([idx, idx])), "room for 4"),
            ((x, torch.full_like(idx, 9)), "expert 9"),
        ]:
            with pytest.raises(errors.InvalidArgument, match=words):
                a.dispatch_send(*args)
        with pytest.raises(errors.InvalidArgument, match="made of"):
            a.dispatch_send(x, idx, scales=w)
        with pytest.raises(errors.InvalidArgument, match="it is dispatch_send"):
            a.combine_send(x)
        a.dispatch_send(x, idx)
        with pytest.raises(errors.InvalidArgument, match="it is dispatch_recv"):
            a.dispatch_send(x, idx)
        got = a.dispatch_recv()
        with pytest.raises(errors.InvalidArgument, match="are needed"):
            a.combine_send(got.x[:1])
        a.combine_send(got.x)
        with pytest.raises(errors.InvalidArgument, match="weights"):
            a.combine_recv(w.double())
        assert torch.equal(a.combine_recv(w), a_sum(x, idx, w))
    engine = TransferEngine()
    for options, words in [
        ({"experts": 3}, "evenly"),
        ({"rank": 2}, r"rank 2 is out of range \[0, 2\)"),
        ({"private_rows": -1}, "private_rows must be >= 0, got -1"),
        ({"shared_rows": -3}, "shared_rows must be >= 1, or None, got -3"),
        ({"answer_dtype": torch.int8}, "can't be summed"),
        ({"answer_dtype": "float32"}, "'float32' is no dtype"),
        ({"dtype": "bfloat16"}, "'bfloat16' is no dtype"),
        ({"parts": [RowPart("s", 1, "int8")]}, "'int8' is no dtype"),
        ({"parts": [RowPart("x", 1, torch.int8)]}, "names of their own"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"timeout": 0}, "more than 0"),
    ]:
        sizes: dict[str, Any] = {"rank": 0, "ranks": 2, "experts": 4, "topk": 2, "hidden": 8}
        with pytest.raises(errors.InvalidArgument, match=words):
            AllToAll(engine, **{**sizes, "max_tokens": 4, **options})
    engine.close()


def a_sum(x: torch.Tensor, idx: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(x.shape)
    for k in range(idx.shape[1]):
        out += torch.where(idx[:, k : k + 1] >= 0, w[:, k : k + 1], 0.0) * x.float()
    return out.to(x.dtype)


def test_buffers_are_explained_and_follow_from_the_sizes() -> None:
    options: dict[str, Any] = {"experts": 8, "topk": 2, "hidden": 64, "max_tokens": 16}
    with group(2, **options) as full, group(2, **options, shared_rows=4) as small:
        assert "in rounds" in small[0].explain()
        assert small[0].nbytes < full[0].nbytes
        assert f"{full[0].nbytes:,}" in full[0].explain()
        x, idx, w = batch(0, 16, 8, 2, 64)
        for alls in (full, small):
            for sums in on_each(alls, lambda a: layer(a, x, idx, w, 4)):
                assert torch.equal(sums, unsharded(x, idx, w))
