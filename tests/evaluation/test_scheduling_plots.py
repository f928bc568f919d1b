"""Plots of benchmarks: what is in them, and what is not."""

from __future__ import annotations

import json
import re

import pytest

from dspark.cli import main
from dspark.errors import DsparkError
from dspark.evaluation.scheduling_plots import plot_bench, plot_jump


def bench_run(drafter, concurrency, temperature=0.0, ratio=1.2, length=2.0):
    return {
        "drafter": drafter,
        "concurrency": concurrency,
        "temperature": temperature,
        "ratio_to_plain": ratio,
        "ratio_to_plain_min": ratio - 0.1,
        "ratio_to_plain_max": ratio + 0.1,
        "verified_length": length,
    }


def bench(*drafters, temperatures=(0.0,)):
    runs = [bench_run(d, c, t) for c in (1, 4, 16) for t in temperatures for d in ("none", *drafters)]
    return {"kind": "bench", "runs": [*runs, bench_run("transformers", 1, length=None)]}


def jump(drafter, temperature=0.0):
    step = {"num_steps": 3, "num_rounds": 6, "num_verified": 12, "num_accepted": 6}
    steps = {"before": [step] * 20, "after": [step | {"num_rounds": 0, "num_verified": 0}, *[step] * 29]}
    return {
        "kind": "jump",
        "settings": {"before": 2, "after": 10, "repeats": 3},
        "runs": [{"drafter": drafter, "temperature": temperature, "steps": steps}],
    }


def texts(path):
    return re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text())


def test_each_drafter_is_named_and_each_temperature_has_panels(tmp_path):
    path = tmp_path / "plot.svg"
    plot_bench(bench("auto", "auto@3", temperatures=(0.0, 1.0)), path)
    words = texts(path)
    assert words.count("auto") == words.count("auto@3") == 1
    assert {"Verified length, T=0", "Verified length, T=1", "requests at once", "1", "4", "16"} <= set(words)
    assert not {"none", "transformers"} & set(words)  # baselines


def test_plots_tell_no_paths_and_are_the_same_when_drawn_again(tmp_path):
    first, second = tmp_path / "a.svg", tmp_path / "b.svg"
    for draw, result in ((plot_bench, bench("some/where/run@3")), (plot_jump, jump("some/where/run@3"))):
        for path in (first, second):
            draw(result, path)
        assert first.read_bytes() == second.read_bytes()
        assert "run@3" in first.read_text()
        assert "some/where" not in first.read_text()


def test_plain_decoding_alone_is_refused(tmp_path):
    with pytest.raises(DsparkError, match="holds plain decoding alone"):
        plot_bench(bench(), tmp_path / "plot.svg")


def test_a_jump_says_from_where_to_where(tmp_path):
    plot_jump(jump("auto", 1.0), tmp_path / "plot.svg")
    words = texts(tmp_path / "plot.svg")
    assert {"From 2 to 10 requests, mean of 3 jumps", "auto, T=1", "steps after the jump"} <= set(words)


def test_the_verb_draws_one_result_of_a_benchmark(tmp_path, capsys):
    saved, plot = tmp_path / "bench.txt", tmp_path / "plot.svg"
    saved.write_text("a table\n" + json.dumps(bench("auto")) + "\n")
    assert main(["plot", str(saved), "--output", str(plot)]) == 0
    assert capsys.readouterr().out.strip() == str(plot)
    assert "auto" in texts(plot)
    for results in ([str(saved), str(saved)], [f"name={saved}"]):
        assert main(["plot", *results, "--output", str(plot)]) == 2
        assert "is a result of dspark bench, which is drawn alone" in capsys.readouterr().err
