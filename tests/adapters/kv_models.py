"""Which models' caches are moved by vLLM's KV connector, and in which ways they were shown to be.

The one source: ``test_vllm_kv_models.py`` runs each cell with vLLM's scheduler and caches, and
docs/integrations.md has what :func:`tables` writes. ``python -m tests.adapters.kv_models`` prints
it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

SERVERS = "tests/adapters/vllm/"
"""Where tests with real servers are."""

WAYS = {
    "chunks": "chunked prefill",
    "hits": "prefix hits",
    "order": "tokens before heads",
    "layers": "cross-layer blocks",
    "blocks": "blocks 16 to 8",
    "tp 1 to 2": "TP 1 to 2",
    "tp 4 to 2": "TP 4 to 2",
    "pp 2 to 1": "PP 2 to 1",
    "pp 1 to 2": "PP 1 to 2",
    "pp 2 to 3": "PP 2 x TP 2 to PP 3",
}
"""Ways in which pages travel, and what the page calls them."""


@dataclass(frozen=True)
class Moved:
    """Caches that are moved."""

    layers: str
    example: str
    servers: str | None = None
    """The module that compares outputs with a plain server's."""
    refused: tuple[str, ...] = ()
    """The ways in which ends refuse each other."""


@dataclass(frozen=True)
class Refused:
    """Caches that end vLLM's start with the name of a layer."""

    layers: str
    example: str
    instead: str


MOVED: dict[str, Moved] = {
    "full": Moved("full attention", "Llama 3, Qwen 3, Mixtral", "test_shared_prefix.py"),
    "mla": Moved("MLA", "DeepSeek V3, Kimi K2"),
    "indexers": Moved("MLA with sparse attention's indexers", "DeepSeek V3.2", refused=("blocks",)),
    "windows": Moved("sliding windows beside full attention", "Gemma 3, gpt-oss", "test_hybrid.py"),
    "windows alone": Moved("sliding windows alone", "Mistral 7B 0.1"),
    "shared": Moved("layers that read another layer's cache", "Gemma 3n"),
    "states": Moved(
        "states beside full attention",
        "Qwen3-Next, Nemotron-H",
        "test_states.py",
    ),
    "drafts": Moved(
        "a draft model's layers, EAGLE's, MTP's",
        "`--speculative-config` at both ends",
        "test_drafts.py",
    ),
}

REFUSED: dict[str, Refused] = {
    "a state for drafts": Refused(
        "states beside drafts", "Qwen3-Next with `--speculative-config`", "no drafts"
    ),
    "chunks": Refused(
        "local attention in chunks",
        "Llama 4 with `VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE=1`",
        "vLLM's default, with which it is moved as full attention",
    ),
    "a latent with a window": Refused("latents with windows", "DeepSeek V4", "no connector"),
    "a compressed state": Refused(
        "several tokens in one state", "DeepSeek V4, GLM with pooled indexers", "no connector"
    ),
    "a window for several drafts": Refused(
        "sliding windows under several MTP modules",
        "MTP with more than one module",
        "one module, or `--disable-hybrid-kv-cache-manager`",
    ),
    "a window of one token": Refused("windows of one token", "none known", "no connector"),
}


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _moved() -> Iterator[str]:
    head = ("Moved", "For example", *WAYS.values(), "real servers")
    yield _row(*head)
    yield "|" + "---|" * len(head)
    for each in MOVED.values():
        ways = ("refused" if way in each.refused else "yes" for way in WAYS)
        yield _row(each.layers, each.example, *ways, "yes" if each.servers else "")


def _refused() -> Iterator[str]:
    yield _row("Refused by the name of a layer", "For example", "Use instead")
    yield "|---|---|---|"
    for each in REFUSED.values():
        yield _row(each.layers, each.example, each.instead)


def tables() -> str:
    """Both tables, as docs/integrations.md has them."""
    return "\n".join([*_moved(), "", *_refused()])


if __name__ == "__main__":
    print(tables())
