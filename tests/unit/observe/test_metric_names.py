"""Every metric follows the rule, reads as Prometheus says, and is what the dashboard names."""

from __future__ import annotations

import re
import urllib.error
import urllib.request

import pytest

from fabric_ray import TransferEngine
from fabric_ray.engine.observability import Histogram
from fabric_ray.errors import ResourceError
from fabric_ray.observe import Endpoint
from fabric_ray.observe.dashboard import dashboard
from fabric_ray.observe.prometheus import render, text
from fabric_ray.observe.samples import FAMILIES, Sample, samples
from tests.ports import has_ipv6

Pair = tuple[TransferEngine, TransferEngine]
UNITS = ("_bytes", "_seconds", "_total")


def moved(pair: Pair) -> None:
    a, b = pair
    inbox = b.alloc(1 << 16)
    there = a.import_region(inbox.descriptor())
    a.write(a.alloc(1 << 16), there, imm=1).wait(10)
    b.plain_counter(1).wait(1, timeout=10)


def test_names_follow_one_rule() -> None:
    for family in FAMILIES:
        assert re.fullmatch(r"fabric_ray(_[a-z]+)+", family.name)
        assert family.name.endswith("_total") == (family.kind == "counter"), family.name
        assert family.name.endswith("_seconds") == (family.kind == "histogram"), family.name
        assert family.labels[:2] == ("engine", "engine_id")
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)


def test_prometheus_reads_the_text(pair: Pair) -> None:
    parser = pytest.importorskip("prometheus_client.parser", reason="comes with Ray")
    moved(pair)
    told = samples([engine.metrics() for engine in pair])
    read = {family.name: family for family in parser.text_string_to_metric_families(render(told))}
    for family in FAMILIES:
        here = family.name.removesuffix("_total")
        if any(sample.family is family for sample in told):
            assert read[here].type == family.kind
    sent = sum(s.value for s in read["fabric_ray_bytes"].samples if s.labels["engine"] == "a")
    assert sent == 1 << 16
    queue = list(read["fabric_ray_transfer_queue_seconds"].samples)
    bounds = [float(s.labels["le"]) for s in queue if "le" in s.labels]
    assert bounds[-1] == float("inf")
    counts = [s.value for s in queue if "le" in s.labels]
    assert counts == sorted(counts), "buckets are cumulative"
    assert [s.value for s in queue if s.name.endswith("_count")] == [1]


def test_labels_survive_any_name() -> None:
    parser = pytest.importorskip("prometheus_client.parser", reason="comes with Ray")
    family = FAMILIES[0]
    odd = 'a "b" \\ c\nd'
    text = render([Sample(family, (odd, "1"), 2)])
    [read] = parser.text_string_to_metric_families(text)
    assert read.samples[0].labels["engine"] == odd


def test_a_histogram_ends_with_all_of_them() -> None:
    family = next(f for f in FAMILIES if f.kind == "histogram")
    # The first and the last bucket lie outside the bounds that are told.
    counts = (1, *[0] * 38, 2)
    lines = render([Sample(family, ("e", "1"), Histogram(counts, 7))]).splitlines()
    buckets = [line for line in lines if "_bucket" in line]
    assert buckets[0].endswith(" 1")
    assert buckets[-2].endswith(" 1")
    assert buckets[-1].endswith(" 3")


def test_the_endpoint_has_the_processs_metrics(pair: Pair) -> None:
    moved(pair)
    with Endpoint() as endpoint:
        url = f"http://127.0.0.1:{endpoint.port}"
        with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
            body = answer.read().decode()
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{url}/else", timeout=10)
    assert f'engine_id="{pair[0].id}"' in body
    assert set(re.findall(r"^# TYPE (\S+)", body, re.M)) == set(
        re.findall(r"^# TYPE (\S+)", text(), re.M)
    )


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no ::1")
def test_the_endpoint_listens_at_an_ipv6_address() -> None:
    with (
        Endpoint(host="::1") as endpoint,
        urllib.request.urlopen(f"http://[::1]:{endpoint.port}/metrics", timeout=10) as answer,
    ):
        assert answer.status == 200


def test_an_endpoint_that_can_not_listen_says_why() -> None:
    with pytest.raises(ResourceError, match=r"at 127\.0\.0\.1:70000: .* 0-65535"):
        Endpoint(70000)


def test_the_dashboard_names_metrics_and_labels_that_there_are() -> None:
    board = dashboard()
    known = {}
    for family in FAMILIES:
        ends = ("_bucket", "_sum", "_count") if family.kind == "histogram" else ("",)
        known |= {family.name + end: {*family.labels, "le"} for end in ends}
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    shown = set()
    for expression in expressions:
        named = re.findall(r"fabric_ray_\w+", expression)
        assert named, expression
        assert set(named) <= set(known), expression
        [by] = re.findall(r"by \(([^)]*)\)", expression) or [""]
        for label in filter(None, by.split(", ")):
            assert all(label in known[name] for name in named), expression
        shown.update(name.removesuffix("_bucket") for name in named)
    assert shown == {family.name for family in FAMILIES}, "every metric has its place"
