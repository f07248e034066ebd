"""vLLM's managers and ``prepare_finalize`` classes over ``deep_ep`` and ``nixl_ep``."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fabric_ray.moe import cast
from tests.adapters.moe_rank import (
    EXPERTS,
    FUSED_MOE,
    TOPK,
    M,
    Rank,
    from_four_bits,
    seen,
    through_four_bits,
)
from tests.adapters.sources import module, run, whole
from tests.moe_ranks import batch, expert, unsharded


class Manager:
    """What vLLM's managers have of their group."""

    def __init__(self, cpu_group: dist.ProcessGroup, tcp_store_group: Any = None) -> None:
        self.cpu_group, self.tcp_store_group, self.internode = cpu_group, tcp_store_group, False
        self.rank, self.world_size = cpu_group.rank(), cpu_group.size()


def vllm_managers(**parallel: int) -> dict[str, Any]:
    base = "vllm.distributed.device_communicators"
    names = run(
        module(f"{base}.base_device_communicator", ""),
        {"threading": threading, "WeakValueDictionary": __import__("weakref").WeakValueDictionary},
        "Cache",
    )
    options = {"enable_fault_tolerance": True, "enable_elastic_ep": bool(parallel), **parallel}
    config = SimpleNamespace(parallel_config=SimpleNamespace(**options))
    given = names | {
        "torch": torch,
        "dist": dist,
        "threading": threading,
        "dataclass": dataclasses.dataclass,
        "contextmanager": contextlib.contextmanager,
        "StatelessProcessGroup": None,
        "Any": Any,
        "All2AllManagerBase": Manager,
        "has_deep_ep": lambda: True,
        "has_deep_ep_v2": lambda: True,
        "get_current_vllm_config": lambda: config,
        "logger": SimpleNamespace(debug=lambda *_: None),
        "envs": SimpleNamespace(
            VLLM_DEEPEP_BUFFER_SIZE_MB=1,
            VLLM_DEEPEP_HIGH_THROUGHPUT_FORCE_INTRA_NODE=False,
            VLLM_DEEPEP_LOW_LATENCY_USE_MNNVL=False,
            VLLM_DEEPEP_V2_ALLOW_HYBRID_MODE=True,
            VLLM_DEEPEP_V2_PREFER_OVERLAP=False,
            VLLM_DEEPEP_V2_ALLOW_MULTIPLE_REDUCTION=False,
        ),
    }
    return run(
        module(f"{base}.all2all", ""),
        given,
        "DeepEPAll2AllManagerBase",
        "DeepEPHTAll2AllManager",
        "DeepEPLLAll2AllManager",
        "DeepEPV2All2AllManager",
        "_NixlEPBufferState",
        "NixlEPAll2AllManager",
    )


