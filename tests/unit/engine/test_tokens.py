"""Tokens of configurations: shown by none, and given to what opens an engine."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError

from fabric_ray import EngineConfig, TransferEngine
from fabric_ray.errors import InvalidArgument
from fabric_ray.integrations.vllm_kv_config import KvConnectorConfig
from fabric_ray.serve.config import ServeArgs


def shown(config: BaseModel) -> list[str]:
    """All that a configuration shows of itself."""
    return [
        repr(config),
        str(config),
        repr(config.model_dump()),
        repr(config.model_dump(mode="json", exclude_unset=True)),
        config.model_dump_json(),
    ]


def test_a_token_is_in_no_text_or_dump() -> None:
    configs: list[BaseModel] = [
        EngineConfig(token=b"hush"),
        EngineConfig.model_validate({"token": "hush"}),
        ServeArgs(fabric=EngineConfig(token=b"hush")),
        ServeArgs.model_validate({"fabric": {"token": "hush"}}),
        KvConnectorConfig(engine={"token": "hush"}),
    ]
    for config in configs:
        assert not any("hush" in text for text in shown(config)), shown(config)
    with pytest.raises(InvalidArgument, match="token: ") as e:
        TransferEngine(token=["hush"])
    assert "hush" not in str(e.value)
    with pytest.raises(ValidationError, match=r"fabric\.token") as wrong:
        ServeArgs.model_validate({"fabric": {"token": 12345678}})
    assert "12345678" not in str(wrong.value)


def test_a_token_in_the_wrong_field_is_in_no_error() -> None:
    for fields in ({"fabric": {"tokn": "hush"}}, {"fabric": "hush"}, {"token": "hush"}):
        with pytest.raises(ValidationError) as wrong:
            ServeArgs.model_validate(fields)
        assert "hush" not in str(wrong.value)
    for option in ({"tokn": "hush"}, {"engine": {"token": "hush"}}):
        with pytest.raises(InvalidArgument, match="there is no such option") as e:
            TransferEngine(**option)
        assert "hush" not in str(e.value)
    with pytest.raises(ValidationError) as wrong:
        KvConnectorConfig(token="hush")
    assert "hush" not in str(wrong.value)


def test_a_token_gets_to_where_an_engine_is_opened(tmp_path: Path) -> None:
    config = EngineConfig(token=b"hush", transport=("tcp",))
    assert EngineConfig(**config.revealed()) == config
    assert EngineConfig.resolve(config, {"heal": False}).token == b"hush"
    assert pickle.loads(pickle.dumps(config)).token == b"hush"
    args = ServeArgs(model="tiny-qwen3", fabric=config)
    revealed = json.loads(json.dumps(args.revealed()))  # as Serve carries them
    assert ServeArgs.model_validate(revealed) == args
    assert "fabric" not in ServeArgs(model="tiny-qwen3").revealed()
    file = tmp_path / "serve.yaml"
    file.write_text("fabric: {token: hush, transport: tcp}")
    assert ServeArgs.from_file(file).fabric.token == b"hush"
    with pytest.raises(InvalidArgument, match=r"fabric\.token is not UTF-8"):
        ServeArgs(fabric=EngineConfig(token=b"\xff\xfe")).revealed()
