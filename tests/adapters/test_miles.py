"""Our updater, and the engine of our tests, against what miles-rl 0.0.2 and its SGLang publish."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from fabric_ray.integrations.miles import UpdateWeightFabric
from fabric_ray.integrations.sglang import _HARMLESS
from tests.adapters.sources import defaults, method, module, names, parameters, remote_calls
from tests.ray.miles_actors import Engine

BACKENDS = "miles.backends.megatron_utils"
UPDATERS = f"{BACKENDS}.update_weight.update_weight_from_distributed"
OURS = {"source", "group", "options"}
CALLED = (
    "get_remote_instance_transfer_engine_info",
    "pause_generation",
    "flush_cache",
    "post_process_weights",
    "update_weight_version",
    "continue_generation",
)


def signature(function: Any) -> list[tuple[str, bool]]:
    found = inspect.signature(function).parameters.values()
    # Ray adds a parameter to what becomes an actor's method.
    plain = [p for p in found if p.name not in OURS and not p.name.startswith("_ray")]
    return [(p.name, p.default is not p.empty) for p in plain]


def test_the_updater_is_made_and_called_like_miles_own() -> None:
    theirs = module(f"{UPDATERS}.p2p")
    for name in ("__init__", "connect_rollout_engines"):
        published = method(theirs, "UpdateWeightP2P", name)
        assert signature(getattr(UpdateWeightFabric, name)) == parameters(published)
    mixin = module(f"{UPDATERS}.mixin")
    published = method(mixin, "DistBucketedWeightUpdateMixin", "update_weights")
    assert signature(UpdateWeightFabric.update_weights) == parameters(published)


def test_miles_actor_finds_what_install_replaces() -> None:
    actor = module(f"{BACKENDS}.actor")
    init = method(actor, "MegatronTrainRayActor", "init")
    assert {"UpdateWeightP2P", "weight_updater"} <= names(init)
    update = method(actor, "MegatronTrainRayActor", "update_weights")
    wanted = {"connect_rollout_engines", "update_weights", "weight_version"}
    assert wanted <= names(update)
    assert "custom_megatron_init_path" in names(module(f"{BACKENDS}.initialize"))
    groups = module("miles.utils.distributed_utils")
    assert "get_gloo_group" in {getattr(node, "name", None) for node in groups.body}


@pytest.mark.parametrize("name", CALLED)
def test_engines_of_miles_take_the_calls_that_those_of_our_tests_take(name: str) -> None:
    theirs = method(module("miles.backends.sglang_utils.sglang_engine"), "SGLangEngine", name)
    assert signature(getattr(Engine, name)) == parameters(theirs)


def test_the_calls_have_miles_order() -> None:
    mixin, p2p = module(f"{UPDATERS}.mixin"), module(f"{UPDATERS}.p2p")
    pause = method(mixin, "DistBucketedWeightUpdateMixin", "_pause_and_prepare_engines")
    assert remote_calls(pause) == ["pause_generation", "flush_cache"]
    assert "post_process_weights" in names(pause)
    finish = method(p2p, "UpdateWeightP2P", "_finalize_and_resume_engines")
    assert remote_calls(finish) == ["update_weight_version"], "and then the mixin's"
    finish = method(mixin, "DistBucketedWeightUpdateMixin", "_finalize_and_resume_engines")
    assert remote_calls(finish) == ["continue_generation"]
    assert "post_process_weights" in names(finish)


def test_sglangs_model_runner_has_what_attach_uses() -> None:
    runner = module("sglang.srt.model_executor.model_runner")
    assert {
        "model",
        "tp_rank",
        "tp_size",
        "remote_instance_transfer_engine_session_id",
        "remote_instance_transfer_engine_weight_info",
    } <= names(method(runner, "ModelRunner", "__init__")) | names(runner)
    made = method(runner, "ModelRunner", "__init__")
    assert {"pp_size", "is_draft_worker", "server_args"} <= {n for n, _ in parameters(made)}
    assert _HARMLESS.items() <= defaults(module("sglang.srt.server_args"), "ServerArgs").items()
    told = method(runner, "ModelRunner", "_register_to_engine_info_bootstrap")
    assert parameters(told) == [("self", False)]
