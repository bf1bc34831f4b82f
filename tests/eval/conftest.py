"""Synthetic records with a known distribution, and the report made of them: what the statistics and the pages are tested on."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from distill.generation.prompts import Prompt
from eval.decoder.records import AUTOREGRESSIVE, SPECULATIVE, Generation, Round, Timing
from eval.measure.suite import Suite
from eval.report.schema import Report
from heads.sampling.draws import token_probabilities
from tests.support.distribution_checks import naive_penalised
from tests.support.reports import report_of

CATEGORIES = ("writing", "coding", "maths", "reasoning")
ACCEPTANCE = {"writing": 0.55, "coding": 0.8, "maths": 0.72, "reasoning": 0.62}


@pytest.fixture(scope="session")
def make_round() -> Callable[..., Round]:
    """Build a round by its counts: `make_round(3, 1)` drafted three, accepted one, and added the target's own token."""

    def build(drafted: int, accepted: int, *, cut: bool = False, **measured: Any) -> Round:
        tokens = tuple(range(1, drafted + 1))
        committed = tokens[:accepted] + (() if cut else (99,))
        return Round(**{"drafted": tokens, "num_accepted": accepted, "committed": committed, "overlap": None, **measured})

    return build


@pytest.fixture(scope="session")
def make_generation() -> Callable[..., Generation]:
    """Build a generation from its rounds; the prefill token is 0."""

    def build(rounds: Sequence[Round], **labels: Any) -> Generation:
        tokens = (0, *(token for round_ in rounds for token in round_.committed))
        usual = {"prompt_id": "writing-1", "category": "writing", "mode": SPECULATIVE, "stop_reason": "length"}
        return Generation(**{**usual, "prompt_tokens": (7, 8), "tokens": tokens, "rounds": tuple(rounds), **labels})

    return build


@pytest.fixture(scope="session")
def make_timing() -> Callable[..., Timing]:
    """Build a timing whose phases take fixed shares of its decode time: draft 0.2, verify 0.7, sample 0.05, the rest 0.05."""

    def build(mode: str, prompt_ids: tuple[str, ...], seconds: float, num_tokens: int, **others: Any) -> Timing:
        shares = {"draft_seconds": 0.2, "verify_seconds": 0.7, "sample_seconds": 0.05, "decode_seconds": 1.0}
        values = {name: share * seconds for name, share in shares.items()}
        values |= {"num_tokens": num_tokens, "num_rounds": num_tokens, "prefill_seconds": 0.1}
        return Timing(**{"mode": mode, "prompt_ids": prompt_ids, "repeat": 0, **values, **others})

    return build


@pytest.fixture(scope="session")
def random_generations(make_round, make_generation) -> list[Generation]:
    """32 prompts in four categories, three drafts a round accepted by coin throws, some texts ended inside a round."""
    dice, other_dice = random.Random(0), random.Random(2)
    generations = []
    for number in range(32):
        category = CATEGORIES[number % 4]
        rounds = []
        for _ in range(dice.randint(10, 25)):
            accepted = next((i for i in range(3) if dice.random() > ACCEPTANCE[category]), 3)
            overlap = tuple(dice.uniform(0.4, 0.9) for _ in range(min(accepted + 1, 3)))
            uncovered = tuple(other_dice.uniform(0, 0.1) for _ in overlap)
            rounds.append(make_round(3, accepted, overlap=overlap, uncovered=uncovered))
        if number % 3 == 0:
            rounds.append(make_round(3, dice.randint(1, 3), cut=True))
        generations.append(make_generation(rounds, prompt_id=f"{category}-{number}", category=category))
    return generations


@pytest.fixture(scope="session")
def random_timings(random_generations, make_timing) -> list[Timing]:
    """Two interleaved repeats of plain, speculative and prompt-lookup decoding, a prompt at a time."""
    dice = random.Random(1)
    timings = []
    for repeat in range(2):
        for generation in random_generations:
            num_tokens, num_rounds = len(generation.tokens) - 1, len(generation.rounds)
            seconds = {AUTOREGRESSIVE: 0.040 * num_tokens, SPECULATIVE: 0.058 * num_rounds, "prompt_lookup": 0.037 * num_tokens}
            for mode, exact in seconds.items():
                measured = exact * dice.uniform(0.97, 1.03)
                timings.append(make_timing(mode, (generation.prompt_id,), measured, num_tokens, repeat=repeat))
    return timings


