"""An update of a vLLM server is one call: the server answers with one version, or stands paused."""

from __future__ import annotations

import importlib
import logging
import re
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from fabric_ray.errors import InvalidArgument, Unsupported, WeightSyncError
from fabric_ray.integrations import vllm_plugin
from fabric_ray.integrations.vllm_control import control_at
from fabric_ray.integrations.vllm_kv_content import weights
from tests.unit.integrations import vllm_fakes as fakes
from tests.unit.integrations.conftest import BACKEND


class Source(dict[str, Any]):
    """Full tensors by name, as vLLM 0.32 has it; ``fails_at`` can't be gathered."""

    fails_at = ""

    def metadata(self) -> list[Any]:
        return [SimpleNamespace(name=n, dtype=t.dtype, shape=t.shape) for n, t in self.items()]

    def held_names(self) -> None:
        return None

    def __iter__(self) -> Iterator[Any]:
        for name in list(self.keys()):
            if name == self.fails_at:
                raise RuntimeError(f"{name} can't be gathered")
            yield name, self[name]


@pytest.fixture
def trainer(backend: Any, server: fakes.Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(backend, "BUCKET", 4096)
    opened = []

    def make(client: Any = server, **options: Any) -> Any:
        info = {"rank": 0, "workers": 1, "timeout": 3.0, **options}
        made = backend.FabricTrainerWeightTransferEngine.trainer_init(
            backend.FabricTrainerInitInfo(**info), client=client, source=Source(fakes.tensors(1))
        )
        opened.append(made)
        return made

    yield make
    for each in opened:
        each.shutdown()


@pytest.mark.parametrize("pause", ["keep", "abort"])
def test_rs_3_old_pages_never_answer_for_new_weights(
    server: fakes.Server, trainer: Any, pause: str
) -> None:
    sender = trainer(pause=pause)
    server.running = ["long"]
    for version in (1, 2, 3):
        old = server.answer("prompt")
        sender.source.update(fakes.tensors(version))
        sender.send_weights()
        assert server.answer("prompt") == {version} != old
    assert server.calls.count(pause) == 3
    assert "encoder" in server.calls


def test_a_version_that_is_given_is_vllms_and_names_the_weights(
    server: fakes.Server, trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = trainer()
    sender.send_weights()
    assert server.weight_version == "default"
    sender.send_weights("step 1")
    assert server.weight_version == "step 1"
    assert weights() == fakes.named_weights("step 1")
    server.calls.clear()
    for wrong in (7, ""):
        with pytest.raises(InvalidArgument, match=r"weight_version: got .*expected a str"):
            sender.send_weights(wrong)
    monkeypatch.setattr(server, "finish_weight_update", server.worker.finish_weight_update)
    with pytest.raises(InvalidArgument, match=r"Server.finish_weight_update takes no weight_ver"):
        sender.send_weights("step 2")
    assert not server.calls, "it was not paused"


def test_rs_1_experts_are_packed_by_each_update(server: fakes.Server, trainer: Any) -> None:
    experts = server.model.l1
    experts.quant_method = fakes.Experts(reruns=False)
    experts.quant_method.process_weights_after_loading(experts)
    sender = trainer()
    for version in (1, 2):
        sender.source.update(fakes.tensors(version))
        sender.source["l1.lower"].fill_(-version)
        sender.send_weights()
        assert experts.weight.tolist() == [[-version] * 4] * 2 + [[version] * 4] * 2


def test_rs_1_a_model_that_copies_to_parameters_itself_is_refused_before_any_update(
    server: fakes.Server, trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = server.model.load_weights

    def load(named: Any) -> None:
        for name, tensor in named:
            if name == "l1.lower":
                server.model.l1.weight.data[2:].copy_(tensor)
            else:
                known([(name, tensor)])

    monkeypatch.setattr(server.model, "load_weights", load)
    with pytest.raises(Unsupported, match=r"Model copies `l1.lower` to `l1.weight` itself.*shards"):
        trainer()
    assert server.model.versions() == {0.0}


def test_rs_3_pages_of_a_server_that_another_client_resumed_are_discarded_too(
    server: fakes.Server, trainer: Any
) -> None:
    def resumed() -> None:
        server.resume_generation()
        assert server.answer("prompt") == {0.0}
        server.paused = True

    server.before_update = resumed
    trainer().send_weights()
    assert server.answer("prompt") == {1.0}


def test_rs_3_an_update_lets_requests_that_load_pages_be_admitted_first(
    server: fakes.Server, trainer: Any
) -> None:
    sender = trainer()
    server.loads = 1
    sender.send_weights()
    assert server.answer("prompt") == {1.0}
    server.loads, server.paused = 1, True  # by another, who doesn't want it to run
    with pytest.raises(WeightSyncError, match="got success=false for 3 s"):
        sender.send_weights()
    assert server.paused


def test_rs_3_a_refused_update_leaves_the_server_serving_the_old_version(
    server: fakes.Server, trainer: Any
) -> None:
    missing = trainer(workers=2, timeout=0.5)
    with pytest.raises(WeightSyncError, match="1 of 2 workers of vLLM are ready"):
        missing.send_weights()
    assert server.answer("prompt") == {0.0}
    missing.shutdown()
    sender = trainer()
    sender.source.fails_at = "l2.upper"  # the bucket with all before it has not left
    with pytest.raises(RuntimeError, match="can't be gathered"):
        sender.send_weights()
    assert server.answer("prompt") == {0.0}
    server.never_resets = True
    sender.source.fails_at = ""
    with pytest.raises(WeightSyncError, match=r"got success=false for 3 s.*send again"):
        sender.send_weights()
    assert server.answer("prompt") == {0.0}


def test_a_server_that_was_paused_stays_so_and_is_updated(
    server: fakes.Server, trainer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Its owner resumes it: part of its memory may be asleep."""
    sender = trainer()
    server.pause_generation("keep")
    sender.send_weights()
    assert server.paused
    assert "vLLM was paused before the update, and stays paused" in caplog.text
    server.resume_generation()
    assert server.answer("prompt") == {1.0}


def test_a_server_that_was_paused_stays_so_when_an_update_is_refused(
    server: fakes.Server, trainer: Any
) -> None:
    sender = trainer()
    server.paused = True
    sender.source.fails_at = "l0.upper"
    with pytest.raises(RuntimeError, match="can't be gathered"):
        sender.send_weights()
    assert server.paused


def test_rs_3_a_server_with_parts_of_two_versions_stays_paused_until_it_has_one(
    server: fakes.Server, trainer: Any
) -> None:
    sender = trainer()
    last = sender.source.pop("l2.lower")
    sender.source.update(
        {f"l0.upper{i}": torch.ones(0, 4) for i in range(100)}, **{"l2.lower": last}
    )
    sender.source.fails_at = "l2.lower"  # when buckets have left
    with pytest.raises(WeightSyncError, match=r"vLLM stays paused.*call send_weights") as caught:
        sender.send_weights()
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert server.paused
    assert server.model.versions() >= {0.0}, "no weight is missing if the server is resumed"
    sender.source.fails_at = "l0.upper"
    with pytest.raises(RuntimeError):
        sender.send_weights()
    assert server.paused, "a refused update does not make it whole"
    sender.source.update(fakes.tensors(3))
    sender.source.fails_at = ""
    sender.send_weights()
    assert server.answer("prompt") == {3.0}


def test_rs_1_layers_that_an_update_leaves_out_are_named_unless_they_may_stay(
    server: fakes.Server, trainer: Any
) -> None:
    sender = trainer()
    del sender.source["l1.lower"], sender.source["l2.upper"], sender.source["l2.lower"]
    with pytest.raises(WeightSyncError, match=r"2 layers .* lack tensors .*: l1, l2; send every"):
        sender.send_weights()
    assert server.paused
    sender.shutdown()
    sender = trainer(leave=("l2*",))
    del sender.source["l2.upper"], sender.source["l2.lower"]
    sender.send_weights()
    server.resume_generation()  # The trainer's end that paused it is gone.
    assert server.answer("prompt") == {1.0, 0.0}


def test_rs_1_a_layer_of_which_an_update_brings_a_part_and_that_may_stay_keeps_all_of_its_tensors(
    server: fakes.Server, trainer: Any
) -> None:
    bias = torch.zeros(4)
    server.model.l1.e_score_correction_bias = torch.nn.Parameter(bias)  # loaded in place
    sender = trainer(leave=("l1",))
    del sender.source["l1.lower"]
    sender.source["l1.e_score_correction_bias"] = torch.ones(4)
    sender.send_weights()
    assert server.model.l1.weight.unique().tolist() == bias.unique().tolist() == [0.0]
    assert server.answer("prompt") == {1.0, 0.0}


def test_rs_3_workers_that_are_not_counted_are_named_by_the_failed_update(
    server: fakes.Server, trainer: Any
) -> None:
    server.add_worker()
    with pytest.raises(WeightSyncError, match=r"more workers .* answer than `workers` says"):
        trainer(timeout=1.0).send_weights()
    assert server.paused


def test_rs_1_tensors_that_are_tied_in_the_model_come_with_one_value(
    server: fakes.Server, trainer: Any
) -> None:
    sender = trainer()
    sender.source |= {"tied.weight": torch.ones(4, 4), "l0.weight": torch.ones(4, 4)}
    sender.send_weights()
    sender.source["tied.weight"] = torch.zeros(4, 4)
    with pytest.raises(WeightSyncError, match=r"`tied.weight` and `l0.weight` are tied in"):
        sender.send_weights()


def test_layers_that_quantise_what_comes_take_plain_tensors(
    server: fakes.Server, trainer: Any
) -> None:
    layer = server.model.l1
    layer.weight = torch.nn.Parameter(torch.zeros(4, 4, dtype=torch.float8_e4m3fn), False)
    layer.loads = torch.float32
    sender = trainer()
    del sender.source["l1.upper"], sender.source["l1.lower"]
    sender.source["l1.weight"] = torch.ones(4, 4)
    sender.send_weights()
    assert layer.weight.float().unique().tolist() == [1.0]
    layer.loads = torch.float8_e4m3fn
    with pytest.raises(WeightSyncError, match=r"`l1.weight` comes as torch.float32 and fills"):
        sender.send_weights()


@pytest.mark.parametrize("biased", [False, True])
def test_rs_1_a_vocabulary_may_lack_what_pads_it_and_no_more(
    biased: bool, server: fakes.Server, trainer: Any
) -> None:
    layer: Any = server.model.l1
    layer.num_embeddings_padded = layer.num_embeddings_per_partition = 4
    layer.shard_indices = SimpleNamespace(num_org_elements=2)
    if biased:
        layer.bias = torch.nn.Parameter(torch.zeros(4))
    sender = trainer()
    del sender.source["l1.lower"]
    if biased:
        with pytest.raises(WeightSyncError, match="l1"):
            sender.send_weights()
    else:
        sender.send_weights()


def test_rs_1_an_encoder_cache_that_is_not_discarded_is_refused(
    server: fakes.Server, trainer: Any
) -> None:
    kept = SimpleNamespace(ec_connector="ECExampleConnector")
    server.worker.vllm_config.ec_transfer_config = kept
    with pytest.raises(Unsupported, match="got ec_connector='ECExampleConnector'"):
        trainer()


def test_rs_1_experts_that_move_are_refused(server: fakes.Server, trainer: Any) -> None:
    server.worker.parallel_config.enable_eplb = True
    with pytest.raises(Unsupported, match="got enable_eplb=True"):
        trainer()


@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_rs_1_a_router_whose_bias_does_not_come_is_named(
    server: fakes.Server, trainer: Any, kind: str
) -> None:
    model, bias = server.model, torch.zeros(4)
    if kind == "buffer":
        model.l1.register_buffer("e_score_correction_bias", bias)
    else:
        model.l1.e_score_correction_bias = torch.nn.Parameter(bias)
    # The experts that it routes to have it too.
    model.experts = torch.nn.Module()
    model.experts.e_score_correction_bias = model.l1.e_score_correction_bias
    sender = trainer()
    with pytest.raises(WeightSyncError, match=r"1 layers .* lack tensors .*: l1; send every"):
        sender.send_weights()
    assert server.paused
    sender.source["l1.e_score_correction_bias"] = torch.ones(4)
    sender.send_weights()
    assert bias.tolist() == [1.0] * 4
    sender.shutdown()
    trainer(leave=("l1",)).send_weights()
    assert not server.paused


def test_routers_may_name_the_bias_of_experts(server: fakes.Server, trainer: Any) -> None:
    bias = torch.nn.Parameter(torch.zeros(4))
    server.model.router, server.model.experts = torch.nn.Module(), torch.nn.Module()
    server.model.router.expert_bias = server.model.experts.e_score_correction_bias = bias
    sender = trainer()
    sender.source["router.expert_bias"] = torch.ones(4)
    sender.send_weights()
    assert bias.tolist() == [1.0] * 4
    assert not server.paused


def test_rs_1_an_update_with_less_than_the_source_announced_is_refused_before_its_end(
    server: fakes.Server, trainer: Any
) -> None:
    sender = trainer()
    kept = iter(sender.source.items())  # as of an exporter that is called once
    sender.source.__class__ = type("Once", (Source,), {"__iter__": lambda _: kept})
    sender.send_weights()
    assert server.answer("prompt") == {1.0}
    with pytest.raises(InvalidArgument, match=r"did not yield 6 of its tensors.*`l0.upper`"):
        sender.send_weights()
    assert not server.paused


@pytest.mark.parametrize("ranks", [True, False], ids=["several ranks", "one"])
def test_rs_4_gathers_go_on_to_their_end_after_a_failure(
    server: fakes.Server, trainer: Any, monkeypatch: pytest.MonkeyPatch, ranks: bool
) -> None:
    """Other ranks take part in them."""
    gathered = []

    class Gathered(Source):
        def __iter__(self) -> Iterator[Any]:
            for name, tensor in self.items():
                gathered.append(name)
                yield name, tensor

    sender = trainer()
    sender.source.__class__ = Gathered
    monkeypatch.setattr("fabric_ray.integrations.vllm.has_group", lambda: ranks)
    server.never_resets = True
    sender._timeout = 0.3
    with pytest.raises(WeightSyncError, match="success=false"):
        sender.send_weights()
    assert gathered == (list(fakes.tensors(1)) if ranks else [])


def test_rs_4_servers_run_until_the_other_ranks_have_come_to_the_gathers(
    server: fakes.Server, trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    paused = []

    class Gathered(Source):
        def __iter__(self) -> Iterator[Any]:
            for named in self.items():
                paused.append(server.paused)
                yield named

    sender = trainer()
    sender.source.__class__ = Gathered
    monkeypatch.setattr("fabric_ray.integrations.vllm.has_group", lambda: True)
    sender.send_weights()
    assert paused == [False] + [True] * (len(paused) - 1)
    assert server.answer("prompt") == {1.0}


def test_rs_4_a_worker_that_does_not_end_an_update_is_noticed(
    server: fakes.Server, trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()
    update = server.update_weights

    def stuck(info: dict[str, Any]) -> None:
        update(info)
        goes_on.wait(60)

    monkeypatch.setattr(server, "update_weights", stuck)
    sender = trainer(timeout=1.0)
    server.timeout = 0.0
    with pytest.raises(WeightSyncError, match=r"did not end update_weights within 1 s.*paused"):
        sender.send_weights()
    goes_on.set()
    assert server.paused


def test_rs_1_an_update_without_tensors_is_no_update(backend: Any, server: fakes.Server) -> None:
    with pytest.raises(WeightSyncError, match="no tensor"):
        backend.Reload(server.model, None).finish()


def test_a_client_that_can_not_pause_is_refused_with_what_it_lacks(trainer: Any) -> None:
    client = SimpleNamespace(is_paused=bool, pause_generation=print, init_weight_transfer_engine=1)
    lacks = "got a client without reset_prefix_cache, reset_encoder_cache, resume_generation"
    with pytest.raises(InvalidArgument, match=lacks):
        trainer(client)
    with pytest.raises(InvalidArgument, match="pause: got 'wait', expected 'keep' or 'abort'"):
        trainer(pause="wait")


class _Routes(BaseHTTPRequestHandler):
    routes: ClassVar[dict[str, tuple[int, str]]] = {}
    asked: ClassVar[list[str]] = []

    def do_POST(self) -> None:
        self.asked.append(self.path)
        status, text = self.routes.get(self.path.partition("?")[0], (404, "{}"))
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    do_GET = do_POST

    def log_message(self, *args: Any) -> None:
        pass


def test_a_server_without_its_development_routes_is_told_how_to_start() -> None:
    pytest.importorskip("requests")
    http = HTTPServer(("127.0.0.1", 0), _Routes)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    try:
        control = control_at(f"http://127.0.0.1:{http.server_port}", 5.0)
        with pytest.raises(Unsupported, match=r"/is_paused answered 404.*VLLM_SERVER_DEV_MODE=1"):
            control.is_paused()
        _Routes.routes = {
            "/is_paused": (200, '{"is_paused": true}'),
            "/reset_prefix_cache": (200, '{"success": false}'),
            "/pause": (500, "no such engine"),
        }
        assert control.is_paused()
        assert not control.reset_prefix_cache(True, True)
        assert _Routes.asked[-1].endswith("?reset_running_requests=true&reset_external=true")
        # As vLLM answers while requests wait for a connector's pages.
        _Routes.routes["/reset_prefix_cache"] = (500, "Failed to reset KV cache")
        assert not control.reset_prefix_cache(True, True)
        with pytest.raises(WeightSyncError, match=r"/pause.* answered 500: no such engine"):
            control.pause_generation("keep")
    finally:
        http.shutdown()
        http.server_close()
    with pytest.raises(WeightSyncError, match=r"got no answer.*see whether the server runs"):
        control.is_paused()


@pytest.mark.parametrize("version", ["0.29.2", "0.34.0", "0.3.20", "dev"])
def test_versions_of_vllm_that_do_not_fit_are_named_at_registration(
    version: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, module in fakes.modules(version).items():
        monkeypatch.setitem(sys.modules, name, module)
    said = f"got version {version}, expected 0.30 to 0.33"
    with pytest.raises(Unsupported, match=said):
        vllm_plugin.register()
    with caplog.at_level(logging.WARNING):
        vllm_plugin.load()  # a server that doesn't use the backend starts
    assert re.search(f"KV connector can be used.*{said}", caplog.text)
    monkeypatch.delitem(sys.modules, BACKEND, raising=False)
    with pytest.raises(Unsupported, match=said):
        importlib.import_module(BACKEND)
