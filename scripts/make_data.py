"""Prompts in, conversations written by the target out: `python scripts/make_data.py --config configs/data/demo.yaml`.

Under `accelerate launch` several processes share the work. Rerun the same command to resume.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if not __package__:  # run as a script: the checkout's root takes the place of this folder, which Python put first
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from configs.startup import guard_imports

    guard_imports()

from configs.runtime.command import run_command
from configs.schema.data import DataConfig

if TYPE_CHECKING:
    from distill.generation.answers import Write
    from heads.frozen.loading import Target


def main(config: DataConfig) -> None:
    """Make the data set that `config` describes."""
    # torch and transformers take seconds to import: a mistyped key is reported before that.
    from distill.generation.make_dataset import make_dataset

    make_dataset(config, None if config.answers.draft is None else partial(speculative_writer, config))


def speculative_writer(config: DataConfig, target: Target) -> Write:
    """Return what writes answers by the decoder with `config.answers.draft`, for the target.

    Raises:
        InputError: see `heads.artifact.load_draft`.
    """
    from configs.schema.decoding import DecodeConfig
    from distill.generation.continuation import not_finite
    from eval.decoder.decode import Request, decode
    from eval.decoder.records import FAILED
    from heads.artifact import load_draft

    answers = config.answers
    proposer = load_draft(str(answers.draft), target.identity, target.model).proposer

    def write(ids: Sequence[Sequence[int]], requests: Sequence[int], limits: Sequence[int]) -> list[list[int]]:
        settings = DecodeConfig(
            temperature=answers.temperature,
            top_k=answers.top_k,
            top_p=answers.top_p,
            num_speculative_tokens=answers.num_speculative_tokens,
            max_new_tokens=max(limits),
            batch_size=len(ids),
            seed=config.seed,
        )
        batch = [Request(prompt_id=str(name), category="", tokens=tuple(row)) for name, row in zip(requests, ids, strict=True)]
        written = decode(target, batch, settings, proposer)[0]
        if any(answer.stop_reason in FAILED for answer in written):
            raise not_finite(target)
        return [list(answer.tokens[:limit]) for answer, limit in zip(written, limits, strict=True)]

    return write


if __name__ == "__main__":
    sys.exit(run_command(DataConfig, main, description="Let the target write training conversations."))
