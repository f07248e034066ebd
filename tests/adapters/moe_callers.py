"""Callers of DeepEP as they are published, as ranks of a gloo group: their classes, with what they
would import from the rest of their frameworks given to them."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fabric_ray.compat import shim_path
from fabric_ray.moe import cast
from tests.adapters.sources import module, run, whole
from tests.moe_ranks import batch, expert, unsharded

EXPERTS, TOPK, M = 8, 3, 16
FUSED_MOE = "vllm.model_executor.layers.fused_moe"
DISPATCHERS = "sglang.srt.layers.moe.token_dispatcher"
MEGATRON = "megatron.core.transformer.moe"


class Rank(SimpleNamespace):
    """This process: its group, and the experts it has."""

    group: dist.ProcessGroup
    rank: int
    ranks: int
    store: dist.Store

    @property
    def local(self) -> int:
        return EXPERTS // self.ranks

    @property
    def first(self) -> int:
        return self.rank * self.local

    def batch(self, turn: int, hidden: int) -> tuple[Tensor, Tensor, Tensor]:
        return batch(turn * 8 + self.rank, 5 + (turn + self.rank) % 3, EXPERTS, TOPK, hidden)

    def batched(self, x: Tensor, counts: Tensor) -> Tensor:
        """The experts' answers to ``[local experts, rows, hidden]``; what fills up is NaN."""
        out = torch.full(x.shape, float("nan"), dtype=torch.bfloat16)
        for number, count in enumerate(counts.tolist()):
            out[number, :count] = expert(self.first + number, x[number, :count])
        return out

    def summed(self, x: Tensor, idx: Tensor, w: Tensor) -> Tensor:
        """Sums of the ranks' sums, each of which is rounded on its way."""
        out = torch.zeros(x.shape, dtype=torch.float32)
        for rank in range(self.ranks):
            mine = (idx >= 0) & (idx // self.local == rank)
            there = mine.any(1)
            out[there] += unsharded(x, torch.where(mine, idx, -1), w)[there].float()
        return out.to(torch.bfloat16)


# vLLM


class Manager:
    """What vLLM's managers have of their group."""

    def __init__(self, cpu_group: dist.ProcessGroup, tcp_store_group: Any = None) -> None:
        self.cpu_group, self.tcp_store_group, self.internode = cpu_group, tcp_store_group, False
        self.rank, self.world_size = cpu_group.rank(), cpu_group.size()


def vllm_managers() -> dict[str, Any]:
    base = "vllm.distributed.device_communicators"
    names = run(
        module(f"{base}.base_device_communicator", ""),
        {"threading": threading, "WeakValueDictionary": __import__("weakref").WeakValueDictionary},
        "Cache",
    )
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(enable_fault_tolerance=True, enable_elastic_ep=False)
    )
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
            VLLM_DEEPEP_V2_ALLOW_MULTIPLE_REDUCTION=True,
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


def vllm_classes(name: str) -> tuple[dict[str, Any], Any]:
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
        "envs": SimpleNamespace(VLLM_DEEPEPLL_NVFP4_DISPATCH=False),
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


def seen(x: Tensor, fp8: bool) -> Tensor:
    return cast.back(*cast.to_fp8(x)) if fp8 else x


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
    found, delegate = vllm_classes("nixl_ep")
    kind = vllm_managers()["NixlEPAll2AllManager"]
    store, hidden = dist.PrefixStore("vllm", me.store), 2048
    manager = kind(me.group, SimpleNamespace(store=store))
    buffer = manager.get_handle(
        {
            "max_num_tokens_per_dp_rank": M,
            "token_hidden_size": hidden,
            "num_local_experts": me.local,
        }
    )
    kind._mask = torch.zeros(me.ranks, dtype=torch.int32)
    for turn, fp8 in enumerate([True, False]):
        calls = found["NixlEPPrepareAndFinalize"](
            buffer, M, me.ranks, EXPERTS, use_fp8_dispatch=fp8
        )
        x, idx, w = me.batch(turn, hidden)
        rows, scales, meta, _, _ = calls.prepare(x, w, idx, EXPERTS, None, False, quantisation(fp8))
        rows = cast.back(rows, scales) if fp8 else rows
        out = torch.empty_like(x)
        calls.finalize(out, me.batched(rows, meta.expert_num_tokens), w, idx, False, delegate)
        assert torch.equal(out, unsharded(seen(x, fp8), idx, w))
        assert not manager.query_fault()
        dist.barrier()
        with manager.mask_remote_ranks():
            assert manager.query_active_mask().sum() == me.ranks - 1
        manager.commit_ep_size()
        manager.clean_buffers()
    manager.destroy()
    buffer.destroy()


