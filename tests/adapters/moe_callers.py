"""Callers of DeepEP as they are published, as ranks of a gloo group: their classes, with what they
would import from the rest of their frameworks given to them."""

from __future__ import annotations

import sys
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
from tests.adapters.moe_callers_torchtitan import torchtitan_elastic, torchtitan_hybrid
from tests.adapters.moe_callers_vllm import (
    vllm_high_throughput,
    vllm_low_latency,
    vllm_low_latency_four_bits,
    vllm_nixl,
    vllm_second_interface,
)
from tests.adapters.moe_rank import (
    DISPATCHERS,
    EXPERTS,
    MEGATRON,
    TOPK,
    M,
    Rank,
    from_four_bits,
    seen,
    through_four_bits,
)
from tests.adapters.sources import module, run, whole
from tests.moe_ranks import batch, expert, unsharded

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
    hidden, fp8, scale = 512, dtype == "fp8", torch.full((me.local,), 448 * 6 / 5.0)
    dispatcher = names["DeepEPDispatcher"](
        me.group, TOPK, num_experts=EXPERTS, num_local_experts=me.local, hidden_size=hidden,
        params_dtype=torch.bfloat16, deepep_mode=names["DeepEPMode"].AUTO, **how,
    )  # fmt: skip
    four_bits = dtype == "nvfp4"
    dispatcher.set_quant_config({"input_global_scale": scale} if four_bits else {})
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
            if four_bits:
                rows = from_four_bits(rows.permute(2, 0, 1), got.hidden_states_scale, scale[0])
            y = me.batched(rows, got.masked_m)
            sums = dispatcher.combine((y, got.topk_ids, got.topk_weights))
            wanted = through_four_bits(x, scale[:1]) if four_bits else seen(x, fp8)
            assert torch.equal(sums, unsharded(wanted, idx, w))
    names["DeepEPBuffer"]._state().buffer.destroy()


def sglang_normal(me: Rank) -> None:
    sglang(me, extend=True, dtype="fp8", how={"async_finish": True})
    sglang(me, extend=True, dtype="bf16", how={"async_finish": False})


def sglang_low_latency(me: Rank) -> None:
    sglang(me, extend=False, dtype="fp8", how={"return_recv_hook": True})
    sglang(me, extend=False, dtype="bf16", how={"return_recv_hook": False})
    sglang(me, extend=False, dtype="nvfp4", how={"return_recv_hook": True})


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
        vllm_low_latency_four_bits,
        vllm_second_interface,
        vllm_nixl,
        sglang_normal,
        sglang_low_latency,
        sglang_second_interface,
        sglang_nixl,
        sglang_pplx,
        megatron_flex,
        megatron_hybrid,
        torchtitan_elastic,
        torchtitan_hybrid,
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
