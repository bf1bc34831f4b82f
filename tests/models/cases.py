"""A family on its way through the stages, and what transformers' own model says: the reference.

In some families transformers' cached forward differs from the uncached one (Moshi), or `generate` drops the cache at a length
(Phi-4 multimodal); ours has to agree with one of them throughout. Where an indexer gives two keys the same score, the choice
between them is transformers' sort's, in the cached and in the uncached forward another; the uncached one takes the first here.
T positions, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from configs.schema.decoding import DecodeConfig
from eval.decoder.decode import generate
from heads.frozen.loading import Target
from heads.inference.runner import first_of_equals
from heads.proposers.protocol import Proposer
from tests.support.architectures import VOCAB_SIZE, tiny_model
from tests.support.scripted_drafts import ScriptedDrafts

PROMPTS = [list(range(3, 14)), list(range(40, 47)), list(range(90, 96))]
NEW_TOKENS = 24
TIE = 1e-4  # two logits this close, as a share of the largest, may change places by rounding
ROUNDING = 1e-3  # of log-probabilities, as a share of their spread


class NotApplicable(Exception):
    """The stage is not for this family."""


class Mismatch(Exception):
    """What came out is not what transformers computes; the message says what differs."""


@dataclass
class Case:
    model: PreTrainedModel  # the reference
    folder: Path
    loaded: Target | None = None
    # What transformers' `generate` continues the prompts by; the drafts that were trained and saved.
    answers: list[list[int]] = field(default_factory=list)
    artifacts: list[Path] = field(default_factory=list)
    name: str = ""

    @property
    def target(self) -> Target:
        assert self.loaded is not None
        return self.loaded


def open_case(name: str, folder: Path) -> Case:
    model = tiny_model(name)
    return Case(name=name, model=model, folder=folder, answers=[reference_answer(model, prompt) for prompt in PROMPTS])


def reference_answer(model: PreTrainedModel, prompt: Sequence[int]) -> list[int]:
    ids_1T = torch.tensor([prompt])
    generator: Any = model
    text_1T = generator.generate(ids_1T, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
    return list(text_1T[0, len(prompt) :].tolist())


def check_answers(case: Case, numbers: Sequence[int], settings: DecodeConfig, proposer: Proposer | None = None) -> None:
    """Decode some prompts greedily, by default with drafts that are right and wrong in turns; compare the answers."""
    target = case.target
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, case.answers, strict=True)]
    if proposer is None and settings.num_speculative_tokens:
        proposer = ScriptedDrafts(texts, VOCAB_SIZE)
    settings = settings.model_copy(update={"max_new_tokens": NEW_TOKENS})
    found = generate(target, [PROMPTS[number] for number in numbers], settings, proposer)
    for number, answer in zip(numbers, found, strict=True):
        room = target.max_positions - len(PROMPTS[number])
        expected = case.answers[number][:room]
        if answer != expected and not is_likeliest(case.model, PROMPTS[number], answer, min(room, NEW_TOKENS)):
            place = next((place for place, pair in enumerate(zip(expected, answer, strict=False)) if len(set(pair)) > 1), None)
            where = f"after {len(answer)} of {len(expected)} tokens" if place is None else f"at token {place}"
            raise Mismatch(f"answer {number} departs from transformers' generate {where}")


@torch.no_grad()
def is_likeliest(model: PreTrainedModel, prompt: Sequence[int], answer: Sequence[int], length: int) -> bool:
    """Say whether each token of an answer of this length is the likeliest, up to rounding, by a forward over the whole text."""
    logits_TV = uncached_logits(model, [*prompt, *answer])[len(prompt) - 1 : -1]
    behind_T = logits_TV.amax(-1) - logits_TV.gather(-1, torch.tensor(answer).unsqueeze(-1)).squeeze(-1)
    return len(answer) == length and bool((behind_T < TIE * logits_TV.abs().amax(-1)).all())


def uncached_logits(model: PreTrainedModel, text: Sequence[int]) -> Tensor:
    """Return the logits `[T, V]` of one forward over a text, in which indexers take the first of keys of equal scores."""
    with first_of_equals(model.config.get_text_config()):
        logits_TV: Tensor = model(input_ids=torch.tensor([text]), use_cache=False).logits[0]
    return logits_TV


def distance(found_V: Tensor, expected_V: Tensor) -> float:
    """Return the largest difference of two log-probabilities, as a share of how far they spread."""
    difference_V = expected_V.log_softmax(-1) - found_V[: len(expected_V)].log_softmax(-1)
    return float(difference_V.abs().max() / expected_V.std())


def cached_logits(model: PreTrainedModel, text: Sequence[int], num_prompt: int) -> Tensor:
    """Return the logits `[V]` after a text that `generate` reads token by token from the prompt on."""
    generator: Any = model
    generated = generator.generate(
        torch.tensor([text[:num_prompt]]),
        max_new_tokens=len(text) - num_prompt + 1,
        do_sample=False,
        pad_token_id=0,
        prefix_allowed_tokens_fn=lambda _, ids_T: [*text[len(ids_T) : len(ids_T) + 1]] or list(range(VOCAB_SIZE)),
        return_dict_in_generate=True,
        output_logits=True,
    )
    logits_V: Tensor = generated.logits[-1][0]
    return logits_V


def names_with_gradient(model: PreTrainedModel, ids_BT: Tensor) -> list[str]:
    """Return the parameters that a loss on transformers' own logits has a gradient for that is not 0."""
    own = copy.deepcopy(model).requires_grad_(True)
    own(input_ids=ids_BT, use_cache=False).logits.logsumexp(-1).sum().backward()
    return [name for name, parameter in own.named_parameters() if parameter.grad is not None and bool(parameter.grad.any())]
