"""What benchmarks of heads decode: suites of prompts for the target, and a journal of what was measured of them."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from configs.runtime.files import sha256_of
from configs.runtime.resumable import Journal, fingerprint
from distill.dataset.conversations import read_conversations
from distill.generation.prompts import Prompt
from eval.decoder.decode import Request, check_decodable
from eval.measure.suite import Turns, fit_suite, load_suite
from heads.frozen.loading import Target, load_target
from heads.metadata import WEIGHTS_FILE
from scripts.lab.bench.provenance import describe_origin
from scripts.lab.bench.turns import after_messages, first_requests, first_turns, in_chat_template, in_long_chat, measured_rows
from scripts.lab.head_settings import HeadsSettings
from scripts.lab.measuring import to_request
from scripts.lab.trained_runs import TrainingRun

MEASURED = "{name}.partial.jsonl"  # in the folder of the runs, for each results file: what a run that was cut off had measured


class OpenSuites(NamedTuple):
    """What the heads of some runs are decoded on."""

    target: Target
    requests: dict[str, list[Request]]  # by suite
    prompts: list[Prompt]  # of the suites that are not of the held-out conversations
    choosing: list[Request]  # the held-out prompts that chose the checkpoints
    journal: Journal


def open_suites(config: HeadsSettings, runs: Sequence[TrainingRun]) -> OpenSuites:
    """Load the target and the suites that the heads of these runs are decoded on."""
    recipes = [run.recipe for run in runs]
    held_out = Path(recipes[0].data.held_out)
    num_choosing = max(recipe.held_out.num_prompts for recipe in recipes)
    target = load_target(recipes[0].target)
    requests, prompts = suite_requests(config, held_out, num_choosing, target)
    path = Path(config.runs) / MEASURED.format(name=Path(config.output).stem)
    return OpenSuites(
        target=target,
        requests=requests,
        prompts=prompts,
        choosing=first_requests(read_conversations(held_out)[:num_choosing]),
        journal=Journal(path, measuring_fingerprint(config, runs, requests)),
    )


def suite_requests(
    config: HeadsSettings, held_out: Path, num_choosing: int, target: Target
) -> tuple[dict[str, list[Request]], list[Prompt]]:
    """Return what is decoded, by suite, and the prompts of those suites that are not of the held-out conversations."""
    rows = {
        name: first_turns(measured_rows(held_out, config.num_prompts, num_choosing, sources))
        for name, sources in config.held_out.items()
    }
    requests = {name: list(map(to_request, own)) for name, own in rows.items()}
    first = next(iter(rows.values()))
    for name, system in config.systems.items():
        requests[name] = [after_messages(target, row, [{"role": "system", "content": system}]) for row in first]
    for name, template in config.templates.items():
        requests[name] = [in_chat_template(target, row, template) for row in first]
    others = first_turns(read_conversations(held_out)[num_choosing:])
    for length in config.lengths:
        few = first[-config.num_long_prompts :]
        requests[f"{length} tokens"] = [
            in_long_chat(target, row, random.Random(row.prompt_id).sample(others, len(others)), length) for row in few
        ]
    suites = [load_suite(each) for each in config.suites]
    for suite, each in zip(suites, config.suites, strict=True):
        requests[suite.name] = Turns(target, fit_suite(suite, target, each.on_too_long, config.max_new_tokens).prompts).first
    for of_suite in requests.values():
        check_decodable(target, of_suite)
    return requests, [prompt for suite in suites for prompt in suite.prompts]


def measuring_fingerprint(config: HeadsSettings, runs: Sequence[TrainingRun], requests: Mapping[str, Sequence[Request]]) -> str:
    """Return a hash of all that decides what is measured, the machine and the commit included."""
    settings = config.model_dump(mode="json", exclude={"output", "plot"})
    prompts = [[name, *([each.prompt_id, *each.tokens] for each in of_suite)] for name, of_suite in requests.items()]
    artifacts = [[run.name, sha256_of(run.artifact / WEIGHTS_FILE)] for run in runs]
    return fingerprint(settings, prompts, artifacts, describe_origin(), torch.get_num_threads())
