"""Joules: the kernel's counters in a made-up /sys, what may be added, what goes round, and what is no measurement."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from configs.schema.decoding import DecodeConfig
from configs.schema.evaluation import EvalConfig
from eval.decoder.decode import Request
from eval.decoder.records import AUTOREGRESSIVE, SPECULATIVE
from eval.measure.interleaved import Measurement
from eval.metrics.energy import find_meter, summarise_energy
from eval.report.schema import EnergySection
from heads.proposers.draft_lm import DraftLM

CPU = torch.device("cpu")
RANGE = 262_143_328_850  # microjoules; what Intel's processors have


@pytest.fixture
def powercap(tmp_path):
    """A folder as the kernel shows it: two packages with cores and memory, the platform, and one package once more."""
    zones = {
        "intel-rapl:0": "package-0",
        "intel-rapl:0:0": "core",
        "intel-rapl:0:1": "dram",
        "intel-rapl:1": "package-1",
        "intel-rapl:1:0": "dram",
        "intel-rapl:2": "psys",
        "intel-rapl:2:0": "dram",
        "intel-rapl-mmio:0": "package-0",
    }
    for folder, name in zones.items():
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "name").write_text(f"{name}\n")
        (tmp_path / folder / "max_energy_range_uj").write_text(f"{RANGE}\n")
        (tmp_path / folder / "energy_uj").write_text("1000000\n")
    return tmp_path


def set_counter(powercap, zone, microjoules):
    (powercap / zone / "energy_uj").write_text(f"{microjoules}\n")


class CountingMeter:
    """A meter that spends one joule a read."""

    source, longest_seconds, reads = "a test meter", None, 0

    def read(self):
        self.reads += 1
        return [self.reads]

    def joules_between(self, before, after):
        return float(after[0] - before[0])


# --- the counters -------------------------------------------------------------------------------------------------


def test_packages_and_their_memory_are_added_and_nothing_twice(powercap):
    meter = find_meter(CPU, powercap=powercap)
    before = meter.read()
    for zone, joules in (("intel-rapl:0", 1), ("intel-rapl:0:1", 10), ("intel-rapl:1", 100), ("intel-rapl:1:0", 1000)):
        set_counter(powercap, zone, 1_000_000 * (1 + joules))
    for zone in ("intel-rapl:0:0", "intel-rapl:2", "intel-rapl:2:0", "intel-rapl-mmio:0"):
        set_counter(powercap, zone, 9_000_000_000)

    assert meter.joules_between(before, meter.read()) == pytest.approx(1111.0)
    assert meter.source == "RAPL, package-0, package-1, dram of intel-rapl:0:1, dram of intel-rapl:1:0"
    before = meter.read()
    set_counter(powercap, "intel-rapl:0", 500_000)  # went round, and goes on from its range
    assert meter.joules_between(before, meter.read()) == pytest.approx(RANGE * 1e-6 - 1.5)


def test_a_machine_without_counters_of_its_own_says_so(tmp_path):
    assert "keeps no energy counters" in find_meter(CPU, powercap=tmp_path)
    assert "several processes" in find_meter(CPU, num_processes=2, powercap=tmp_path)
    assert "device mps" in find_meter(torch.device("mps"))


@pytest.mark.parametrize(("damage", "words"), [(Path.unlink, "No such file"), (lambda f: f.write_text("?"), "invalid literal")])
def test_counters_that_cannot_be_read_are_not_available_with_the_reason(powercap, damage, words):
    damage(powercap / "intel-rapl:0" / "energy_uj")

    reason = find_meter(CPU, powercap=powercap)
    assert words in reason
    assert "chmod a+r" in reason


def test_a_gpu_is_asked_by_its_own_name_and_in_millijoules(monkeypatch):
    counts, asked = iter([5000, 5000, 7500]), []
    nvml = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=asked.append,
        nvmlDeviceGetName=lambda handle: b"A GPU",
        nvmlDeviceGetTotalEnergyConsumption=lambda handle: next(counts),
        NVMLError=StopIteration,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1234"))
    meter = find_meter(torch.device("cuda", 0), num_processes=2)
    assert meter.joules_between(meter.read(), meter.read()) == 2.5
    assert (meter.source, asked) == ("NVML, A GPU", ["GPU-1234"])
    assert "cannot be read" in find_meter(torch.device("cuda", 0))


# --- what is measured ---------------------------------------------------------------------------------------------


def test_a_pass_of_its_own_is_metered_for_all_timed_ones_and_no_warm_up(tiny_llama, as_target):
    target, meter = as_target(tiny_llama(seed=1)), CountingMeter()
    requests = [Request(prompt_id=f"q{n}", category="c", tokens=(7, 8, n)) for n in range(2)]
    config = EvalConfig(decode=DecodeConfig(max_new_tokens=4, num_speculative_tokens=2), repeats=2, warmup_prompts=2)

    measurement = Measurement(target, config, {SPECULATIVE: DraftLM(tiny_llama(seed=2), 64)}, meter=meter)
    measurement.warm_up([requests[:1], requests[1:]])
    assert meter.reads == 0

    timings = measurement.measure_batch(requests).timings

    assert [timing.decode_joules for timing in timings if timing.mode == AUTOREGRESSIVE] == [1.0, 1.0]
    assert all(timing.decode_joules > 0 for timing in timings)


# --- the section --------------------------------------------------------------------------------------------------


@pytest.fixture
def timings(make_timing):
    """Three batches, twice each: plain decoding takes 2 J a token, speculative decoding 1.5, prompt lookup is not asked."""
    joules = {AUTOREGRESSIVE: 2.0, SPECULATIVE: 1.5}
    return [
        replace(make_timing(mode, (prompt,), 1.0, tokens, repeat=repeat), decode_joules=per_token * tokens)
        for repeat in range(2)
        for prompt, tokens in (("a", 10), ("b", 20), ("c", 40))
        for mode, per_token in joules.items()
    ]


def summarise(timings, meter):
    section = summarise_energy(timings, meter, EvalConfig(bootstrap_samples=50))
    EnergySection.model_validate(section)
    return section


def test_joules_per_token_are_totals_over_totals(timings):
    section = summarise(timings, CountingMeter())

    assert section["source"] == "a test meter"
    assert section["decode_joules_autoregressive"] == pytest.approx(2 * 140.0)
    assert section["joules_per_token_speculative"] == pytest.approx(1.5)
    assert section["joules_per_token_ratio"] == pytest.approx(0.75)
    assert section["joules_per_token_ratio_ci"] == pytest.approx([0.75, 0.75])


@pytest.mark.parametrize("mode", [AUTOREGRESSIVE, SPECULATIVE])
def test_counters_that_stand_still_are_no_energy_of_zero(timings, mode):
    still = [replace(timing, decode_joules=0.0) if timing.mode == mode else timing for timing in timings]

    section = summarise(still, CountingMeter())

    assert section.pop("reason") == "the energy counters did not move"
    assert set(section.values()) == {None}


def test_a_decode_in_which_a_counter_may_go_round_twice_is_not_believed(timings, powercap):
    meter = find_meter(CPU, powercap=powercap)
    assert summarise(timings, meter)["source"] is not None

    slow = [replace(timing, decode_seconds=300.0) for timing in timings]

    assert "start over more than once" in summarise(slow, meter)["reason"]
