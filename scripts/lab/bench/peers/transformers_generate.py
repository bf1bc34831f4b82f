"""transformers' own generation with the same target and the same draft: what our decoder is measured against."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from configs.runtime.errors import InputError
from eval.decoder.decode import Request
from eval.decoder.records import Generation
from heads.frozen.loading import Target


class TransformersPeer:
    """Greedy `generate` for one prompt at a time; replaces both models' generation configs and thaws their weights."""

    def __init__(self, target: Target, draft: PreTrainedModel, num_speculative_tokens: int, max_new_tokens: int) -> None:
        sizes = draft.config.get_text_config().vocab_size, target.vocab_size
        if sizes[0] != sizes[1]:
            raise InputError(
                f"transformers assists with a draft of the target's vocabulary size only; the draft has {sizes[0]}, "
                f"the target {sizes[1]}"
            )
        self.target, self.draft = target, draft
        self.model: Any = target.model  # the type of a pretrained model does not know `generate`
        # As `from_pretrained` leaves them, although no gradient is ever taken here. transformers cuts the last positions out of
        # [1, T, D] hidden states; such a cut times a frozen weight is a batched product in torch, for the head in bfloat16 on
        # a CPU twenty times slower (115 ms against 6) than the plain product that a trainable weight gets.
        target.model.requires_grad_(True)
        draft.requires_grad_(True)
        eos = list(target.eos_token_ids) or None
        # Padding with an end-of-text id keeps the draft from taking such an id in the prompt for padding.
        shared = {"do_sample": False, "use_cache": True, "eos_token_id": eos, "pad_token_id": eos[0] if eos else None}
        target.model.generation_config = GenerationConfig(max_new_tokens=max_new_tokens, **shared)
        # These three count on the draft's config only. By default the draft stops where its confidence falls below 0.4.
        draft.generation_config = GenerationConfig(
            num_assistant_tokens=num_speculative_tokens,
            num_assistant_tokens_schedule="constant",
            assistant_confidence_threshold=0.0,
            **shared,
        )

    def generate(self, request: Request, *, assisted: bool) -> Generation:
        assistant = {"assistant_model": self.draft} if assisted else {}
        ids_1T = torch.tensor([request.tokens], device=self.target.device)
        with torch.inference_mode():  # as our decoder does
            output_1T = self.model.generate(ids_1T, attention_mask=torch.ones_like(ids_1T), **assistant)
        return self._to_generation(request, output_1T[0, ids_1T.shape[1] :].tolist(), assisted)

    def _to_generation(self, request: Request, tokens: Sequence[int], assisted: bool) -> Generation:
        return Generation(
            prompt_id=request.prompt_id,
            category=request.category,
            mode="transformers_assisted" if assisted else "transformers",
            prompt_tokens=request.tokens,
            tokens=tuple(tokens),
            rounds=(),
            stop_reason="eos" if tokens[-1] in self.target.eos_token_ids else "length",
        )
