"""Cache groups of vLLM: what is loaded of a prompt, what is kept of a window."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace as Fields
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fabric_ray.errors import InvalidArgument
from fabric_ray.integrations.vllm_kv_groups import BlockPins, LayerGroup, loaded_tokens
from fabric_ray.integrations.vllm_kv_layout import Shards, WorkerCache, worker_cache
from fabric_ray.integrations.vllm_kv_states import State
from tests.kv_pages import rows

GROUPS = st.lists(
    st.builds(
        LayerGroup,
        block_tokens=st.sampled_from([4, 8]),
        window=st.one_of(st.none(), st.integers(2, 40)),
    ),
    min_size=1,
    max_size=3,
)


@given(groups=GROUPS, prompt=st.integers(1, 80), blocks=st.integers(0, 9))
def test_rs_1_the_last_token_of_a_prompt_sees_only_blocks_that_vllm_keeps(
    groups: list[LayerGroup], prompt: int, blocks: int
) -> None:
    """vLLM takes back what the token after the loaded ones doesn't see, and computes the last token
    of the prompt when all of it was loaded."""
    here = min(8 * blocks, (prompt - 1) // 8 * 8)
    loaded = loaded_tokens(groups, prompt, here)
    assert here <= loaded <= prompt
    next_token = min(loaded, prompt - 1)
    for group in groups:
        sees = 0 if group.window is None else max(0, next_token - group.window + 1)
        assert group.taken_back(loaded) <= sees // group.block_tokens
    if loaded < prompt - 1:
        assert loaded == here == prompt - 1, "else all but the last token are loaded"


@pytest.mark.parametrize(("prompt", "here", "loaded"), [(20, 0, 18), (20, 16, 18), (2, 0, 0)])
def test_tokens_whose_drafts_depend_on_samples_are_not_loaded(
    prompt: int, here: int, loaded: int
) -> None:
    """Of three draft modules the last one reads two tokens beyond the next."""
    assert loaded_tokens([LayerGroup(8)], prompt, here, recomputed=2) == loaded


class Pool:
    """Blocks with users, as vLLM counts them; 0 is the one that stands for none."""

    def __init__(self, blocks: int) -> None:
        self.blocks = [Fields(number=i, users=0, is_null=i == 0) for i in range(blocks)]

    def touch(self, blocks: Any) -> None:
        for block in blocks:
            block.users += 1

    def free_blocks(self, blocks: Any) -> None:
        for block in blocks:
            block.users -= 1

    def used(self) -> list[int]:
        return [block.number for block in self.blocks if block.users]


def test_mr_1_blocks_of_windows_are_kept_until_they_are_given_back() -> None:
    pool = Pool(20)
    pins = BlockPins([LayerGroup(4), LayerGroup(4, window=6), LayerGroup(2, window=3)])
    pins.bind(pool)
    tables = [[1, 2, 3, 4], [0, 0, 5, 6], [0, 0, 0, 0, 0, 7, 8, 9]]
    assert not pins.pin("r", tables, 13)
    # The last token is number 12. It sees 7 to 12, and 10 to 12.
    assert pool.used() == []
    tables[1][1] = 10
    assert pins.pin("r", tables, 13)
    assert pool.used() == [5, 6, 7, 8, 10]
    pins.unpin("r")
    pins.unpin("r")
    assert pool.used() == []


SHARDS = Shards(ranks=1, rank=0, shards=1)
NAMES = [f"model.layers.{i}.attn" for i in range(4)]


def overlaid(blocks: int = 5, tokens: int = 4) -> dict[str, torch.Tensor]:
    """Two groups of two layers in the same memory, as vLLM places them."""
    raw = torch.zeros(2, blocks, 1, tokens, 6)
    return {name: raw[i // 2] for i, name in enumerate(NAMES)}


def described(tensors: dict[str, torch.Tensor], **options: Any) -> WorkerCache:
    groups = [LayerGroup(4, (NAMES[0], NAMES[2])), LayerGroup(4, (NAMES[1], NAMES[3]), 9)]
    options = {"groups": groups, "shards": SHARDS, "model": "m", "form": rows, **options}
    return worker_cache(tensors, **options)


STATE = State("short", nbytes=20)


def with_states(content: int = 20) -> tuple[dict[str, torch.Tensor], list[LayerGroup]]:
    """Two layers with states, and one of attention."""
    names = ["model.layers.0.mixer", "model.layers.1.mixer", NAMES[2]]
    states = {name: torch.zeros(5, 24, dtype=torch.int8) for name in names[:2]}
    tensors = {name: pages[:, None, None, :content] for name, pages in states.items()}
    tensors[names[2]] = torch.zeros(5, 1, 4, 6)
    groups = [
        LayerGroup(8, tuple(names[:2]), states=dict.fromkeys(names[:2], STATE)),
        LayerGroup(4, tuple(names[2:])),
    ]
    return tensors, groups


def test_a_state_is_the_block_of_the_last_token_and_leaves_after_all_attention() -> None:
    tensors, groups = with_states()
    cache = described(tensors, groups=groups, shards=Shards(ranks=2, rank=1, shards=1))
    attention, states = sorted(cache.layouts[1].groups, key=lambda group: group.is_state)
    assert [group.is_state for group in (attention, states)] == [False, True]
    (held,) = states.tensors
    assert (held.width, held.page_stride, held.heads, held.first_head) == (20, 24, 2, 1)
    assert cache.layers == (NAMES[2], "model.layers.0.mixer", "model.layers.1.mixer")
    blocks = [[0, 3, 4], [1, 2, 3, 4, 1, 2]]
    of = {group.name: i for i, group in enumerate(cache.layouts[0].groups)}
    assert [cache.tables(blocks, n)[of[states.name]] for n in (9, 16, 17)] == [[3], [3], [4]]
    with pytest.raises(InvalidArgument, match="no state after 8 tokens"):
        cache.tables(blocks, 8)


@pytest.mark.parametrize(("tokens", "kept"), [(8, 8), (9, 9), (10, 10), (12, 12), (16, 16)])
def test_what_a_block_has_beyond_loaded_tokens_is_zeroed(tokens: int, kept: int) -> None:
    """Blocks of 8 tokens are two pages."""
    tensors, groups = with_states()
    groups[1] = dataclasses.replace(groups[1], block_tokens=8)
    pages = tensors[NAMES[2]] = torch.ones(10, 1, 4, 6)
    cache = described(tensors, groups=groups)
    cache.clear_rest([[0, 3], [2, 4]], tokens)
    table = [4, 5, 8, 9][: 2 * -(-tokens // 8)]
    rows = pages[table].flatten(0, 2).sum(1)
    assert rows.bool().tolist() == [i < kept for i in range(4 * len(table))]
    assert pages.sum() == 6 * (40 - (4 * len(table) - kept)), "no other page"


def test_rs_1_a_state_of_another_form_is_refused() -> None:
    tensors, groups = with_states(content=16)
    with pytest.raises(InvalidArgument, match=r"`model.layers.0.mixer` has shape \(5, 1, 1, 16\)"):
        described(tensors, groups=groups)


def test_layers_of_two_groups_in_the_same_memory_are_both_described() -> None:
    cache = described(overlaid())
    full, windowed = cache.layouts[0].groups
    assert (full.layers, full.window) == ((0, 2), None)
    assert (windowed.layers, windowed.window) == ((1, 3), 8)
    assert full.tensors[0].places == windowed.tensors[0].places
    assert cache.layers == tuple(NAMES)
    assert [(of.group, of.per_block, of.block_tokens) for of in cache.pages] == [
        (0, 1, 4),
        (1, 1, 4),
    ]
    assert cache.tables([[1, 2, 3, 4], [0, 3, 2, 1]], 13) == [[1, 2, 3, 4], [0, 3, 2, 1]]
    assert "sliding window of 9" in windowed.name


def test_groups_have_block_sizes_of_their_own() -> None:
    raw = torch.zeros(10, 1, 4, 6)
    tensors = dict.fromkeys(NAMES[:2], raw)
    groups = [LayerGroup(4, (NAMES[0],)), LayerGroup(8, (NAMES[1],), 9)]
    cache = described(tensors, groups=groups)
    assert cache.tables([[1, 2, 3, 4, 5], [0, 4, 2]], 17) == [[1, 2, 3, 4, 5], [0, 1, 8, 9, 4]]


def test_rs_1_a_block_that_the_next_token_sees_and_vllm_has_not_is_never_moved() -> None:
    cache = described(overlaid())
    assert cache.tables([[1, 2, 3, 4], [0, 0, 2, 1]], 16)[1] == [0, 0, 2, 1]
    for tokens in (13, 15):  # Of which the next one sees the last 8.
        with pytest.raises(InvalidArgument, match="vLLM has taken back a block"):
            cache.tables([[1, 2, 3, 4], [0, 0, 2, 1]], tokens)


def test_layers_that_read_anothers_cache_are_left_out() -> None:
    tensors = overlaid()
    tensors["model.layers.4.attn"] = tensors[NAMES[3]]
    cache = described(tensors, shared={"model.layers.4.attn": NAMES[3]})
    assert cache.layers == tuple(NAMES)
    tensors["model.layers.4.attn"] = tensors[NAMES[0]].clone()
    with pytest.raises(InvalidArgument, match=r"reads the cache of `model.layers.3.attn`"):
        described(tensors, shared={"model.layers.4.attn": NAMES[3]})
    with pytest.raises(InvalidArgument, match=r"`model.layers.4.attn` is of none"):
        described(tensors)


def test_rs_1_layers_with_another_number_of_heads_fit_as_many_ranks_only() -> None:
    raw = torch.zeros(5, 2, 4, 6)
    other = torch.zeros(5, 1, 4, 6)
    tensors = {NAMES[0]: raw, NAMES[1]: other}
    groups = [LayerGroup(4, (NAMES[0],)), LayerGroup(4, (NAMES[1],), 9)]
    shards = Shards(ranks=4, rank=0, shards=2, held_heads=2)
    cache = described(tensors, groups=groups, shards=shards)
    known, unknown = ([layout.groups[i].tensors[0] for layout in cache.layouts] for i in (0, 1))
    assert [(t.heads, t.first_head) for t in known] == [(4, 0), (4, 0), (4, 2), (4, 2)]
    assert [(t.heads, t.first_head) for t in unknown] == [(4, 0), (4, 1), (4, 2), (4, 3)]
    assert "of 4 ranks" not in known[0].name
    assert "of 4 ranks" in unknown[0].name
