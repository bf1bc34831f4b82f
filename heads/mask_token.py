"""The token that stands where a parallel head is to say the token itself: P-EAGLE and DFlash.

A target has no token of that meaning; any that a text does not go on after serves, because the head learns what it stands
for.
"""

from __future__ import annotations

from transformers import PreTrainedModel

from configs.errors import InputError


def mask_token(given: int | None, target: PreTrainedModel) -> int:
    """Return the id of the mask token: the given one, else the target's padding token, else its first end-of-text token.

    Raises:
        InputError: the target has no such token, or the given id is not in its vocabulary.
    """
    config = target.config.get_text_config()
    if given is not None:
        if given >= config.vocab_size:
            raise InputError(f"head.mask_token_id: the target's tokens are 0 to {config.vocab_size - 1}, got {given}")
        return given
    for declared in (config.pad_token_id, config.eos_token_id):
        ids = declared if isinstance(declared, list) else [declared]
        known = [token for token in ids if token is not None and 0 <= token < config.vocab_size]
        if known:
            return int(known[0])
    raise InputError("head.mask_token_id: the target's config names neither a padding nor an end-of-text token; give an id")
