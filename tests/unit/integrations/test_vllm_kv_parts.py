"""The parts of vLLM's KV connector that need no vLLM: caches as layouts, offers as text."""

from __future__ import annotations

import importlib
import sys

import msgspec
import pytest
import torch

from fabric_ray import TransferEngine
from fabric_ray.errors import DecodeError, InvalidArgument
from fabric_ray.integrations import MissingFramework
from fabric_ray.integrations.vllm_kv_config import KvConnectorConfig
from fabric_ray.integrations.vllm_kv_groups import LayerGroup
from fabric_ray.integrations.vllm_kv_layout import Shards, worker_cache
from fabric_ray.integrations.vllm_kv_offer import from_text, instance, joined, to_text
from fabric_ray.integrations.vllm_kv_plan import Claim, digest
from fabric_ray.integrations.vllm_kv_probe import PageForm
from fabric_ray.kvcache import CacheLayout, Prefiller, RankCache
from tests.kv_pages import rows

LAYERS, BLOCKS, HEADS, TOKENS, CONTENT = 3, 5, 4, 8, 6


def caches(order: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """One allocation of layers x blocks x heads x tokens x content, stored in an order of these."""
    sizes = (LAYERS, BLOCKS, HEADS, TOKENS, CONTENT)
    raw = torch.arange(torch.Size(sizes).numel(), dtype=torch.int32)
    stored = raw.view([sizes[axis] for axis in order])
    view = stored.permute([order.index(axis) for axis in range(5)])
    return {f"model.layers.{i}.self_attn.attn": view[i] for i in range(LAYERS)}


def one(tensors: dict[str, torch.Tensor], block: int = TOKENS) -> list[LayerGroup]:
    """All layers in one group."""
    return [LayerGroup(block, tuple(tensors))]


@pytest.mark.parametrize(
    "order", [(0, 1, 2, 3, 4), (0, 1, 3, 2, 4), (0, 2, 1, 3, 4), (1, 0, 2, 3, 4), (1, 2, 0, 3, 4)]
)
def test_a_layout_says_where_each_token_of_each_head_lies(order: tuple[int, ...]) -> None:
    tensors = caches(order)
    shards = Shards(ranks=2, rank=1, shards=2)
    cache = worker_cache(tensors, groups=one(tensors), shards=shards, model="m", form=rows)
    (buffer,) = cache.buffers
    (group,) = cache.layouts[1].groups
    (tensor,) = group.tensors
    assert (tensor.heads, tensor.first_head, tensor.held_heads) == (2 * HEADS, HEADS, HEADS)
    assert cache.layouts[0].groups[0].tensors[0].first_head == 0
    for i, view in enumerate(tensors.values()):
        place = tensor.places[i]
        for block, head, token in [(0, 0, 0), (4, 1, 7), (2, 3, 5)]:
            at = place.offset + block * tensor.page_stride
            at += head * tensor.head_stride + token * tensor.token_stride
            found = buffer[at : at + CONTENT * 4].view(torch.int32)
            assert torch.equal(found, view[block, head, token])


def test_a_block_of_the_scheduler_is_several_pages_of_the_kernels() -> None:
    tensors = caches((0, 1, 2, 3, 4))
    shards = Shards(ranks=1, rank=0, shards=1)
    cache = worker_cache(
        tensors, groups=one(tensors, 2 * TOKENS), shards=shards, model="m", form=rows
    )
    assert cache.tables([[1, 0]], 2 * TOKENS + 1) == [[2, 3, 0]]


def test_ranks_beyond_the_heads_hold_the_same_ones() -> None:
    shards = Shards(ranks=8, rank=0, shards=2)
    tensors = caches((0, 1, 2, 3, 4))
    cache = worker_cache(tensors, groups=one(tensors), shards=shards, model="m", form=rows)
    firsts = [layout.groups[0].tensors[0].first_head for layout in cache.layouts]
    assert firsts == [0] * 4 + [HEADS] * 4
    latent = Shards(ranks=2, rank=1, shards=1)
    cache = worker_cache(tensors, groups=one(tensors), shards=latent, model="m", form=rows)
    assert [layout.groups[0].tensors[0].first_head for layout in cache.layouts] == [0, 0]


def test_layers_that_share_a_cache_have_one_place_and_unlike_ones_groups_of_their_own() -> None:
    tensors = caches((0, 1, 2, 3, 4))
    first, second, third = tensors
    tensors["model.layers.7.self_attn.attn"] = tensors[first]
    tensors[third] = torch.zeros(BLOCKS, HEADS, TOKENS, 2 * CONTENT, dtype=torch.int32)
    shards = Shards(ranks=1, rank=0, shards=1)
    cache = worker_cache(tensors, groups=one(tensors), shards=shards, model="m", form=rows)
    assert cache.layers == (first, second, third)
    assert [group.layers for group in cache.layouts[0].groups] == [(0, 1), (2,)]
    assert len(cache.layouts[0].buffers) == 2
    assert cache.tables([[3]], 2) == [[3], [3]]


def test_rs_1_layers_have_the_same_numbers_in_whatever_order_they_are_registered() -> None:
    """A draft model's layers have the numbers and the form of the model's own."""
    own = caches((0, 1, 2, 3, 4))
    drafts = {f"draft_model.{name}": each.clone() for name, each in own.items()}
    modules = {f"model.mtp.0.layers.{i}.attn": torch.zeros(5, 4, 8, 6) for i in (10, 2)}
    tensors = {**own, **drafts, **modules}
    made = []
    for order in (tensors, dict(reversed(tensors.items()))):
        shards = Shards(ranks=1, rank=0, shards=1)
        cache = worker_cache(order, groups=one(order), shards=shards, model="m", form=rows)
        (layout,) = cache.layouts
        where = {
            (group.name, layer): (place.offset, cache.buffers[place.buffer].data_ptr())
            for group in layout.groups
            for layer, place in zip(group.layers, group.tensors[0].places, strict=True)
        }
        made.append((where, cache.layers))
    assert made[0] == made[1]
    names = [name for name, _ in made[0][0]]
    assert sorted(set(names))[0] == "draft_model.model.layers.*.self_attn.attn"
    layers = [name for name in made[0][1] if "mtp" in name]
    assert layers == ["model.mtp.0.layers.2.attn", "model.mtp.0.layers.10.attn"]


def test_the_stride_of_a_single_head_is_no_difference() -> None:
    """Pages of indexers are moved whole; vLLM's memory orders give their only head any stride."""
    names = []
    for stride in (48, 6):
        pages = torch.zeros(5 * 48).as_strided((5, 1, 8, 6), (48, stride, 6, 1))
        cache = worker_cache(
            {"layers.0.k_cache": pages},
            groups=[LayerGroup(8, ("layers.0.k_cache",))],
            shards=Shards(ranks=1, rank=0, shards=1),
            model="m",
            form=lambda _: PageForm(tokens=False, heads=False, content="of INDEXER"),
        )
        names.append(cache.layouts[0].groups[0].tensors[0].name)
    assert names[0] == names[1]


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (torch.zeros(2, 5, 8, 4, 6), "not \\[blocks, heads, tokens, content\\]"),
        (torch.zeros(5, 4, 6, 8).transpose(2, 3), "in pieces"),
        (torch.zeros(5, 4, 3, 6), "3 tokens in a page"),
    ],
)
def test_a_cache_of_another_kind_is_refused_by_the_name_of_its_layer(
    tensor: torch.Tensor, text: str
) -> None:
    with pytest.raises(InvalidArgument, match=f"`layers.3`.*{text}"):
        worker_cache(
            {"layers.3": tensor},
            groups=[LayerGroup(8, ("layers.3",))],
            shards=Shards(ranks=1, rank=0, shards=1),
            model="m",
            form=rows,
        )