def vllm_classes(name: str, four_bits: bool = False) -> tuple[dict[str, Any], Any]:
    """A module of ``prepare_finalize``, and the reduction that vLLM asks for."""
    mk = run(
        module(f"{FUSED_MOE}.modular_kernel", ""),
        {"torch": torch, "dataclass": dataclasses.dataclass, "PIN_MEMORY": False},
        "ExpertTokensMetadata",
    )
    kernels = SimpleNamespace(
        FusedMoEPrepareAndFinalizeModular=object,
        FusedMoEActivationFormat=SimpleNamespace(Standard=1, BatchedExperts=2),
        TopKWeightAndReduce=object,
        ExpertTokensMetadata=mk["ExpertTokensMetadata"],
    )
    sums = SimpleNamespace(moe_sum=lambda x, out: out.copy_(x.float().sum(1).to(out.dtype)))
    reduces = run(
        module(f"{FUSED_MOE}.topk_weight_and_reduce", ""),
        {"torch": torch, "mk": kernels, "ops": sums},
        "TopKWeightAndReduceDelegate",
        "TopKWeightAndReduceContiguous",
    )
    given = {
        "mk": kernels,
        "envs": SimpleNamespace(VLLM_DEEPEPLL_NVFP4_DISPATCH=four_bits),
        "init_logger": lambda _: SimpleNamespace(
            debug_once=print, info_once=print, warning_once=print
        ),
        "moe_kernel_quantize_input": quantised,
        "normalize_batched_scales_shape": lambda scales, _: scales,
        "current_platform": SimpleNamespace(is_rocm=lambda: False),
        "round_up": lambda n, to: -(-n // to) * to,
        "cdiv": lambda a, b: -(-a // b),
        "current_stream": None,
        "dbo_current_ubatch_id": lambda: 0,
        "dbo_enabled": lambda: False,
        "dbo_maybe_run_recv_hook": lambda: None,
        # As with two batches: the event is of the buffer's own capture.
        "dbo_get_previous_event": lambda capture: capture(),
        "get_forward_context": lambda: SimpleNamespace(dp_metadata=None),
        "triton": SimpleNamespace(jit=lambda function: function),
        "tl": None,
        "MXFP8_BLOCK_SIZE": 32,
        "swizzle_mxfp8_scale": None,
        **reduces,
    }
    for moment in ("comm", "compute", "compute_sync"):
        given[f"dbo_switch_to_{moment}"] = lambda: None
    for moment in ("comm_to_compute", "compute_to_comm"):
        given[f"dbo_yield_and_switch_from_{moment}"] = lambda: None
    found = whole(f"{FUSED_MOE}.prepare_finalize.{name}", given, "")
    return found, reduces["TopKWeightAndReduceDelegate"]()


def quantised(x: Tensor, *_: Any, block_shape: Any = None, **options: Any) -> Any:
    return cast.to_fp8(x) if block_shape and x.dtype == torch.bfloat16 else (x, None)


def quantisation(fp8: bool) -> SimpleNamespace:
    return SimpleNamespace(
        is_block_quantized=fp8, quant_dtype=torch.float8_e4m3fn if fp8 else None,
        block_shape=[128, 128] if fp8 else None, a1_scale=None, a2_scale=None, a1_gscale=None,
        per_act_token_quant=False, is_scale_swizzled=False, mx_alignment=0,
    )  # fmt: skip


def by_token(me: Rank, x: Tensor, ids: Tensor) -> Tensor:
    """Each expert's answer ``[rows, topk, hidden]``, zeros for others' experts."""
    out = torch.zeros(len(x), ids.shape[1], x.shape[1], dtype=torch.bfloat16)
    for row, k in ((ids >= me.first) & (ids < me.first + me.local)).nonzero().tolist():
        out[row, k] = expert(int(ids[row, k]), x[row])
    return out


def vllm_high_throughput(me: Rank) -> None:
    found, delegate = vllm_classes("deepep_ht")
    manager = vllm_managers()["DeepEPHTAll2AllManager"](me.group)
    buffer = manager.get_handle({})
    assert manager.get_handle({}) is buffer
    manager.set_num_sms(16)
    calls = found["DeepEPHTPrepareAndFinalize"](buffer, me.ranks, me.ranks, me.first)
    for turn, fp8 in enumerate([False, True, False]):
        x, idx, w = me.batch(turn, 512)
        rows, scales, meta, ids, weights = calls.prepare(
            x, w, idx, EXPERTS, None, False, quantisation(fp8)
        )
        rows = cast.back(rows, scales) if fp8 else rows
        here = (ids >= me.first) & (ids < me.first + me.local)
        each = [int((ids[here] == me.first + n).sum()) for n in range(me.local)]
        assert meta.expert_num_tokens.tolist() == each
        y, out = by_token(me, rows, torch.where(here, ids, -1)), torch.empty_like(x)
        if turn == 1:
            calls.finalize_async(out, y, weights, ids, False, delegate)()
        else:
            calls.finalize(out, y, weights, ids, False, delegate)
        # vLLM rounds each weighted answer before it adds them up.
        wanted = me.summed(seen(x, fp8), idx, w)
        torch.testing.assert_close(out, wanted, rtol=0.03, atol=0.25)
    manager.destroy()


def vllm_low_latency(me: Rank) -> None:
    found, delegate = vllm_classes("deepep_ll")
    kind = vllm_managers()["DeepEPLLAll2AllManager"]
    manager, hidden = kind(me.group), 2048
    buffer = manager.get_handle(
        {
            "max_num_tokens_per_dp_rank": M,
            "token_hidden_size": hidden,
            "num_ep_ranks": me.ranks,
            "num_global_experts": EXPERTS,
            "num_local_experts": me.local,
        }
    )
    assert manager.max_sms_used() == 0
    kind._mask = torch.zeros(me.ranks, dtype=torch.int32)
    for turn, fp8 in enumerate([True, False, True]):
        calls = found["DeepEPLLPrepareAndFinalize"](buffer, M, me.ranks, use_fp8_dispatch=fp8)
        packed = turn == 2
        calls.post_init_setup(SimpleNamespace(supports_packed_ue8m0_act_scales=lambda p=packed: p))
        x, idx, w = me.batch(turn, hidden)
        hook, receive = calls.prepare_async(x, w, idx, EXPERTS, None, False, quantisation(fp8))
        hook()
        rows, scales, meta, _, _ = receive()
        rows = cast.back(rows, scales) if fp8 else rows
        out = torch.empty_like(x)
        y = me.batched(rows, meta.expert_num_tokens)
        if turn:
            receive, _ = calls.finalize_async(out, y, w, idx, False, delegate)
            receive()
        else:
            calls.finalize(out, y, w, idx, False, delegate)
        x = cast.back(*cast.to_fp8(x, powers_of_two=packed)) if fp8 else x
        assert torch.equal(out, unsharded(x, idx, w))
        assert not manager.query_fault()
        manager.clean_buffers()
        kind._last_mask = None
    manager.destroy()


def vllm_low_latency_four_bits(me: Rank) -> None:
    found, delegate = vllm_classes("deepep_ll", four_bits=True)
    manager, hidden = vllm_managers()["DeepEPLLAll2AllManager"](me.group), 2048
    buffer = manager.get_handle(
        {
            "max_num_tokens_per_dp_rank": M,
            "token_hidden_size": hidden,
            "num_ep_ranks": me.ranks,
            "num_global_experts": EXPERTS,
            "num_local_experts": me.local,
        }
    )
    calls = found["DeepEPLLPrepareAndFinalize"](buffer, M, me.ranks)
    calls.post_init_setup(SimpleNamespace(supports_packed_ue8m0_act_scales=lambda: False))
    # One for each expert, and all the same.
    scale = torch.full((EXPERTS,), 448 * 6 / 5.0)
    how = quantisation(False)
    how.quant_dtype, how.a1_gscale = "nvfp4", scale
    for turn in range(3):
        x, idx, w = me.batch(turn, hidden)
        hook, receive = calls.prepare_async(x, w, idx, EXPERTS, None, False, how)
        hook()
        rows, tiles, meta, _, _ = receive()
        y = me.batched(from_four_bits(rows, tiles, scale[0]), meta.expert_num_tokens)
        out = torch.empty_like(x)
        calls.finalize(out, y, w, idx, False, delegate)
        assert torch.equal(out, unsharded(through_four_bits(x, scale[:1]), idx, w))
    manager.destroy()


def vllm_second_interface(me: Rank) -> None:
    found, delegate = vllm_classes("deepep_v2")
    manager, hidden = vllm_managers()["DeepEPV2All2AllManager"](me.group), 512
    manager._gin_checked = True  # asks NCCL about the GPU's NICs
    buffer = manager.get_handle(
        {"num_max_tokens_per_rank": M, "hidden": hidden, "num_topk": TOPK,
         "use_fp8_dispatch": True, "num_experts": EXPERTS}
    )  # fmt: skip
    assert manager.max_sms_used() > 0
    for turn, (fp8, graph) in enumerate([(False, False), (True, False), (False, True)]):
        calls = found["DeepEPV2PrepareAndFinalize"](
            buffer, me.ranks, me.ranks, me.first, EXPERTS, TOPK, fp8, graph
        )
        # The experts make the ids global: vLLM's kernel for it runs on GPUs.
        calls.defer_globalize = graph
        # A batch of a graph has as many tokens on all ranks.
        x, idx, w = batch(turn * 8 + me.rank, 6, EXPERTS, TOPK, hidden)
        rows, scales, meta, ids, weights = calls.prepare(
            x, w, idx, EXPERTS, None, False, quantisation(fp8)
        )
        rows = cast.back(rows, scales) if fp8 else rows
        if graph:
            assert len(rows) == 8 * me.ranks
            there = torch.arange(len(ids)) < int(meta.psum_recv_per_rank[-1])
            ids = torch.where((ids >= 0) & there[:, None], ids + meta.rank_expert_offset, -1)
        y, out = by_token(me, rows, ids), torch.empty_like(x)
        if turn == 1:
            calls.finalize_async(out, y, weights, ids, False, delegate)()
        else:
            calls.finalize(out, y, weights, ids, False, delegate)
        wanted = me.summed(seen(x, fp8), idx, w)
        torch.testing.assert_close(out, wanted, rtol=0.03, atol=0.25)
    manager.destroy()


def vllm_nixl(me: Rank) -> None:
    """All ranks but the last serve while that one joins and warms up alone; then all of them."""
    found, delegate = vllm_classes("nixl_ep")
    few, hidden = me.ranks - 1, 2048
    of_few = dist.new_group(range(few))
    joins = me.rank == few
    kind = vllm_managers(
        elastic_ep_max_dp_size=me.ranks, data_parallel_size=me.ranks if joins else few
    )["NixlEPAll2AllManager"]
    shared = SimpleNamespace(store=dist.PrefixStore("vllm", me.store))
    manager = kind(me.group if joins else of_few, shared)
    buffer = manager.get_handle(
        {
            "max_num_tokens_per_dp_rank": M,
            "token_hidden_size": hidden,
            "num_local_experts": me.local,
        }
    )
    kind._mask = torch.zeros(me.ranks, dtype=torch.int32)

    def passes(ranks: range, turns: int) -> None:
        """Layers of the experts of some ranks."""
        here = range(ranks.start * me.local, ranks.stop * me.local)
        for turn in range(turns):
            fp8 = turn % 2 == 0
            calls = found["NixlEPPrepareAndFinalize"](
                buffer, M, me.ranks, EXPERTS, use_fp8_dispatch=fp8
            )
            x, idx, w = me.batch(turn, hidden)
            answered = torch.where((idx >= here.start) & (idx < here.stop), idx, -1)
            # A rank that warms up names experts of masked ranks too.
            idx = idx if joins else answered
            rows, scales, meta, _, _ = calls.prepare(
                x, w, idx, EXPERTS, None, False, quantisation(fp8)
            )
            rows = cast.back(rows, scales) if fp8 else rows
            out = torch.empty_like(x)
            calls.finalize(out, me.batched(rows, meta.expert_num_tokens), w, idx, False, delegate)
            assert torch.equal(out, unsharded(seen(x, fp8), answered, w))

    if joins:
        with manager.mask_remote_ranks():
            assert manager.query_active_mask().sum() == few
            passes(range(few, me.ranks), 2)
        assert not manager.query_active_mask().any()
    else:
        passes(range(few), 2)
        manager = kind(me.group, shared)
        manager.stage_ep_size()
        passes(range(few), 3)
    dist.barrier()
    if not joins:
        manager.commit_ep_size()
    passes(range(me.ranks), 2)
    assert not manager.query_fault()
    dist.barrier()
    manager.clean_buffers()
    passes(range(me.ranks), 1)
    manager.destroy()
    buffer.destroy()
