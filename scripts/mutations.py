"""Breaks the product on purpose, line by line, and demands that the checks notice.

``mutations.toml`` names the lines. Those in Rust are all broken in one copy of the workspace, each
behind a switch that the environment sets: one build serves for all, and the crates themselves
know nothing of it. Those of the Python package, which needs no build, are broken one by one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
NATIVE = ROOT / "native"
TABLE = Path(__file__).with_suffix(".toml")
COUNTS = {"IC": 6, "MR": 3, "RS": 4}
PROMISES = [f"{kind}-{i + 1}" for kind, count in COUNTS.items() for i in range(count)]
CRATES = ("engine", "kvcache", "moe")
"""Those whose lines can be broken."""
SWITCH = "FABRIC_MUTANT"
# A run that takes longer has not been noticed by a check, but by impatience.
LIMIT_S = 600

SWITCHED = f"""
/// The line that is broken in this run.
pub(crate) fn mutant(which: u32) -> bool {{
    static CHOSEN: std::sync::OnceLock<Option<u32>> = std::sync::OnceLock::new();
    let chosen = || std::env::var("{SWITCH}").ok().and_then(|v| v.parse().ok());
    *CHOSEN.get_or_init(chosen) == Some(which)
}}
"""


@dataclass(frozen=True)
class Edit:
    file: str
    """Below the ``src`` of its crate; Python files below the root."""
    old: str
    new: str
    after: str = ""
    crate: str = "engine"

    @property
    def is_python(self) -> bool:
        return self.file.endswith(".py")

    @property
    def path(self) -> str:
        """Below the root."""
        return self.file if self.is_python else f"native/{self.crate}/src/{self.file}"


@dataclass(frozen=True)
class Mutation:
    name: str
    promise: str
    checks: list[str]
    """Which checks must notice, each by itself; after a colon: which tests of it."""
    seen_as: list[str]
    """What a check may say: one of these stands in its output."""
    edits: list[Edit]


@dataclass(frozen=True)
class Check:
    binary: str
    """A test program of the engine, ``lib`` for the tests beside its code, or ``pytest``. Of
    another crate with its name before: ``kvcache/lib``."""
    filter: str
    """Its arguments."""
    environment: dict[str, str]

    @property
    def is_python(self) -> bool:
        return self.binary == "pytest"

    @property
    def program(self) -> tuple[str, str]:
        """Its crate, and its name there."""
        crate, _, name = self.binary.rpartition("/")
        return crate or "engine", name


@dataclass(frozen=True)
class Table:
    checks: dict[str, Check]
    mutations: list[Mutation]

    def check(self, name: str) -> Check:
        base, _, only = name.partition(":")
        check = self.checks[base]
        return replace(check, filter=only) if only else check


def read(path: Path = TABLE) -> Table:
    table = tomllib.loads(path.read_text())
    checks = {
        name: Check(binary, only, dict(v.split("=", 1) for v in environment))
        for name, (binary, only, *environment) in table["checks"].items()
    }
    mutations = [
        Mutation(**{**m, "edits": [Edit(**e) for e in m["edits"]]}) for m in table["mutation"]
    ]
    return Table(checks, mutations)


def place(edit: Edit, text: str) -> int:
    """Where ``old`` begins; an error unless it is there exactly once."""
    found = text.count(edit.after + edit.old)
    if found != 1:
        raise ValueError(f"{edit.file} has {found} times: {edit.after + edit.old!r}")
    return text.index(edit.after + edit.old) + len(edit.after)


def wrong(table: Table, root: Path = ROOT) -> list[str]:
    """What is wrong with the table: lines that are gone, promises without a mutation."""
    said = []
    for mutation in table.mutations:
        for edit in mutation.edits:
            try:
                place(edit, (root / edit.path).read_text())
            except (ValueError, FileNotFoundError) as e:
                said.append(f"{mutation.name!r}: {e}")
        unknown = {c.partition(":")[0] for c in mutation.checks} - set(table.checks)
        said += [f"{mutation.name!r}: no check is called {name!r}" for name in sorted(unknown)]
        kinds = {e.is_python for e in mutation.edits}
        kinds |= {table.check(c).is_python for c in mutation.checks if not unknown}
        if len(kinds) > 1:
            said.append(f"{mutation.name!r}: the engine and the package are broken apart")
    kept = {m.promise for m in table.mutations}
    said += [f"no mutation breaks {p}" for p in PROMISES if p not in kept]
    said += [f"no promise is called {p}" for p in sorted(kept - set(PROMISES))]
    names = [m.name for m in table.mutations]
    return said + [f"two are called {n!r}" for n in sorted(set(names)) if names.count(n) > 1]


def broken(text: str, edits: list[tuple[int, Edit]]) -> str:
    """A file with switches: every edit behind the number of its mutation."""
    spans: dict[tuple[int, int], list[tuple[int, Edit]]] = {}
    for number, edit in edits:
        start = place(edit, text)
        spans.setdefault((start, start + len(edit.old)), []).append((number, edit))
    ordered = sorted(spans, reverse=True)
    for (start, _), (_, end) in itertools.pairwise(ordered):
        if end > start:
            raise ValueError(f"two mutations overlap: {text[start:end]!r}")
    for start, end in ordered:
        old = text[start:end]
        ways = "".join(
            f"if crate::mutant({number}) {{ {edit.new} }} else "
            for number, edit in spans[start, end]
        )
        switched = f"{ways}{{ {old} }}"
        # A statement stands by itself; an expression may stand anywhere.
        text = text[:start] + (switched if old.endswith(";") else f"({switched})") + text[end:]
    return text


def write_package(to: Path, edits: list[Edit]) -> None:
    """The package and its tests, broken."""
    shutil.rmtree(to, ignore_errors=True)
    skip = shutil.ignore_patterns("__pycache__")
    for name in ("fabric_ray", "tests"):
        shutil.copytree(ROOT / name, to / name, ignore=skip)
    shutil.copy(ROOT / "pyproject.toml", to)
    for edit in edits:
        path = to / edit.file
        text = path.read_text()
        start = place(edit, text)
        path.write_text(text[:start] + edit.new + text[start + len(edit.old) :])


def write_crates(table: Table, to: Path) -> None:
    """The workspace with all mutations. Files that stay the same keep their time for cargo."""

    def put(path: Path, content: bytes) -> None:
        if not path.exists() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    edits: dict[str, list[tuple[int, Edit]]] = {}
    for number, mutation in enumerate(table.mutations):
        for edit in mutation.edits:
            if not edit.is_python:
                edits.setdefault(edit.path, []).append((number, edit))
    roots = {f"native/{crate}/src/lib.rs" for crate in CRATES}
    kept = set()
    skip = shutil.ignore_patterns("target", "corpus", "artifacts")
    for folder, folders, files in os.walk(NATIVE):
        folders[:] = sorted(set(folders) - set(skip(folder, folders)))
        for name in files:
            path = Path(folder) / name
            inside = path.relative_to(NATIVE)
            content = path.read_bytes()
            file = path.relative_to(ROOT).as_posix()
            if file in edits:
                content = broken(content.decode(), edits[file]).encode()
            if file in roots:
                content = b"#![allow(warnings)]\n" + content + SWITCHED.encode()
            put(to / inside, content)
            kept.add(to / inside)
    for folder, folders, files in os.walk(to):
        folders[:] = [f for f in folders if f != "target"]
        for path in [Path(folder) / name for name in files]:
            if path not in kept:
                path.unlink()


def build(copy: Path, programs: set[tuple[str, str]]) -> dict[tuple[str, str], Path]:
    """The test programs of the copy, by crate and name."""
    made = {}
    for crate in sorted({crate for crate, _ in programs}):
        names = {name for of, name in programs if of == crate}
        made |= {(crate, name): path for name, path in _build(copy, crate, names).items()}
    return made


def _build(copy: Path, crate: str, names: set[str]) -> dict[str, Path]:
    tests = [word for name in sorted(names - {"lib"}) for word in ("--test", name)]
    if "lib" in names:
        tests.append("--lib")
    command = ["cargo", "test", "-p", f"fabric-{crate}", "--no-run", *tests]
    # Not the target of the engine itself: cargo would take one for the other.
    environment = {
        "CARGO_PROFILE_TEST_DEBUG": "0",
        "CARGO_PROFILE_DEV_DEBUG": "0",
        **os.environ,
        "CARGO_TARGET_DIR": str(copy / "target"),
    }
    said = subprocess.run(
        [*command, "--message-format=json-render-diagnostics"],
        cwd=copy,
        env=environment,
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    ).stdout
    made = [json.loads(line) for line in said.splitlines()]
    return {
        "lib" if "lib" in m["target"]["kind"] else m["target"]["name"]: Path(m["executable"])
        for m in made
        if m.get("reason") == "compiler-artifact" and m.get("executable")
    }


@dataclass(frozen=True)
class Runner:
    """Runs checks over copies in which lines are broken."""

    package: Path
    programs: dict[tuple[str, str], Path]

    def run(self, check: Check, broken: tuple[int, Mutation] | None) -> tuple[bool, str]:
        """Whether a check passes, and what it says."""
        environment = {**os.environ, "RUST_BACKTRACE": "0", **check.environment}
        arguments = check.filter.split()
        if check.is_python:
            write_package(self.package, broken[1].edits if broken else [])
            options = ("-q", "-x", "-p", "no:cacheprovider")
            command = [sys.executable, "-m", "pytest", *options, *arguments]
            where = self.package
        else:
            command = [str(self.programs[check.program]), *arguments]
            where = NATIVE / check.program[0]
            if broken:
                environment[SWITCH] = str(broken[0])
        try:
            done = subprocess.run(
                command, cwd=where, env=environment, capture_output=True, text=True, timeout=LIMIT_S
            )
        except subprocess.TimeoutExpired:
            return True, f"still going on after {LIMIT_S} s"
        return done.returncode == 0, done.stdout + done.stderr


def notices(mutation: Mutation, said: str) -> str | None:
    """As what the check has noticed it, if it has."""
    return next((s for s in mutation.seen_as if re.search(rf"\b{re.escape(s)}", said)), None)


def prepare(table: Table, checks: dict[str, Check]) -> Runner:
    """Makes the copies, and builds what the checks need."""
    copy = NATIVE / "target/mutations"
    programs: dict[tuple[str, str], Path] = {}
    if wanted := {c.program for c in checks.values() if not c.is_python}:
        write_crates(table, copy)
        programs = build(copy, wanted)
    return Runner(NATIVE / "target/mutations-python", programs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only whether the table is true")
    parser.add_argument(
        "--only", default="", help="those whose name has this in it, or of this promise or check"
    )
    arguments = parser.parse_args()
    table = read()
    if said := wrong(table):
        print(*said, sep="\n", file=sys.stderr)
        return 1
    if arguments.check:
        return 0
    chosen = [
        (number, m)
        for number, m in enumerate(table.mutations)
        if arguments.only in m.name or arguments.only in (m.promise, *m.checks)
    ]
    bases = {check.partition(":")[0] for _, m in chosen for check in m.checks}
    runner = prepare(table, {name: table.checks[name] for name in sorted(bases)})
    for name in sorted(bases):
        passes, words = runner.run(table.checks[name], None)
        if not passes:
            print(f"{name} fails with nothing broken:\n{words}", file=sys.stderr)
            return 1
    unseen = 0
    for number, mutation in chosen:
        for name in mutation.checks:
            start = time.monotonic()
            passes, words = runner.run(table.check(name), (number, mutation))
            seen = None if passes else notices(mutation, words)
            took = f"{time.monotonic() - start:.1f} s"
            result = f"{mutation.promise}  {mutation.name}: {name} "
            if seen is None:
                unseen += 1
                last = "\n    ".join(words.strip().splitlines()[-12:])
                why = "notices nothing" if passes else "fails with other words"
                print(f"{result}{why} ({took})\n    {last}", flush=True)
            else:
                print(f"{result}sees {seen} ({took})", flush=True)
    print(f"{unseen} unseen" if unseen else "all are seen")
    return 1 if unseen else 0


if __name__ == "__main__":
    sys.exit(main())
