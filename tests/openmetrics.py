"""Reads a metrics page as an OpenMetrics scraper does."""

from __future__ import annotations

from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families


def families(page: bytes) -> dict[str, Metric]:
    """The metrics of a page, which must be valid, by name."""
    return {family.name: family for family in text_string_to_metric_families(page.decode())}  # type: ignore[no-untyped-call]
