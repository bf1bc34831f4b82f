"""Which prompts a source gives, before the target has seen any: those of a file or a data set, the first ones or all."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from itertools import chain, islice

from configs.schema.data import PromptsConfig
from distill.generation.prompts import Prompt, dataset_prompts, load_dataset_prompts, read_prompts

logger = logging.getLogger("draftsmith")


def list_prompts(settings: PromptsConfig) -> list[Prompt] | None:
    """Return the first `num_prompts` prompts of a file or data set; None where the target is to write them."""
    if settings.source == "self_seeded":
        return None
    if settings.source == "dataset":
        return load_dataset_prompts(settings)
    prompts = read_prompts(settings)
    if len(prompts) != settings.num_prompts:
        found = "fewer than" if len(prompts) < settings.num_prompts else "of which the first are taken:"
        logger.info("%s holds %d prompts, %s num_prompts = %d", settings.path, len(prompts), found, settings.num_prompts)
    return prompts[: settings.num_prompts]


def list_source(settings: PromptsConfig, *, whole: bool) -> Iterable[Prompt] | None:
    """Return a source's prompts, as many as it is to give or, the rest of a data set only when asked for, the whole."""
    if not whole or settings.source == "self_seeded":
        return list_prompts(settings)
    if settings.source == "file":
        return read_prompts(settings)
    rows = dataset_prompts(settings)
    return chain(list(islice(rows, settings.num_prompts)), rows)
