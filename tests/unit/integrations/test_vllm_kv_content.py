"""RS-1: pages of another model, or of other weights, are not taken for those of one's own."""

from __future__ import annotations

from types import SimpleNamespace as Fields
from typing import Any

import pytest
import torch

from fabric_ray.integrations import vllm_kv_content
from fabric_ray.integrations.vllm_kv_content import WeightsUpdate, model_content, weights

LONG = {"rope_type": "longrope", "original_max_position_embeddings": 4096}


def config(rope: Any = None, hf: Any = None, **told: Any) -> Any:
    """A ``ModelConfig`` of vLLM, as far as it is looked at."""
    text = Fields(rope_parameters=rope)
    made = Fields(get_text_config=lambda: text, **(hf or {}))
    given = {"hf_overrides": {}, "quantization": None, "max_model_len": 8192}
    given |= {"multimodal_config": None} | told
    return Fields(hf_config=made, **given)


def test_a_server_that_was_told_nothing_names_its_checkpoint() -> None:
    assert model_content(config(), "m@1") == "m@1"
    assert model_content(config({"rope_type": "default"}), "m") == "m"
    # A checkpoint's own quantisation is the same at both ends, whatever kernels they choose.
    ours = {"quantization_config": {"quant_method": "gptq"}}
    assert model_content(config(hf=ours, quantization="gptq_marlin"), "m") == "m"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (config(LONG, max_model_len=4096), config(LONG, max_model_len=131072)),
        (config({"full": LONG}, max_model_len=4096), config({"full": LONG})),
        (config(), config(quantization="fp8")),
        (
            config(multimodal_config=Fields(mm_processor_kwargs=None)),
            config(multimodal_config=Fields(mm_processor_kwargs={"do_normalize": False})),
        ),
        (config(), config(hf_overrides={"rope_parameters": {"rope_type": "yarn"}})),
        (config(), config(hf_overrides=test_a_server_that_was_told_nothing_names_its_checkpoint)),
        (
            config(hf={"attn_temperature_tuning": True}),
            config(hf={"attn_temperature_tuning": False}),
        ),
    ],
)
def test_rs_1_what_changes_the_bytes_of_pages_is_in_their_name(one: Any, other: Any) -> None:
    assert model_content(one, "m") != model_content(other, "m")


def test_lengths_that_change_no_bytes_are_one_content() -> None:
    lengths = (8192, 131072)
    assert len({model_content(config(LONG, max_model_len=n), "m") for n in lengths}) == 1
    assert len({model_content(config(max_model_len=n), "m") for n in lengths}) == 1


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_kv_content, "_weights", vllm_kv_content._Weights())


def loaded(tensors: dict[str, torch.Tensor], *, partial: bool = False) -> str:
    update = WeightsUpdate(brought=frozenset(tensors) if partial else None)
    for name, tensor in tensors.items():
        update.add(name, tensor)
    update.finish()
    return weights()


def some(dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    # 21 of them: not whole words.
    return {
        "a": torch.arange(21, dtype=torch.float32).reshape(3, 7).to(dtype),
        "b": torch.ones(4, dtype=dtype),
        "none": torch.empty(0, dtype=dtype),
        "one": torch.tensor(3.0, dtype=dtype),
    }


def test_the_same_update_has_one_fingerprint_in_any_order_and_memory() -> None:
    assert weights() == ""
    first = loaded(some())
    assert first
    turned = {n: t.T.contiguous().T if t.dim() == 2 else t for n, t in reversed(some().items())}
    assert loaded(turned) == first


def test_rs_1_updates_that_differ_in_a_bit_a_name_or_a_dtype_differ() -> None:
    made = [loaded(some()), loaded(some(torch.float32)), loaded({**some(), "c": torch.ones(1)})]
    for name, at in (("a", 0), ("a", 20), ("b", 3), ("one", 0)):
        changed = some()
        changed[name].view(-1)[at:].view(torch.int16)[0] ^= 1
        made.append(loaded(changed))
    assert len({*made}) == len(made)


@pytest.mark.parametrize(("one", "other"), [(0, 8), (0, 1 << 15), (8, (1 << 15) + 16)])
def test_rs_1_bytes_that_change_places_change_the_fingerprint(one: int, other: int) -> None:
    data = torch.arange(1 << 17, dtype=torch.int32).view(torch.uint8)
    before = loaded({"a": data})
    moved = data.clone()
    moved[one : one + 8], moved[other : other + 8] = data[other : other + 8], data[one : one + 8]
    assert loaded({"a": moved}) != before


def test_rs_1_weights_of_an_update_that_was_left_are_like_no_others() -> None:
    WeightsUpdate().add("a", torch.ones(1))
    left = weights()
    WeightsUpdate().add("a", torch.ones(1))
    assert left != weights()
    assert loaded(some()) not in (left, "")


def test_rs_1_what_a_partial_update_leaves_out_is_told_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def after(*updates: tuple[dict[str, torch.Tensor], bool]) -> str:
        """The weights of a process that got these."""
        monkeypatch.setattr(vllm_kv_content, "_weights", vllm_kv_content._Weights())
        return [loaded(tensors, partial=partial) for tensors, partial in updates][-1]

    whole, part, later = (some(), False), ({"b": torch.ones(4)}, True), ({"b": torch.ones(1)}, True)
    assert after(part) == after(later, part)
    assert after(whole, part) == after(whole, later, part) != after(part)
    assert after(whole, part, whole) == after(whole) != after(whole, part)
    other = {"a": torch.ones(2)}, True
    assert after(other, part) != after(part)
    assert after(whole, other, part) != after(whole, part) == after(whole, later, part)
    assert after(other, ({**other[0], **part[0]}, True)) == after(({**other[0], **part[0]}, True))

    def failed() -> str:
        WeightsUpdate().begin()
        return loaded(*part[:1], partial=True)

    assert len({after(part), failed(), failed()}) == 3