@pytest.fixture(scope="session")
def shared_inputs(random_generations, random_timings, make_round, make_generation) -> dict:
    """Everything `report_of` takes, for a run of 32 prompts with a prompt-lookup baseline; only for copying."""
    lookup, plain = [], []
    for number, generation in enumerate(random_generations):
        labels = {"prompt_id": generation.prompt_id, "category": generation.category}
        lookup.append(make_generation([make_round(3, number % 2)] * 20, mode="prompt_lookup", **labels))
        plain.append(make_generation([make_round(0, 0)] * (len(generation.tokens) - 1), mode=AUTOREGRESSIVE, **labels))
    divergence = {"prompt_id": "coding-1", "position": 17, "plain_token": 3, "speculative_token": 5}
    return {
        "target": {
            "name": "embedded:smollm2-135m-instruct",
            "weights_sha256": "a" * 64,
            "tokenizer_sha256": "d" * 64,
            "chat_template_sha256": "e" * 64,
            "dtype": "bfloat16",
        },
        "draft": {"kind": "draft_lm", "path": "runs/distill/artifact", "sha256": "b" * 64, "target_sha256": "a" * 64},
        "decode": {"num_speculative_tokens": 3, "temperature": 0.0, "verification": "token", "batch_size": 1, "seed": 0},
        "prompts": Suite(
            name="house64",
            source="eval/suites/house64.jsonl",
            format="turns",
            sha256="c" * 64,
            prompts=tuple(
                Prompt(prompt_id=each.prompt_id, category=each.category, turns=(f"Question {each.prompt_id}: why?",))
                for each in random_generations
            ),
            trained_on=(),
        ),
        "generations": [*plain, *random_generations, *lookup],
        "timings": random_timings,
        "lossless": {
            "verdict": "lossless_up_to_ties",
            "checked_prompts": 32,
            "divergences": [divergence | {"logit_gap": 0.03, "tie_tolerance": 0.25}],
        },
        "hardware": {"cpu": "a test machine", "cores": 2},
        "versions": {"python": "3.11", "torch": "2.13.0"},
        "git": {"commit": "0123abc", "dirty": False},
        "command": ["eval/run.py", "--config", "configs/eval/heads.yaml"],
    }


@pytest.fixture(scope="session")
def report(shared_inputs) -> Report:
    """A whole report, not to be changed: `tests.support.reports.changed` makes a changed copy."""
    return report_of(shared_inputs)


@pytest.fixture
def report_inputs(shared_inputs) -> dict:
    """Everything `report_of` takes, to change at will."""
    return copy.deepcopy(shared_inputs)


@pytest.fixture(scope="session")
def quality_section() -> dict:
    """What a report says of the worth of its answers, where a run asks for it."""
    return {
        "num_answers": 32,
        "num_identical": 30,
        "num_failed": 0,
        "num_cut": 29,
        "perplexity": {
            "autoregressive": 1.52,
            "autoregressive_ci": [1.40, 1.70],
            "speculative": 1.55,
            "speculative_ci": [1.41, 1.72],
            "ratio": 1.02,
            "ratio_ci": [0.99, 1.05],
        },
        "exact_match": {
            "autoregressive": 0.25,
            "autoregressive_ci": [0.1, 0.4],
            "speculative": 0.22,
            "speculative_ci": None,
            "difference": -0.031,
            "difference_ci": [-0.09, 0.01],
            "num_changed": 1,
        },
    }


@pytest.fixture(scope="session")
def exact_distribution():
    """A function that gives the joint probabilities of all continuations of a prompt, a dimension a token."""

    def distribution_of(model, prompt, num_tokens, config, answer=()):
        if num_tokens == 0:
            return torch.tensor(1.0)
        logits = model(input_ids=torch.tensor([[*prompt, *answer]]), use_cache=False).logits[0, -1]
        distribution = token_probabilities(torch.tensor(naive_penalised(logits.tolist(), prompt, answer, config)), config)
        return torch.stack(
            [
                distribution[token] * distribution_of(model, prompt, num_tokens - 1, config, (*answer, token))
                for token in range(len(distribution))
            ]
        )

    return distribution_of
