"""Joules per token, with the draft and without: the counters of energy that can be read here, and the report's section.

On an NVIDIA GPU the board's own counter (NVML; needs `nvidia-ml-py`), on a CPU the kernel's RAPL counters of all packages and
their memory; never an estimate from a power rating. A counter does not tell processes apart: it holds idle power and whatever
else runs on the machine, and on a GPU nothing of the host. Counters are read where the decode seconds begin and end, without
prefill and measuring. Where none can be read or trusted, the section holds the reason and no numbers.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from configs.runtime.errors import first_line
from configs.schema.evaluation import EvalConfig
from eval.decoder.records import AUTOREGRESSIVE, SPECULATIVE, Clock, Timing
from eval.metrics.speed import sums_by_batch
from eval.stats.bootstrap import paired_ratio_interval, ratio_interval
from heads.device import nvml_uuid

POWERCAP = Path("/sys/class/powercap")
MAX_WATTS = 1000.0  # of one package; a counter that could have gone round more than once at this power says nothing
MODES = (AUTOREGRESSIVE, SPECULATIVE)
NUMBERS = (
    *(f"decode_joules_{mode}" for mode in MODES),
    *(f"joules_per_token_{side}{end}" for side in (*MODES, "ratio") for end in ("", "_ci")),
)


class MeteredClock(Clock):
    """A clock that reads a meter as well, at both ends of whole decodes and of the measuring within them."""

    def __init__(self, device: torch.device, meter: Meter) -> None:
        super().__init__(device)
        self._meter, self.joules = meter, {"decode": 0.0, "measure": 0.0}  # other phases are too short for a counter

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add time and energy spent inside the `with` block to a phase."""
        if name not in self.joules:
            with super().phase(name):
                yield
            return
        self._now()  # drains the queue of a GPU
        before = self._meter.read()
        with super().phase(name):
            yield
        self.joules[name] += self._meter.joules_between(before, self._meter.read())

    @property
    def decode_joules(self) -> float:
        """Joules of what is timed as decoding: without the prefill, and without measuring."""
        return self.joules["decode"] - self.joules["measure"]


def find_meter(device: torch.device, num_processes: int = 1, powercap: Path = POWERCAP) -> Meter | str:
    """Return what can tell the energy of work on a device, or why nothing can; processes on one CPU cannot be told apart."""
    if (uuid := nvml_uuid(device)) is not None:
        return _nvml(uuid)
    if device.type != "cpu":
        return f"no energy counter is known for device {device.type}; there is one for cpu and for NVIDIA's cuda"
    if num_processes > 1:
        return "several processes of this run share the machine's energy counters: measure with one"
    try:
        meter = RaplMeter(powercap)
        meter.read()
    except (OSError, ValueError) as error:
        return f"the energy counters cannot be read: {error}; as root: chmod a+r {powercap}/*/energy_uj"
    return meter if meter.zones else f"the kernel keeps no energy counters of the processor (none under {powercap})"


class RaplMeter:
    """The kernel's counters, in microjoules, of every package, and of its memory where that is counted apart.

    A package's cores are in it; `psys` is the whole platform with the packages in it, and the intel-rapl-mmio zones are the
    same packages once more: none of these may be added.
    """

    def __init__(self, powercap: Path) -> None:
        names = {path: (path / "name").read_text().strip() for path in sorted(powercap.glob("intel-rapl:*"))}
        packages = {path.name: path for path, name in names.items() if name.startswith("package")}
        memory = {f"dram of {path.name}": path for path, name in names.items() if name == "dram"}
        memory = {name: path for name, path in memory.items() if path.name.rpartition(":")[0] in packages}
        self.zones = [*packages.values(), *memory.values()]
        self.source = f"RAPL, {', '.join([*(names[path] for path in packages.values()), *memory])}"
        self._ranges = [int((zone / "max_energy_range_uj").read_text()) for zone in self.zones]  # start over there
        self.longest_seconds: float | None = min(self._ranges, default=0) * 1e-6 / MAX_WATTS

    def read(self) -> list[int]:
        """Return microjoules by zone."""
        return [int((zone / "energy_uj").read_text()) for zone in self.zones]

    def joules_between(self, before: Sequence[int], after: Sequence[int]) -> float:
        """Return joules over all zones; a counter that stands lower than before went round once."""
        spent = [(end - start) % range_ for range_, start, end in zip(self._ranges, before, after, strict=True)]
        return sum(spent) * 1e-6


class NvmlMeter:
    """The energy counter of one GPU, which counts millijoules since the driver was loaded."""

    longest_seconds: float | None = None

    def __init__(self, nvml: Any, uuid: str) -> None:
        nvml.nvmlInit()
        self._nvml, self._handle = nvml, nvml.nvmlDeviceGetHandleByUUID(uuid)
        name = nvml.nvmlDeviceGetName(self._handle)
        self.source = f"NVML, {name.decode() if isinstance(name, bytes) else name}"

    def read(self) -> list[int]:
        """Return the millijoules, as a list of one."""
        return [int(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle))]

    def joules_between(self, before: Sequence[int], after: Sequence[int]) -> float:
        """Return joules."""
        return (after[0] - before[0]) * 1e-3


Meter = RaplMeter | NvmlMeter  # `joules_between` two reads, at most `longest_seconds` apart


def _nvml(uuid: str) -> Meter | str:
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return "reading a GPU's energy counter needs pynvml: pip install nvidia-ml-py"
    try:
        meter = NvmlMeter(nvml, uuid)
        meter.read()
    except nvml.NVMLError as error:
        return f"the GPU's energy counter cannot be read: {first_line(error)}"
    return meter


def summarise_energy(timings: Sequence[Timing], meter: Meter | str, config: EvalConfig) -> dict[str, Any]:
    """Return the report's `energy` section (`meter` of `find_meter`); the bootstrap draws batches, as for the speed."""
    reason = meter if isinstance(meter, str) else _untrustworthy(timings, meter)
    if isinstance(meter, str) or reason:
        return {"source": None, "reason": reason, **dict.fromkeys(NUMBERS)}
    sums = [sums_by_batch(timings, mode, "decode_joules", "num_tokens") for mode in MODES]
    plain, speculative = (list(zip(*own.values(), strict=True)) for own in sums)  # joules, tokens
    samples, seed = config.bootstrap_samples, config.decode.seed
    intervals = (
        ratio_interval(*plain, samples=samples, seed=seed),
        ratio_interval(*speculative, samples=samples, seed=seed),
        paired_ratio_interval(*speculative, *plain, samples=samples, seed=seed),
    )
    per_token = [value for interval in intervals for value in (interval.point, interval.bounds)]
    numbers = [sum(plain[0]), sum(speculative[0]), *per_token]
    return {"source": meter.source, "reason": None, **dict(zip(NUMBERS, numbers, strict=True))}


def _untrustworthy(timings: Sequence[Timing], meter: Meter) -> str | None:
    joules = [[timing.decode_joules for timing in timings if timing.mode == mode] for mode in MODES]
    if any(None in own or sum(filter(None, own)) <= 0 for own in joules):
        return "the energy counters did not move"
    longest = max(timing.decode_seconds + timing.measure_seconds for timing in timings)
    if meter.longest_seconds is not None and longest > meter.longest_seconds:
        return (
            f"a batch took {longest:.0f} s, in which the energy counters, read before and after it, may start over more than "
            f"once: ask for fewer tokens or smaller batches, to stay under {meter.longest_seconds:.0f} s"
        )
    return None
