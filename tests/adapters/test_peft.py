"""Pushes of modules of PEFT have the bits of its `merge_and_unload`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from transformers.pytorch_utils import Conv1D

from fabric_ray import TransferEngine
from fabric_ray.errors import InvalidArgument
from fabric_ray.weights.source_tensors import SourceTensors


class Model(torch.nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(40, 24, dtype=dtype)
        self.q_proj = torch.nn.Linear(24, 33, dtype=dtype)
        self.norm = torch.nn.LayerNorm(33, dtype=dtype)
        self.down_proj = torch.nn.Linear(33, 24, bias=False, dtype=dtype)
        self.lm_head = torch.nn.Linear(24, 40, bias=False, dtype=dtype)

    def forward(self, x: Any) -> Any:
        return self.lm_head(self.down_proj(self.norm(self.q_proj(self.embed_tokens(x)))))


def trained(model: torch.nn.Module) -> Any:
    for name, parameter in model.named_parameters():
        if "lora" in name or "modules_to_save" in name:
            torch.nn.init.normal_(parameter.data)
    return model


def pushed(model: torch.nn.Module, engine: TransferEngine) -> dict[str, torch.Tensor]:
    held = SourceTensors(model, engine)
    held.gather_adapters()
    return {name: held.local(name).clone() for name in held.tensors}


def check(model: Any, engine: TransferEngine) -> None:
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = pushed(model, engine)
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    merged = copy.deepcopy(model).merge_and_unload().state_dict()
    assert found.keys() == merged.keys()
    for name, tensor in merged.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


CONFIGS = {
    "lora": {"r": 4, "lora_alpha": 7},
    "rslora": {"r": 6, "lora_alpha": 5, "use_rslora": True},
    "head": {"r": 4, "modules_to_save": ["lm_head", "norm"]},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("half", [False, True], ids=["float32 adapters", "adapters of the dtype"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_push_has_the_bits_of_merge_and_unload(
    open_engine: Callable[..., TransferEngine], kind: str, half: bool, dtype: torch.dtype
) -> None:
    targets = ["q_proj", "down_proj", "embed_tokens"]
    config = peft.LoraConfig(target_modules=targets, **CONFIGS[kind])
    options = {"autocast_adapter_dtype": not half}
    model = trained(peft.get_peft_model(Model(dtype), config, **options))
    check(model, open_engine())
    model.add_adapter("other", peft.LoraConfig(target_modules=["q_proj"], r=3), **options)
    trained(model)
    check(model, open_engine())  # "other" isn't active
    model.base_model.set_adapter(["default"] if kind == "head" else ["default", "other"])
    check(model, open_engine())
    model.merge_adapter(["default"])
    if kind != "head":  # PEFT computes without "other" now
        with pytest.raises(InvalidArgument, match="without the active `other`"):
            check(model, open_engine())
    model.merge_adapter()
    check(model, open_engine())


def test_a_transposed_layer(open_engine: Callable[..., TransferEngine]) -> None:
    model = torch.nn.Sequential(Conv1D(12, 20), Conv1D(20, 12))
    config = peft.LoraConfig(target_modules=["0"], r=4, fan_in_fan_out=True)
    check(trained(peft.get_peft_model(model, config)), open_engine())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"use_dora": True}, "`default` of `.*q_proj` is Dora.*, expected plain LoRA"),
        ({"lora_bias": True}, "has a bias of its own"),
    ],
)
def test_other_adapters_are_refused_by_name(
    open_engine: Callable[..., TransferEngine], options: dict[str, Any], words: str
) -> None:
    model = peft.get_peft_model(
        Model(torch.float32), peft.LoraConfig(target_modules=["q_proj"], **options)
    )
    with pytest.raises(InvalidArgument, match=f"{words}.*merge_and_unload"):
        SourceTensors(model, open_engine())
    ia3 = peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[])
    with pytest.raises(InvalidArgument, match=r"`default` of .*, expected LoRA; merge it"):
        SourceTensors(peft.get_peft_model(Model(torch.float32), ia3), open_engine())


@pytest.mark.parametrize(
    "config",
    [
        peft.LoraConfig(target_modules=["0"]),
        peft.AdaLoraConfig(target_modules=["1"], total_step=10),
    ],
    ids=["convolution", "AdaLoRA"],
)
def test_factors_of_another_form_are_refused_by_name(
    open_engine: Callable[..., TransferEngine], config: Any
) -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Linear(4, 4))
    with pytest.raises(InvalidArgument, match=r"`default` of `.*[01]` belongs to no weight"):
        SourceTensors(peft.get_peft_model(model, config), open_engine())


def test_disabled_adapters_are_refused(open_engine: Callable[..., TransferEngine]) -> None:
    model = peft.get_peft_model(Model(torch.float32), peft.LoraConfig(target_modules=["q_proj"]))
    held = SourceTensors(model, open_engine())
    with (
        model.disable_adapter(),
        pytest.raises(InvalidArgument, match=r"`.*q_proj` are disabled; push outside"),
    ):
        held.refresh()
    held.refresh()
    base = model.unload()
    assert pushed(base, open_engine()).keys() == base.state_dict().keys()
