"""Gemma-3-270m: every head family trains on it, is written, read back, and decodes to what the target says alone.

Slow: `make gemma-check` fetches the weights and runs this. The tiny random Gemma of `tests/heads` has layers of the same kind;
here they have learnt magnitudes, 262,144 tokens and a window of 512 positions. All is in float32, where decoding with a head
and without must agree on every token. The weights are those of a pretrained model without a chat template, so prompts are
plain text; `scripts/data.py`, which wants one, is left out. Runs read a folder that the GGUF file was turned into, because
reading the file takes longer than training on it.
"""

import gc
import json
import logging
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from configs.schema.decoding import DecodeConfig
from configs.schema.target import TargetConfig
from configs.schema.training import HeadsConfig
from distill.dataset.conversations import FORMAT_VERSION, MANIFEST
from eval.decoder.decode import decode, generate
from heads.artifact import load_draft
from heads.families.registry import FAMILIES
from heads.frozen.loading import load_target
from tests.support.caches import conversation, write_rows
from tests.support.decoding import requests_for
from train.launch import run_heads

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

GGUF = Path(__file__).resolve().parents[2] / ".cache" / "gemma" / "gemma-3-270m-q4_k_m.gguf"
PLACE = {"dtype": "float32", "device": "cpu"}
TEXTS = [
    "Water boils at",
    "Monday, Tuesday, Wednesday,",
    "def add(a, b):\n    return",
    "The capital of France is",
    "Once upon a time there was a little",
]
ANSWER_LENGTH = 16
NUM_STEPS = 12
NUM_DRAFTS = 3
HEADS = {
    "medusa": {"num_depths": NUM_DRAFTS},
    "hydra": {"num_depths": NUM_DRAFTS},
    "eagle3": {"num_depths": NUM_DRAFTS},
    "mtp": {"num_depths": NUM_DRAFTS},
    "peagle": {"num_depths": NUM_DRAFTS, "num_layers": 2},
    "dflash": {"block_size": NUM_DRAFTS + 1},
    "dspark": {"block_size": NUM_DRAFTS + 1},
    "dflash2": {"block_size": NUM_DRAFTS + 1},
    "xpress": {"block_size": NUM_DRAFTS + 1},
    "domino": {"block_size": NUM_DRAFTS + 1},
    "early_exit": {},
}


@pytest.fixture(scope="module")
def from_file():
    """The target in the GGUF file."""
    if not GGUF.exists():
        pytest.fail(f"{GGUF} is missing; make gemma-check fetches it")
    return load_target(TargetConfig(name=str(GGUF), **PLACE))


@pytest.fixture(scope="module")
def target(from_file, tmp_path_factory):
    """The same target from a folder, which is 1.1 GB large and removed at the end."""
    folder = tmp_path_factory.mktemp("gemma")
    from_file.model.save_pretrained(folder)
    from_file.tokenizer.save_pretrained(folder)
    yield load_target(TargetConfig(name=str(folder), **PLACE))
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def prompts(target):
    """The texts as token ids, and all of them again and again until they are longer than the window."""
    rows = [target.tokenizer(text)["input_ids"] for text in TEXTS]
    bos, *_ = rows[0]
    told = [token for row in rows for token in row[1:]]
    length = target.model.config.sliding_window + 20
    return [*rows, [bos, *(told * (length // len(told) + 1))[:length]]]


@pytest.fixture(scope="module")
def answers(target, prompts):
    """What the target says to each prompt alone, greedily."""
    return generate(target, prompts, DecodeConfig(num_speculative_tokens=0, max_new_tokens=ANSWER_LENGTH))


@pytest.fixture(scope="module")
def data(target, prompts, answers, tmp_path_factory):
    """A folder with the short conversations, as `scripts/data.py` writes them; held out are ends of the same answers."""
    folder = tmp_path_factory.mktemp("data")
    for name, told in (("train", 0), ("held_out", 4)):
        rows = []
        for number, (prompt, answer) in enumerate(zip(prompts[:-1], answers[:-1], strict=True)):
            row = conversation([*prompt, *answer[:told]], answer[told:], f"p{number}")
            rows.append(replace(row, messages=({"role": "user", "content": target.tokenizer.decode(row.prompt_ids)},)))
        write_rows(folder / f"{name}.jsonl", rows)
    (folder / MANIFEST).write_text(json.dumps({"format_version": FORMAT_VERSION, "target": target.identity.to_dict()}))
    return folder


def test_the_file_is_read_as_the_model_that_it_is(target, answers):
    config = target.model.config
    assert (config.vocab_size, config.sliding_window) == (262_144, 512)
    assert set(config.layer_types) == {"sliding_attention", "full_attention"}
    assert target.model.get_output_embeddings().weight is target.model.get_input_embeddings().weight
    for answer, known in zip(answers, ("100 degrees Celsius", "Thursday", "a + b"), strict=False):
        assert target.tokenizer.decode(answer).strip().startswith(known)


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_head_learns_is_written_and_decodes_as_the_target_alone(kind, target, prompts, answers, data, tmp_path, caplog):
    """The gates of the run ask, besides, that drafting is training's forward and that the artifact reads back."""
    caplog.set_level(logging.INFO, "draftsmith")
    assert run_heads(config_for(kind, target, data, tmp_path)) == 0
    gc.collect()  # the run's own copy of the target
    (gates,) = [line for line in caplog.messages if line.startswith("sanity: passed")]
    losses = [float(loss) for line in caplog.messages for loss in re.findall(r"^step \d+/\d+: .*\bloss ([^,]+)", line)]
    assert len(losses) == NUM_STEPS
    assert sum(losses[-3:]) / 3 < 0.8 * losses[0]

    draft = load_draft(tmp_path / "artifact", target.identity, target.model)
    assert (draft.metadata.kind, draft.metadata.draft_vocab_size) == (kind, 4096)
    config = DecodeConfig(num_speculative_tokens=NUM_DRAFTS, max_new_tokens=ANSWER_LENGTH, batch_size=3)
    generations = [
        generation
        for start in range(0, len(prompts), config.batch_size)
        for generation in decode(target, requests_for(prompts[start : start + config.batch_size]), config, draft.proposer)[0]
    ]
    assert [list(generation.tokens) for generation in generations] == answers
    rounds = [round_ for generation in generations for round_ in generation.rounds]
    accepted, drafted = (
        sum(counts) for counts in zip(*((each.num_accepted, len(each.drafted)) for each in rounds), strict=True)
    )
    assert accepted > 0
    print(f"\n{kind}: loss {losses[0]:.2f} -> {losses[-1]:.2f}, {accepted} of {drafted} drafts accepted\n{gates}")


def config_for(kind, target, data, output):
    return HeadsConfig.model_validate(
        {
            "target": {"name": target.identity.name, **PLACE},
            "data": {"train": str(data / "train.jsonl"), "held_out": str(data / "held_out.jsonl")},
            "head": {"kind": kind, "draft_vocab_size": 4096, **HEADS[kind]},
            "schedule": {
                "batch_size": len(TEXTS),  # every step sees all the text, so that its loss can be held against the first
                "max_steps": NUM_STEPS,
                "mixed_precision": "no",
                "log_every_steps": 1,
                "trackers": [],
            },
            "held_out": {
                "num_prompts": 2,
                "decode": {"num_speculative_tokens": NUM_DRAFTS, "max_new_tokens": 12, "batch_size": 2},
            },
            # All depths of P-EAGLE read one placeholder, which it learns to tell apart by place: more steps than the default.
            "sanity": {"overfit_steps": 400},
            "num_speculative_tokens": NUM_DRAFTS,
            "output": str(output),
        }
    )
