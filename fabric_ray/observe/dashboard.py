"""The Grafana dashboard of all metrics: ``python -m fabric_ray.observe.dashboard > board.json``."""

from __future__ import annotations

import json
from string import ascii_uppercase
from typing import Any

_SOURCE = {"type": "prometheus", "uid": "$datasource"}
_LEGEND = {"legend": {"displayMode": "list", "placement": "bottom"}}
_LAST = {"reduceOptions": {"calcs": ["lastNotNull"]}}

Queries = dict[str, str]
"""By legend."""


def _now(metric: str, by: str = "") -> str:
    grouped = f"sum by ({by}) " if by else "sum"
    return f'{grouped}(${{prefix}}fabric_ray_{metric}{{engine=~"$engine"}})'


def _rate(metric: str, by: str) -> str:
    value = f'${{prefix}}fabric_ray_{metric}{{engine=~"$engine"}}'
    return f"sum by ({by}) (rate({value}[$__rate_interval]))"


def _stage(metric: str, by: str = "") -> Queries:
    """Half of the values are below the first, 99 % below the second."""
    legend = f" {{{{{by}}}}}" if by else ""
    rates = _rate(f"{metric}_seconds_bucket", f"le, {by}" if by else "le")
    return {
        f"p{share * 100:.0f}{legend}": f"histogram_quantile({share}, {rates})"
        for share in (0.5, 0.99)
    }


_RAIL = "{{transport}} {{device}}"
_SERIES: list[tuple[str, str, Queries]] = [
    ("Bytes out by engine", "Bps", {"{{engine}}": _rate("bytes_total", "engine")}),
    ("Bytes out by rail", "Bps", {_RAIL: _rate("bytes_total", "transport, device")}),
    ("Work requests by class", "ops", {"{{priority}}": _rate("slices_total", "priority")}),
    (
        "Writes counted on arrival",
        "ops",
        {
            "{{engine}}": _rate("writes_counted_total", "engine"),
            "ghosts {{engine}}": _rate("ghosts_total", "engine"),
        },
    ),
    ("Queue: request to first work request", "s", _stage("transfer_queue", "priority")),
    ("Post: first work request to last", "s", _stage("transfer_post", "priority")),
    ("Wire: a work request until acknowledged", "s", _stage("transfer_wire", "priority")),
    ("Deliver: last acknowledgement until notified", "s", _stage("transfer_deliver", "priority")),
    ("Expectations: until full", "s", _stage("expectation")),
    (
        "Window of rails, and what is under way",
        "bytes",
        {
            f"under way {_RAIL}": _now("rail_under_way_bytes", "transport, device"),
            f"window {_RAIL}": _now("rail_window_bytes", "transport, device"),
        },
    ),
    (
        "Sent again, failed, links lost",
        "ops",
        {
            "again {{peer}}": _rate("retries_total", "peer"),
            "failed {{peer}}": _rate("failures_total", "peer"),
            "links lost {{peer}}": _rate("exclusions_total", "peer"),
        },
    ),
    (
        "Waits for room",
        "ops",
        {
            "{{priority}}": _rate("quota_waits_total", "priority"),
            "waiting for {{peer}}": _now("peer_waiting", "peer"),
        },
    ),
]
_NUMBERS: list[tuple[str, Queries]] = [
    ("Peers connected", {"up": _now("peer_up"), "links": _now("peer_links")}),
    ("Requests going on", {"requests": _now("requests_going_on")}),
    ("Regions", {"registered": _now("regions"), "retiring": _now("regions_retiring")}),
]


def dashboard() -> dict[str, Any]:
    """What Grafana imports. Its variables choose a Prometheus, the package's own endpoint or Ray's
    metrics, and engines."""
    panels = [
        _panel("timeseries", title, unit, queries, at % 2 * 12, at // 2 * 8, 12, 8)
        for at, (title, unit, queries) in enumerate(_SERIES)
    ]
    below = len(_SERIES) // 2 * 8
    panels += [
        _panel("stat", title, "short", queries, at * 8, below, 8, 6)
        for at, (title, queries) in enumerate(_NUMBERS)
    ]
    sources = {"fabric-ray endpoint": "", "Ray": "ray_"}
    options = [
        {"text": text, "value": value, "selected": not value} for text, value in sources.items()
    ]
    return {
        "title": "fabric-ray",
        "uid": "fabric-ray",
        "tags": ["fabric-ray"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {
            "list": [
                {
                    "name": "datasource",
                    "label": "Data source",
                    "type": "datasource",
                    "query": "prometheus",
                },
                {
                    "name": "prefix",
                    "label": "Source of metrics",
                    "type": "custom",
                    "query": ",".join(f"{text} : {value}" for text, value in sources.items()),
                    "current": {"text": "fabric-ray endpoint", "value": ""},
                    "options": options,
                },
                {
                    "name": "engine",
                    "label": "Engine",
                    "type": "query",
                    "datasource": _SOURCE,
                    "query": "label_values(${prefix}fabric_ray_requests_going_on, engine)",
                    "includeAll": True,
                    "multi": True,
                    "allValue": ".*",
                    "refresh": 2,
                },
            ]
        },
        "panels": [{"id": number, **panel} for number, panel in enumerate(panels, 1)],
    }


def _panel(kind: str, title: str, unit: str, queries: Queries, *box: int) -> dict[str, Any]:
    return {
        "type": kind,
        "title": title,
        "description": "",
        "datasource": _SOURCE,
        "gridPos": dict(zip("xywh", box, strict=True)),
        "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
        "targets": [
            {"expr": expr, "legendFormat": legend, "refId": letter, "datasource": _SOURCE}
            for letter, (legend, expr) in zip(ascii_uppercase, queries.items(), strict=False)
        ],
        "options": _LEGEND if kind == "timeseries" else _LAST,
    }


if __name__ == "__main__":
    print(json.dumps(dashboard(), indent=1))
