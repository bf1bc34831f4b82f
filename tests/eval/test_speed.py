"""Speed from timings: totals over the same batches, prefill apart, repeats summed before anything is resampled."""

import dataclasses
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
from eval.report.schema import EnergySection
from eval.speed import compare_speed, find_meter, summarise_advantage, summarise_energy, summarise_speed, timings_within
from heads.proposers.draft_lm import DraftLM


def test_the_decode_speedup_is_a_ratio_of_totals_without_prefill(make_timing):
    timings = [
        make_timing(AUTOREGRESSIVE, ("a",), 4.0, 10, prefill_seconds=1.0),
        make_timing(SPECULATIVE, ("a",), 2.0, 10, prefill_seconds=1.0),
        make_timing(AUTOREGRESSIVE, ("b",), 40.0, 100, prefill_seconds=1.0),
        make_timing(SPECULATIVE, ("b",), 38.0, 100, prefill_seconds=1.0),
    ]

    speed = summarise_speed(timings)

    assert speed["decode_speedup"] == pytest.approx(44 / 40)
    assert speed["end_to_end_speedup"] == pytest.approx(46 / 42)
    assert (speed["decode_seconds_autoregressive"], speed["decode_seconds_speculative"]) == (44, 40)
    assert speed["milliseconds_per_token_autoregressive"] == pytest.approx(400.0)  # 44 s for 110 tokens


def test_repeats_of_a_batch_are_no_independent_evidence(make_timing):
    once = [
        make_timing(mode, (prompt,), seconds, 10)
        for prompt, plain, fast in (("a", 4.0, 2.0), ("b", 5.0, 4.0), ("c", 4.5, 2.0))
        for mode, seconds in ((AUTOREGRESSIVE, plain), (SPECULATIVE, fast))
    ]
    thrice = [dataclasses.replace(timing, repeat=repeat) for repeat in range(3) for timing in once]

    three, one = (compare_speed(timings, SPECULATIVE) for timings in (thrice, once))
    for name, value in one.items():
        assert three[name] == pytest.approx(value), name
    speed = summarise_speed(thrice)
    assert (speed["repeats"], speed["decode_seconds_speculative"]) == (3, 24.0)
    shares = {"draft_seconds": 0.2, "verify_seconds": 0.7, "sample_seconds": 0.05, "overhead_seconds": 0.05}
    assert speed["phase_shares"] == pytest.approx(shares)
    assert speed["phases"] == pytest.approx({name: 24.0 * share for name, share in shares.items()})


def test_a_batch_that_was_not_timed_on_both_sides_is_refused(make_timing):
    timings = [make_timing(AUTOREGRESSIVE, ("a",), 4.0, 10), make_timing(SPECULATIVE, ("b",), 2.0, 10)]

    with pytest.raises(ValueError, match="different batches or repeats"):
        summarise_speed(timings)


def test_an_answer_of_one_token_has_no_decode_time_and_disturbs_nothing(random_timings, make_timing):
    idle = [make_timing(mode, ("short",), 0.0, 0) for mode in (AUTOREGRESSIVE, SPECULATIVE)]

    with_idle, without = (compare_speed(timings, SPECULATIVE) for timings in ([*random_timings, *idle], random_timings))
    assert with_idle["decode_speedup_ci"] == without["decode_speedup_ci"]


def test_the_time_of_a_mixed_batch_belongs_to_no_category(make_timing):
    mixed, pure = make_timing(SPECULATIVE, ("a", "b"), 1.0, 10), make_timing(SPECULATIVE, ("a",), 1.0, 10)

    assert timings_within([pure, mixed], {"a"}) == []
    assert timings_within([pure, mixed], {"a", "b"}) == [pure, mixed]
    assert timings_within([pure, make_timing(SPECULATIVE, ("c",), 1.0, 10)], {"a"}) == [pure]


