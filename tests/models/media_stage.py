"""The stage of families that read images or sounds: decoding, and states for training, with these in the prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from configs.schema.decoding import DecodeConfig, StaticTree
from configs.schema.target import TargetConfig
from distill.dataset.batches import Example, collate
from eval.decoder.decode import Request, decode
from heads.frozen.hidden_states import num_blocks, read_states
from heads.frozen.loading import Target, load_target
from heads.frozen.tokenizer import OBJECT, SOUND
from heads.inference.causal_lm import head_logits
from tests.models.cases import NEW_TOKENS, TIE, Case, Mismatch, NotApplicable
from tests.support.architectures import VOCAB_SIZE
from tests.support.media_models import (
    HEIGHT,
    MEDIA_FAMILIES,
    PLACEHOLDER,
    WIDTH,
    MediaFamily,
    picture,
    save_processor,
    sound,
)
from tests.support.scripted_drafts import ScriptedDrafts

FILES = {"images": ("a.png", "b.png", "tall.jpg"), "audio": ("a.wav", "b.wav", "long.wav")}
WAYS: tuple[dict[str, Any], ...] = (
    {"num_speculative_tokens": 0},
    {},
    {"batch_size": 4},
    {"batch_size": 4, "tree": StaticTree(kind="static", branching=[2, 2, 1])},
)


@torch.no_grad()
def media(case: Case) -> None:
    """Decode with pictures or sounds: plainly, with chains, together, with trees; read the states of prompts and answers."""
    family = MEDIA_FAMILIES.get(case.name)
    if family is None:
        raise NotApplicable("its images and sounds are not tried")
    target = media_target(case)
    requests = media_requests(target, asked_of(family))
    answers = [media_answer(case.model, target, request) for request in requests]
    if answers[0] == answers[1]:
        raise Mismatch(f"{family.reads} make no difference to transformers' generate")
    texts = [[*request.tokens, *answer] for request, answer in zip(requests, answers, strict=True)]
    for way in WAYS:
        settings = DecodeConfig(max_new_tokens=NEW_TOKENS, **way)
        drafts = ScriptedDrafts(texts, VOCAB_SIZE) if settings.num_speculative_tokens else None
        found: list[list[int]] = []
        for start in range(0, len(requests), settings.batch_size):
            generations, _ = decode(target, requests[start : start + settings.batch_size], settings, drafts)
            found += [list(each.tokens) for each in generations]
        for number, (answer, expected) in enumerate(zip(found, answers, strict=True)):
            if answer != expected:
                raise Mismatch(f"with {way}, answer {number} on {family.reads} departs from transformers' generate")
    check_states(case, target, requests, answers)


def media_target(case: Case) -> Target:
    folder, reads = case.folder / "media", MEDIA_FAMILIES[case.name].reads
    case.model.save_pretrained(folder)
    save_processor(case.name, folder)
    for number, name in enumerate(FILES[reads]):
        is_last = number == 2
        if reads == "audio":
            (folder / name).write_bytes(sound(number, 0.8 if is_last else 0.3))
        else:
            picture(number, *((WIDTH, HEIGHT) if is_last else (HEIGHT, WIDTH))).save(folder / name)
    media = {reads: {"folder": str(folder)}}
    return load_target(TargetConfig.model_validate({"name": str(folder), "dtype": "float32", "device": "cpu", **media}))


def asked_of(family: MediaFamily) -> list[tuple[str, list[str]]]:
    a, b, other = (SOUND * (family.reads == "audio") + name for name in FILES[family.reads])
    return [
        (f"w20 {OBJECT} w30 w31", [a]),
        (f"w20 {OBJECT} w30 w31", [b]),
        (f"w40 {OBJECT} w41 {OBJECT} w45", [other, a]) if family.at_most > 1 else (f"w40 {OBJECT} w45", [other]),
        ("w20 w21 w22", []),
    ]


def media_requests(target: Target, asked: Sequence[tuple[str, Sequence[str]]]) -> list[Request]:
    requests = []
    for number, (text, references) in enumerate(asked):
        messages = [{"role": "user", "content": text}]
        tokens = tuple(target.encode_chat(messages, media=references))
        prompt = target.media_prompt(messages, references)
        requests.append(Request(prompt_id=str(number), category="", tokens=tokens, media_prompt=prompt))
    return requests


def media_answer(model: Any, target: Target, request: Request) -> list[int]:
    inputs = target.media_inputs([request.media_prompt], [request.tokens])
    given = {} if inputs is None else {**inputs.of_media, **inputs.of_tokens}
    text_1T = model.generate(
        torch.tensor([request.tokens]), **given, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0
    )
    return list(text_1T[0, len(request.tokens) :].tolist())


def own_logits(case: Case, target: Target, request: Request, ids: Sequence[int]) -> Tensor:
    """Return the logits `[T, V]` of transformers' own forward over a prompt and what follows it, given the same media."""
    inputs, model = target.media_inputs([request.media_prompt], [ids]), case.model
    own: Any = {} if inputs is None else dict(inputs.of_media)
    for name, kinds_1P in ({} if inputs is None else inputs.of_tokens).items():
        own[name] = torch.nn.functional.pad(kinds_1P, (0, len(ids) - kinds_1P.shape[1]))
    logits_TV: Tensor = model(input_ids=torch.tensor([ids]), use_cache=False, **own).logits[0]
    return logits_TV


def check_states(case: Case, target: Target, requests: Sequence[Request], answers: Sequence[Sequence[int]]) -> None:
    """Compare the logits of the states that training reads with those of transformers' own forward, row by row."""
    rows = [
        Example(
            (*request.tokens, *(token for token in answer if token != PLACEHOLDER)),
            len(request.tokens),
            0,
            request.media_prompt,
        )
        for request, answer in zip(requests, answers, strict=True)
    ]
    batch = collate(rows)
    states = read_states(target.model, batch.input_ids_BT, [num_blocks(target.model)], None, batch.media_inputs(target))
    for number, row in enumerate(rows):
        expected_TV = own_logits(case, target, requests[number], row.input_ids)
        found_TV = head_logits(target.model, states.final_BTE[number, : len(row.input_ids)])
        if (error := float((found_TV - expected_TV).abs().max() / expected_TV.abs().max())) > TIE:
            raise Mismatch(f"the states of row {number} give logits that are off by {error:.2g} of them")
