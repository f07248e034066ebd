"""No layer of the native core calls past its neighbour, and no crate knows one above it.

The layers are those of the design notes; what Python packages may import is in `pyproject.toml`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

tomllib = pytest.importorskip("tomllib", reason="Python 3.11 reads TOML")

NATIVE = Path(__file__).parents[2] / "native"
ENGINE = NATIVE / "engine" / "src"

# What each module of the engine may use. `fuzzing` is for tests, and sees all.
BASE = {"api", "error", "locks", "process", "sync", "time", "topology", "wake"}
MAY_USE = {
    "simulation": BASE | {"engine", "transport", "domain"},
    "engine": BASE | {"group", "domain", "flight", "memory", "transport"},
    "group": BASE | {"domain", "flight"},
    "flight": {"api", "time"},
    "transport": BASE | {"domain", "memory"},
    "domain": BASE | {"memory"},
    "memory": BASE,
    "api": {"error", "topology"},
    "topology": set[str](),
    "wake": {"sync"},
    "error": set[str](),
    "process": {"error"},
    "locks": set[str](),
    "sync": {"locks"},
    "time": set[str](),
}
CRATES_MAY_USE = {
    "fabric-kvcache": {"fabric-engine"},
    "fabric-moe": {"fabric-engine", "fabric-proxy"},
    "fabric-python": {
        "fabric-engine",
        "fabric-kvcache",
        "fabric-moe",
        "fabric-plan",
        "fabric-simulate",
    },
    "fabric-proxy": {"fabric-engine"},
    "fabric-simulate": {"fabric-engine", "fabric-plan"},
    "fabric-perf": {"fabric-engine", "fabric-kvcache", "fabric-moe"},
    "fabric-microbench": {"fabric-engine", "fabric-moe", "fabric-proxy"},
    "fabric-engine": {"fabric-sys"},
    "fabric-plan": set[str](),
    "fabric-sys": set[str](),
}
ALIASES = {"EngineError": "error", "LostLink": "error", "Result": "error", "Time": "time"}


def _heads(tree: str) -> Iterator[str]:
    """The first names of what stands in the braces of a `use`."""
    depth, name = 0, ""
    for letter in tree + ",":
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            yield name.split("::")[0].strip()
            name = ""
        else:
            name += letter


def _uses(source: str) -> set[str]:
    """The modules of the crate that a file names."""
    source = re.sub(r"//.*", "", source)
    found = set(re.findall(r"\bcrate::(\w+)", source))
    for tree in re.findall(r"\bcrate::\{(.*?)\};", source, re.DOTALL):
        found.update(_heads(tree))
    return {ALIASES.get(name, name) for name in found if name}


def _module(path: Path) -> str:
    return path.relative_to(ENGINE).parts[0].removesuffix(".rs")


def test_every_module_has_its_layer() -> None:
    modules = {_module(path) for path in ENGINE.rglob("*.rs")}
    assert modules - {"lib", "fuzzing"} == set(MAY_USE)


@pytest.mark.parametrize("layer", MAY_USE)
def test_a_layer_uses_what_is_below_it(layer: str) -> None:
    allowed = MAY_USE[layer] | {layer, "fuzzing"}
    wrong = {
        f"{path.relative_to(ENGINE)} uses {used}"
        for path in ENGINE.rglob("*.rs")
        if _module(path) == layer
        # What a file tests itself with may lie above it.
        for used in _uses(path.read_text().split("\nmod tests {")[0]) - allowed
    }
    assert not wrong


def _std(source: str) -> set[str]:
    """The modules of the standard library that a file names."""
    source = re.sub(r"//.*", "", source)
    found = set(re.findall(r"\bstd::(\w+)", source))
    for tree in re.findall(r"\bstd::\{(.*?)\};", source, re.DOTALL):
        found.update(_heads(tree))
    return found - {""}


def test_the_group_has_no_thread_clock_or_file() -> None:
    outside = re.compile(r"\b(Instant|SystemTime|locks|rustix|libc)\b|Time::now|Rng::new\(")
    files = list((ENGINE / "group").rglob("*.rs"))
    assert files
    for path in files:
        source = path.read_text()
        assert not _std(source) & {"thread", "net", "fs", "io", "os", "process", "env"}, path
        assert not outside.search(source), path.relative_to(ENGINE)


def test_no_python_module_takes_a_detour_through_the_package() -> None:
    package = NATIVE.parent / "fabric_ray"
    own = {"_native", "__version__", *(path.stem for path in package.iterdir())}
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "fabric_ray":
                assert {name.name for name in node.names} <= own, path.relative_to(package)


def test_policies_know_nothing_but_their_arguments() -> None:
    allowed = {"api", "time", "topology"}
    for path in (ENGINE / "group" / "policy").glob("*.rs"):
        assert _uses(path.read_text()) <= allowed, path.name


def test_crates_depend_downwards() -> None:
    found = {}
    for manifest in NATIVE.glob("*/Cargo.toml"):
        crate = tomllib.loads(manifest.read_text())
        named = crate["dependencies"].items()
        depends = {d.get("package", n) if isinstance(d, dict) else n for n, d in named}
        found[crate["package"]["name"]] = depends & set(CRATES_MAY_USE)
    assert found == CRATES_MAY_USE
