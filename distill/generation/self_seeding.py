"""The choice of self-seeded prompts: the first usable ones by number, out of those that the target writes.

Turn n is a function of (seed, n) (`distill.generation.steering`), so neither the batch size nor the number of processes favours
short turns, nor changes which turns are drawn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from configs.runtime.errors import InputError
from configs.runtime.terminal import Tokens, progress
from configs.schema.data import PromptsConfig
from distill.dataset.conversations import folded_text
from distill.generation.prompts import DUPLICATE, Prompt
from distill.generation.sources import Admission
from distill.generation.split import NearDuplicates
from distill.generation.steering import Turn, Writer, plan_prompt
from heads.frozen.loading import Target

MIN_CHARACTERS = 8
MIN_YIELD = 0.05
MIN_TURNS_JUDGED = 256  # the yield is not judged on fewer

UNUSABLE = "self_seeded_turn_unusable"  # not ended in time, with a special token inside, or filling the context
TOO_SHORT = "self_seeded_turn_too_short"
NEAR_DUPLICATE = "near_duplicate"


def self_seed(
    target: Target,
    config: PromptsConfig,
    *,
    batch_size: int,
    seed: int,
    name: str = "",
    rank: int = 0,
    num_processes: int = 1,
    exchange: Callable[[list[Turn]], list[Turn]] = lambda turns: turns,
    admission: Admission | None = None,
) -> tuple[list[Prompt], dict[str, int]]:
    """Let the target write `config.num_prompts` distinct prompts, and count the turns thrown away by reason.

    This process writes the share of its `rank`; `exchange` gathers the turns of all processes, the same everywhere.
    """
    tokens, near = Tokens(), NearDuplicates()
    writer = Writer(target, config, tokens, batch_size=batch_size, seed=seed, name=name)
    chosen: dict[str, Prompt] = {}  # by normalised text
    dropped = Counter[str]()
    num_written = 0

    def objection(prompt: Prompt) -> str | None:
        if not prompt.turns:
            return UNUSABLE
        if len(prompt.user_text) < MIN_CHARACTERS:
            return TOO_SHORT
        if folded_text(prompt.user_text) in chosen:
            return DUPLICATE
        if config.kinds is not None and not near.add(prompt.user_text):
            return NEAR_DUPLICATE
        return None if admission is None else admission.objection(prompt)

    with progress("self-seeded prompts", config.num_prompts, "prompts", tokens=tokens) as advance:
        while (before := len(chosen)) < config.num_prompts:
            # A quarter more than is missing: most turns are usable, and a second wave would begin with a nearly empty batch.
            wave = range(num_written, num_written + max(batch_size, (config.num_prompts - before) * 5 // 4))
            num_written = wave.stop
            for number, said in sorted(exchange(writer.write([each for each in wave if each % num_processes == rank]))):
                if len(chosen) == config.num_prompts:
                    break
                kind = plan_prompt(config, seed, name, number).kind
                prompt = Prompt(prompt_id=f"self-{number}", category=kind, turns=tuple(said or ()))
                if (reason := objection(prompt)) is None:
                    chosen[folded_text(prompt.user_text)] = prompt
                else:
                    dropped[reason] += 1
            advance(len(chosen) - before)
            if num_written >= MIN_TURNS_JUDGED and len(chosen) < MIN_YIELD * num_written:
                raise InputError(
                    f"only {len(chosen)} of {num_written} self-seeded turns are usable: raise prompts.max_prompt_tokens, lower "
                    "prompts.temperature, or give prompts.source file or dataset"
                )
    return list(chosen.values()), dict(sorted(dropped.items()))
