"""Evaluations of the tiny run that `tests/conftest.py` makes, and what they leave on disk."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from configs.schema.decoding import DecodeConfig
from configs.schema.evaluation import EvalConfig, LosslessConfig, SuiteConfig
from configs.schema.target import TargetConfig
from eval.decoder.decode import Request
from eval.decoder.records import Records
from eval.measure.interleaved import Follow, Measurement, in_batches
from eval.report.schema import Report, load_report
from heads.frozen.loading import Target
from heads.proposers.protocol import Proposer


def tiny_evaluation(
    run: Path, output: Path, *, num_prompts: int | None = None, decode: Any = None, **others: Any
) -> EvalConfig:
    """Return the config of a short evaluation of the tiny run; `others` are fields in place of those here."""
    settings: dict[str, Any] = {
        "target": TargetConfig(name=str(run / "target"), dtype="float32", device="cpu"),
        "draft": str(run / "artifact"),
        "suite": SuiteConfig(path=str(run / "suite.jsonl"), num_prompts=num_prompts),
        "decode": DecodeConfig(**{"num_speculative_tokens": 2, "max_new_tokens": 8, "batch_size": 2} | (decode or {})),
        "repeats": 1,
        "lookup_num_speculative_tokens": 2,
        "lookup_expects": 0.2,
        "warmup_prompts": 0,
        "lossless": LosslessConfig(first_token_samples=64),
        "output": str(output),
    }
    return EvalConfig(**settings | others)


def report_in(config: EvalConfig) -> Report:
    """Read the report that an evaluation wrote."""
    return load_report(Path(config.output) / "report.json")


def write_suite(path: Path, rows: Iterable[dict[str, Any]]) -> SuiteConfig:
    """Write rows as a suite's file; return the config that reads it."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return SuiteConfig(path=str(path))


def measure(
    target: Target,
    requests: Sequence[Request],
    config: EvalConfig,
    proposers: Mapping[str, Proposer],
    *,
    follow: Follow | None = None,
    settings: Mapping[str, DecodeConfig] | None = None,
) -> Records:
    """Decode requests plainly and with each proposer, those that `settings` names by these, as an evaluation does."""
    measurement = Measurement(target, config, proposers, follow)
    measurement.settings |= settings or {}
    batches = in_batches(requests, config.decode.batch_size)
    records = Records()
    measurement.warm_up(batches)
    for batch in batches:
        records.extend(measurement.measure_batch(batch))
    return records
