"""The trial of an imported draft: what its target accepts of it, with its config as it was read and as it may have been meant.

Programs count the ids of hidden states in two ways, one apart, and MTP modules read the last state before or after the final
norm. So a few prompts are decoded with either reading, unless the import was told which to take.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from configs.runtime.errors import InputError
from configs.schema.commands.release import ImportConfig
from configs.schema.decoding import DecodeConfig
from eval.decoder.decode import Request, decode
from heads.families.registry import FAMILIES, serve
from heads.formats.importing.importer import Fitted, drafts_a_round, fit
from heads.formats.importing.reading import ExternalDraft, read_external
from heads.frozen.loading import Target

MIN_GAIN = 1.05  # times the accepted drafts by which another reading must be ahead; ids one off lose a tenth and more
OTHERS = {"block_output": "h", "h": "block_output", "post_norm": "pre_norm", "pre_norm": "post_norm"}


def read_and_fit(folder: Path, config: ImportConfig, target: Target) -> tuple[ExternalDraft, Fitted, int]:
    """Read a draft as the config says and fit it to the target; return it with the drafts of a round."""
    external = read_external(folder, layer_ids=config.layer_ids, reads=config.reads)
    try:
        fitted = fit(external, target.model)
    except InputError as error:
        raise InputError(f"{folder} ({external.form}) does not fit {config.target.name}: {error}") from error
    return external, fitted, drafts_a_round(external, config.num_speculative_tokens, fitted.settings)


def try_out(folder: Path, config: ImportConfig, target: Target, external: ExternalDraft, fitted: Fitted, tokens: int) -> float:
    """Return the drafts that the target accepts a round; an InputError where they are too few, or another reading has more."""
    accepted = accepted_per_round(fitted, target, config, tokens)
    said = f"{folder}: the target accepts {accepted:.3f} drafts a round on {len(config.prompts)} prompts"
    key, taken = ("layer_ids", external.layer_ids) if external.layer_ids else ("reads", getattr(fitted.settings, "reads", None))
    if taken is not None and getattr(config, key) is None:
        other = OTHERS[taken]
        more = _accepted_otherwise(folder, config.model_copy(update={key: other}), target)
        if more > max(MIN_GAIN * accepted, config.min_accepted_per_round):
            raise InputError(
                f"{said}, and {more:.3f} with {key}={other}: --set {key}={other} takes it so, {key}={taken} as it was"
            )
    if accepted < config.min_accepted_per_round:
        raise InputError(
            f"{said}, below min_accepted_per_round {config.min_accepted_per_round:g}: the draft is another target's, or does "
            "something that its config does not say"
        )
    return accepted


def _accepted_otherwise(folder: Path, config: ImportConfig, target: Target) -> float:
    """Return what is accepted with another reading; 0 where the target has no such states."""
    try:
        _, fitted, tokens = read_and_fit(folder, config, target)
    except InputError:
        return 0.0
    return accepted_per_round(fitted, target, config, tokens)


def accepted_per_round(fitted: Fitted, target: Target, config: ImportConfig, num_speculative_tokens: int) -> float:
    """Decode the config's prompts with a draft; return how many drafts stay a round on average."""
    family = FAMILIES[fitted.settings.kind]
    head: Any = family.build(fitted.settings, target.model, fitted.vocabulary)
    for name, value in head.state_dict().items():  # one after another: only one tensor is in memory twice
        value.copy_(fitted.weights[name])
    settings = DecodeConfig(num_speculative_tokens=num_speculative_tokens, max_new_tokens=config.max_new_tokens)
    prompts = [target.encode_chat([{"role": "user", "content": prompt}]) for prompt in config.prompts]
    requests = [Request(prompt_id=str(number), category="", tokens=tuple(tokens)) for number, tokens in enumerate(prompts)]
    generations, _ = decode(target, requests, settings, family.propose(serve(head, target.model), target.device))
    accepted = [each.num_accepted for generation in generations for each in generation.rounds]
    return sum(accepted) / len(accepted) if accepted else 0.0
