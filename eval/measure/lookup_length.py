"""How many tokens a lookup drafts a round: as many as are fastest for it here, whatever the draft under evaluation drafts.

A way of decoding that needs no training is a rival only at its best. It is timed at a few numbers of drafts on some of the
suite's own prompts, so that the choice is, if anything, in its favour.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from accelerate import PartialState
from accelerate.utils import broadcast_object_list

from configs.runtime.resumable import Journal
from configs.schema.evaluation import LOOKUPS, EvalConfig
from eval.decoder.decode import Request, decode
from eval.measure.record_files import JOURNAL
from heads.frozen.loading import Target
from heads.proposers.prompt_lookup import PromptLookup

log = logging.getLogger("draftsmith")

KEY = "lookup"
LENGTHS = (2, 4, 8)  # beside the draft's own number
NUM_PROMPTS = 4


def find_lookup_length(
    config: EvalConfig, requests: Sequence[Request], target: Target, state: PartialState, job: str
) -> EvalConfig:
    """Return the config with `lookup_num_speculative_tokens`, chosen where it is None and a baseline looks up.

    All processes must call this; the main one's number is everyone's. A run that was cut off goes on with the one it had.

    Args:
        requests: of the suite.
        job: fingerprint of the evaluation.
    """
    own = config.decode.num_speculative_tokens
    if config.lookup_num_speculative_tokens is not None or not own or not set(config.baselines) & set(LOOKUPS):
        return config
    journal = Journal(Path(config.output) / JOURNAL.format(rank=KEY), job)
    (known,) = broadcast_object_list([journal.read().get(KEY) if state.is_main_process else None])
    if known is None:
        (known,) = broadcast_object_list([fastest_length(config, requests, target)])
        if state.is_main_process:
            journal.append(KEY, known)
    log.info("prompt lookup drafts %d tokens a round, the fastest of %s on %d prompts", *known)
    return config.model_copy(update={"lookup_num_speculative_tokens": known[0]})


def fastest_length(config: EvalConfig, requests: Sequence[Request], target: Target) -> tuple[int, list[int], int]:
    """Return the number of drafts a round at which prompt lookup is fastest, those that were tried, and by how many prompts."""
    lengths = sorted({*LENGTHS, config.decode.num_speculative_tokens})
    step = max(1, len(requests) // NUM_PROMPTS)
    chosen = list(requests[::step][: max(NUM_PROMPTS, config.decode.batch_size)])
    plain = config.decode.model_copy(update={"tree": None, "stopping": None, "lossy": None})
    settings = {length: plain.model_copy(update={"num_speculative_tokens": length}) for length in lengths}
    seconds, tokens = dict.fromkeys(lengths, 0.0), dict.fromkeys(lengths, 0)
    for start in range(0, len(chosen), plain.batch_size):
        batch = chosen[start : start + plain.batch_size]
        for length in lengths[:: -1 if start % 2 else 1]:
            _, timing = decode(target, batch, settings[length], PromptLookup(target.device))
            seconds[length] += timing.decode_seconds
            tokens[length] += timing.num_tokens
    return max(lengths, key=lambda length: tokens[length] / max(seconds[length], 1e-9)), lengths, len(chosen)
