"""The Grafana dashboard can be imported, and every metric and label it names is exported."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from dspark.metrics import EngineMetrics

DASHBOARD = json.loads((Path(__file__).parents[1] / "docs" / "grafana" / "dspark.json").read_text())
QUERIES = [
    (panel["title"], target["expr"], target["legendFormat"])
    for panel in DASHBOARD["panels"]
    for target in panel["targets"]
]
METRIC = re.compile(r"\b(?:dspark|vllm):[a-z0-9_]+")


def exported() -> dict[str, set[str]]:
    """Return the labels of every sample that /metrics has once each kind of event has happened."""
    metrics = EngineMetrics("m")
    metrics.observe_round("ngram", num_verified=1, num_accepted=1, num_emitted=2)
    metrics.observe_plan(1, [0.5])
    metrics.observe_step({"forward": 0.1}, 1, 1)
    metrics.count_declined("resting", 1)
    metrics.count_breaker("open")
    metrics.show_calibration_error([0.1])
    samples = [sample for family in metrics.registry.collect() for sample in family.samples]
    return {sample.name: set(sample.labels) for sample in samples}


EXPORTED = exported()


@pytest.mark.parametrize(("title", "query", "legend"), QUERIES)
def test_every_metric_and_label_of_a_query_is_exported(title: str, query: str, legend: str) -> None:
    names = METRIC.findall(query)
    assert names
    assert set(names) <= set(EXPORTED)
    grouped = {label.strip() for labels in re.findall(r"by \(([^)]*)\)", query) for label in labels.split(",")}
    labels = grouped | set(re.findall(r"\{\{(\w+)\}\}", legend)) | set(re.findall(r"[{,](\w+)=~?\"", query))
    assert all(labels <= EXPORTED[name] for name in names)
    assert query.count("(") == query.count(")")


def test_rates_are_of_what_only_grows_and_the_rest_is_taken_as_it_is() -> None:
    grows = re.compile(r"(?:rate|increase)\(((?:dspark|vllm):\w+)")
    for _, query, _ in QUERIES:
        rated = set(grows.findall(query))
        assert all(name.endswith(("_total", "_bucket", "_sum", "_count")) for name in rated), query
        assert not any(name.endswith(("_total", "_bucket")) for name in set(METRIC.findall(query)) - rated), query


def test_the_data_source_is_asked_for_at_import_and_used_everywhere() -> None:
    assert [given["name"] for given in DASHBOARD["__inputs"]] == ["DS_PROMETHEUS"]

    def sources(value: Any) -> list[Any]:
        if isinstance(value, dict):
            return [v for n, v in value.items() if n == "datasource"] + [s for v in value.values() for s in sources(v)]
        return [source for item in value for source in sources(item)] if isinstance(value, list) else []

    assert len(sources(DASHBOARD)) == 1 + len(DASHBOARD["panels"]) + len(QUERIES)
    assert all(source == {"type": "prometheus", "uid": "${DS_PROMETHEUS}"} for source in sources(DASHBOARD))


def test_panels_have_their_own_ids_and_places() -> None:
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in DASHBOARD["panels"])
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
