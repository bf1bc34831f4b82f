"""The trial of a draft that is to be imported: one prompt, decoded with it on the target."""

from __future__ import annotations

from configs.errors import InputError
from configs.exchange import ImportConfig
from distill.target import Target
from eval.probe import accepted_per_round
from heads.families import FAMILIES, serve
from heads.formats.importing import Fitted


def try_out(fitted: Fitted, target: Target, config: ImportConfig, num_speculative_tokens: int) -> float | None:
    """Return how many drafts the target accepts a round; None where the config leaves the trial out.

    Args:
        fitted: the draft.
        target: the model that judges.
        config: has the prompt, and the limit below which the draft is refused.
        num_speculative_tokens: drafts a round.

    Raises:
        InputError: fewer than the config's limit are accepted.
    """
    if config.min_accepted_per_round == 0:
        return None
    family = FAMILIES[fitted.settings.kind]
    head = family.build(fitted.settings, target.model, fitted.vocabulary)
    head.load_state_dict({name: stored.load() for name, stored in fitted.weights.items()})
    accepted = accepted_per_round(
        target,
        family.propose(serve(head, target.model), target.device),
        target.encode_chat([{"role": "user", "content": config.prompt}]),
        num_speculative_tokens=num_speculative_tokens,
        max_new_tokens=config.max_new_tokens,
    )
    if accepted < config.min_accepted_per_round:
        raise InputError(
            f"the target accepts {accepted:.3f} drafts a round on one prompt, below min_accepted_per_round "
            f"{config.min_accepted_per_round:g}: the draft is another target's, or its states are counted otherwise "
            "(layer_ids, reads)"
        )
    return accepted