# SGLang


def sglang_names(extend: bool, dtype: str) -> dict[str, Any]:
    base = whole(f"{DISPATCHERS}.base", {}, "sglang")
    from enum import Enum
    from typing import NamedTuple

    utils = run(
        module("sglang.srt.layers.moe.utils", "sglang"),
        {"Enum": Enum, "NamedTuple": NamedTuple},
        "DeepEPMode",
        "DispatcherOutputDtype",
        "DeepEPv2Fp8ScaleFormat",
    )
    resources = SimpleNamespace(buffers={})
    no_recorder: Any = type("Recorder", (), {"__getattr__": lambda *_: lambda *_, **__: None})()
    limit = SimpleNamespace(get=lambda: M)
    off = SimpleNamespace(get=lambda: False)
    return {
        **base,
        **utils,
        "envs": SimpleNamespace(
            SGLANG_ZBAL_LOCAL_MEM_SIZE=off,
            SGLANG_IN_DEEPGEMM_PRECOMPILE_STAGE=off,
            SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK=limit,
            SGLANG_DEEPEP_V2_NUM_MAX_DISPATCH_TOKENS_PER_RANK=limit,
            SGLANG_NIXL_EP_NUM_MAX_DISPATCH_TOKENS_PER_RANK=limit,
            SGLANG_NIXL_EP_BF16_DISPATCH=off,
            SGLANG_PPLX_NUM_MAX_DISPATCH_TOKENS_PER_RANK=limit,
            SGLANG_DEEPEP_V2_ENABLE_PREFILL_EXPAND=SimpleNamespace(get=lambda: None),
            SGLANG_DEEPEP_V2_NUM_SMS=SimpleNamespace(get=lambda: 0),
        ),
        "deep_gemm_wrapper": SimpleNamespace(
            ENABLE_JIT_DEEPGEMM=True, DEEPGEMM_BLACKWELL=False, DEEPGEMM_SCALE_UE8M0=False
        ),
        "get_is_extend_in_batch": lambda: extend,
        "get_global_expert_distribution_recorder": lambda: no_recorder,
        "get_resources": lambda: resources,
        "get_parallel": lambda: SimpleNamespace(attn_dp_size=2, attn_cp_size=1),
        "get_exec": lambda: SimpleNamespace(moe=SimpleNamespace(deepep_v2_mode="hybrid")),
        "get_deepep_config": lambda: "",
        "get_deepep_output_dtype": lambda _: utils["DispatcherOutputDtype"](dtype),
        "get_deepep_v2_fp8_scale_format": lambda: utils["DeepEPv2Fp8ScaleFormat"](True, False),
        "sglang_per_token_group_quant_fp8": by_groups,
        "is_tbo_enabled": lambda: False,
        "get_bool_env_var": lambda _: False,
        "get_cuda_version": lambda: (13, 0),
        "load_json_config": None,
        "TopKOutput": None,
        **{f"is_{what}": lambda: False for what in ("blackwell", "hip", "npu")},
        "is_flashinfer_available": lambda: False,
    }


def by_groups(x: Tensor, block: int, column_major_scales: bool = False, **_: Any) -> Any:
    x8, scales = cast.to_fp8(x, block=block)
    return x8, scales.T.contiguous().T if column_major_scales else scales


