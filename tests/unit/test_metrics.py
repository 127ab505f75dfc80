"""The metrics page in both formats, read by real parsers, and the negotiation of the format."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from duetime.doors.monitoring import prefers_openmetrics
from duetime.model import OutcomeKind, Status, Unsent
from duetime.telemetry import Telemetry
from tests.openmetrics import families


def busy() -> Telemetry:
    """Telemetry in which every metric has a value."""
    telemetry = Telemetry()
    telemetry.created("http_v1", 3)
    telemetry.attempted(OutcomeKind.ANSWERED, Status.COMPLETED)
    for ms in (1, 70, 4_000_000):
        telemetry.lateness(ms)
    telemetry.begin_took(0.002)
    telemetry.record_took(0.2)
    telemetry.overdue({"paused": 2})
    telemetry.owned_shards(8)
    telemetry.clock_offset(-3)
    telemetry.fenced(2)
    telemetry.deferred(Unsent.NAMESPACE)
    telemetry.refused_command()
    telemetry.wrong_key()
    return telemetry


def samples(read: Iterable[Metric]) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """The value of each sample by its name and labels, which must be unique; no sample may have a timestamp."""
    found = [sample for family in read for sample in family.samples]
    assert not [sample for sample in found if sample.timestamp is not None]
    values = {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in found}
    assert len(values) == len(found) > 50
    return values


@pytest.mark.parametrize("workers", [None, ["1"], ["1", "2"]], ids=["alone", "one worker", "two workers"])
def test_both_formats_have_the_same_values(workers: list[str] | None) -> None:
    telemetry = busy()
    pages = None if workers is None else {name: busy().own_page() for name in workers}
    openmetrics = telemetry.page(dict.fromkeys(Status, 5), pages, openmetrics=True)
    text = telemetry.page(dict.fromkeys(Status, 5), pages)
    assert openmetrics.endswith(b"\n# EOF\n") and b"# EOF" not in text
    values = samples(families(openmetrics).values())
    assert values == samples(text_string_to_metric_families(text.decode()))
    label = () if workers is None else (("worker", workers[-1]),)
    assert values["duetime_creates_total", (("api", "http_v1"), *label)] == 3
    assert values["duetime_lateness_seconds_count", label] == 3
    assert values["duetime_timers", (("status", "pending"),)] == 5


def test_openmetrics_names_a_counter_without_its_suffix_in_the_type() -> None:
    page = busy().page(dict.fromkeys(Status, 0), openmetrics=True)
    assert b"# TYPE duetime_creates counter\n" in page and b"\nduetime_creates_total{" in page


@pytest.mark.parametrize(
    ("accept", "prefers"),
    [
        (b"", False),
        (b"*/*", False),
        (b"text/plain", False),
        (b"application/json", False),
        (b"application/openmetrics-text", True),
        (b"application/openmetrics-text; version=1.0.0", True),
        (b"Application/OpenMetrics-Text;VERSION=1.0.0 , */*;q=0.1", True),
        (
            b"application/openmetrics-text;version=1.0.0;q=0.5,application/openmetrics-text;version=0.0.1;q=0.4,"
            b"text/plain;version=0.0.4;q=0.3,*/*;q=0.2",
            True,
        ),
        (b"text/plain;version=0.0.4;q=0.5,application/openmetrics-text;version=1.0.0;q=0.4", False),
        (b"application/openmetrics-text;q=0", False),
        (b"application/openmetrics-text;version=0.0.1", False),
        (b"application/openmetrics-text;version=2.0.0,text/plain", False),
        (b"application/openmetrics-text;q=x", False),
        (b"application/openmetrics-text;q=nan", False),
        (b"application/openmetrics-text;;=;q", False),
        (b"\xff;\xff=\xff", False),
        (b"," * 60_000, False),
    ],
)
def test_openmetrics_is_sent_if_the_accept_header_prefers_it(accept: bytes, prefers: bool) -> None:
    assert prefers_openmetrics(accept) is prefers
