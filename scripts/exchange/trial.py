"""The trial of an imported draft: decode a few prompts with it, and test other readings of its config (layer ids, norm)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from configs.runtime.errors import InputError
from configs.schema.commands.release import TAP_OF_ID, ImportConfig, LayerIds
from configs.schema.decoding import DecodeConfig
from eval.decoder.decode import Request, decode
from heads.families.registry import FAMILIES, serve
from heads.formats.importing.importer import Fitted
from heads.frozen.loading import Target
from heads.modules.output_head import HeadModule
from scripts.exchange.tap_convention import TapComparison, compare_readings, other_readings


@dataclass(frozen=True, kw_only=True)
class Trial:
    """How many drafts the target accepts a round, and what the user is warned of."""

    accepted_per_round: float
    warnings: list[str]


def try_out(
    fitted: Fitted, target: Target, config: ImportConfig, num_speculative_tokens: int, layer_ids: LayerIds | None
) -> Trial | None:
    """Decode with a draft, and see whether its config may have meant other states; None where the config leaves the trial out.

    Raises:
        InputError: fewer than the config's limit are accepted; or with another reading of the draft's config clearly
            more stay, and the config does not say which one to take.
    """
    if config.min_accepted_per_round == 0:
        return None
    family = FAMILIES[fitted.settings.kind]
    head = family.build(fitted.settings, target.model, fitted.vocabulary)
    for name, value in head.state_dict().items():  # one after another: only one tensor is in memory twice
        value.copy_(fitted.weights[name].load())
    head = serve(head, target.model)
    prompts = [target.encode_chat([{"role": "user", "content": prompt}]) for prompt in config.prompts]
    settings = DecodeConfig(num_speculative_tokens=num_speculative_tokens, max_new_tokens=config.max_new_tokens)
    requests = [Request(prompt_id=str(number), category="", tokens=tuple(tokens)) for number, tokens in enumerate(prompts)]
    generations, _ = decode(target, requests, settings, family.propose(head, target.device))
    answers = [generation.tokens for generation in generations]
    accepted = [each.num_accepted for generation in generations for each in generation.rounds]
    accepted_per_round = sum(accepted) / len(accepted) if accepted else 0.0
    better = _better_reading(cast(HeadModule, head), target, prompts, answers)
    hint = "" if better is None else _hint(better, layer_ids, fitted)
    if accepted_per_round < config.min_accepted_per_round:
        raise InputError(
            f"the target accepts {accepted_per_round:.3f} drafts a round on {len(prompts)} prompts, below "
            f"min_accepted_per_round {config.min_accepted_per_round:g}: "
            + (hint or "the draft is another target's, or does something that its config does not say")
        )
    if better is None:
        return Trial(accepted_per_round=accepted_per_round, warnings=[])
    chosen = config.layer_ids is not None if better.reading.shift else config.reads is not None
    if not chosen:
        raise InputError(f"its config seems to mean other states than it was taken to mean: {hint}")
    return Trial(accepted_per_round=accepted_per_round, warnings=[f"taken as told, but {hint}"])


def _better_reading(
    head: HeadModule, target: Target, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> TapComparison | None:
    """Return the best reading among those clearly ahead of the draft's own, if any is."""
    texts = [([*prompt, *answer], len(prompt)) for prompt, answer in zip(prompts, answers, strict=True) if len(answer) > 2]
    readings = other_readings(head.taps, target.model, getattr(head.settings, "reads", None))
    if not texts or not readings:
        return None
    clear = [each for each in compare_readings(head, target.model, texts, readings) if each.is_clear]
    return max(clear, key=lambda each: each.expected, default=None)


def _hint(better: TapComparison, layer_ids: LayerIds | None, fitted: Fitted) -> str:
    """Say which reading is accepted more, and the setting that takes it."""
    words = (
        f"with {better.reading.name} more of its drafts stay, {better.expected:.3f} a position in place of "
        f"{better.expected - better.gain:.3f} (the difference is known to {better.gain_error:.3f})"
    )
    if better.reading.other_norm:
        other = "pre_norm" if fitted.settings.reads == "post_norm" else "post_norm"
        return f"{words}; --set reads={other} takes it so, --set reads={fitted.settings.reads} as it was taken"
    by_tap = {tap: name for name, tap in TAP_OF_ID.items()}
    taken: LayerIds = layer_ids or "h"
    other_ids = by_tap.get(TAP_OF_ID[taken] + better.reading.shift)
    if other_ids is None:
        return f"{words}; correct the ids in its config.json, or --set layer_ids={taken} takes them as they stand"
    return f"{words}; --set layer_ids={other_ids} takes them so, --set layer_ids={taken} as they were taken"
