"""Sides take turns in a fair order, ratios are of sums and paired by case, and the file says where it comes from."""

import json
import sys

import pytest

from configs.schema.benchmarks import BenchDecodeConfig
from eval.stats.bootstrap import Interval
from scripts.bench import harness as benchmarks
from scripts.bench.harness import Turn, speed_ratio, take_turns, with_bounds, write_results


@pytest.fixture
def clock(monkeypatch):
    """A clock that only moves when told to, in seconds: `clock.spend(3)`."""

    class Clock:
        now = 0.0

        def spend(self, seconds):
            self.now += seconds

    clock = Clock()
    monkeypatch.setattr(benchmarks.time, "perf_counter", lambda: clock.now)
    return clock


def test_sides_follow_one_another_and_every_second_time_in_reverse():
    calls = []
    sides = {name: lambda case, repeat, name=name: calls.append((name, case, repeat)) for name in "ab"}
    take_turns(sides, ["x", "y"], 2, description="testing")
    warm_up, timed = calls[:2], calls[2:]
    assert warm_up == [("a", "x", 0), ("b", "x", 0)]
    assert timed == [
        *(("a", "x", 0), ("b", "x", 0)),
        *(("b", "x", 1), ("a", "x", 1)),
        *(("b", "y", 0), ("a", "y", 0)),
        *(("a", "y", 1), ("b", "y", 1)),
    ]


def test_without_a_warm_up_every_run_is_timed():
    calls = []
    sides = {name: lambda case, repeat, name=name: calls.append((name, case)) for name in "ab"}
    take_turns(sides, range(2), 1, description="testing", warm_up=False)
    assert calls == [("a", 0), ("b", 0), ("b", 1), ("a", 1)]


def test_each_turn_holds_its_own_seconds_and_result_in_the_order_of_the_repeats(clock):
    def side(case, repeat):
        clock.spend(case + repeat)
        return f"{case} again {repeat}"

    turns = take_turns({"only": side, "other": lambda case, repeat: ""}, [10, 20], 2, description="testing")
    assert turns["only"] == [
        [Turn("10 again 0", 10), Turn("10 again 1", 11)],
        [Turn("20 again 0", 20), Turn("20 again 1", 21)],
    ]


def test_a_speed_ratio_is_one_of_amounts_by_seconds_summed_over_everything():
    ours = [[Turn(10, 1.0), Turn(10, 1.0)], [Turn(30, 8.0), Turn(30, 6.0)]]
    theirs = [[Turn(10, 2.0), Turn(10, 2.0)], [Turn(20, 8.0), Turn(20, 8.0)]]
    interval = speed_ratio(ours, theirs, float, samples=200)
    assert interval.point == pytest.approx((80 / 16) / (60 / 20))
    assert interval.low <= interval.point <= interval.high


def test_what_is_hard_for_both_sides_cancels():
    seconds = [1.0, 5.0, 30.0, 2.0, 11.0]
    ours = [[Turn(1, each)] for each in seconds]
    theirs = [[Turn(1, 1.5 * each)] for each in seconds]
    interval = speed_ratio(ours, theirs, float, samples=200)
    assert (interval.point, interval.low, interval.high) == pytest.approx((1.5, 1.5, 1.5))


def test_sides_that_did_not_do_the_same_are_not_compared():
    with pytest.raises(ValueError, match="same cases equally often"):
        speed_ratio([[Turn(1, 1.0)]], [[Turn(1, 1.0), Turn(1, 1.0)]], float, samples=10)


def test_a_ratio_without_an_interval_has_empty_bounds():
    assert with_bounds("speed", Interval(2.0)) == {"speed": 2.0, "speed_low": None, "speed_high": None}


def test_the_file_says_what_was_run_where_and_with_what(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["somewhere/benchmark.py", "decode", "--set", "hub_token=secret", "--set", "repeats=3"])
    path = tmp_path / "results" / "decode.json"
    config = BenchDecodeConfig(repeats=3)
    write_results(path, "decode", config, rows=[{"tau": 1.5}], ratios={"speed": 2.0}, threads=2)
    content = json.loads(path.read_text())
    assert content["command"] == "python scripts/benchmark.py decode --set 'hub_token=***' --set repeats=3"
    assert (content["name"], content["rows"], content["ratios"]) == ("decode", [{"tau": 1.5}], {"speed": 2.0})
    assert content["config"]["repeats"] == 3
    assert content["threads"] == 2
    assert {"hardware", "versions", "git"} <= content.keys()
