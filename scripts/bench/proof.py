"""Can the proofs fail? `python -m scripts.bench.proof`: how often sound decoding is refused, and how often a bug is found.

The losslessness check judges prompt lookup's greedy answers, `num_prompts` of a suite at a time, drawn `num_draws` times from
one decoding of the whole suite: sound ones; with noise of 0.2 added to every logit of every second forward; and with keys and
values that went through a narrower dtype. The intervals' coverage is simulated. Ten minutes of two cores.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from configs.runtime.command import DONE, run_command
from configs.runtime.files import read_json
from configs.schema.base import PositiveInt, Settings
from configs.schema.decoding import DecodeConfig
from configs.schema.evaluation import LosslessConfig, SuiteConfig
from configs.schema.target import TargetConfig
from eval.decoder.decode import decode
from eval.decoder.records import Generation, Request
from eval.decoder.verifier import Verifier
from eval.measure.interleaved import in_batches
from eval.measure.suite import Turns, load_suite
from eval.stats import ratio_interval
from eval.teacher_forcing import check_modes, read_answers
from heads.frozen.loading import Target, load_target
from heads.inference.kv_cache import RowLayer
from heads.proposers.lookup import PromptLookup
from scripts.bench.harness import write_results

NOISE = 0.2  # standard deviation, in logits
NARROWER = {"bfloat16": torch.float8_e4m3fn, "float32": torch.bfloat16}  # than the target's dtype: of keys and values
NUM_CLUSTERS, SPREADS = (3, 8), (0.1, 0.25)  # of the simulated intervals: prompts, and how far their own taus scatter


class ProofBenchConfig(Settings):
    """`python -m scripts.bench.proof`: what is decoded and how often it is judged."""

    target: TargetConfig = TargetConfig(name="embedded:smollm2-135m-instruct")
    suite: SuiteConfig = SuiteConfig()
    num_prompts: PositiveInt = 16  # judged at a time
    num_draws: PositiveInt = 200
    num_simulations: PositiveInt = 20000  # of each interval
    decode: DecodeConfig = DecodeConfig(num_speculative_tokens=3, max_new_tokens=64, batch_size=8)
    output: str = "docs/results/proof.json"


def prove(config: ProofBenchConfig) -> int:
    """Measure both proofs and write the results file."""
    rows = [row for dtype in NARROWER for row in judge_decoders(config, dtype)]
    share = {(row["dtype"], row["decoder"]): row["refused_share"] for row in rows}
    ratios = {
        "noise_02_found_share": share["bfloat16", "noise"],
        "wrong_cache_dtype_found_share": min(share[dtype, "cache"] for dtype in NARROWER),
        "false_alarm_share": max(value for (_, decoder), value in share.items() if decoder.startswith("sound")),
    }
    simulated = [simulate(number, spread, config.num_simulations) for number in NUM_CLUSTERS for spread in SPREADS]
    for number in NUM_CLUSTERS:
        own = [row for row in simulated if row["clusters"] == number]
        ratios[f"interval_coverage_{number}_clusters"] = min(row["coverage"] for row in own)
    ratios["gate_pass_share_at_threshold"] = max(row["above_share"] for row in simulated)
    earlier = read_json(Path(config.output), "results") if Path(config.output).is_file() else {"ratios": {}}
    ratios |= {name: value for name, value in earlier["ratios"].items() if name.startswith("mutants")}
    planted = earlier.get("mutants")  # by `scripts.bench.mutants`
    write_results(config.output, "proof", rows=[*rows, *simulated], ratios=ratios, config=config, mutants=planted)
    return DONE


def judge_decoders(config: ProofBenchConfig, dtype: str) -> list[dict[str, Any]]:
    """Return how often each decoder's answers are refused where `num_prompts` of them are judged."""
    target = load_target(config.target.model_copy(update={"dtype": dtype}), for_chats=True)
    requests = Turns(target, load_suite(config.suite).prompts).first
    alone = config.decode.model_copy(update={"batch_size": 1, "num_speculative_tokens": 5})
    plain = answers_of(target, requests, config.decode, drafts=False)
    modes = {"sound": answers_of(target, requests, config.decode), "sound, alone": answers_of(target, requests, alone)}
    with noisy_logits():
        modes["noise"] = answers_of(target, requests, config.decode)
    with narrower_cache(NARROWER[dtype]):
        modes["cache"] = answers_of(target, requests, config.decode)
    readings = read_answers(target, [*plain, *(each for answers in modes.values() for each in answers)])
    refused, generator = dict.fromkeys(modes, 0), np.random.default_rng(0)
    for _ in range(config.num_draws):
        drawn = generator.choice(len(plain), config.num_prompts, replace=False)
        few = {mode: [answers[place] for place in drawn] for mode, answers in modes.items()}
        checks = check_modes(readings, [plain[place] for place in drawn], few, LosslessConfig().tie_noise)
        for mode in modes:
            refused[mode] += not checks[mode].is_right
    return [
        {
            "dtype": dtype,
            "decoder": mode,
            "differing_answers": differing(plain, modes[mode]),
            "refused_share": refused[mode] / config.num_draws,
        }
        for mode in modes
    ]


def answers_of(target: Target, requests: Sequence[Request], config: DecodeConfig, *, drafts: bool = True) -> list[Generation]:
    """Decode prompts of similar lengths together, by prompt lookup's drafts or by none."""
    found: list[Generation] = []
    for batch in in_batches(sorted(requests, key=lambda each: len(each.tokens)), config.batch_size):
        found += decode(target, batch, config, PromptLookup(target.device) if drafts else None)[0]
    return found


def differing(plain: Sequence[Generation], other: Sequence[Generation]) -> float:
    return float(np.mean([one.tokens != two.tokens for one, two in zip(plain, other, strict=True)]))


@contextmanager
def noisy_logits() -> Iterator[None]:
    """Add noise to the logits of every second forward that verifies."""
    own, numbers, forwards = Verifier.target_tokens, torch.Generator().manual_seed(0), [0]

    def noisy(verifier: Verifier, logits_BKV: Tensor, inputs: Any) -> Tensor:
        forwards[0] += 1
        noise_BKV = NOISE * (forwards[0] % 2) * torch.randn(logits_BKV.shape, generator=numbers)
        return own(verifier, logits_BKV + noise_BKV.to(logits_BKV), inputs)

    with patch.object(Verifier, "target_tokens", noisy):
        yield


@contextmanager
def narrower_cache(dtype: torch.dtype) -> Iterator[None]:
    """Round the target's keys and values to a narrower dtype as they are written."""
    own = RowLayer._written

    def rounded(layer: RowLayer, stored: Tensor, states: Tensor) -> Tensor:
        return own(layer, stored, states.to(dtype).to(states.dtype))

    with patch.object(RowLayer, "_written", rounded):
        yield


def simulate(num_clusters: int, spread: float, num_simulations: int) -> Mapping[str, Any]:
    """Return how often intervals of tau hold the truth, and how often they lie above it, where its gate passes."""
    generator, held, above = np.random.default_rng(0), 0, 0
    for _ in range(num_simulations):
        rounds = generator.integers(20, 60, num_clusters).astype(float)
        found = ratio_interval(rounds * generator.normal(2.0, 2.0 * spread, num_clusters), rounds)
        low, high = found.bounds or (0.0, 0.0)
        held, above = held + (low <= 2.0 <= high), above + (low > 2.0)
    shares = {"coverage": held / num_simulations, "above_share": above / num_simulations}
    return {"clusters": num_clusters, "spread": spread, **shares}


if __name__ == "__main__":
    sys.exit(run_command(ProofBenchConfig, prove, description=__doc__))
