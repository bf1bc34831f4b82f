"""A few steps under torch's profiler, on request (`schedule.profile`): OUTPUT/profile/profile_N.json for each process N.

The file is a Chrome trace for chrome://tracing and ui.perfetto.dev; the parts of a step (`train.telemetry.step_clock`) are
blocks around the operations. The operations that took most time are logged. accelerate runs the profiler and writes the trace.
The computation is unchanged; the profiled steps are slower, which shows in their line of metrics.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import ProfileKwargs

from configs.schema.training import ProfileConfig
from heads.device import profiler_activity
from train.telemetry.step_clock import STEP_PARTS, StepClock

log = logging.getLogger("draftsmith")

FOLDER = "profile"
NUM_ROWS = 10


class StepProfiler:
    """Records the steps that a config asks for; without a config it does nothing.

    Args:
        config: which steps; None: none.
    """

    def __init__(self, config: ProfileConfig | None, output: Path, accelerator: Accelerator, clock: StepClock) -> None:
        self.config, self.accelerator, self.clock = config, accelerator, clock
        activity = profiler_activity(accelerator.device)
        activities = ["cpu"] if activity is None else ["cpu", activity]
        self.settings = ProfileKwargs(activities=activities, output_trace_dir=str(output / FOLDER))
        self.order = "self_cpu_time_total" if activity is None else "self_device_time_total"
        self.recording: ExitStack | None = None
        self.is_done = False

    def before_step(self, step: int) -> None:
        """Start recording if the step of this number, from 1, is the first to be recorded."""
        if self.config is None or self.recording is not None or step != self.config.start_step:
            return
        self.recording = ExitStack()
        self.profiler = self.recording.enter_context(self.accelerator.profile(self.settings))
        self.clock.names_parts = True

    def after_step(self, step: int, *, is_last: bool) -> None:
        """Write the trace after the last step to be recorded or taken, the same step in all processes."""
        if self.config is None:
            return
        if self.recording is not None and (is_last or step == self.config.start_step + self.config.num_steps - 1):
            self._write(self.recording)
        if is_last and not self.is_done:
            log.warning("schedule.profile: step %d was not among those of this run; no profile", self.config.start_step)

    def _write(self, recording: ExitStack) -> None:
        self.clock.names_parts = False
        recording.close()
        self.recording, self.is_done = None, True
        log.info("profile in %s; the operations that took most:\n%s", self.settings.output_trace_dir, self._table())

    def _table(self) -> str:
        """Return the largest operations by their own time, without that of operations they call."""
        operations = [each for each in self.profiler.key_averages() if each.key not in STEP_PARTS]
        spent = {each.key: getattr(each, self.order) for each in operations}
        whole = max(sum(spent.values()), 1e-9)
        largest = sorted(operations, key=lambda each: -spent[each.key])[:NUM_ROWS]
        rows = [
            f"{spent[each.key] / whole:6.1%} {spent[each.key] / 1000:10.2f} ms {each.count:7d} calls  {each.key}"
            for each in largest
        ]
        return "\n".join(rows)
