"""The prompts that an engine is asked: chats of text alone, which every server takes as they are."""

from __future__ import annotations

import logging

from configs.schema.commands.release import PROMPTS
from configs.schema.evaluation import SuiteConfig
from distill.generation.prompts import UNCATEGORISED, Prompt
from eval.measure.suite import load_suite, spread_over_categories

log = logging.getLogger("draftsmith")


def chat_prompts(path: str | None, number: int) -> list[Prompt]:
    """Return so many prompts of a file, or all it has; general ones without a file, or where it has none of text alone."""
    given = () if path is None else load_suite(SuiteConfig(path=path)).prompts
    texts = [each for each in given if not each.tools and not each.media and all(len(said) == 2 for said in each.messages)]
    if given and not texts:
        log.warning("%s holds no chat without tools, images and sounds: general prompts take their place", path)
    general = [Prompt(prompt_id=str(place), category=UNCATEGORISED, turns=(text,)) for place, text in enumerate(PROMPTS)]
    return spread_over_categories(texts or general, number)
