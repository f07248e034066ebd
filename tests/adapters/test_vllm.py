"""vLLM's published engine interface, factories and sources drive the backend `fabric`."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config.kv_transfer import KVTransferConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer import (
    ModuleSource,
    ParamMeta,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
    WeightTransferEngine,
    WeightTransferEngineFactory,
    WeightTransferTrainerFactory,
)

from fabric_ray.errors import InvalidArgument, Unsupported, WeightSyncError
from fabric_ray.integrations import vllm
from fabric_ray.integrations.vllm_plugin import load, register
from fabric_ray.integrations.vllm_recorded import refuse_stores
from tests.adapters.vllm_workers import Client, Model, model, worker
from tests.processes import Other

WORKERS = 2
BUCKET = 100_000


@pytest.fixture(autouse=True)
def buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "BUCKET", BUCKET)


@pytest.fixture(scope="module", autouse=True)
def plugin() -> None:
    for _ in range(2):
        register()


@pytest.fixture(scope="module")
def workers() -> Iterator[list[Other]]:
    made = [Other(worker) for _ in range(WORKERS)]
    try:
        for each in made:
            assert each.hear(120.0) == "ready"
        yield made
    finally:
        for each in made:
            each.__exit__()


def trainer(client: Any, source: Any, **options: Any) -> Any:
    info = {"rank": 0, "workers": WORKERS, "timeout": 20.0, **options}
    return WeightTransferTrainerFactory.trainer_init(
        vllm.FabricTrainerInitInfo(**info), client=client, source=source
    )


class Full(ModuleSource):
    """Its iteration may differ from the module's, so it is streamed."""

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from super().iter_full()


def test_the_classes_have_the_shapes_of_the_published_ones() -> None:
    pairs = {
        vllm.FabricWeightTransferEngine: WeightTransferEngine,
        vllm.FabricTrainerWeightTransferEngine: TrainerWeightTransferEngine,
    }
    for ours, theirs in pairs.items():
        assert issubclass(ours, theirs)
        assert not inspect.isabstract(ours)
        for name in {*theirs.__abstractmethods__, "shutdown"}:
            own, published = (
                list(inspect.signature(getattr(c, name)).parameters.values())
                for c in (ours, theirs)
            )
            assert [p.name for p in own[: len(published)]] == [p.name for p in published], name
            assert all(p.default is None for p in own[len(published) :]), name
    assert WeightTransferEngineFactory._registry["fabric"]() is vllm.FabricWeightTransferEngine
    plain = {n for n in dir(VLLMWeightSyncClient) if not n.startswith("_")}
    assert plain <= set(dir(Client)), "the test's client has all that a client has"


def test_vllm_finds_the_plugin_by_the_entry_point_that_the_package_declares() -> None:
    declared = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    group = '[project.entry-points."vllm.general_plugins"]\n'
    assert f'{group}fabric = "{load.__module__}:{load.__name__}"' in declared


