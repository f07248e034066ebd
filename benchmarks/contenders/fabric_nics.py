"""Ourselves over libfabric, on the providers that need no NIC."""

from __future__ import annotations

import ctypes.util
import os

from benchmarks.contenders.fabric import FabricRust
from benchmarks.harness.cases import WINDOW, Case


class FabricLibfabric(FabricRust):
    """`fabric-perf engine serve` over the provider of the case's link."""

    obtain = f"{FabricRust.obtain}; apt-get install libfabric1"

    def __init__(self) -> None:
        super().__init__("fabric-rust libfabric")

    def available(self) -> str | None:
        named = os.environ.get("FABRIC_RAY_LIBFABRIC")
        if not named and ctypes.util.find_library("fabric") is None:
            return "libfabric is not installed"
        return super().available()

    def supports(self, case: Case) -> bool:
        return case.operation == "window"

    def describe(self, case: Case) -> str:
        return f"libfabric's {case.link} provider, {WINDOW} counted writes in flight"

    def transport(self, case: Case) -> str:
        del case
        return "libfabric"

    def options(self, case: Case) -> list[str]:
        return ["--provider", case.link]
