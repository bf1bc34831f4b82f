"""Joules per token, with the draft and without: the report's `energy` section.

The counters (`eval.metrics.meters`) are read where the decode seconds begin and end, so that joules and seconds are of the
same work, without prefill and measuring. Where no counter can be read, or it is not trustworthy, the section holds the reason
and no numbers. The free baselines are not metered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from configs.schema.evaluation import EvalConfig
from eval.decoder.records import AUTOREGRESSIVE, SPECULATIVE, Timing
from eval.metrics.meters import Meter, Metering
from eval.metrics.speed import sums_by_batch
from eval.stats.bootstrap import paired_ratio_interval, ratio_interval

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