def test_every_worker_loads_every_tensor_update_after_update(workers) -> None:
    client = Client(workers)
    module = model(1)
    sender = trainer(client, Full(module))
    fingerprints = set()
    try:
        for step in (1, 2):
            module.load_state_dict(model(step).state_dict())
            sender.send_weights()
            for each in workers:
                assert each.ask(("wrong", step)) == []
            [fingerprint] = {each.ask(("fingerprint", None)) for each in workers}
            fingerprints.add(fingerprint)
        assert len(fingerprints) == 2
    finally:
        sender.shutdown()
    assert client.calls == [
        "init",
        *["pause", "reset", "start", "update", "finish", "reset", "resume"] * 2,
    ]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_rs_1_quantised_tensors_are_not_loaded_into_a_model_that_is_not(dtype) -> None:
    def receive(quantization: str | None, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        loads = Model()
        engine = WeightTransferEngineFactory.create_engine(
            WeightTransferConfig(backend="fabric"),
            SimpleNamespace(
                parallel_config=None,
                model_config=SimpleNamespace(quantization=quantization, dtype=torch.float32),
            ),
            torch.device("cpu"),
            loads,
        )
        engine._trainer = engine._peer = None
        engine._engine = SimpleNamespace(send=lambda *_: SimpleNamespace(wait=lambda: None))
        engine._inbox = SimpleNamespace(
            invite=lambda: SimpleNamespace(to_bytes=bytes),
            receive=lambda *_: (step for step in [("a.weight", tensor)]),
        )
        engine.receive_weights(engine.parse_update_info({"update": 1}))
        return loads.loaded

    tensor = torch.ones(2, 2)
    assert receive(None, tensor).keys() == receive("fp8", tensor.to(dtype)).keys() == {"a.weight"}
    with pytest.raises(InvalidArgument, match=f"`a.weight` comes as {dtype}.*scales"):
        receive(None, tensor.to(dtype))


def test_workers_that_are_not_there_are_missed_soon(workers) -> None:
    client = Client(workers)
    sender = trainer(client, Full(model(1)), workers=3, timeout=1.0)
    try:
        with pytest.raises(WeightSyncError, match="2 of 3 workers of vLLM are ready"):
            sender.send_weights()
    finally:
        sender.shutdown()
    assert all(isinstance(answer, RuntimeError) for answer in client.answers()), "they stop waiting"


def test_what_workers_are_told_may_travel_as_json_and_rank_0_alone_sends() -> None:
    told: list[Any] = []

    class Listener:
        def __getattr__(self, name: str) -> Any:
            return lambda *given: told.append((name, *given)) if given else None

    trainer(Listener(), Full(model(1))).shutdown()
    name, info = told.pop()
    assert name == "init_weight_transfer_engine"
    vllm.FabricInitInfo(**json.loads(json.dumps(info)))
    gathered = []

    class Source(ModuleSource):
        def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
            for named in super().iter_full():
                gathered.append(named[0])
                yield named

    trainer(Listener(), Source(model(1)), rank=1).send_weights()
    assert gathered == [name for name, _ in model(1).named_parameters()]
    assert told == []


def test_a_source_that_rank_0_cannot_send_is_refused_by_name() -> None:
    class Stage(WeightSource):
        @cached_property
        def metadata(self) -> list[ParamMeta]:
            return [ParamMeta("layers.9.weight", torch.bfloat16, (2, 2), owners=(1,))]

        def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
            yield from ()

    with pytest.raises(InvalidArgument, match=r"doesn't own `layers\.9\.weight`"):
        trainer(None, Stage())
    with pytest.raises(InvalidArgument, match="give a WeightSource"):
        trainer(None, None)


def test_rs_4_a_killed_worker_is_named_and_the_others_have_all(workers) -> None:
    client = Client(workers)
    sender = trainer(client, Full(model(5)))
    workers[1].ask(("die at", "3.weight"))
    with pytest.raises(WeightSyncError, match="did not reach vllm worker") as caught:
        sender.send_weights()
    assert len(caught.value.failed) == 1
    sender.shutdown()
    assert client.answers()[0] is None
    assert workers[0].ask(("wrong", 5)) == []


def _served_with(*connectors: str) -> Any:
    """vLLM's configuration of a server with these KV connectors."""
    load()
    each = [{"kv_connector": name, "kv_role": "kv_both"} for name in connectors]
    several = {"kv_connector": "MultiConnector", "kv_role": "kv_both"}
    chosen = (
        each[0]
        if len(each) == 1
        else {**several, "kv_connector_extra_config": {"connectors": each}}
    )
    return SimpleNamespace(kv_transfer_config=KVTransferConfig(**chosen), ec_transfer_config=None)


@pytest.mark.parametrize(
    "connectors", [("ExampleConnector",), ("FabricRayConnector", "ExampleConnector")]
)
def test_rs_1_connectors_that_keep_pages_of_earlier_weights_are_refused(
    connectors: tuple[str, ...],
) -> None:
    with pytest.raises(Unsupported, match="got kv_connector='ExampleConnector'"):
        refuse_stores(_served_with(*connectors))


@pytest.mark.parametrize(
    "connectors",
    [
        ("FabricRayConnector",),
        ("OffloadingConnector",),
        ("FabricRayConnector", "OffloadingConnector"),
    ],
)
def test_connectors_that_discard_their_pages_are_taken(connectors: tuple[str, ...]) -> None:
    refuse_stores(_served_with(*connectors))
