"""What a run will take: arithmetic, the words it is said in, and a calibration of real servers' stand-ins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.node import run_of, settings_for, stand_ins, write_prompts
from shardmill.calibrate import Calibration, levels_up_to
from shardmill.economics.estimate import WHOLE_RUN, Estimate, knee
from shardmill.economics.forecast import make_forecast
from shardmill.economics.show import describe, describe_calibration
from shardmill.errors import UserError
from shardmill.files import write_json
from shardmill.planning import make_plan
from tests.pipeline import Workspace

URLS = [f"http://127.0.0.1:{port}" for port in (1, 2)]


def settings(folder: Path, count: int, **sections: Any) -> dict[str, Any]:
    write_prompts(folder / "prompts.jsonl", count)
    return settings_for(folder, URLS, shards={"size": 10}, **sections)


def test_hours_and_money():
    """900,000 answers of 2,306 tokens on seven B200: the two days that it took."""
    estimate = Estimate(tokens=900_000 * 2306, rate=7 * 2300, gpus=7, price_per_hour=35.0)
    assert estimate.hours == pytest.approx(35.8 / WHOLE_RUN, rel=0.01)
    assert estimate.gpu_hours == 7 * estimate.hours
    assert estimate.cost == 35 * estimate.hours
    assert Estimate(1.0, 1.0, 1, None).cost is None


@pytest.mark.parametrize(
    ("levels", "found"),
    [
        ([(1, 240.0), (8, 1200.0), (32, 2200.0), (48, 2300.0)], (32, False)),
        ([(1, 100.0), (2, 200.0), (4, 400.0)], (4, True)),
        ([(1, 50.0)], (1, False)),
        ([(1, 100.0), (2, 90.0)], (1, False)),
    ],
)
def test_the_knee(levels: list[tuple[int, float]], found: tuple[int, bool]):
    assert knee(levels) == found


def test_no_tokens_have_no_knee():
    with pytest.raises(ValueError, match="no tokens"):
        knee([(1, 0.0), (2, 0.0)])


def test_levels():
    assert levels_up_to(48) == [1, 2, 4, 8, 12, 16, 24, 32, 48]
    assert levels_up_to(5) == [1, 2, 4, 5]
    assert levels_up_to(1) == [1]


def test_what_is_known_decides(tmp_path: Path):
    """Nothing; then what was given; then the canary; then a calibration; then the run itself."""
    plan = make_plan(settings(tmp_path, 35))
    layout = plan.layout
    forecast = make_forecast(plan)
    assert (forecast.prompts, forecast.shards, forecast.pending, forecast.prompts_left) == (35, 4, 4, 35)
    assert (forecast.rate, forecast.here) == (None, None)
    assert "run `snakemake calibrate`" in describe(plan.config, forecast)

    given = {"economics": {"tokens_per_second": 100.0, "tokens_per_answer": 50.0}, "monitor": {"price_per_hour": 8.0}}
    plan = make_plan(settings(tmp_path, 35, **given))
    here = make_forecast(plan).here
    assert here and (here.tokens, here.rate, here.price_per_hour) == (1750, 200, 8.0)

    write_json(layout.canary, {"mean_completion_tokens": 70.0, "accepted": 3})
    assert make_forecast(plan).tokens_each.value == 70
    calibration = {"engine": "external", "tokens_per_second": 300.0, "knee": 8}
    write_json(layout.calibration, calibration)
    here = make_forecast(plan).here
    assert here and (here.tokens, here.rate) == (35 * 70, 600)
    write_json(layout.calibration, calibration | {"engine": "sglang"})
    rate = make_forecast(plan).rate
    assert rate and rate.value == 100, "it was another engine"


def test_a_gpu_by_name(tmp_path: Path):
    forecast = make_forecast(make_plan(settings(tmp_path, 5, economics={"gpu": "B200"})))
    assert forecast.rate and forecast.rate.value == 2300
    assert forecast.here and forecast.here.price_per_hour == 10
    with pytest.raises(UserError, match=r"economics\.gpu: 'B2000' is not among the known kinds: .*B200"):
        make_forecast(make_plan(settings(tmp_path, 5, economics={"gpu": "B2000"})))


def test_snakemake_plan_of_a_finished_run(finished: Workspace):
    """Nothing is left, and what it says rests on the run's own answers. It starts no server and writes no result."""
    before = finished.snapshot()
    result = finished.finish("plan")
    assert result.jobs == {"plan": 1}
    assert "20 prompts in 4 shards, 0 shards to make (0 prompts)" in result.output
    assert "mean of 20 answers of this run" in result.output
    assert "7 x B200" in result.output
    # The lock is this run's own, and what it says goes into a log.
    assert [name for name, seen in before.items() if finished.snapshot().get(name) != seen] == ["run.lock"]


def test_calibration_finds_what_the_servers_can_do(tmp_path: Path):
    """A server with room for 20 requests, each of which costs the others a twentieth of a step."""
    write_prompts(tmp_path / "prompts.jsonl", 50)
    servers = stand_ins(tmp_path, [1.0, 1.0], scale=1.0, lengths="3000,0.1,8000", slots=20, step="4,0.2,0.0")
    with servers as running:
        made = settings_for(tmp_path, [one.url for one in running], economics={"calibration_seconds": 2.0})
        with run_of(made) as config:
            report = Calibration(config).run()
            plan = make_plan(made)
            forecast = make_forecast(plan)
            still = sum(one.call("GET", "/_standin/stats").json()["running"] for one in running)
    rates = {level["in_flight"]: level["tokens_per_second"] for level in report["levels"]}
    assert list(rates) == levels_up_to(20)
    assert rates[20] > rates[8] > rates[2] > rates[1]
    assert json.loads(config.layout.calibration.read_text())["knee"] == report["knee"] > 4
    assert forecast.rate and forecast.rate.value == report["tokens_per_second"] == rates[20]
    assert "engine.external.window" in report["advice"]
    assert "<- knee" in describe_calibration(report)
    assert still <= 40, "every request was cut off or answered"