def sglang(me: Rank, *, extend: bool, dtype: str, how: Mapping[str, bool]) -> None:
    """``DeepEPDispatcher``, normal in an extending batch and low-latency otherwise."""
    names = whole(f"{DISPATCHERS}.deepep", sglang_names(extend, dtype), "sglang")
    assert names["use_deepep"], names["_deepep_import_error"]
    hidden, fp8 = 512, dtype == "fp8"
    dispatcher = names["DeepEPDispatcher"](
        me.group, TOPK, num_experts=EXPERTS, num_local_experts=me.local, hidden_size=hidden,
        params_dtype=torch.bfloat16, deepep_mode=names["DeepEPMode"].AUTO, **how,
    )  # fmt: skip
    for turn in range(3):
        x, idx, w = me.batch(turn, hidden)
        topk = SimpleNamespace(topk_ids=idx.to(torch.int32), topk_weights=w)
        got = dispatcher.dispatch(x, topk)
        rows = got.hidden_states
        rows = cast.back(rows, got.hidden_states_scale) if fp8 else rows
        if extend:
            assert all(n % 128 == 0 for n in got.num_recv_tokens_per_expert)
            y = unsharded(rows, got.topk_ids, got.topk_weights, first=me.first)
            sums = dispatcher.combine((y, got.topk_ids, got.topk_weights))
            assert torch.equal(sums, me.summed(seen(x, fp8), idx, w))
        else:
            y = me.batched(rows, got.masked_m)
            sums = dispatcher.combine((y, got.topk_ids, got.topk_weights))
            assert torch.equal(sums, unsharded(seen(x, fp8), idx, w))
    names["DeepEPBuffer"]._state().buffer.destroy()


def sglang_normal(me: Rank) -> None:
    sglang(me, extend=True, dtype="fp8", how={"async_finish": True})
    sglang(me, extend=True, dtype="bf16", how={"async_finish": False})


def sglang_low_latency(me: Rank) -> None:
    sglang(me, extend=False, dtype="fp8", how={"return_recv_hook": True})
    sglang(me, extend=False, dtype="bf16", how={"return_recv_hook": False})


