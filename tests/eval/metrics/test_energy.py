"""Joules: the kernel's counters in a made-up /sys, what goes round, and what is no measurement."""

import sys
from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import pytest
import torch

from configs.schema.decoding import DecodeConfig
from configs.schema.evaluation import EvalConfig
from eval.decoder.decode import Request
from eval.decoder.records import AUTOREGRESSIVE, SPECULATIVE
from eval.measure.interleaved import Measurement
from eval.metrics.speed import find_meter, summarise_energy
from eval.report.schema import EnergySection
from heads.proposers.draft_lm import DraftLM

CPU = torch.device("cpu")
RANGE = 262_143_328_850  # microjoules; what Intel's processors have


@pytest.fixture
def powercap(tmp_path):
    """A folder as the kernel shows it: two packages with cores, the platform, and one package once more."""
    zones = {"intel-rapl:0": "package-0", "intel-rapl:0:0": "core", "intel-rapl:1": "package-1", "intel-rapl:2": "psys"}
    for folder, name in (zones | {"intel-rapl-mmio:0": "package-0"}).items():
        (tmp_path / folder).mkdir()
        for file, text in (("name", name), ("max_energy_range_uj", RANGE), ("energy_uj", 1_000_000)):
            (tmp_path / folder / file).write_text(f"{text}\n")
    return tmp_path


def test_packages_are_added_and_nothing_twice_and_a_counter_may_go_round(powercap):
    meter = find_meter(CPU, powercap=powercap)
    before = meter()
    for zone, joules in (("0", 2), ("1", 101), ("0:0", 9000), ("2", 9000)):
        (powercap / f"intel-rapl:{zone}" / "energy_uj").write_text(f"{joules}000000\n")
    assert meter() - before == pytest.approx(1.0 + 100.0)
    before = meter()
    (powercap / "intel-rapl:0" / "energy_uj").write_text("500000\n")
    assert meter() - before == pytest.approx(RANGE * 1e-6 - 1.5)


def test_what_cannot_be_read_is_not_available_with_the_reason(powercap, tmp_path_factory):
    assert "keeps no energy counters" in find_meter(CPU, powercap=tmp_path_factory.mktemp("empty"))
    assert "one process of 2 on cpu" in find_meter(CPU, num_processes=2, powercap=powercap)
    assert "on mps" in find_meter(torch.device("mps"))
    (powercap / "intel-rapl:0" / "energy_uj").unlink()
    assert "chmod a+r" in find_meter(CPU, powercap=powercap)


def test_a_gpu_is_asked_by_its_own_name_and_in_millijoules(monkeypatch):
    counts, asked = iter([5000, 5000, 7500]), []
    nvml = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=asked.append,
        nvmlDeviceGetTotalEnergyConsumption=lambda handle: next(counts),
        NVMLError=StopIteration,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1234"))
    meter = find_meter(torch.device("cuda", 0), num_processes=2)
    assert (-meter() + meter(), asked) == (2.5, ["GPU-1234"])
    assert "cannot be read" in find_meter(torch.device("cuda", 0))


def test_a_pass_of_its_own_is_metered_for_all_timed_ones_and_no_warm_up(tiny_llama, as_target):
    """The meter spends a joule a read."""
    target, reads = as_target(tiny_llama(seed=1)), count()
    requests = [Request(prompt_id=f"q{n}", category="c", tokens=(7, 8, n)) for n in range(2)]
    config = EvalConfig(decode=DecodeConfig(max_new_tokens=4, num_speculative_tokens=2), repeats=2, warmup_prompts=2)
    proposers = {SPECULATIVE: DraftLM(tiny_llama(seed=2), 64)}
    measurement = Measurement(target, config, proposers, meter=lambda: float(next(reads)))
    measurement.warm_up([requests[:1], requests[1:]])
    assert next(reads) == 0
    timings = measurement.measure_batch(requests).timings
    assert [timing.decode_joules for timing in timings if timing.mode == AUTOREGRESSIVE] == [1.0, 1.0]
    assert all(timing.decode_joules > 0 for timing in timings)


def test_joules_per_token_are_totals_over_totals_and_a_counter_that_stands_still_is_none(make_timing):
    """Three batches, twice each: plain decoding takes 2 J a token, speculative decoding 1.5."""
    timings = [
        replace(make_timing(mode, (prompt,), 1.0, tokens, repeat=repeat), decode_joules=per_token * tokens)
        for repeat in range(2)
        for prompt, tokens in (("a", 10), ("b", 20), ("c", 40))
        for mode, per_token in ((AUTOREGRESSIVE, 2.0), (SPECULATIVE, 1.5))
    ]

    def summarise(timings):
        return EnergySection.model_validate(summarise_energy(timings, lambda: 0.0, samples=50, seed=0))

    found = summarise(timings).joules_per_token
    assert (found.speculative, found.ratio) == (pytest.approx(1.5), pytest.approx(0.75))
    assert found.ratio_ci == pytest.approx([0.75, 0.75])
    for mode in (AUTOREGRESSIVE, SPECULATIVE):
        still = summarise([replace(each, decode_joules=0.0) if each.mode == mode else each for each in timings])
        assert (still.joules_per_token, still.reason) == (None, "the energy counters did not move")
