"""Where the seconds of a training run go, by part, without waiting for the device; and some steps under torch's profiler.

Time is charged to the innermost part that is under way, to `other` where there is none, so that the parts add up to the whole.
On a CPU it is the wall clock's, as on devices without timed events. On others an event is queued at each border and read when
the seconds are asked for: it is the time of the device's own queue. docs/running.md says what counts as what. The
gradient of the draft's head is part of `loss`, as `distill.loss.chunked` computes it there; of the gradients' communication
only what the backward did not hide is known, and only under DDP (`mark_gradient`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import ProfileKwargs
from torch import Tensor, nn
from torch.profiler import record_function

from configs.schema.training import ProfileConfig
from heads.device import has_timed_events, profiler_activity, timed_event

log = logging.getLogger("draftsmith")

OTHER, BACKWARD, COMMUNICATION = "other", "backward", "communication"
STEP_PARTS = ("data", "rewriting", "target", "draft", "loss", BACKWARD, COMMUNICATION, "optimizer", OTHER)
ASIDE = ("evaluation", "checkpoint")
MOST_MARKS = 10_000  # borders kept before they are turned into seconds

Moment = float | torch.Event


class StepClock:
    """Seconds by part since `start`; before it nothing is counted. `names_parts`: whether a profiler is told of the parts."""

    def __init__(self, device: torch.device) -> None:
        self.names_parts = False
        self._device, self._by_events = device, has_timed_events(device)
        self._part: str | None = None  # under way; None: not started
        self._since: Moment = 0.0
        self._marks: list[tuple[Moment, str]] = []  # the end of a part and its name, one after another
        self._gradient: Moment | None = None
        self._seconds = dict.fromkeys((*STEP_PARTS, *ASIDE), 0.0)

    def start(self) -> None:
        self._since, self._part = self._now(), OTHER

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Charge the time of the `with` block to `part`, less that of parts inside it; what is aside has no parts of a step."""
        outer = self._part
        if outer is None or (outer in ASIDE and part not in ASIDE):
            yield
            return
        self._turn_to(part)
        try:
            with record_function(part) if self.names_parts else nullcontext():
                yield
        finally:
            if part == BACKWARD and self._gradient is not None:
                self._marks.append((self._gradient, BACKWARD))
                self._part, self._gradient = COMMUNICATION, None
            self._turn_to(outer)

    def mark_gradient(self, _: Tensor | None = None) -> None:
        """Say that a gradient of this process is there; after the last one, what is left of a backward is communication."""
        if self._part != BACKWARD:
            return
        if self._gradient is None or isinstance(self._gradient, float):
            self._gradient = self._now()
        else:
            self._gradient.record()  # the same event anew: only the last gradient's moment counts

    def follow_gradients(self, module: nn.Module) -> None:
        """Mark each gradient of `module` from now on."""
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.mark_gradient)

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each part since the start."""
        if self._part is not None:
            self._turn_to(self._part)
            self._count()
        return dict(self._seconds)

    def _turn_to(self, part: str) -> None:
        assert self._part is not None
        self._marks.append((self._now(), self._part))
        self._part = part
        if len(self._marks) >= MOST_MARKS:
            self._count()

    def _count(self) -> None:
        if self._marks and not isinstance(last := self._marks[-1][0], float):
            last.synchronize()  # the queue is in order: all before it have come, too
        for moment, part in self._marks:
            self._seconds[part] += _between(self._since, moment)
            self._since = moment
        self._marks.clear()

    def _now(self) -> Moment:
        return timed_event(self._device) if self._by_events else time.perf_counter()


def _between(start: Moment, end: Moment) -> float:
    """Return seconds from one moment to a later one, both of which have come."""
    if isinstance(start, float) or isinstance(end, float):
        assert isinstance(start, float)
        assert isinstance(end, float)
        return end - start
    return start.elapsed_time(end) / 1000


class StepProfiler:
    """Records the steps that a config asks for (`schedule.profile`), if any: OUTPUT/profile/profile_N.json for each process N.

    The file is a Chrome trace for chrome://tracing and ui.perfetto.dev, with the parts of a step as blocks around the
    operations; those that took most time are logged. The computation is unchanged; the profiled steps are slower.
    """

    def __init__(self, config: ProfileConfig | None, output: Path, accelerator: Accelerator, clock: StepClock) -> None:
        self.config, self.accelerator, self.clock = config, accelerator, clock
        activity = profiler_activity(accelerator.device)
        activities = ["cpu"] if activity is None else ["cpu", activity]
        self.settings = ProfileKwargs(activities=activities, output_trace_dir=str(output / "profile"))
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
            self.clock.names_parts = False
            self.recording.close()
            self.recording, self.is_done = None, True
            log.info("profile in %s; the operations that took most:\n%s", self.settings.output_trace_dir, self._table())
        if is_last and not self.is_done:
            log.warning("schedule.profile: step %d was not among those of this run; no profile", self.config.start_step)

    def _table(self) -> str:
        """Return the ten largest operations by their own time, without that of operations they call."""
        operations = [each for each in self.profiler.key_averages() if each.key not in STEP_PARTS]
        spent = {each.key: getattr(each, self.order) for each in operations}
        whole = max(sum(spent.values()), 1e-9)
        return "\n".join(
            f"{spent[each.key] / whole:6.1%} {spent[each.key] / 1000:10.2f} ms {each.count:7d} calls  {each.key}"
            for each in sorted(operations, key=lambda each: -spent[each.key])[:10]
        )
