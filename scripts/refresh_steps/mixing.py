"""What is trained on, the traffic's conversations with some of the old ones, and what is measured.

Of the held-out prompts of the traffic every fourth chooses the checkpoint during training; the others are measured, so that
the verdict is not on prompts that chose what it judges.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from configs.runtime.errors import InputError
from configs.runtime.files import new_folder, read_object, write_json, write_text
from configs.schema.commands.refreshing import RefreshConfig
from distill.dataset.conversations import (
    MANIFEST,
    Conversation,
    check_written_for,
    index_of,
    open_conversations,
    text_hash,
)
from eval.measure.suite import load_suite
from heads.artifact import read_training_prompts
from heads.frozen.identity import TargetIdentity

log = logging.getLogger("draftsmith")
CHOOSING = 4  # of so many held-out prompts, one


def known_prompts(served: Path) -> set[int]:
    """Return the hashes of the prompts that the served draft was trained on, as far as it says."""
    hashes = read_training_prompts(served)
    return set() if hashes is None else set(hashes.tolist())


def mix(config: RefreshConfig, served: Path, data: Path, replay: Path | None, folder: Path) -> None:
    """Write train.jsonl without what the old suite asks, and held_out.jsonl and suite.jsonl without what was trained on."""
    known = known_prompts(served)
    manifest = read_object(data / MANIFEST, "data manifest")
    own, all_held_out = open_conversations(data / "train.jsonl"), open_conversations(data / "held_out.jsonl")
    held_out = [row for row in all_held_out if text_hash(row.user_text) not in known]
    choosing, measured = _share_out(held_out, config.max_suite_prompts)
    asked = {text_hash(text) for prompt in load_suite(config.old_suite).prompts for text in prompt.user_texts}
    fresh = [row for row in own if text_hash(row.user_text) not in asked]
    if not fresh:
        raise InputError(
            f"old_suite: {config.old_suite.path} holds every prompt that could be trained on; name another, or more traffic"
        )
    not_again = asked | set(index_of(all_held_out).user_texts.tolist())
    identity = TargetIdentity.from_dict(manifest["target"], str(data / MANIFEST))
    replayed = [] if replay is None else _draw(config, replay, identity, not_again, len(fresh))
    counts: dict[str, Any] = {
        "train": {
            "conversations": len(fresh) + len(replayed),
            "by_source": {"traffic": len(fresh), "replay": len(replayed)},
            "left_out_of_old_suite": len(own) - len(fresh),
        },
        "held_out": {"conversations": len(choosing), "left_out_trained_on": len(all_held_out) - len(held_out)},
    }
    with new_folder(folder) as scratch:
        write_text(scratch / "train.jsonl", "".join(row.to_line() for row in [*fresh, *replayed]))
        write_text(scratch / "held_out.jsonl", "".join(row.to_line() for row in choosing))
        write_text(scratch / "suite.jsonl", "".join(row.to_line() for row in measured))
        write_json(scratch / MANIFEST, {**manifest, "counts": counts, "sha256": {}})
    log.info("training on %d conversations of the traffic and %d of the old data", len(fresh), len(replayed))


def _draw(
    config: RefreshConfig, replay: Path, identity: TargetIdentity, not_again: Collection[int], num_fresh: int
) -> list[Conversation]:
    """Return the old conversations to train on again, beside so many new ones."""
    for difference in check_written_for(replay, identity):
        log.warning("%s, which is replayed, was written by a target with other %s", replay, difference)
    old = open_conversations(replay)
    places = [place for place, text in enumerate(index_of(old).user_texts.tolist()) if text not in not_again]
    wanted = round(num_fresh * config.replay_share / (1 - config.replay_share))
    if wanted > len(places):
        log.warning("%s has %d conversations to replay, of the %d wanted", replay, len(places), wanted)
    return [old[place] for place in sorted(random.Random(config.seed).sample(places, min(wanted, len(places))))]


def _share_out(held_out: Sequence[Conversation], max_measured: int) -> tuple[list[Conversation], list[Conversation]]:
    """Return the conversations of prompts that choose a checkpoint, and the first turns of those that are measured."""
    prompts = list(dict.fromkeys(row.prompt_id for row in held_out))
    if len(prompts) < 2:
        raise InputError(
            f"held_out_share: {len(prompts)} prompt of the traffic is held out that the served draft was not trained on, and "
            "two are needed, to choose a checkpoint and to measure: raise it, or give a longer log"
        )
    chosen_by = set(prompts[::CHOOSING])
    measured = [each for each in prompts if each not in chosen_by][:max_measured]
    firsts = {row.prompt_id: row for row in held_out if row.turn == 0 and row.prompt_id in measured}
    return [row for row in held_out if row.prompt_id in chosen_by], list(firsts.values())
