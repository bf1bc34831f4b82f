"""Which prompts a source gives, before the target has seen any: those of a file or a data set, the first ones or all."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from itertools import chain, islice

from configs.runtime.errors import InputError
from configs.runtime.wheels import wheel_file
from configs.schema.data import PromptsConfig
from distill.generation.prompts import Prompt, dataset_prompts, load_dataset_prompts, read_prompts
from heads.frozen.loading import Target

logger = logging.getLogger("draftsmith")


def list_prompts(settings: PromptsConfig) -> list[Prompt] | None:
    """Return the first `num_prompts` prompts of files or a data set; None where the target is to write them."""
    if settings.source == "self_seeded":
        return None
    if settings.source == "dataset":
        return load_dataset_prompts(settings)
    prompts = read_prompts(_at_hand(settings))
    if len(prompts) != settings.num_prompts:
        found = "fewer than" if len(prompts) < settings.num_prompts else "of which the first are taken:"
        logger.info("%s holds %d prompts, %s num_prompts = %d", settings.path, len(prompts), found, settings.num_prompts)
    return prompts[: settings.num_prompts]


def list_source(settings: PromptsConfig, *, whole: bool) -> Iterable[Prompt] | None:
    """Return a source's prompts, as many as it is to give or, the rest of a data set only when asked for, the whole."""
    if not whole or settings.source == "self_seeded":
        return list_prompts(settings)
    if settings.source != "dataset":
        return read_prompts(_at_hand(settings))
    rows = dataset_prompts(settings)
    return chain(list(islice(rows, settings.num_prompts)), rows)


def _at_hand(settings: PromptsConfig) -> PromptsConfig:
    """Return the settings with the path of the file itself, where it lies in a package's wheel."""
    if settings.source != "package":
        return settings
    path = wheel_file(str(settings.package), str(settings.sha256), str(settings.path), "prompts")
    return settings.model_copy(update={"path": str(path)})


def check_readable(target: Target, prompts: Sequence[Prompt], *, written_here: bool) -> None:
    """Refuse media where others than the local target's plain decoding write answers; warn of tools that nothing reads.

    Raises:
        InputError: a prompt, which is named, brings images or sounds.
    """
    with_media = next((prompt for prompt in prompts if prompt.media), None)
    if with_media is not None and not written_here:
        raise InputError(
            f"prompt {with_media.prompt_id} brings images or sounds, which the local target alone reads, without a draft: set "
            "answers.written_by to target and answers.draft to null"
        )
    num_with_tools = sum(bool(prompt.tools) for prompt in prompts)
    if num_with_tools and "tools" not in str(target.tokenizer.chat_template):
        logger.warning("%d prompts bring tools, which the chat template of the target does not read", num_with_tools)


def check_given(prompts: Sequence[Prompt]) -> None:
    """Raise `InputError` where a prompt, which is named, brings no answer."""
    without = [prompt.prompt_id for prompt in prompts if prompt.answer is None]
    if without:
        raise InputError(
            f"answers.written_by is 'dataset', and {len(without)} of {len(prompts)} prompts bring no answer, the first is "
            f"{without[0]}: expected chat messages that end with one by the assistant; correct or leave out those rows, or set "
            "answers.written_by=target"
        )
