"""What a training lets one see of itself: lines in a file, and trackers."""

import json
from typing import ClassVar

import pytest
from accelerate import tracking
from accelerate.utils import LoggerType

from configs.runtime.errors import ConfigError
from configs.runtime.terminal import PROGRESS_FILE, STAGE
from scripts.watch.reading import find_run, read_run
from tests.support.training_runs import distil, distill_config, read_evaluations, read_metrics
from train.launch import make_accelerator
from train.loop.telemetry import METRICS_FILE, SHARE, STEP_PARTS, MetricsFile, explain_gap, flat_config
from train.tasks.draft import DraftTask

PLAIN = {"max_steps": 6, "eval_every_steps": None, "checkpoint_every_steps": None}


# --- looking in ---------------------------------------------------------------------------------------------------


def test_the_output_of_a_training_is_a_run_to_look_in_on(tmp_path, greedy_target, greedy_rows, monkeypatch):
    monkeypatch.setenv(PROGRESS_FILE, str(tmp_path / "progress.json"))
    monkeypatch.setenv(STAGE, "train")
    distil(distill_config(tmp_path), greedy_target, greedy_rows)
    found = read_run(find_run(str(tmp_path)))
    assert [(each.name, each.state) for each in found.stages] == [("train", "running")]
    assert (found.progress.description, found.progress.done, found.progress.total) == ("training", 10, 10)
    assert [point.step for point in found.taus] == [5, 10]
    assert len(found.losses) == 5
    (tmp_path / "outcome.json").write_text("{}")  # by `train.launch`, once it has ended
    assert read_run(tmp_path).state == "ended"


# --- the file of metrics ------------------------------------------------------------------------------------------


def test_a_run_writes_a_line_a_log_entry_and_evaluation_and_a_resumed_one_none_twice(
    tmp_path, greedy_target, greedy_rows, monkeypatch
):
    taus = iter((1.1, 1.2, 1.3, 1.4))
    monkeypatch.setattr(DraftTask, "evaluate", lambda *_: {"tokens_per_target_step": next(taus)})
    config = distill_config(tmp_path, max_steps=6, log_every_steps=1, eval_every_steps=2, checkpoint_every_steps=3)
    with pytest.raises(KeyboardInterrupt):
        distil(config, greedy_target, greedy_rows, stop_after=5)
    before, evaluated = read_metrics(tmp_path / METRICS_FILE), read_evaluations(tmp_path / METRICS_FILE)
    distil(config, greedy_target, greedy_rows)  # from step 3 on: step 4 is taken and evaluated anew
    after, again = read_metrics(tmp_path / METRICS_FILE), read_evaluations(tmp_path / METRICS_FILE)
    assert [row["step"] for row in before] == [1, 2, 3, 4, 5]
    assert [row["step"] for row in after] == [1, 2, 3, 4, 5, 6]
    assert [(row["step"], row["tokens_per_target_step"]) for row in evaluated] == [(2, 1.1), (4, 1.2)]
    assert [(row["step"], row["tokens_per_target_step"]) for row in again] == [(2, 1.1), (4, 1.3), (6, 1.4)]
    assert (after[:3], again[0]) == (before[:3], evaluated[0])
    assert after[4]["seconds"] > after[3]["seconds"] > after[2]["seconds"]
    assert [row["loss"] for row in after[3:5]] == [row["loss"] for row in before[3:]]
    for row in after:
        assert sum(row[f"{SHARE}{part}"] for part in STEP_PARTS) == pytest.approx(1, abs=1e-5)
        assert min(row[f"{SHARE}{part}"] for part in ("data", "target", "loss", "backward", "optimizer")) > 0
        assert 0 < row["labels_per_second"] < row["tokens_per_second"]
        assert row["memory_peak_bytes"] > 2**26
        assert {"acceptance", "top1_agreement", "gradient_norm", "learning_rate"} <= row.keys()


@pytest.mark.parametrize("whole", [[], [{"step": 1, "seconds": 2.0, "loss": 3.0}]], ids=["no line", "a line"])
def test_a_line_that_a_killed_process_left_half_written_is_dropped(tmp_path, whole):
    lines = "".join(json.dumps(row) + "\n" for row in whole)
    (tmp_path / METRICS_FILE).write_text(lines + '{"step": 2, "sec')
    MetricsFile(tmp_path, done_steps=5, evaluated_steps=5).add(2, 1.0, {"loss": 2.0})
    seconds = 3.0 if whole else 1.0
    assert read_metrics(tmp_path / METRICS_FILE) == [*whole, {"step": 2, "seconds": seconds, "loss": 2.0}]


@pytest.mark.parametrize(
    ("decoded", "predicted", "is_gap"), [(1.81, 2.0, False), (1.79, 2.0, True), (1.0, 1.0, False), (1.2, None, False)]
)
def test_a_gap_is_less_than_four_fifths_of_the_promised_gain(decoded, predicted, is_gap):
    metrics = {"tokens_per_target_step": decoded} | ({} if predicted is None else {"predicted_tau": predicted})
    assert (explain_gap(metrics) is not None) == is_gap


# --- trackers -----------------------------------------------------------------------------------------------------


class StandIn(tracking.GeneralTracker):
    """What a tracker was asked to keep: its library is not installed here."""

    name, requires_logging_directory, tracker = "standin", False, None
    made: ClassVar = []

    def __init__(self, project, **settings):
        super().__init__()
        self.made.append(self)
        self.started, self.settings, self.logged, self.is_finished = {"project": project, **settings}, {}, [], False

    def store_init_configuration(self, values):
        self.settings.update(values)

    def log(self, values, step, **_):
        self.logged.append((step, values))

    def finish(self):
        self.is_finished = True


@pytest.mark.parametrize("name", ["wandb", "trackio", "mlflow"])
def test_a_tracker_gets_the_whole_config_and_every_logged_step(tmp_path, greedy_target, greedy_rows, monkeypatch, name):
    monkeypatch.setattr(StandIn, "made", [])
    monkeypatch.setattr(tracking, "_available_trackers", [LoggerType(name)])
    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, name, StandIn)
    config = distill_config(tmp_path / "seventh", **PLAIN, trackers=[name])
    distil(config, greedy_target, greedy_rows)
    (library,) = StandIn.made
    assert library.started["project"] == "draftsmith"
    assert "seventh" in library.started.values()
    assert library.settings == flat_config(config.model_dump(mode="json"))
    assert library.settings["optimizer.learning_rate"] == 3e-3
    assert [step for step, _ in library.logged] == [2, 4, 6, 6]
    assert {"train/loss", f"train/{SHARE}target"} <= library.logged[0][1].keys()
    assert "held_out/tokens_per_target_step" in library.logged[-1][1]
    assert library.is_finished


def test_a_tracker_whose_library_is_missing_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(tracking, "_available_trackers", [])
    with pytest.raises(ConfigError, match=r"schedule\.trackers: mlflow is not installed; install it, or take it out"):
        make_accelerator(distill_config(tmp_path, trackers=["mlflow"]).schedule, tmp_path)