def test_later_turns_belong_to_the_batch_that_their_prompts_came_from(make_timing):
    turns = [("a", "b", "c"), ("a", "c"), ("c",), ("d", "e"), ("e",), ("f",)]
    timings = [
        make_timing(mode, batch, 1.0 + place, 10) for place, batch in enumerate(turns) for mode in (AUTOREGRESSIVE, SPECULATIVE)
    ]
    section = summarise_speed(timings)
    assert [batch["prompt_ids"] for batch in section["per_batch"]] == [["a", "b", "c"], ["d", "e"], ["f"]]
    assert [batch[SPECULATIVE] for batch in section["per_batch"]] == [[6.0, 30.0], [9.0, 20.0], [6.0, 10.0]]
    assert section["decode_speedup_ci"] == pytest.approx([1.0, 1.0])


# --- the draft against another way of decoding -------------------------------------------------------------------


def test_against_plain_decoding_it_is_tau_and_the_speedup_themselves(report):
    plain = report.baselines["autoregressive"]

    for name, section, number in (
        ("tokens_per_target_step_ratio", report.acceptance, "tokens_per_target_step"),
        ("decode_speed_ratio", report.speed, "decode_speedup"),
    ):
        for found, expected in zip(plain.interval_of(name), section.interval_of(number), strict=True):
            assert found == pytest.approx(expected)


def test_prompts_that_are_easy_for_both_cancel(make_timing):
    # Prompts of six, two and four tokens a step with the draft, and of half as many without.
    ours, theirs = {"0": [48, 8], "1": [16, 8], "2": [32, 8]}, {"1": [8, 8], "0": [24, 8], "2": [16, 8]}
    timings = [
        make_timing(mode, (str(prompt),), seconds * (1 + prompt), 40)
        for mode, seconds in ((SPECULATIVE, 1.0), ("other", 2.0))
        for prompt in range(3)
    ]

    found = summarise_advantage(timings, {SPECULATIVE: ours, "other": theirs}, SPECULATIVE, "other")
    assert found["tokens_per_target_step_ratio_ci"] == pytest.approx([2.0, 2.0])
    assert found["decode_speed_ratio_ci"] == pytest.approx([2.0, 2.0])
    one = summarise_advantage([], {SPECULATIVE: {**ours, "2": [4, 4]}, "other": {"0": [24, 8]}}, SPECULATIVE, "other")
    assert (one["tokens_per_target_step_ratio"], one["decode_speed_ratio"]) == (2.0, None)


# --- energy ---------------------------------------------------------------------------------------------------------

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


def test_timed_decodes_are_metered_and_no_warm_up(tiny_llama, as_target):
    """The meter spends a joule a read."""
    target, reads = as_target(tiny_llama(seed=1)), count()
    requests = [Request(prompt_id=f"q{n}", category="c", tokens=(7, 8, n)) for n in range(2)]
    config = EvalConfig(decode=DecodeConfig(max_new_tokens=4, num_speculative_tokens=2), repeats=2, warmup_prompts=2)
    proposers = {SPECULATIVE: DraftLM(tiny_llama(seed=2), 64)}
    measurement = Measurement(target, config, proposers, meter=lambda: float(next(reads)))
    measurement.warm_up([requests[:1], requests[1:]])
    assert next(reads) == 0
    assert [timing.joules for timing in measurement.measure_batch(requests).timings] == [1.0] * 4


def test_joules_per_token_are_totals_over_totals_and_a_counter_that_stands_still_is_none(make_timing):
    """Three batches, twice each: plain decoding takes 2 J a token, speculative decoding 1.5."""
    timings = [
        replace(make_timing(mode, (prompt,), 1.0, tokens, repeat=repeat), joules=per_token * (tokens + 1))
        for repeat in range(2)
        for prompt, tokens in (("a", 10), ("b", 20), ("c", 40))
        for mode, per_token in ((AUTOREGRESSIVE, 2.0), (SPECULATIVE, 1.5))
    ]

    def summarise(timings):
        return EnergySection.model_validate(summarise_energy(timings, lambda: 0.0))

    found = summarise(timings).joules_per_token
    assert (found.speculative, found.ratio) == (pytest.approx(1.5), pytest.approx(0.75))
    assert found.ratio_ci == pytest.approx([0.75, 0.75])
    for mode in (AUTOREGRESSIVE, SPECULATIVE):
        still = summarise([replace(each, joules=0.0) if each.mode == mode else each for each in timings])
        assert (still.joules_per_token, still.reason) == (None, "the energy counters did not move")
