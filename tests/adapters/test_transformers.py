"""Modules of transformers, as FSDP2 trainers hold them, fill plain ones: a line at each end."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
import transformers
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fabric_ray import TransferEngine
from fabric_ray.errors import InvalidArgument
from fabric_ray.weights import WeightSource, WeightSync, WeightTarget
from tests.adapters.trainer_processes import Processes, serve
from tests.processes import Other

RANKS = 2
_SMALL: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
_MOE = _SMALL | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**_SMALL),
    "tied": lambda: transformers.Qwen3Config(**_SMALL, tie_word_embeddings=True),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**_MOE),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **_SMALL, num_local_experts=6, num_experts_per_tok=2
    ),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **(_SMALL | {"num_key_value_heads": 4, "head_dim": 4}),
        q_lora_rank=12,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
        n_routed_experts=6,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=20,
        first_k_dense_replace=1,
    ),
}
TRAINERS = [
    *(("plain", name) for name in CONFIGS),
    ("wrapped", "qwen3_moe"),
    ("lora", "tied"),
    ("lora", "qwen3_moe"),
]


def model_of(name: str, seed: int, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]()).to(dtype)
    with torch.no_grad():
        for tensor in (*model.parameters(), *(b for b in model.buffers() if b.numel() == 6)):
            tensor.normal_()
    return model


def _lora(model: Any) -> Any:
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "o_proj"])
    model = peft.get_peft_model(model, config)
    torch.manual_seed(7)
    for name, parameter in model.named_parameters():
        if "lora" in name:
            torch.nn.init.normal_(parameter.data)
    return model


def _layers(model: Any) -> Any:
    return next(m for n, m in model.named_modules() if n.endswith("model.layers"))


def train(connection: Any, rank: int, store: str, name: str, kind: str) -> None:
    """A rank of FSDP2 that says what a checkpoint has, and then does what a controller asks."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    model = model_of(name, 1)
    model = _lora(model) if kind == "lora" else model
    layers = _layers(model)
    for index, layer in enumerate(layers):
        if kind == "wrapped":
            layers[index] = layer = checkpoint_wrapper(layer)
        fully_shard(layer, mesh=init_device_mesh("cpu", (RANKS,)))
    fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    connection.send(full if rank == 0 else None)
    if kind == "wrapped":
        model = torch.compile(model)
    engine = TransferEngine(transport="shm")
    serve(connection, WeightSource(model, engine=engine))
    engine.close()
    dist.destroy_process_group()


def divide(connection: Any, rank: int, store: str, folder: str) -> None:
    """A rank of a model that transformers itself divides; says how each end refuses it."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto")
    with TransferEngine(transport="shm") as engine:
        for end in (lambda: WeightSource(model, engine=engine), lambda: WeightTarget(into=model)):
            try:
                connection.send(str(end()))
            except InvalidArgument as error:
                connection.send(error)
    dist.destroy_process_group()


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_rs_1_parts_of_a_model_are_not_taken_for_all_of_it(tmp_path: Path, name: str) -> None:
    model_of(name, 1).save_pretrained(tmp_path / "model")
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(
                Other(divide, rank, str(tmp_path / "store"), str(tmp_path / "model"))
            )
            for rank in range(RANKS)
        ]
        for rank in ranks:
            for _ in range(2):
                with pytest.raises(InvalidArgument, match="divided the module over 2 ranks"):
                    rank.hear(180)


@pytest.mark.parametrize(("kind", "name"), TRAINERS)
def test_fsdp2_modules_fill_plain_ones(
    tmp_path: Path, open_engine: Callable[..., TransferEngine], kind: str, name: str
) -> None:
    with ExitStack() as stack:
        trainers = [
            stack.enter_context(Other(train, rank, str(tmp_path / "store"), name, kind))
            for rank in range(RANKS)
        ]
        full, _ = (trainer.hear(180) for trainer in trainers)
        whole = model_of(name, 2)
        whole = _lora(whole) if kind == "lora" else whole
        whole.load_state_dict(full)
        whole = whole.merge_and_unload() if kind == "lora" else whole
        rollouts = [model_of(name, 3 + number) for number in range(2)]
        targets = [
            stack.enter_context(closing(WeightTarget(into=into, name=who, engine=open_engine(who))))
            for who, into in zip(("one", "two"), rollouts, strict=True)
        ]
        sync = WeightSync(trainers, ["one", "two"], calls=Processes(), digest=True)
        sync.push()
        wanted = whole.state_dict()
        for target, into in zip(targets, rollouts, strict=True):
            assert target.version == 1
            assert wanted.keys() == into.state_dict().keys()
            for tensor, value in into.state_dict().items():
                assert torch.equal(value, wanted[tensor]), tensor
        if kind == "lora":
            assert "sent with the adapters `default` added" in sync.explain()
        for trainer in trainers:
            trainer.say(None)
