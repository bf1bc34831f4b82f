"""What `--from ARTIFACT` adds to a run: the served draft, its recipe, and its traffic mixed with its old data.

Of the traffic's held-out prompts every fourth chooses the checkpoint in training; the others are measured, so that the verdict
is not on prompts that chose what it judges.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from configs.runtime.errors import InputError
from configs.runtime.files import new_folder, read_object, write_json, write_text
from configs.schema.commands.running import RefreshConfig, RunConfig
from configs.schema.evaluation import SuiteConfig
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
from heads.frozen.identity import TargetIdentity, hash_weights, locate
from heads.metadata import Metadata, locate_artifact, read_metadata
from scripts.run.draft_file import Choice
from scripts.run.log import write_log_prompts

log = logging.getLogger("draftsmith")
RECIPE = "recipe.json"  # in the output: the served draft's own
GATE = "configs/gates/refresh.yaml"
CHOOSING = 4  # of so many held-out prompts, one


def prepare(run: RunConfig) -> list[Choice]:
    """Clean the log, once, and return the recipe and the gate of training on."""
    served, metadata = find_served(run)
    prompts = Path(str(run.stage_prompts.path))
    if not prompts.is_file():
        write_log_prompts(run, prompts)
    choices = [Choice("gate", GATE, "the new draft against the served one")]
    if "recipe" not in run.model_fields_set:
        if not metadata.training:
            raise InputError(f"--from: {served} does not say how it was trained; name a recipe of train/heads.py with recipe")
        path = Path(run.output).absolute() / RECIPE
        schedule = {**metadata.training.get("schedule", {}), "max_steps": None}  # the budget decides
        write_json(path, {**metadata.training, "schedule": schedule})
        choices.append(Choice("recipe", str(path), "what the served draft was trained by"))
    return choices


def find_served(run: RunConfig) -> tuple[Path, Metadata]:
    """Return the folder of the served artifact, and what it says of itself; an InputError for another target's."""
    served = locate_artifact(settings_of(run).served)
    metadata = read_metadata(served)
    if metadata.target.get("weights_sha256") != hash_weights(locate(run.stage_target)):
        raise InputError(
            f"--from: {served} was made for {metadata.target.get('name')}, and target.name {run.target.name} has other "
            "weights: name the target that it serves, or train a new draft for this one"
        )
    return served, metadata


def settings_of(run: RunConfig) -> RefreshConfig:
    """Return the settings of a run that was begun by `--from`."""
    assert run.refresh is not None
    return run.refresh


def known_prompts(served: Path) -> set[int]:
    """Return the hashes of the prompts that the served draft was trained on, as far as it says."""
    hashes = read_training_prompts(served)
    return set() if hashes is None else set(hashes.tolist())


def mix(run: RunConfig, suites: Sequence[SuiteConfig], data: Path, folder: Path) -> None:
    """Write train.jsonl without what the suites ask, and held_out.jsonl and suite.jsonl without what was trained on."""
    settings, (served, metadata) = settings_of(run), find_served(run)
    known = known_prompts(served)
    manifest = read_object(data / MANIFEST, "data manifest")
    own, all_held_out = open_conversations(data / "train.jsonl"), open_conversations(data / "held_out.jsonl")
    held_out = [row for row in all_held_out if text_hash(row.user_text) not in known]
    choosing, measured = _share_out(held_out)
    asked = {text_hash(text) for suite in suites for prompt in load_suite(suite).prompts for text in prompt.user_texts}
    fresh = [row for row in own if asked.isdisjoint(map(text_hash, row.user_texts))]
    if not fresh:
        raise InputError("eval.suites hold every prompt that could be trained on; name others, or more traffic")
    replayed: list[Conversation] = []
    if settings.replay_share:
        not_again = asked | set(index_of(all_held_out).user_texts.tolist())
        identity = TargetIdentity.from_dict(manifest["target"], str(data / MANIFEST))
        replayed = _draw(_replay(settings, metadata), settings.replay_share, identity, not_again, len(fresh))
    counts: dict[str, Any] = {
        "train": {
            "conversations": len(fresh) + len(replayed),
            "by_source": {"traffic": len(fresh), "replay": len(replayed)},
            "left_out_of_suites": len(own) - len(fresh),
        },
        "held_out": {"conversations": len(choosing), "left_out_trained_on": len(all_held_out) - len(held_out)},
    }
    with new_folder(folder) as scratch:
        for name, rows in (("train", [*fresh, *replayed]), ("held_out", choosing), ("suite", measured)):
            write_text(scratch / f"{name}.jsonl", "".join(row.to_line() for row in rows))
        write_json(scratch / MANIFEST, {**manifest, "counts": counts, "sha256": {}})
    log.info("training on %d conversations of the traffic and %d of the old data", len(fresh), len(replayed))


def _replay(settings: RefreshConfig, metadata: Metadata) -> Path:
    """Return the file that the served draft was trained on."""
    path = Path(settings.replay or metadata.training.get("data", {}).get("train", ""))
    if not path.is_file():
        raise InputError(
            f"refresh.replay: {path} is not there; name the train.jsonl of the served draft, or set refresh.replay_share to 0"
        )
    return path


def _draw(path: Path, share: float, identity: TargetIdentity, not_again: Collection[int], num_fresh: int) -> list[Conversation]:
    """Return old conversations that are to be a share of those trained on, beside so many new ones."""
    for difference in check_written_for(path, identity):
        log.warning("%s, which is replayed, was written by a target with other %s", path, difference)
    old = open_conversations(path)
    places = np.flatnonzero(~index_of(old).asking(not_again)).tolist()
    wanted = round(num_fresh * share / (1 - share))
    if wanted > len(places):
        log.warning("%s has %d conversations to replay, of the %d wanted", path, len(places), wanted)
    return [old[place] for place in sorted(random.Random(0).sample(places, min(wanted, len(places))))]


def _share_out(held_out: Sequence[Conversation]) -> tuple[list[Conversation], list[Conversation]]:
    """Return the conversations of prompts that choose a checkpoint, and a turn of each measured chat, drawn by its id."""
    chats: dict[str, list[Conversation]] = {}
    for row in held_out:
        chats.setdefault(row.prompt_id, []).append(row)
    prompts = list(chats)
    if len(prompts) < 2:
        raise InputError(
            f"data.held_out_share: {len(prompts)} prompt of the traffic is held out that the served draft was not trained on, "
            "and two are needed, to choose a checkpoint and to measure: raise it, or give a longer log"
        )
    choosing = set(prompts[::CHOOSING])
    measured = [rows[text_hash(name) % len(rows)] for name, rows in chats.items() if name not in choosing]
    return [row for row in held_out if row.prompt_id in choosing], measured
