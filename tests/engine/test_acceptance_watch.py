"""Which drafters are reported, and how often."""

from __future__ import annotations

import pytest

from dspark.engine.acceptance_watch import AcceptanceWatch


def report(outcomes, caplog) -> int:
    watch = AcceptanceWatch()
    for is_right in outcomes:
        watch.observe("other", is_first_accepted=True)
        watch.observe("some", is_first_accepted=is_right)
    assert "the other drafter" not in caplog.text
    return caplog.text.count("the some drafter is of no use here")


@pytest.mark.parametrize(("num_right", "num_reports"), [(0, 1), (3, 1), (4, 0), (200, 0)])
def test_fewer_than_two_percent_of_two_hundred_is_reported(num_right, num_reports, caplog):
    assert report([True] * num_right + [False] * (200 - num_right), caplog) == num_reports


def test_nothing_is_said_before_two_hundred_drafts_were_checked(caplog):
    assert report([False] * 199, caplog) == 0


def test_a_drafter_that_stops_being_right_is_reported_once(caplog):
    assert report([True] * 300 + [False] * 900, caplog) == 1


def test_the_report_says_what_to_check(caplog):
    report([False] * 200, caplog)
    for word in ("its last 200 drafts 0 began", "target_layer_ids", "--drafter-layout", "--drafter none"):
        assert word in caplog.text
