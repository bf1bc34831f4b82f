"""Joules per token, with the draft and without: the counters of energy that can be read here, and the report's section.

On an NVIDIA GPU the board's own counter (NVML; needs `nvidia-ml-py`), on a CPU the kernel's RAPL counters of all packages and
their memory; never an estimate from a power rating. A counter does not tell processes apart: it holds idle power and
whatever else runs on the machine, and on a GPU nothing of the host.

The counters are read where the decode seconds begin and end, without prefill and measuring. Where none can be read or trusted,
the section holds the reason and no numbers. The free baselines are not metered.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from configs.runtime.errors import first_line
from configs.schema.evaluation import EvalConfig
from eval.decoder.clock import Clock
from eval.decoder.records import AUTOREGRESSIVE, SPECULATIVE, Timing
from eval.metrics.speed import sums_by_batch
from eval.stats.bootstrap import paired_ratio_interval, ratio_interval
from heads.device import has_nvml, nvml_uuid

POWERCAP = Path("/sys/class/powercap")
MICRO, MILLI = 1e-6, 1e-3
MAX_WATTS = 1000.0  # of one package; a counter that could have gone round more than once at this power says nothing
SHARED = "several processes of this run share the machine's energy counters: measure with one"


@dataclass(frozen=True, kw_only=True)
class Metering:
    """A meter, or the reason why there is none."""

    meter: Meter | None = None
    reason: str | None = None


class MeteredClock(Clock):
    """A clock that reads a meter as well, at both ends of whole decodes and of the measuring within them.

    Other phases are too short for a counter.
    """

    METERED = ("decode", "measure")

    def __init__(self, device: torch.device, meter: Meter) -> None:
        super().__init__(device)
        self._meter, self.joules = meter, dict.fromkeys(self.METERED, 0.0)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add time and energy spent inside the `with` block to a phase."""
        metered = name in self.METERED
        if metered:
            self._now()  # drains the queue of a GPU
            before = self._meter.read()
        with super().phase(name):
            yield
        if metered:
            self.joules[name] += self._meter.joules_between(before, self._meter.read())

    @property
    def decode_joules(self) -> float:
        """Joules of what is timed as decoding: without the prefill, and without measuring."""
        return self.joules["decode"] - self.joules["measure"]


# --- finding a counter --------------------------------------------------------------------------------------------


def find_meter(device: torch.device, num_processes: int = 1, powercap: Path = POWERCAP) -> Metering:
    """Return what can tell the energy of work on a device; processes that share a CPU cannot be told apart."""
    if has_nvml(device):
        return _nvml(device)
    if device.type != "cpu":
        return Metering(
            reason=f"no energy counter is known for device {device.type}; there is one for cpu and for NVIDIA's cuda"
        )
    return Metering(reason=SHARED) if num_processes > 1 else _rapl(powercap)


class RaplMeter:
    """The kernel's counters of some zones that hold no energy in common, given as (name, folder)."""

    def __init__(self, zones: Sequence[tuple[str, Path]]) -> None:
        self.source = f"RAPL, {', '.join(name for name, _ in zones)}"
        self._files = [folder / "energy_uj" for _, folder in zones]
        self._ranges = [_read_number(folder / "max_energy_range_uj") for _, folder in zones]  # start over there
        self.longest_seconds: float | None = min(self._ranges) * MICRO / MAX_WATTS

    def read(self) -> list[int]:
        """Return microjoules by zone."""
        return [_read_number(file) for file in self._files]

    def joules_between(self, before: Sequence[int], after: Sequence[int]) -> float:
        """Return joules over all zones; a counter that stands lower than before went round once."""
        spent = [(end - start) % range_ for range_, start, end in zip(self._ranges, before, after, strict=True)]
        return sum(spent) * MICRO


def _rapl(powercap: Path) -> Metering:
    try:
        zones = _zones(powercap)
        if not zones:
            return Metering(reason=f"the kernel keeps no energy counters of the processor (none under {powercap})")
        meter = RaplMeter(zones)
        meter.read()
    except (OSError, ValueError) as error:
        return Metering(reason=f"the energy counters cannot be read: {error}; as root: chmod a+r {powercap}/*/energy_uj")
    return Metering(meter=meter)


def _zones(powercap: Path) -> list[tuple[str, Path]]:
    """Return (name, folder) of every package, and of its memory where that is counted apart.

    A package's cores are in it; `psys` is the whole platform with the packages in it, and the intel-rapl-mmio zones are the
    same packages once more: none of these may be added.
    """
    named = [((path / "name").read_text().strip(), path) for path in sorted(powercap.glob("intel-rapl:*"))]
    packages = {path.name for name, path in named if name.startswith("package")}
    memory = [(name, path) for name, path in named if name == "dram" and path.name.rpartition(":")[0] in packages]
    return [(name, path) for name, path in named if path.name in packages] + [
        (f"{name} of {path.name}", path) for name, path in memory
    ]


def _read_number(file: Path) -> int:
    return int(file.read_text())


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
        return (after[0] - before[0]) * MILLI


Meter = RaplMeter | NvmlMeter  # `joules_between` two reads, at most `longest_seconds` apart


def _nvml(device: torch.device) -> Metering:
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return Metering(reason="reading a GPU's energy counter needs pynvml: pip install nvidia-ml-py")
    try:
        meter = NvmlMeter(nvml, nvml_uuid(device))
        meter.read()
    except nvml.NVMLError as error:
        return Metering(reason=f"the GPU's energy counter cannot be read: {first_line(error)}")
    return Metering(meter=meter)


# --- the report's section ------------------------------------------------------------------------------------------

MODES = (AUTOREGRESSIVE, SPECULATIVE)


def summarise_energy(timings: Sequence[Timing], metering: Metering, config: EvalConfig) -> dict[str, Any]:
    """Return the report's `energy` section; the bootstrap draws batches, as for the speed."""
    reason = metering.reason or _untrustworthy(timings, metering.meter)
    if metering.meter is None or reason:
        return {"source": None, "reason": reason, **dict.fromkeys(_NUMBERS)}
    sums = [sums_by_batch(timings, mode, "decode_joules", "num_tokens") for mode in MODES]
    plain, speculative = (list(zip(*own.values(), strict=True)) for own in sums)  # joules, tokens
    samples, seed = config.bootstrap_samples, config.decode.seed
    found = {
        "autoregressive": ratio_interval(*plain, samples=samples, seed=seed),
        "speculative": ratio_interval(*speculative, samples=samples, seed=seed),
        "ratio": paired_ratio_interval(*speculative, *plain, samples=samples, seed=seed),
    }
    section: dict[str, Any] = {
        "source": metering.meter.source,
        "reason": None,
        "decode_joules_autoregressive": sum(plain[0]),
        "decode_joules_speculative": sum(speculative[0]),
    }
    for side, interval in found.items():
        section |= {f"joules_per_token_{side}": interval.point, f"joules_per_token_{side}_ci": interval.bounds}
    return section


_NUMBERS = (
    *(f"decode_joules_{mode}" for mode in MODES),
    *(f"joules_per_token_{side}{end}" for side in (*MODES, "ratio") for end in ("", "_ci")),
)


def _untrustworthy(timings: Sequence[Timing], meter: Meter | None) -> str | None:
    """Return why the counters cannot be trusted, or `None`."""
    if meter is None:
        return None
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
