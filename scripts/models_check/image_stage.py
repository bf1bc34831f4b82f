"""The stage of families that read images: decoding and training with pictures in the prompts.

Prompts are of unequal lengths: equal texts with other pictures, two pictures, none. The reference is what transformers'
`generate` answers to each alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from configs.schema.decoding import DecodeConfig
from configs.schema.drafting import StaticTree
from configs.schema.target import ImagesConfig, TargetConfig
from distill.dataset.batches import Example, collate
from eval.decoder.decode import Request, decode
from heads.inference.causal_lm import head_logits
from heads.target.chat_template import OBJECT
from heads.target.hidden_states import num_blocks, read_states
from heads.target.loading import Target, load_target
from scripts.models_check.architectures import VOCAB_SIZE
from scripts.models_check.cases import NEW_TOKENS, TIE, Case, NotMeant, Wrong
from scripts.models_check.image_models import IMAGE, PICTURED, picture, save_processor
from scripts.models_check.scripted_drafts import ScriptedDrafts

ASKED = [
    (f"w20 {OBJECT} w30 w31", ["a.png"]),
    (f"w20 {OBJECT} w30 w31", ["b.png"]),
    (f"w40 {OBJECT} w41 {OBJECT} w45", ["tall.jpg", "a.png"]),
    ("w20 w21 w22", []),
]
WAYS: tuple[dict[str, Any], ...] = (
    {"num_speculative_tokens": 0},
    {},
    {"batch_size": 4},
    {"batch_size": 4, "tree": StaticTree(kind="static", branching=[2, 2, 1])},
)


@torch.no_grad()
def images(case: Case) -> None:
    """Decode with pictures: plainly, with chains, together, with trees; and read the states of prompts and answers."""
    if case.name not in PICTURED:
        raise NotMeant("its images are not tried")
    target = picture_target(case)
    requests = picture_requests(target)
    answers = [picture_answer(case.model, target, request) for request in requests]
    if answers[0] == answers[1]:
        raise Wrong("the picture makes no difference to transformers' generate")
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
                raise Wrong(f"with {way}, answer {number} on pictures departs from transformers' generate")
    check_states(case, target, requests, answers)


def picture_target(case: Case) -> Target:
    """Load the family as a target that reads images, some of which are put beside it."""
    folder = case.folder / "pictures"
    case.model.save_pretrained(folder)
    save_processor(case.name, folder)
    for number, name in enumerate(("a.png", "b.png")):
        picture(number).save(folder / name)
    picture(2, height=84, width=56).save(folder / "tall.jpg")
    return load_target(TargetConfig(name=str(folder), dtype="float32", device="cpu", images=ImagesConfig(folder=str(folder))))


def picture_requests(target: Target) -> list[Request]:
    """Return requests with pictures."""
    requests = []
    for number, (text, references) in enumerate(ASKED):
        messages = [{"role": "user", "content": text}]
        tokens = tuple(target.encode_chat(messages, images=references))
        prompt = target.image_prompt(messages, references)
        requests.append(Request(prompt_id=str(number), category="", tokens=tokens, image_prompt=prompt))
    return requests


def picture_answer(model: Any, target: Target, request: Request) -> list[int]:
    """Return what transformers' `generate` continues a prompt by, given the same pictures; no mark of an image is written."""
    inputs = target.image_inputs([request.image_prompt], [request.tokens])
    given = {} if inputs is None else {**inputs.of_images, **inputs.of_tokens}
    text_1T = model.generate(
        torch.tensor([request.tokens]), **given, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0
    )
    return list(text_1T[0, len(request.tokens) :].tolist())


def check_states(case: Case, target: Target, requests: Sequence[Request], answers: Sequence[Sequence[int]]) -> None:
    """Compare the logits of the states that training reads with those of transformers' own forward, row by row."""
    rows = [
        Example((*request.tokens, *(token for token in answer if token != IMAGE)), len(request.tokens), 0, request.image_prompt)
        for request, answer in zip(requests, answers, strict=True)
    ]
    batch = collate(rows)
    states = read_states(target.model, batch.input_ids_BT, [num_blocks(target.model)], None, batch.image_inputs(target))
    for number, row in enumerate(rows):
        alone = collate([row])
        inputs, model = alone.image_inputs(target), case.model
        own: Any = {} if inputs is None else dict(inputs.of_images)
        for name, kinds_1P in ({} if inputs is None else inputs.of_tokens).items():
            own[name] = torch.nn.functional.pad(kinds_1P, (0, len(row.input_ids) - kinds_1P.shape[1]))
        expected_TV = model(input_ids=alone.input_ids_BT, use_cache=False, **own).logits[0]
        found_TV = head_logits(target.model, states.final_BTE[number, : len(row.input_ids)])
        if (error := float((found_TV - expected_TV).abs().max() / expected_TV.abs().max())) > TIE:
            raise Wrong(f"the states of row {number} give logits that are off by {error:.2g} of them")
