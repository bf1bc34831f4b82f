"""Measurements of a training run: step metrics, time by part, utilisation, evaluations, profiles, trackers.

The loop reports through `StepMetrics`, `MetricsFile` and `History`; `StepClock` times the parts of a step.
"""

from train.telemetry.files import MetricsFile, read_metrics
from train.telemetry.history import History
from train.telemetry.step_clock import StepClock
from train.telemetry.step_metrics import StepMetrics

__all__ = ["History", "MetricsFile", "StepClock", "StepMetrics", "read_metrics"]
