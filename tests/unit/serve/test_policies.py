"""Decisions of a deployment that need no replica: routing, text, requests, configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

pytest.importorskip("ray")

from ray import serve
from ray.serve._private.common import (
    DeploymentHandleSource,
    DeploymentID,
    ReplicaID,
    RequestMetadata,
    RunningReplicaInfo,
)
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from fabric_ray.errors import InvalidArgument
from fabric_ray.inference.tokenizer import ByteTokenizer
from fabric_ray.models.checkpoint import save_checkpoint
from fabric_ray.models.errors import UnsupportedModel
from fabric_ray.models.hf import CONFIG_FILE
from fabric_ray.serve import BadRequest, DecodeArgs, PrefillArgs, ServeArgs, build_app
from fabric_ray.serve.errors import Busy
from fabric_ray.serve.messages import Failed, Generate
from fabric_ray.serve.prefillers import least_loaded
from fabric_ray.serve.routing import (
    PrefillRouter,
    PrefixMemory,
    PrefixRouter,
    prefer_prefix,
    prompt_blocks,
)
from fabric_ray.serve.scaling import replicas_for, with_policy
from fabric_ray.serve.stop_text import StopTextFilter
from tests.unit.models.small_models import SMALL, waves


def test_the_longest_prefix_wins_while_its_holder_is_not_much_busier() -> None:
    loads = {"a": 3.0, "b": 0.0, "c": 1.0}
    assert prefer_prefix(loads, {"a": 5, "c": 2}, slack=4) == [["a"], ["b", "c"]]
    assert prefer_prefix(loads, {"a": 5, "c": 2}, slack=2) == [["c"], ["b", "a"]]
    assert prefer_prefix(loads, {}, slack=4) == [["b", "c", "a"]]


def test_replicas_to_avoid_come_last() -> None:
    assert least_loaded({"a": 2, "b": 1, "c": 0}, avoid={"c": 1}) == ["b", "a", "c"]
    assert least_loaded({"a": 2, "b": 1, "c": 0}, avoid={"c": 1, "b": 2}) == ["a", "c", "b"]


class Named(RunningReplica):
    """A replica that is never called."""

    def __init__(self, name: str, **told: Any) -> None:
        of = ReplicaID(name, DeploymentID("Prefill", "app"))
        self._replica_info = RunningReplicaInfo(of, None, None, None, name, 8, **told)


def router_of(policy: type[RequestRouter], **parameters: Any) -> Any:
    """A policy as Serve makes it, without replicas."""
    router = policy(DeploymentID("Decode", "app"), DeploymentHandleSource.REPLICA)
    router.initialize_state(**parameters)
    return router


def request(*args: Any, **kwargs: Any) -> PendingRequest:
    return PendingRequest(args=[*args], kwargs=kwargs, metadata=RequestMetadata("r", "r"))


async def test_a_decoder_that_has_seen_the_prompt_is_preferred_until_it_dies() -> None:
    router = router_of(PrefixRouter, slack=4)
    a, b = Named("a"), Named("b")
    for replica, waiting in ((a, 3), (b, 1)):
        router.replica_queue_len_cache.update(replica.replica_id, waiting)
    tokens = tuple(range(8))
    blocks = prompt_blocks(tokens, block_tokens=4, most=8)
    prompt = request(Generate(id="r", tokens=tokens, max_tokens=1, blocks=blocks))
    assert await router.choose_replicas([a, b], prompt) == [[b, a]]
    router.on_request_routed(prompt, a.replica_id, None)
    assert await router.choose_replicas([a, b], prompt) == [[a], [b]]
    assert await router.choose_replicas([b, a]) == [[b, a]], "not a prompt"
    router.on_replica_actor_died(a.replica_id)
    assert await router.choose_replicas([b], prompt) == [[b]]
    router.replica_queue_len_cache.update(a.replica_id, 3)
    assert await router.choose_replicas([a, b], prompt) == [[b, a]]


@pytest.mark.parametrize("policy", [PrefixRouter, PrefillRouter])
async def test_serve_waits_between_attempts_to_route_a_request(policy: type[RequestRouter]) -> None:
    prompt = request()
    assert await router_of(policy).choose_replicas([], prompt) == []
    assert prompt.routing_context.should_backoff, "the router's event loop would spin"


async def test_prefillers_that_have_not_told_how_they_are_met_are_not_named() -> None:
    router = router_of(PrefillRouter)
    offer = {"replica_metadata": {"name": "prefill-x", "offer": "eA=="}}
    busy, idle = Named("busy", routing_stats={"load": 3.0}, **offer), Named("idle", **offer)
    fresh, other = Named("fresh"), Named("other", replica_metadata={"name": "prefill-y"})
    named = await router.choose_replicas([fresh, busy, other, idle])
    assert named == [[idle], [busy]]
    assert await router.choose_replicas([fresh, other]) == []


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(0, 40))
def test_replicas_are_remembered_by_what_prompts_have_in_common(
    tokens: list[int], same: int
) -> None:
    memory = PrefixMemory()
    memory.remember(prompt_blocks(tokens, block_tokens=4, most=8), "a")
    other = tokens[:same] + [9] * 8
    held = memory.held(prompt_blocks(other, block_tokens=4, most=8)).get("a", 0)
    assert held == min(min(same, len(tokens)) // 4, 8)


def test_the_oldest_blocks_are_forgotten_and_so_is_who_is_gone() -> None:
    memory = PrefixMemory(entries=4)
    old, new = (prompt_blocks([n] * 16, block_tokens=4, most=4) for n in (1, 2))
    memory.remember(old, "a")
    memory.remember(new, "b")
    assert (memory.held(old), memory.held(new)) == ({}, {"b": 4})
    memory.forget("b")
    assert memory.held(new) == {}


@given(
    st.text(alphabet="ab€", max_size=30),
    st.lists(st.text(alphabet="ab€", min_size=1, max_size=4), max_size=3),
)
def test_text_ends_before_the_first_stop_text_however_it_comes(said: str, stop: list[str]) -> None:
    whole = StopTextFilter(ByteTokenizer(), stop)
    got = ""
    for token in said.encode():
        got += whole.push(token)
        if whole.stopped:
            break
    got += whole.end()
    # The stop text that is complete first ends it; of several, the one that begins first.
    found = [(said.find(s) + len(s), said.find(s)) for s in stop if s in said]
    assert got == (said[: min(found)[1]] if found else said)
    assert whole.whole() == got


def test_a_stop_text_counts_once_enough_tokens_were_generated() -> None:
    text = StopTextFilter(ByteTokenizer(), ["ab", "b"])
    got = "".join(text.push(token, may_stop=at > 2) for at, token in enumerate(b"ab-ab"))
    # Within the first three tokens the texts are a part of what is said.
    assert (got, text.stopped) == ("ab-", True)
    across = StopTextFilter(ByteTokenizer(), ["ab"])
    assert across.push(ord("a"), may_stop=False) + across.push(ord("b")) == ""
    assert across.stopped


def test_errors_keep_their_kind_over_the_wire() -> None:
    back = Failed.of(Busy("full", param="x")).error()
    assert isinstance(back, Busy)
    assert (str(back), back.status, back.fields) == ("full", 429, {"param": "x"})


def test_configuration_comes_from_yaml_and_refuses_what_there_is_not(tmp_path: Path) -> None:
    file = tmp_path / "args.yaml"
    file.write_text("model: tiny-mla\ndecode: {tp: 2, options: {num_replicas: 3}}\n")
    args = ServeArgs.from_file(file)
    assert (args.model_id, args.decode.tp) == ("tiny-mla", 2)
    for wrong in ({"modle": "x"}, {"terms": {"beat": 2, "silence": 3}}, {"fabric": {"nic": 1}}):
        with pytest.raises(ValidationError):
            ServeArgs.model_validate(wrong)


def test_a_model_that_is_not_there_is_refused_before_anything_starts() -> None:
    with pytest.raises(BadRequest, match="neither a directory nor one of tiny-llama"):
        build_app(ServeArgs(model="/no/such/model"))


def test_a_model_that_is_not_computed_is_refused_before_anything_starts(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, SMALL["llama"], waves(SMALL["llama"]))
    file = tmp_path / CONFIG_FILE
    file.write_text(json.dumps(json.loads(file.read_text()) | {"hidden_act": "gelu"}))
    with pytest.raises(UnsupportedModel, match="llama with activation 'gelu'"):
        build_app(ServeArgs(model=str(tmp_path)))


def test_serve_parses_the_arguments_of_the_builder() -> None:
    from ray.serve._private.api import call_user_app_builder_with_args_if_necessary as build

    app = build(build_app, {"model": "tiny-mla", "seed": "7"})
    (args, *_) = app._bound_deployment.init_args
    assert (args.model, args.seed) == ("tiny-mla", 7)


class InTurn(RequestRouter):
    """A policy as a user writes it."""

    def initialize_state(self, *, first: int = 0) -> None:
        self._first = first


def _routing(args: ServeArgs) -> tuple[RequestRouterConfig, RequestRouterConfig]:
    """The policies of decoders and prefillers."""
    (_, decode, prefill) = build_app(args)._bound_deployment.init_args
    of_decode, of_prefill = (
        app._bound_deployment._deployment_config.request_router_config for app in (decode, prefill)
    )
    return of_decode, of_prefill


def test_a_policy_of_your_own_is_a_class_named_in_the_options() -> None:
    mine = {"request_router_config": {"request_router_class": f"{__name__}.InTurn"}}
    args = ServeArgs(decode=DecodeArgs(options=mine), prefill=PrefillArgs(options=mine))
    decode, prefill = _routing(args)
    assert decode.get_request_router_class().__name__ == InTurn.__name__
    assert decode.request_router_kwargs == {}, "slack is a parameter of PrefixRouter"
    assert prefill.get_request_router_class().__name__ == InTurn.__name__
    assert prefill.request_routing_stats_period_s == 1.0, "prefillers report as often as before"


def test_options_change_single_fields_of_the_policy() -> None:
    kwargs = {"request_router_config": {"request_router_kwargs": {"slack": 9}}}
    decode, prefill = _routing(ServeArgs(decode=DecodeArgs(options=kwargs)))
    assert decode.get_request_router_class().__name__ == "PrefixRouter"
    assert decode.request_router_kwargs == {"slack": 9}
    assert prefill.get_request_router_class().__name__ == "PrefillRouter"


@pytest.mark.parametrize("wrong", ["no_such_module.Policy", f"{__name__}.NoSuchPolicy"])
def test_a_policy_that_is_not_there_is_refused_with_what_to_do(wrong: str) -> None:
    options = {"request_router_config": {"request_router_class": wrong}}
    with pytest.raises(InvalidArgument, match="runtime_env"):
        build_app(ServeArgs(decode=DecodeArgs(options=options)))


def test_prefillers_scale_by_the_prompts_that_they_report() -> None:
    assert replicas_for([9, 0], target=2, least=1, most=8) == 5
    assert replicas_for([90], target=2, least=1, most=8) == 8
    assert replicas_for([], target=2, least=1, most=8) == 1
    scaled = with_policy({"autoscaling_config": {"max_replicas": 3}})["autoscaling_config"]
    assert scaled["policy"]["policy_function"] == "fabric_ray.serve.scaling.by_prompts"
    assert with_policy({"num_replicas": 2}) == {"num_replicas": 2}


@pytest.mark.parametrize(
    "options",
    [
        {"num_replicas": "auto"},
        {"num_replicas": "auto", "autoscaling_config": {"max_replicas": 3}},
        {"autoscaling_config": AutoscalingConfig(max_replicas=3)},
    ],
)
def test_prefillers_scale_by_prompts_however_autoscaling_is_asked_for(
    options: dict[str, Any],
) -> None:
    scaled = serve.deployment(PrefixMemory).options(**with_policy(options))
    config: Any = scaled._deployment_config.autoscaling_config
    assert config.policy.policy_function == "fabric_ray.serve.scaling.by_prompts"


def test_prefillers_that_may_scale_to_zero_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="got min_replicas 0, expected at least 1"):
        with_policy({"autoscaling_config": {"min_replicas": 0, "max_replicas": 3}})
