"""Checkpoints: what is written is read back, in parts and from parts, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fabric_ray.models import CheckpointError, UnsupportedModel
from fabric_ray.models.checkpoint import SINGLE_FILE, Checkpoint, save_checkpoint
from tests.unit.models.small_models import SMALL, small, waves

INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("shard_bytes", [1 << 30, 20_000])
def test_what_is_written_is_read_back(name: str, shard_bytes: int, tmp_path: Path) -> None:
    config = SMALL[name]
    full = waves(config)
    save_checkpoint(tmp_path, config, full, shard_bytes=shard_bytes)
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.config == config
    assert list(checkpoint) == list(full)
    assert all(torch.equal(checkpoint[n], t) for n, t in full.items())
    assert (tmp_path / INDEX).exists() == (shard_bytes == 20_000)
    assert not list(tmp_path.glob("*.part"))


def test_tensors_may_come_one_by_one_and_in_any_order(tmp_path: Path) -> None:
    config = SMALL["llama"]
    full = waves(config)
    save_checkpoint(tmp_path, config, reversed(list(full.items())), shard_bytes=10_000)
    assert all(torch.equal(t, full[n]) for n, t in Checkpoint(tmp_path).items())


def test_a_box_is_read_alone_and_owns_its_memory(tmp_path: Path) -> None:
    config = SMALL["llama"]
    full = waves(config)
    save_checkpoint(tmp_path, config, full)
    name = "model.layers.1.mlp.down_proj.weight"
    box = (slice(5, 9), slice(40, 48))
    part = Checkpoint(tmp_path).box(name, box)
    assert torch.equal(part, full[name][box])
    assert part.untyped_storage().nbytes() == 4 * 8 * 4


def test_reading_a_part_does_not_need_the_other_files(tmp_path: Path) -> None:
    config = SMALL["llama"]
    full = waves(config)
    save_checkpoint(tmp_path, config, full, shard_bytes=10_000)
    weight_map = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    wanted = "model.embed_tokens.weight"
    checkpoint = Checkpoint(tmp_path)
    for file in set(weight_map.values()) - {weight_map[wanted]}:
        # Contents gone, header kept: any read of data in there would be zeros.
        path = tmp_path / file
        data = path.read_bytes()
        header = 8 + int.from_bytes(data[:8], "little")
        path.write_bytes(data[:header] + bytes(len(data) - header))
    rows = slice(90, 97)
    part = checkpoint.box(wanted, (rows, slice(0, 32)))
    assert torch.equal(part, full[wanted][rows])
    spoilt = Checkpoint(tmp_path)["lm_head.weight"]
    assert not spoilt.any(), "the other files were really spoilt"


def test_tensors_come_in_the_dtype_of_the_config(tmp_path: Path) -> None:
    config = small("llama")
    save_checkpoint(tmp_path, config, waves(config))
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | {"torch_dtype": "bfloat16"}))
    tensor = Checkpoint(tmp_path)["lm_head.weight"]
    assert torch.equal(tensor, waves(config)["lm_head.weight"].bfloat16())


def test_rs_1_a_value_out_of_the_range_of_the_config_dtype_is_refused(tmp_path: Path) -> None:
    config = small("llama")
    full = waves(config)
    full["lm_head.weight"][3, 5] = 1e5
    save_checkpoint(tmp_path, config, full)
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | {"torch_dtype": "float16"}))
    checkpoint = Checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"range of torch\.float16") as caught:
        checkpoint["lm_head.weight"]
    assert caught.value.parameter == "lm_head.weight"
    assert checkpoint["model.embed_tokens.weight"].dtype == torch.float16


def test_tensors_that_the_model_lacks_are_ignored(tmp_path: Path) -> None:
    untied = SMALL["llama"]
    full = waves(untied)
    full["lm_head.weight"] = full["model.embed_tokens.weight"]
    save_checkpoint(tmp_path, untied, ((name, t.clone()) for name, t in full.items()))
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | {"tie_word_embeddings": True}))
    assert "lm_head.weight" not in Checkpoint(tmp_path)


def test_a_missing_parameter_is_named_when_writing_and_nothing_stays(tmp_path: Path) -> None:
    config = SMALL["llama"]
    full = waves(config)
    del full["model.norm.weight"]
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight") as caught:
        save_checkpoint(tmp_path, config, full, shard_bytes=10_000)
    assert caught.value.parameter == "model.norm.weight"
    assert not list(tmp_path.glob("*.safetensors")) + list(tmp_path.glob("*.part"))


def test_wrong_tensors_are_refused_when_writing(tmp_path: Path) -> None:
    config = SMALL["llama"]
    for wrong, words in [
        ({"lm_head.weight": torch.zeros(96, 32)}, "lm_head.weight is \\[96, 32\\]"),
        ({"lm_head.weight": torch.zeros(97, 32).half()}, "float16"),
        ({"surplus": torch.zeros(1)}, "surplus"),
    ]:
        with pytest.raises(CheckpointError, match=words):
            save_checkpoint(tmp_path, config, waves(config) | wrong, shard_bytes=10_000)
        assert [p.name for p in tmp_path.iterdir()] == ["config.json"]


def test_a_config_of_another_model_is_refused_with_both_shapes(tmp_path: Path) -> None:
    config = SMALL["llama"]
    save_checkpoint(tmp_path, config, waves(config))
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | {"vocab_size": 96}))
    with pytest.raises(CheckpointError, match=r"\[97, 32\].*\[96, 32\]"):
        Checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(fields | {"num_hidden_layers": 4}))
    with pytest.raises(CheckpointError, match=r"lacks model\.layers\.3\..* and 8 more"):
        Checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(fields | {"model_type": "mamba"}))
    with pytest.raises(UnsupportedModel, match="'mamba'"):
        Checkpoint(tmp_path)


def test_damaged_checkpoints_are_refused_with_the_file(tmp_path: Path) -> None:
    config = SMALL["llama"]
    save_checkpoint(tmp_path, config, waves(config))
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    for damaged in (whole[:-10], whole[:100], b"", b"\xff" * 64):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            Checkpoint(tmp_path)
    path.unlink()
    with pytest.raises(CheckpointError, match="neither"):
        Checkpoint(tmp_path)


def test_damaged_indices_are_refused_with_the_file(tmp_path: Path) -> None:
    config = SMALL["llama"]
    save_checkpoint(tmp_path, config, waves(config), shard_bytes=10_000)
    index = tmp_path / INDEX
    whole = json.loads(index.read_text())
    escaping = {"weight_map": dict.fromkeys(whole["weight_map"], "../secret.safetensors")}
    for text in ("{", "[]", "{}", '{"weight_map": 3}', json.dumps(escaping)):
        index.write_text(text)
        with pytest.raises(CheckpointError, match=r"index\.json"):
            Checkpoint(tmp_path)
    index.write_text(json.dumps(whole))
    file = next(iter(whole["weight_map"].values()))
    (tmp_path / file).unlink()
    with pytest.raises(CheckpointError, match=f"{file}.*missing"):
        Checkpoint(tmp_path)


def test_rs_1_two_checkpoints_in_a_directory_are_not_chosen_from(tmp_path: Path) -> None:
    config = SMALL["llama"]
    save_checkpoint(tmp_path / "single", config, waves(config))
    save_checkpoint(tmp_path, config, waves(config), shard_bytes=10_000)
    single, index = tmp_path / SINGLE_FILE, tmp_path / INDEX
    single.write_bytes((tmp_path / "single" / SINGLE_FILE).read_bytes())
    with pytest.raises(CheckpointError, match=rf"{SINGLE_FILE} and {INDEX}"):
        Checkpoint(tmp_path)
    index.write_text(json.dumps({"weight_map": dict.fromkeys(waves(config), SINGLE_FILE)}))
    assert len(Checkpoint(tmp_path)) == len(waves(config))


def test_saving_over_a_checkpoint_replaces_it(tmp_path: Path) -> None:
    big, little = SMALL["llama"], SMALL["qwen3"]
    save_checkpoint(tmp_path, big, waves(big), shard_bytes=10_000)
    save_checkpoint(tmp_path, little, waves(little))
    assert Checkpoint(tmp_path).config == little
    save_checkpoint(tmp_path, big, waves(big), shard_bytes=10_000)
    assert Checkpoint(tmp_path).config == big
