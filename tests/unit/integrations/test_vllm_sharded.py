"""Shards go from trainers' memory into vLLM's workers by recorded loaders, all or none of them."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fabric_ray.errors import WeightSyncError
from fabric_ray.integrations.vllm_kv_content import weights
from fabric_ray.plan.dtensor import param_meta
from fabric_ray.plan.report import side_from_param_meta
from fabric_ray.weights.stacked import checkpoint_tensors
from tests.ports import free_ports
from tests.processes import Other
from tests.unit.integrations import vllm_fakes as fakes
from tests.unit.integrations.vllm_ranks import Trained, rank


def test_the_checkpoint_of_stacked_experts_has_a_tensor_for_each() -> None:
    def shapes(up: tuple[int, ...], down: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        held = {"gate_up_proj": torch.zeros(up), "down_proj": torch.zeros(down)}
        metas = [param_meta(f"mlp.experts.{n}", t, rank=0) for n, t in held.items()]
        tensors = checkpoint_tensors(side_from_param_meta({0: metas}))
        return {name.removeprefix("mlp.experts."): t.shape for name, t in tensors.items()}

    assert shapes((2, 12, 8), (2, 8, 6)) == {
        f"{expert}.{part}.weight": shape
        for part, shape in (("gate_proj", (6, 8)), ("up_proj", (6, 8)), ("down_proj", (8, 6)))
        for expert in range(2)
    }
    # As gpt-oss has them, they are the checkpoint's.
    assert shapes((2, 8, 12), (2, 6, 8)).keys() == {"gate_up_proj", "down_proj"}


@pytest.mark.parametrize("wrap", [fakes.ModuleSource, lambda module: module])
def test_rs_3_a_module_is_pushed_and_old_pages_never_answer_for_new_weights(
    server: fakes.Server, trainer: Any, wrap: Callable[[Any], Any]
) -> None:
    module = Trained(1)
    sender = trainer(wrap(module))
    names = set()
    for version in (1, 2, 3):
        old = server.answer("prompt")
        module.turn_to(version)
        sender.send_weights()
        assert server.answer("prompt") == {version} != old
        names.add(weights())
    assert len(names) == 3, "pages of one version are never taken for another's"
    assert not any("unfinished" in name for name in names)


def test_a_version_that_is_given_is_vllms_and_names_the_weights_of_all_senders(
    server: fakes.Server, trainer: Any
) -> None:
    for version in ("step 1", "step 2"):
        sender = trainer(Trained(1))  # as for the server of the decoders, too
        sender.send_weights(version)
        assert server.weight_version == version
        assert weights() == fakes.named_weights(version)
        sender.shutdown()


def test_rs_1_every_tensor_arrives_where_it_belongs(server: fakes.Server, trainer: Any) -> None:
    module = Trained(1)
    sender = trainer(module)
    for seed in range(2):
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.normal_()
        sender.send_weights()
        for name in ("l0", "l1", "l2"):
            own = module.get_submodule(name)
            assert torch.equal(
                server.model.get_submodule(name).weight, torch.cat([own.upper, own.lower])
            )
        assert torch.equal(server.model.tied.packed, server.model.l0.weight)


@pytest.mark.parametrize("both", [True, False])
def test_rs_1_float32_trainers_send_bfloat16_where_all_workers_round(
    server: fakes.Server, trainer: Any, both: bool
) -> None:
    models = [server.model, server.add_worker()]
    for model in models if both else models[:1]:
        model.l1.weight.data = model.l1.weight.data.bfloat16()
    module = Trained(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    sender = trainer(module, workers=2)
    sender.send_weights()
    for model in models:
        for name in ("l0", "l1", "l2"):
            own, got = module.get_submodule(name), model.get_submodule(name).weight
            assert torch.equal(got, torch.cat([own.upper, own.lower]).to(got.dtype))
    saved = 2 * models[0].l1.weight.nbytes if both else 0
    assert sender._sharded.report.nbytes == 2 * 3 * 64 - saved


@pytest.mark.parametrize("reruns", [False, True])
def test_rs_1_experts_are_packed_once_by_each_push(
    server: fakes.Server, trainer: Any, reruns: bool
) -> None:
    experts = server.model.l1
    experts.quant_method = fakes.Experts(reruns=reruns)
    experts.quant_method.process_weights_after_loading(experts)
    module = Trained(1)
    sender = trainer(module)
    for _ in range(2):
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.normal_()
        sender.send_weights()
        loaded = torch.cat([module.l1.upper, module.l1.lower])
        assert torch.equal(experts.weight, loaded.flip(0))
    assert "process_weights_after_loading" not in vars(experts.quant_method)


def test_rs_3_bytes_arrive_while_the_server_runs_and_a_push_that_fails_changes_nothing(
    server: fakes.Server, trainer: Any
) -> None:
    module = Trained(1)
    sender = trainer(module)
    sender.send_weights()
    server.calls.clear()
    module.l1.upper = torch.nn.Parameter(torch.zeros(2, 5))
    with pytest.raises(WeightSyncError, match=r"`l1.upper` differs from the plan"):
        sender.send_weights()
    assert server.calls == [], "it was never paused"
    assert server.answer("prompt") == {1.0}
    module.l1.upper = torch.nn.Parameter(torch.zeros(2, 4))
    server.never_resets = True
    sender._sharded._info.timeout = 0.5
    with pytest.raises(WeightSyncError, match=r"got success=false.*send again"):
        sender.send_weights()
    assert not server.paused
    assert server.model.versions() == {1.0}
    server.never_resets = False
    module.turn_to(2)
    sender.send_weights()
    assert server.answer("prompt") == {2.0}


def test_rs_3_a_server_whose_worker_failed_to_flip_stays_paused_until_it_has_one_version(
    server: fakes.Server, trainer: Any
) -> None:
    module = Trained(1)
    sender = trainer(module)

    def fail() -> None:
        raise RuntimeError("the worker is out of memory")

    server.before_update = fail
    with pytest.raises(WeightSyncError, match=r"out of memory.*vLLM stays paused"):
        sender.send_weights()
    assert server.paused
    server.before_update = lambda: None
    module.turn_to(4)
    sender.send_weights()
    assert server.answer("prompt") == {4.0}


@pytest.mark.parametrize("name", ["start_weight_update", "update_weights", "finish_weight_update"])
def test_rs_4_a_worker_that_does_not_end_a_call_is_noticed_and_the_server_is_named(
    server: fakes.Server, trainer: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    goes_on = threading.Event()
    server.base_url = "http://127.0.0.1:1"  # type: ignore[attr-defined]
    sender = trainer(Trained(1), timeout=3.0)
    server.timeout = 0.0
    monkeypatch.setattr(server, name, lambda *_: goes_on.wait(60))
    said = rf"127.0.0.1:1 did not end {name} within 3 s; see .* vLLM stays paused"
    start = time.monotonic()
    with pytest.raises(WeightSyncError, match=said):
        sender.send_weights()
    assert time.monotonic() - start < 30.0
    goes_on.set()
    assert server.paused


def test_rs_4_a_worker_that_does_not_open_its_end_is_noticed(
    server: fakes.Server, trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()
    server.timeout = 0.0
    monkeypatch.setattr(server, "init_weight_transfer_engine", lambda _: goes_on.wait(60))
    with pytest.raises(WeightSyncError, match="not end init_weight_transfer_engine within 1 s"):
        trainer(Trained(1), timeout=1.0)
    goes_on.set()


def test_rs_4_an_update_that_a_dead_trainer_left_open_does_not_stop_a_later_push(
    server: fakes.Server, trainer: Any
) -> None:
    calls: list[Any] = []
    server.before_update = lambda: calls.append(server._weight_update_active)
    server.start_weight_update()
    sender = trainer(Trained(3))
    assert not server._weight_update_active, "no call of vLLM fails at its workers"
    sender.send_weights()
    assert server.answer("prompt") == {3.0}
    server.start_weight_update()  # by a call that got no answer
    sender.send_weights()
    assert calls == [True, True]


def test_rs_3_a_worker_that_does_not_take_a_version_tells_the_trainer_and_fails_no_call(
    server: fakes.Server, trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = trainer(Trained(1))
    answered = []
    update = server.update_weights
    monkeypatch.setattr(server, "update_weights", lambda info: answered.append(update(info)))
    with monkeypatch.context() as broken:
        broken.setattr(server.worker._sharded._recorded, "apply", lambda *_: 1 / 0)
        with pytest.raises(WeightSyncError, match=r"division by zero.*vLLM stays paused"):
            sender.send_weights()
    assert answered == [None]
    sender.send_weights()
    assert server.answer("prompt") == {1.0}


def test_tensors_that_the_model_has_no_use_for_are_left_and_whole_ones_arrive(
    server: fakes.Server, trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = Trained(1)
    module.draft = torch.nn.Linear(4, 4)
    known = server.model.load_weights

    def load(named: Any) -> None:
        for name, tensor in named:
            if not name.startswith("draft"):
                known([(name, tensor * 2 if name == "l2.upper" else tensor)])

    monkeypatch.setattr(server.model, "load_weights", load)
    sender = trainer(module)
    sharded = server.worker._sharded
    assert sharded is not None
    assert sharded._recorded.whole.keys() == {"l2.upper", "l2.lower"}, "one layer, at once"
    for version in (1, 2):
        module.turn_to(version)
        sender.send_weights()
        assert server.model.l1.weight.unique().tolist() == [version]
        assert server.model.l2.weight[:2].unique().tolist() == [2.0 * version]
        assert server.model.l2.weight[2:].unique().tolist() == [version]


def test_a_module_that_is_not_in_memory_of_the_host_is_streamed_by_vllms_own_source(
    backend: Any, caplog: pytest.LogCaptureFixture
) -> None:
    module = Trained(1).to("meta")
    assert backend.shards_of(module, 0) is None
    assert "`l0.upper` is on meta, and shards are sent from host memory" in caplog.text
    source = backend.full_source(module)
    assert type(source) is fakes.ModuleSource
    assert source._module is module


def test_rs_1_what_a_model_keeps_is_not_overwritten_by_a_version_that_is_not_in_use(
    server: fakes.Server, trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, kept = server.model.load_weights, []

    def load(named: Any) -> None:
        for name, tensor in named:
            if name == "l2.extra":
                kept[:] = [tensor]
            else:
                known([(name, tensor)])

    monkeypatch.setattr(server.model, "load_weights", load)
    module = Trained(1)
    module.l2.extra = torch.nn.Parameter(torch.ones(4))
    sender = trainer(module)
    sender.send_weights()
    module.turn_to(2)
    server.never_resets = True
    sender._sharded._info.timeout = 0.5
    with pytest.raises(WeightSyncError, match=r"got success=false"):
        sender.send_weights()
    assert kept[0].tolist() == [1.0] * 4


def test_loaders_that_put_tensors_together_get_all_of_them_in_one_call(
    server: fakes.Server, trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = server.model.load_weights

    def load(named: Any) -> None:
        upper = {}
        for name, tensor in named:
            if name == "l1.upper":
                upper[name] = tensor
            elif name == "l1.lower":
                known([("l1.upper", upper.pop("l1.upper") + tensor), (name, tensor)])
            else:
                known([(name, tensor)])

    monkeypatch.setattr(server.model, "load_weights", load)
    trainer(Trained(1)).send_weights()
    assert server.model.l1.weight.tolist() == [[2.0] * 4] * 2 + [[1.0] * 4] * 2


def _ranks(*options: Any) -> list[Other]:
    port, _ = free_ports()
    ranks = [Other(rank, number, 2, port, *options) for number in range(2)]
    for each in ranks:
        assert each.hear(600.0) == "ready"
    return ranks


@pytest.mark.timeout(900)
def test_rs_3_fsdp2_ranks_push_their_shards_and_one_that_is_killed_changes_nothing() -> None:
    ranks = _ranks()
    try:
        for version in (1.0, 2.0):
            for each in ranks:
                each.say((version, None))
            answers = [each.hear(100.0) for each in ranks]
            assert answers[0] == (None, False, {version})
            assert answers[1][0] is None
        for each in ranks:
            each.say((3.0, 1))
        error, paused, versions = ranks[0].hear(100.0)
        assert "trainer 1: its connection ended" in error
        assert not paused
        assert versions == {2.0}
    finally:
        for each in ranks:
            each.__exit__()


@pytest.mark.long
@pytest.mark.timeout(900)
def test_rs_3_a_trainer_that_is_stopped_is_named_in_time_and_the_next_push_has_it() -> None:
    ranks = _ranks(5.0)
    try:
        for each in ranks:
            each.say((1.0, None))
        assert [each.hear(100.0)[0] for each in ranks] == [None, None]
        ranks[1].signal(signal.SIGSTOP)
        ranks[0].say((2.0, None))
        error, paused, versions = ranks[0].hear(60.0)
        assert "trainer 1: it did not come within 5 s" in error
        assert not paused
        assert versions == {1.0}
        ranks[1].signal(signal.SIGCONT)
        assert "trainer 1: it did not come within 5 s" in ranks[1].ask((2.0, None), 60.0)[0]
        for each in ranks:
            each.say((2.0, None))
        assert [each.hear(100.0)[0] for each in ranks] == [None, None]
    finally:
        for each in ranks:
            each.__exit__()


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_trainers_end_that_is_made_again_leaves_no_file_and_no_thread() -> None:
    ranks = _ranks()
    try:
        for each in ranks:
            each.say((None, 4))
        for each in ranks:
            files, threads = each.hear(300.0)
            assert files <= 0
            assert threads <= 0
    finally:
        for each in ranks:
            each.__exit__()


@pytest.mark.long
@pytest.mark.timeout(900)
def test_rs_4_a_trainer_whose_module_is_refused_is_named_on_all_ranks() -> None:
    ranks = _ranks()
    try:
        for refused in (1, 0):
            start = time.monotonic()
            for each in ranks:
                each.say(("refused", refused))
            errors = [each.hear(50.0) for each in ranks]
            assert all("l0.upper" in error for error in errors)
            assert errors[refused].startswith("InvalidArgument")
            assert "WeightSyncError" in errors[1 - refused]
            assert time.monotonic() - start < 60.0, "the others did not wait for it"
            for each in ranks:
                assert each.hear(100.0) == "ready"
        for each in ranks:
            each.say((2.0, None))
        assert [each.hear(100.0)[0] for each in ranks] == [None, None]
    finally:
        for each in ranks:
            each.__exit__()
