"""How long planning a push takes, and how good the plan is, for models of public shape.

256 trainers (two pipeline stages; parameters fully sharded over the 128 ranks of a stage, experts
over 8 expert-parallel groups of 16) push bf16 to 128 rollout ranks (4 engines of 32-way expert
parallelism). Run ``python -m benchmarks.plan``; with ``--json`` it prints one object a line.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from fabric_ray.plan import (
    Concat,
    Container,
    DType,
    Layout,
    Leaf,
    Mesh,
    Plan,
    Replicate,
    Shard,
    Side,
    Stack,
    StridedShard,
    Tensor,
    plan,
)

BF16 = DType.of("bfloat16")
F32 = DType.of("float32")

STAGES, EP, FSDP = 2, 8, 16
STAGE_RANKS = EP * FSDP
ENGINES, ENGINE_EP = 4, 32
ROLLOUTS = ENGINES * ENGINE_EP
GQA_TP = 4
"""Attention tensor parallelism inside an engine for models with grouped heads; MLA has none."""

NIC_BYTES_PER_S = 50e9
"""Each rank has a 400 Gb/s NIC of its own."""


@dataclass(frozen=True)
class Model:
    """A model's tensors, and how an engine fuses them."""

    config: dict[str, Any]
    experts: str
    """``stacked`` (one 3-D tensor per projection and layer) or ``named`` (one tensor each)."""

    @property
    def moe_layers(self) -> range:
        return range(self.config["dense_layers"], self.config["layers"])

    def stage_of(self, layer: int) -> int:
        """The first stage gets the dense layers and half of the others."""
        dense = self.config["dense_layers"]
        return int(layer >= dense + (self.config["layers"] - dense) // 2)

    def attention(self, prefix: str) -> list[tuple[str, list[Tensor], int | None]]:
        """Per engine container: its name, the fused tensors, the dimension TP shards."""
        c = self.config
        hidden, heads = c["hidden"], c["heads"]

        def t(name: str, *shape: int) -> Tensor:
            return Tensor(f"{prefix}self_attn.{name}", shape, BF16)

        if c["attention"] == "mla":
            q_rank, kv_rank, rope = c["q_lora_rank"], c["kv_lora_rank"], c["qk_rope_head_dim"]
            q_head = c["qk_nope_head_dim"] + rope
            kv_head = c["qk_nope_head_dim"] + c["v_head_dim"]
            return [
                (
                    "fused_qkv_a_proj",
                    [
                        t("q_a_proj.weight", q_rank, hidden),
                        t("kv_a_proj_with_mqa.weight", kv_rank + rope, hidden),
                    ],
                    None,
                ),
                ("q_a_layernorm", [t("q_a_layernorm.weight", q_rank)], None),
                ("q_b_proj", [t("q_b_proj.weight", heads * q_head, q_rank)], None),
                ("kv_a_layernorm", [t("kv_a_layernorm.weight", kv_rank)], None),
                ("kv_b_proj", [t("kv_b_proj.weight", heads * kv_head, kv_rank)], None),
                ("o_proj", [t("o_proj.weight", hidden, heads * c["v_head_dim"])], None),
            ]
        q, kv = heads * c["head_dim"], c["kv_heads"] * c["head_dim"]
        widths = {"q": q, "k": kv, "v": kv}
        fused: list[tuple[str, list[Tensor], int | None]] = [
            ("qkv_proj", [t(f"{x}_proj.weight", n, hidden) for x, n in widths.items()], 0)
        ]
        if c.get("attention_bias"):
            fused.append(("qkv_bias", [t(f"{x}_proj.bias", n) for x, n in widths.items()], 0))
        if c.get("qk_norm"):
            fused += [(f"{x}_norm", [t(f"{x}_norm.weight", c["head_dim"])], None) for x in "qk"]
        return [*fused, ("o_proj", [t("o_proj.weight", hidden, q)], 1)]

    def mlp(self, prefix: str, width: int) -> list[tuple[str, list[Tensor], int | None]]:
        hidden = self.config["hidden"]
        gate, up = (
            Tensor(f"{prefix}{x}_proj.weight", (width, hidden), BF16) for x in ("gate", "up")
        )
        down = Tensor(f"{prefix}down_proj.weight", (hidden, width), BF16)
        return [(f"{prefix}gate_up_proj", [gate, up], None), (f"{prefix}down_proj", [down], None)]

    def layer(self, layer: int) -> list[tuple[str, list[Tensor], int | None]]:
        """Everything of a layer but its routed experts."""
        c, prefix = self.config, f"model.layers.{layer}."
        found = [(prefix + name, ts, tp) for name, ts, tp in self.attention(prefix)]
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found.append(
                (prefix + norm, [Tensor(f"{prefix}{norm}.weight", (c["hidden"],), BF16)], None)
            )
        if layer not in self.moe_layers:
            return found + self.mlp(prefix + "mlp.", c["intermediate"])
        router = Tensor(f"{prefix}mlp.gate.weight", (c["routed_experts"], c["hidden"]), BF16)
        found.append((prefix + "mlp.gate", [router], None))
        if c["shared_experts"]:
            bias = Tensor(f"{prefix}mlp.gate.e_score_correction_bias", (c["routed_experts"],), F32)
            found.append((prefix + "mlp.gate.bias", [bias], None))
            width = c["moe_intermediate"] * c["shared_experts"]
            found += self.mlp(prefix + "mlp.shared_experts.", width)
        return found

    def projection(self, layer: int, which: str, expert: int | None) -> Tensor:
        c = self.config
        inner, hidden = c["moe_intermediate"], c["hidden"]
        shape = (hidden, inner) if which == "down" else (inner, hidden)
        prefix = f"model.layers.{layer}.mlp.experts."
        if expert is None:
            return Tensor(f"{prefix}{which}_proj", (c["routed_experts"], *shape), BF16)
        return Tensor(f"{prefix}{expert}.{which}_proj.weight", shape, BF16)

    def ends(self) -> list[tuple[int, Tensor, int | None]]:
        """Stage, tensor and sharded dimension of what lies outside the layers."""
        c = self.config
        tp = None if c["attention"] == "mla" else 0
        table = (c["vocab"], c["hidden"])
        return [
            (0, Tensor("model.embed_tokens.weight", table, BF16), tp),
            (1, Tensor("model.norm.weight", (c["hidden"],), BF16), None),
            (1, Tensor("lm_head.weight", table, BF16), tp),
        ]


def trainers(model: Model) -> Side:
    """FSDP2 over expert parallelism, as its DTensors describe themselves."""
    stages = [range(s * STAGE_RANKS, (s + 1) * STAGE_RANKS) for s in range(STAGES)]
    everyone = [Mesh.line(stage, name="fsdp") for stage in stages]
    grids = [Mesh(tuple(stage), (FSDP, EP), ("fsdp", "ep")) for stage in stages]
    groups = [[Mesh.line(stage[e::EP], name="fsdp") for e in range(EP)] for stage in stages]
    containers = []

    def add(tensor: Tensor, layout: Layout) -> None:
        containers.append(Container(tensor.name, tensor.dtype, layout))

    def dense(stage: int, tensor: Tensor) -> None:
        add(tensor, Leaf(tensor, everyone[stage], (Shard(0),)))

    for stage, tensor, _ in model.ends():
        dense(stage, tensor)
    experts = model.config["routed_experts"]
    for layer in range(model.config["layers"]):
        stage = model.stage_of(layer)
        for _, tensors, _ in model.layer(layer):
            for tensor in tensors:
                dense(stage, tensor)
        if layer not in model.moe_layers:
            continue
        for which in ("gate", "up", "down"):
            if model.experts == "stacked":
                tensor = model.projection(layer, which, None)
                add(tensor, Leaf(tensor, grids[stage], (StridedShard(0, EP), Shard(0))))
                continue
            for expert in range(experts):
                tensor = model.projection(layer, which, expert)
                add(tensor, Leaf(tensor, groups[stage][expert * EP // experts], (Shard(0),)))
    return Side.of(STAGES * STAGE_RANKS, containers)


def rollouts(model: Model) -> Side:
    """Engines with data-parallel attention, 32-way experts and fused projections."""
    everyone = Mesh.line(range(ROLLOUTS))
    tp = Mesh(tuple(range(ROLLOUTS)), (ROLLOUTS // GQA_TP, GQA_TP), ("dp", "tp"))
    ep = Mesh(tuple(range(ROLLOUTS)), (ENGINES, ENGINE_EP), ("engine", "ep"))
    owners = [Mesh.line(range(r, ROLLOUTS, ENGINE_EP), name="engine") for r in range(ENGINE_EP)]
    containers = []

    def placed(tensor: Tensor, tp_dim: int | None) -> Leaf:
        if tp_dim is None:
            return Leaf(tensor, everyone, (Replicate(),))
        return Leaf(tensor, tp, (Replicate(), Shard(tp_dim)))

    def add(name: str, tensors: list[Tensor], tp_dim: int | None) -> None:
        parts = tuple(placed(tensor, tp_dim) for tensor in tensors)
        layout = parts[0] if len(parts) == 1 else Concat(0, parts)
        containers.append(Container(name, tensors[0].dtype, layout))

    experts = model.config["routed_experts"]

    def expert(layer: int, which: str, index: int | None) -> Leaf:
        tensor = model.projection(layer, which, index)
        if index is None:
            return Leaf(tensor, ep, (Replicate(), Shard(0)))
        return Leaf(tensor, owners[index * ENGINE_EP // experts], (Replicate(),))

    ends = model.ends()
    add(ends[0][1].name, [ends[0][1]], ends[0][2])
    for layer in range(model.config["layers"]):
        for name, tensors, tp_dim in model.layer(layer):
            add(name, tensors, tp_dim)
        if layer not in model.moe_layers:
            continue
        prefix = f"model.layers.{layer}.mlp.experts."
        if model.experts == "stacked":
            w13: Layout = Concat(1, (expert(layer, "gate", None), expert(layer, "up", None)))
            w2: Layout = expert(layer, "down", None)
        else:
            w13 = Stack(
                tuple(
                    Concat(0, (expert(layer, "gate", e), expert(layer, "up", e)))
                    for e in range(experts)
                )
            )
            w2 = Stack(tuple(expert(layer, "down", e) for e in range(experts)))
        containers.append(Container(prefix + "w13_weight", BF16, w13))
        containers.append(Container(prefix + "w2_weight", BF16, w2))
    for _, tensor, tp_dim in ends[1:]:
        add(tensor.name, [tensor], tp_dim)
    return Side.of(ROLLOUTS, containers)


def peak_bytes() -> int:
    """The most memory this process ever held."""
    # Unlike getrusage's figure this one doesn't count what the parent held at the fork.
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM; run this on Linux")


def measure(name: str, experts: str) -> dict[str, Any]:
    """Plans one model: seconds, bytes, and imbalances as the largest over the mean."""
    config = json.loads(files("fabric_ray.plan").joinpath("data/models.json").read_text())[name]
    model = Model(config, experts)
    began = time.perf_counter()
    source, target = trainers(model), rollouts(model)
    built, cpu = time.perf_counter(), time.process_time()
    planned = plan(source, target)
    done, cpu = time.perf_counter(), time.process_time() - cpu
    peak = peak_bytes()
    data = planned.to_bytes()
    written = time.perf_counter()
    again = Plan.from_bytes(data)
    read = time.perf_counter()
    if again != planned:
        raise RuntimeError("the plan read back is another; fix to_bytes or from_bytes")
    copies = planned.for_source(0)
    ordered = time.perf_counter()
    balance = planned.balance()
    sent, received = max(balance.sent.values()), max(balance.received.values())
    return {
        "model": name,
        "experts": experts,
        "trainers": len(source.ranks),
        "rollouts": len(target.ranks),
        "source_containers": len(source.containers),
        "target_containers": len(target.containers),
        "seconds_build_sides": round(built - began, 3),
        "seconds_plan": round(done - built, 3),
        "cpu_seconds_plan": round(cpu, 3),
        "seconds_to_bytes": round(written - done, 3),
        "seconds_from_bytes": round(read - written, 3),
        "seconds_for_source": round(ordered - read, 3),
        "peak_bytes": peak,
        "copies": planned.copy_count,
        "copies_stored": planned.stored_copy_count,
        "copies_of_source_0": len(copies),
        "serialised_bytes": len(data),
        "links": len(planned.links()),
        "bytes": balance.nbytes,
        "busiest_sender_bytes": sent,
        "busiest_receiver_bytes": received,
        "sender_max_over_mean": round(balance.sender_imbalance, 4),
        "receiver_max_over_mean": round(balance.receiver_imbalance, 4),
        "rank_pair_max_over_mean": round(balance.link_imbalance, 4),
        "floor_seconds": round(max(sent, received) / NIC_BYTES_PER_S, 3),
        "digest": f"{planned.digest():016x}",
    }


def told(r: dict[str, Any]) -> str:
    """A measurement as a few lines of text."""
    bound = "sending" if r["busiest_sender_bytes"] > r["busiest_receiver_bytes"] else "receiving"
    return "\n".join(
        (
            f"{r['model']}, {r['experts']} experts: {r['trainers']} trainers -> {r['rollouts']} "
            f"rollouts, {r['bytes'] / 1e12:.2f} TB",
            f"  planned in {r['seconds_plan']:.2f} s ({r['cpu_seconds_plan']:.2f} s of CPU), peak "
            f"{r['peak_bytes'] / 1e9:.2f} GB; "
            f"{r['copies']:,} copies, {r['copies_stored']:,} stored, "
            f"{r['serialised_bytes'] / 1e6:.1f} MB as bytes",
            f"  largest over mean: senders {r['sender_max_over_mean']:.3f}, receivers "
            f"{r['receiver_max_over_mean']:.3f}, pairs of ranks {r['rank_pair_max_over_mean']:.2f}",
            f"  at least {r['floor_seconds']:.2f} s, {bound}, with 400 Gb/s a rank",
        )
    )


MODELS = ("kimi-k2", "deepseek-v3", "qwen3-235b-a22b", "glm-4.5-air")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, action="append")
    parser.add_argument("--experts", choices=("stacked", "named"), action="append")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    args = parser.parse_args()
    models, variants = args.model or MODELS, args.experts or ("stacked", "named")
    if len(models) == len(variants) == 1:
        result = measure(models[0], variants[0])
        print(json.dumps(result) if args.json else told(result))
        return
    for model in models:
        for variant in variants:
            # A process each: peak memory can't be reset within one.
            command = ["-m", "benchmarks.plan", "--model", model, "--experts", variant]
            subprocess.run([sys.executable, *command, *["--json"] * args.json], check=True)


if __name__ == "__main__":
    main()
