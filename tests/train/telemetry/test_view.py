"""A run's metrics for the eye: a table and a picture that say what the lines say."""

import json
import xml.etree.ElementTree as ElementTree

import pytest

from configs.runtime.command import BAD_INPUT, DONE, run_command
from configs.schema.base import Settings
from scripts.show_training import add_arguments, main
from train.telemetry.files import METRICS_FILE
from train.telemetry.step_clock import STEP_PARTS
from train.telemetry.step_metrics import SHARE
from train.telemetry.view import as_table, draw_metrics, merged


def row(step, value=2.0, **shares):
    metrics = {"tokens_per_second": 100.0, "model_flop_utilization": 0.25, "memory_peak_bytes": 3e9}
    shares = {SHARE + part: shares.get(part, 0.0) for part in STEP_PARTS}
    return {"step": step, "seconds": step / 2, "loss": value} | metrics | shares


ROWS = [row(10, 4.0, target=0.7, loss=0.3), row(20, 2.0, target=0.5, loss=0.5)]


def test_a_table_has_a_column_for_every_part_that_took_time():
    head, *lines = [
        line.split()
        for line in as_table(ROWS).replace("tokens/s", "speed").replace("memory GB", "memory").replace("% ", "%").splitlines()
    ]
    assert head == ["step", "seconds", "loss", "speed", "MFU", "memory", "%target", "%loss"]
    assert lines[0] == ["10", "5", "4", "100", "25.0%", "3.00", "70.0", "30.0"]
    assert len({len(line) for line in as_table(ROWS).splitlines()}) == 1


def test_neighbours_are_shown_by_their_mean():
    assert merged(ROWS, 2) == ROWS
    (one,) = merged([*ROWS, row(30, 3.0, target=0.3) | {"only_here": 1.0}], 1)
    assert (one["step"], one["seconds"], one["loss"]) == (30, 15.0, 3.0)
    assert one[SHARE + "target"] == pytest.approx(0.5)
    assert "only_here" not in one
    assert [each["step"] for each in merged([row(step) for step in range(1, 8)], 3)] == [3, 6, 7]


def test_the_picture_names_the_parts_and_equal_runs_give_equal_files():
    svg = draw_metrics(ROWS)
    texts = {
        "".join(element.itertext()).strip() for element in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
    }
    assert {"loss", "target", "share of the time", "optimiser step"} <= texts
    assert "rewriting" not in texts
    assert svg == draw_metrics(ROWS)


def show(*arguments):
    return run_command(Settings, main, description="", argv=arguments, add_arguments=add_arguments)


def test_a_run_is_shown_by_its_folder(tmp_path, capsys):
    (tmp_path / METRICS_FILE).write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    assert show(str(tmp_path)) == DONE
    assert capsys.readouterr().out == as_table(ROWS) + "\n"
    assert (tmp_path / "metrics.svg").read_text() == draw_metrics(ROWS)


def test_a_folder_without_metrics_is_a_sentence(tmp_path, capsys):
    assert show(str(tmp_path)) == BAD_INPUT
    assert "error: training metrics not found" in capsys.readouterr().err