def offers(model: str = "m") -> list[bytes]:
    """Those of two workers of one instance."""
    made = []
    for rank in range(2):
        shards = Shards(ranks=2, rank=rank, shards=2)
        tensors = caches((0, 1, 2, 3, 4))
        groups = one(tensors)
        cache = worker_cache(tensors, groups=groups, shards=shards, model=model, form=rows)
        with TransferEngine(name=f"worker-{rank}") as engine:
            regions = [engine.register(buffer) for buffer in cache.buffers]
            rank_cache = RankCache(engine, cache.layouts[rank], regions)
            prefiller = Prefiller([rank_cache], layouts=cache.layouts, first_rank=rank, name="p")
            with prefiller:
                made.append(prefiller.offer())
    return made


def test_an_instance_offers_the_ranks_of_all_its_workers_and_text_brings_it_back() -> None:
    first, second = offers()
    text = instance({(0, 1): second, (0, 0): first})
    (offer,) = from_text(text)
    whole = msgspec.msgpack.decode(offer[4:])
    assert [[rank for rank, _ in end["ranks"]] for end in whole["ends"]] == [[0], [1]]
    layouts = [msgspec.convert(layout, CacheLayout) for layout in whole["layouts"]]
    assert [layout.groups[0].tensors[0].first_head for layout in layouts] == [0, HEADS]
    assert len(text) < 4096, "it travels with every request"
    assert to_text(from_text(text)) == text


def test_workers_of_different_instances_make_no_offer() -> None:
    with pytest.raises(InvalidArgument, match="offer different caches"):
        joined([offers()[0], offers("another")[1]])
    with pytest.raises(InvalidArgument, match="no worker"):
        joined([])


@pytest.mark.parametrize("text", ["", "nonsense", None, 7, "AAAA", "QUJD"])
def test_a_text_that_is_no_offer_is_refused(text: object) -> None:
    with pytest.raises(DecodeError, match="remote_offer"):
        from_text(text)


def test_a_text_that_is_cut_short_is_refused() -> None:
    text = to_text(offers()[:1])
    with pytest.raises(DecodeError, match="remote_offer"):
        from_text(text[: len(text) // 2 // 4 * 4])


def test_claims_come_back_and_other_payloads_do_not() -> None:
    claim = Claim("t", digest([1, 2, 3]), "r", 4, "v")
    assert Claim.decoded(claim.encoded()) == claim
    with pytest.raises(DecodeError, match="claim"):
        Claim.decoded(b"\x01")


def test_prompts_that_differ_in_anything_have_digests_that_differ() -> None:
    made = [
        digest([1, 2]),
        digest([1, 2, 0]),
        digest([2, 1]),
        digest(None),
        digest([1, 2], inputs=["image"]),
        digest([1, 2], adapter="lora"),
    ]
    assert len(set(made)) == len(made)


def test_a_configuration_that_there_is_not_is_named() -> None:
    assert KvConnectorConfig.of({"lease": 5, "terms": {"beat": 0.1}}).terms.beat == 0.1
    for wrong, text in [
        ({"leese": 5}, "`leese`"),
        ({"lease": 0}, "`lease`"),
        ({"terms": {"silence": -1}}, "`terms.silence`"),
        ({"terms": {"tail_nbytes": 8}}, "tail_nbytes"),
        ({"terms": {"silense": 3}}, r"the fields are terms\.beat, terms\.silence"),
    ]:
        with pytest.raises(InvalidArgument, match=text):
            KvConnectorConfig.of(wrong)


def test_without_vllm_the_connector_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    module = "fabric_ray.integrations.vllm_kv"
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(MissingFramework, match=r"pip install 'vllm>="):
        importlib.import_module(module)
