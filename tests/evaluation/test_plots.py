"""Plots of results: what is in them, and what is not (paths, dates)."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from dspark.errors import ConfigError, DsparkError
from dspark.evaluation.plots import check_plot_path, load_result, plot_calibration, plot_results
from dspark.speculation.calibration import calibrate


def counts(length, rates):
    return {"num_rounds": 10, "accepted_length": length, "conditional_acceptance": rates}


def result(length, *, temperatures=("0",), bins=(), tasks=("some/where/gsm8k.jsonl", "mbpp.jsonl")):
    measured = {name: counts(length + n, [0.9, 0.5, None]) for n, name in enumerate(tasks)}
    return {
        "drafter": "run/step-1",
        "temperatures": {t: {"tasks": measured, "all": counts(length + 0.5, [0.8, 0.6])} for t in temperatures},
        "reliability": list(bins),
    }


BINS = [{"confidence": 0.1, "acceptance": 0.2, "num_slots": 4}, {"confidence": 0.9, "acceptance": 0.8, "num_slots": 6}]
PLAIN = {"drafter": "none", "temperatures": {"0": {"tasks": {"mbpp.jsonl": counts(1, [])}, "all": counts(1, [])}}}


def texts(path):
    return re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text())


def test_several_drafters_and_temperatures_stand_side_by_side(tmp_path):
    path = tmp_path / "plot.svg"
    plot_results({"dspark": result(2, temperatures=("0", "1")), "rank 0": result(1.5), "plain": PLAIN}, path)
    words = texts(path)
    for label in ("dspark, T=0", "dspark, T=1", "rank 0, T=0"):
        assert words.count(label) == 2  # in the legends of both panels
    assert words.count("plain, T=0") == 1  # plain decoding proposes nothing
    assert {"gsm8k", "mbpp", "all tasks", "2.50", "1.00"} <= set(words)
    assert "Reliability (size: number of slots)" not in words


def test_one_drafter_at_one_temperature_has_a_line_for_each_task(tmp_path):
    path = tmp_path / "plot.svg"
    plot_results({"dspark": result(2)}, path)
    assert texts(path).count("gsm8k") == texts(path).count("mbpp") == 2  # below the bars and in the legend


def test_files_of_one_name_are_numbered(tmp_path):
    path = tmp_path / "plot.svg"
    plot_results({"dspark": result(2, tasks=("a/test.jsonl", "b/test.jsonl"))}, path)
    assert {"test", "test (2)", "2.00", "3.00"} <= set(texts(path))


def test_reliability_is_drawn_where_there_is_any(tmp_path):
    path = tmp_path / "plot.svg"
    plot_results({"dspark": result(2, bins=BINS), "ngram": result(1.5)}, path)
    assert "Reliability (size: number of slots)" in texts(path)


def test_a_plot_tells_no_paths_and_no_dates_and_is_the_same_when_drawn_again(tmp_path):
    first, second = tmp_path / "a.svg", tmp_path / "b.svg"
    for path in (first, second):
        plot_results({"dspark": result(2, bins=BINS)}, path)
    assert first.read_bytes() == second.read_bytes()
    assert not re.search(r"some/where|\.jsonl|dc:date|\d{4}-\d\d-\d\d|Matplotlib v", first.read_text())


def test_a_png_is_a_png(tmp_path):
    plot_results({"dspark": result(2)}, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("name", "message"), [("plot.pdf", r"must end in \.svg or \.png"), ("gone/plot.svg", "the folder of .* does not")]
)
def test_a_file_that_cannot_be_a_plot_is_refused_ahead(tmp_path, name, message):
    with pytest.raises(ConfigError, match=message):
        check_plot_path(tmp_path / name)


def test_a_result_is_the_last_line_of_what_was_printed(tmp_path):
    path = tmp_path / "out.txt"
    path.write_text("a table\n" + json.dumps(result(2)) + "\n")
    assert load_result(path) == ("evaluation", result(2))


@pytest.mark.parametrize("kind", ["bench", "jump"])
def test_results_of_a_benchmark_say_what_they_are(tmp_path, kind):
    path = tmp_path / "out.txt"
    path.write_text(json.dumps({"kind": kind, "runs": []}) + "\n")
    assert load_result(path) == (kind, {"kind": kind, "runs": []})


@pytest.mark.parametrize("content", ["", "text\n", "[1]\n", '{"drafter": "a"}\n', '{"runs": []}\n'])
def test_a_file_without_a_result_is_named(tmp_path, content):
    path = tmp_path / "other.txt"
    path.write_text(content)
    with pytest.raises(DsparkError, match=r"other\.txt"):
        load_result(path)


def test_results_without_rounds_are_refused(tmp_path):
    with pytest.raises(DsparkError, match="dspark hold no rounds to plot"):
        plot_results({"dspark": {"drafter": "a", "temperatures": {}}}, tmp_path / "plot.svg")


@pytest.mark.parametrize("num_positions", [1, 5])
def test_a_calibration_has_a_panel_for_each_position(tmp_path, num_positions):
    """Logit ln 9 says .9, one of two is accepted, of both positions alike: the error is .4 at first."""
    rates = np.array([[1.0] * num_positions, [0.0] * num_positions])
    plot_calibration(calibrate(np.full_like(rates, np.log(9)), rates, np.array([0, 1])), tmp_path / "plot.svg")
    words = texts(tmp_path / "plot.svg")
    assert {"before", "after", "survived"} <= set(words)
    assert [word[:11] for word in words if word.startswith("position")] == [
        f"position {k + 1}:" for k in range(num_positions)
    ]
    assert any(word.startswith("position 1: ECE 40.0%") for word in words)
