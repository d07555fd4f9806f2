"""The router's histograms equal those of Prometheus' client."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from router.observe.metrics import LoopHistogram

BOUNDS = (0.001, 0.5, 10.0, 1e6)


@given(st.lists(st.floats(min_value=-1, max_value=1e9) | st.sampled_from(BOUNDS)))
@example([])
def test_values_are_shown_as_prometheus_shows_them(values):
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    histogram = LoopHistogram("tandem_a_seconds", "What it is.", BOUNDS, "a model")
    ours.register(histogram)
    own = Histogram("tandem_a_seconds", "What it is.", ["model_name"], buckets=BOUNDS, registry=theirs)
    for value in values:
        histogram.observe(value)
        own.labels("a model").observe(value)
    if not values:
        own.labels("a model")
    expected = [line for line in generate_latest(theirs).decode().splitlines() if "_created" not in line]
    assert generate_latest(ours).decode().splitlines() == expected