def sglang_second_interface(me: Rank) -> None:
    hidden = 512
    for extend, fp8 in ((True, False), (True, True), (False, True)):
        names = whole(f"{DISPATCHERS}.deepep_v2", sglang_names(extend, "fp8"), "sglang")
        # It says None before it imports its kernel.
        names["sglang_per_token_group_quant_fp8"] = by_groups
        dispatcher = names["DeepEPv2Dispatcher"](
            me.group, TOPK, EXPERTS, me.local, hidden, torch.bfloat16, fp8
        )
        dispatcher.prebuild()
        for turn in range(2):
            x, idx, w = me.batch(turn, hidden)
            if extend and turn and not me.rank:
                x, idx, w = x[:0], idx[:0], w[:0]  # an idle rank sends a dummy
            got = dispatcher.dispatch(x, SimpleNamespace(topk_ids=idx, topk_weights=w))
            rows = got.hidden_states
            rows = cast.back(rows, got.hidden_states_scale) if fp8 else rows
            y, begin = torch.zeros_like(rows), 0
            for number, end in enumerate(got.psum_num_recv_tokens_per_expert.tolist()):
                of = slice(begin, end)
                weighted = expert(me.first + number, rows[of]).float() * got.topk_weights[of, None]
                y[of] = weighted.to(y.dtype)
                begin = -(-end // got.expert_alignment) * got.expert_alignment
            sums = dispatcher.combine(names["DeepEPv2CombineInput"](y, got.topk_weights))
            wanted = me.summed(seen(x, fp8), idx, w)
            torch.testing.assert_close(sums, wanted, rtol=0.03, atol=0.25)
        buffer = names["DeepEPv2Buffer"]._state().buffer
        names["DeepEPv2Buffer"].destroy()
        buffer.destroy()


def sglang_nixl(me: Rank) -> None:
    names = sglang_names(False, "bf16")
    outputs = whole(f"{DISPATCHERS}.deepep", names, "sglang")
    store = dist.PrefixStore("sglang", me.store)
    names |= {
        "DeepEPLLDispatchOutput": outputs["DeepEPLLDispatchOutput"],
        "DeepEPLLCombineInput": outputs["DeepEPLLCombineInput"],
        "get_global_tcp_store": lambda: store,
        "ElasticEPStateManager": SimpleNamespace(
            instance=lambda: None, get_ep_join_rank_offset=lambda: 0
        ),
        "get_parallel": lambda: SimpleNamespace(max_ep_size=me.ranks + 1),
    }
    found = whole(f"{DISPATCHERS}.nixl", names, "sglang")
    for hooks in (True, False):
        dispatcher = found["NixlEPDispatcher"](
            me.group, TOPK, num_experts=EXPERTS, num_local_experts=me.local, hidden_size=512,
            params_dtype=torch.bfloat16, deepep_mode=names["DeepEPMode"].LOW_LATENCY,
            return_recv_hook=hooks,
        )  # fmt: skip
        for turn in range(2):
            x, idx, w = me.batch(turn, 512)
            got = dispatcher.dispatch(x, SimpleNamespace(topk_ids=idx, topk_weights=w))
            rows = cast.back(got.hidden_states, got.hidden_states_scale)
            y = me.batched(rows, got.masked_m)
            sums = dispatcher.combine((y, got.topk_ids, got.topk_weights))
            assert torch.equal(sums, unsharded(seen(x, True), idx, w))
    found["NixlEPBuffer"]._state().buffer.destroy()


def sglang_pplx(me: Rank) -> None:
    """With one rank of a data-parallel group, and with two that have the same tokens."""
    for dp in (1, 2):
        names = sglang_names(False, "bf16")
        parallel = SimpleNamespace(attn_tp_size=dp, attn_dp_size=me.ranks // dp, nnodes=2)
        names["get_parallel"] = lambda parallel=parallel: parallel
        found = whole(f"{DISPATCHERS}.pplx", names, "sglang")
        assert found["use_pplx"]
        dispatcher = found["PplxDispatcher"](
            me.group, TOPK, num_experts=EXPERTS, num_local_experts=me.local, hidden_size=512,
            params_dtype=torch.bfloat16, deepep_mode=names["DeepEPMode"].LOW_LATENCY,
        )  # fmt: skip
        for turn in range(2):
            x, _, w = batch(turn * 8 + me.rank // dp, 6 + turn, EXPERTS, TOPK, 512)
            g = torch.Generator().manual_seed(turn * 8 + me.rank // dp)
            idx = torch.rand(len(x), EXPERTS, generator=g).argsort(1)[:, :TOPK]
            got = dispatcher.dispatch(x, SimpleNamespace(topk_ids=idx, topk_weights=w))
            y = me.batched(got.hidden_states, got.masked_m)
            sums = dispatcher.combine((y, got.topk_ids, got.topk_weights))
            assert torch.equal(sums, unsharded(x, idx, w))
        found["PplxAllToAllManager"]._all_to_all.destroy()


# Megatron-Core


def megatron_config(**options: Any) -> SimpleNamespace:
    plain = {
        "moe_router_dtype": "fp32", "moe_expert_capacity_factor": None,
        "moe_permute_fusion": False, "moe_router_padding_for_quantization": False,
        "moe_deepep_num_sms": 20, "moe_hybridep_num_sms": 16, "moe_router_topk": TOPK,
        "moe_pad_expert_input_to_capacity": False, "fp8": None, "fp4": None,
    }  # fmt: skip
    return SimpleNamespace(**(plain | options))


def megatron(me: Rank, manager: str, **options: Any) -> None:
    """A manager of the flexible dispatcher, forward and backward, against one place."""
    # Its autograd takes what the module has for all processes of a rank.
    fused = whole(f"{MEGATRON}.fused_a2a", {"internal_api": lambda kind: kind}, "miles-rl")
    given = {"torch": torch, "HAVE_TE": False, "fused_permute": None}
    permutes = run(module(f"{MEGATRON}.moe_utils", "miles-rl"), given, "permute", "unpermute")
    names = run(
        module(f"{MEGATRON}.token_dispatcher", "miles-rl"),
        {
            **fused,
            **permutes,
            "ABC": object,
            "abstractmethod": lambda method: method,
            "is_experimental_enabled": lambda: False,
            "get_align_size_for_quantization": lambda _: 16,
        },
        "_DispatchManager",
        "_DeepepManager",
        "_HybridEPManager",
    )
    sizes = {"num_local_experts": me.local, "num_experts": EXPERTS}
    if manager == "_DeepepManager":
        sizes["router_topk"] = TOPK
    config = megatron_config(**options)
    for turn in range(3):
        x, _, w = me.batch(turn, 256)
        g = torch.Generator().manual_seed(turn * 8 + me.rank)
        idx = torch.rand(len(x), EXPERTS, generator=g).argsort(1)[:, :TOPK]
        routes = torch.zeros(len(x), EXPERTS, dtype=torch.bool).scatter(1, idx, True)
        probs = torch.zeros(len(x), EXPERTS).scatter(1, idx, w).requires_grad_()
        calls = names[manager](group=me.group, config=config, **sizes)
        x = x.requires_grad_()
        calls.setup_metadata(routes, probs)
        rows, of_rows = calls.get_permuted_hidden_states_by_experts(
            calls.dispatch(x, async_finish=True, allocate_on_comm_stream=True)
        )
        counts = calls.get_number_of_tokens_per_expert()
        if options.get("fp8"):
            assert all(n % 16 == 0 for n in counts.tolist())
        scale = torch.arange(me.first, me.first + me.local).repeat_interleave(counts)[:, None] + 1
        y = (rows * scale * of_rows[:, None]).to(torch.bfloat16)
        sums = calls.combine(calls.get_restored_hidden_states_by_experts(y))
        sums.float().sum().backward()
        factor = (w * (idx + 1)).sum(1, keepdim=True)
        near: dict[str, Any] = {"rtol": 0.03, "atol": 0.1}
        torch.testing.assert_close(sums.float(), x.float() * factor, **near)
        torch.testing.assert_close(x.grad.float(), factor.expand_as(x), **near)
        ways = x.detach().float().sum(1, keepdim=True) * (torch.arange(EXPERTS) + 1)
        wanted = torch.where(routes, ways, 0.0)
        torch.testing.assert_close(probs.grad, wanted, rtol=0.05, atol=2.0)
    for name in ("_buffer", "_hybrid_ep_buffer"):
        if fused[name] is not None:
            fused[name].destroy()


def megatron_flex(me: Rank) -> None:
    megatron(me, "_DeepepManager")


def megatron_hybrid(me: Rank) -> None:
    megatron(me, "_HybridEPManager")
    megatron(me, "_HybridEPManager", fp8="e4m3")


CALLERS: dict[str, Callable[[Rank], None]] = {
    call.__name__: call
    for call in (
        vllm_high_throughput,
        vllm_low_latency,
        vllm_second_interface,
        vllm_nixl,
        sglang_normal,
        sglang_low_latency,
        sglang_second_interface,
        sglang_nixl,
        sglang_pplx,
        megatron_flex,
        megatron_hybrid,
    )
}


def serve(connection: Connection, rank: int, ranks: int, store: str) -> None:
    """A rank with a gloo group that runs the callers it is told."""
    sys.path[:0] = shim_path("deep_ep", "nixl_ep", "pplx_kernels").split(":")
    torch.set_num_threads(1)
    # What asks a GPU is told that there is none to wait for.
    torch.accelerator.synchronize = lambda *_: None
    torch.cuda.get_device_properties = lambda *_, **__: SimpleNamespace(multi_processor_count=132)
    torch.cuda.nvtx.range = nullcontext  # type: ignore[assignment]
    torch.cuda.current_device = lambda: 0
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    shared = dist.FileStore(f"{store}-shared", ranks)
    me = Rank(group=dist.group.WORLD, rank=rank, ranks=ranks, store=shared)
    connection.send("here")
    while (name := connection.recv()) is not None:
        try:
            CALLERS[name](me)
        except BaseException as error:
            import traceback

            connection.send(f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
        else:
            connection.send("passed")
    dist.destroy_process_group()
