"""Calls and parameters of the libraries whose interfaces are here, against those that are here."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from fabric_ray.moe import deepep, nixl_ep, pplx_garden

CLASSES: dict[str, Any] = {
    "deep_ep Buffer": deepep.Buffer,
    "deep_ep ElasticBuffer": deepep.ElasticBuffer,
    "deep_ep EventOverlap": deepep.EventOverlap,
    "hybrid-ep Buffer": deepep.Buffer,
    "hybrid-ep HybridEPBuffer": deepep.HybridEPBuffer,
    "uccl Buffer": deepep.Buffer,
    "nixl_ep Buffer": nixl_ep.Buffer,
    "pplx_garden P2PAllToAll": pplx_garden.P2PAllToAll,
}
BY_NAME = {
    ("hybrid-ep HybridEPBuffer", "dispatch_with_permute"),
    ("hybrid-ep HybridEPBuffer", "combine_with_unpermute"),
    ("hybrid-ep Buffer", "__init__"),
    ("hybrid-ep Buffer", "low_latency_dispatch"),
    ("hybrid-ep Buffer", "low_latency_combine"),
    ("uccl Buffer", "__init__"),
}
"""Calls that take parameters by name, or that stand in another order in DeepEP's main branch."""
ABSENT = {"internode_dispatch", "internode_combine", "dispatch_pcie", "combine_pcie",
          "update_template_config"}  # fmt: skip
"""Parts of other calls, which no caller makes."""


def published() -> list[tuple[str, str, tuple[str, ...]]]:
    found: list[tuple[str, str, tuple[str, ...]]] = []
    kind = ""
    for line in Path(__file__).with_name("published_calls.txt").read_text().splitlines():
        if line.startswith("["):
            kind = line.strip("[]")
        elif line.startswith(" "):
            found[-1] = (*found[-1][:2], (*found[-1][2], *line.split()))
        elif line and not line.startswith("#"):
            call, _, names = line.partition(":")
            found.append((kind, call, tuple(names.split())))
    return found


def parameters(function: Any) -> tuple[list[str], set[str], bool]:
    """Those that may be given by place, all names, and whether further ones are passed on."""
    found = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
    plain = [p.name for p in found if p.kind is p.POSITIONAL_OR_KEYWORD]
    return plain, {p.name for p in found}, any(p.kind is p.VAR_POSITIONAL for p in found)


@pytest.mark.parametrize(("kind", "call", "theirs"), published(), ids=lambda each: str(each)[:40])
def test_a_call_takes_what_is_published(kind: str, call: str, theirs: tuple[str, ...]) -> None:
    function = getattr(CLASSES[kind], call, None)
    if call in ABSENT:
        assert function is None, f"{call} is there now; take it out of ABSENT"
        return
    assert function is not None, f"{kind} has {call}"
    plain, names, passed_on = parameters(function)
    if passed_on:
        # The rest is as DeepEP's.
        more, more_names, _ = parameters(getattr(deepep.Buffer, call.removeprefix("ht_"), function))
        plain, names = plain + more[len(plain) :], names | more_names
    if (kind, call) in BY_NAME or kind.startswith("pplx"):
        assert {*theirs} <= names
    else:
        assert plain[: len(theirs)] == [*theirs]
