"""Configs of `scripts/export.py` and `scripts/import.py`."""

from __future__ import annotations

from typing import Literal

from configs.decoding import TargetConfig
from configs.settings import Dtype, NonNegativeFloat, PositiveInt, Settings

ENGINES = ("vllm", "transformers", "speculators", "sglang", "tensorrt_llm")


class ExportConfig(Settings):
    """`scripts/export.py`: write an artifact in the form that an engine loads."""

    dtype: Dtype | None = None  # of the weights; None: as they are in the artifact
    num_speculative_tokens: PositiveInt | None = None  # drafts a round; None: what the artifact says
    allow_target_mismatch: bool = False  # the target's weights may be others than those of the target trained for


class ImportConfig(Settings):
    """`scripts/import.py`: turn another program's draft into an artifact."""

    target: TargetConfig = TargetConfig()
    # Which of the target's last states an MTP head was trained on; other families do not ask.
    reads: Literal["post_norm", "pre_norm"] = "post_norm"
    # What ids of hidden states in a flat EAGLE-3 config mean: a block's output (SGLang, SpecForge), or h_i (vLLM).
    layer_ids: Literal["block_output", "h"] = "block_output"
    num_speculative_tokens: PositiveInt | None = None  # drafts a round; None: what the draft's config says, or 3
    # The first prompt decoded with it; acceptance below the limit refuses the import, 0 leaves the check out.
    prompt: str = "Explain in a few sentences why the sky is blue."
    min_accepted_per_round: NonNegativeFloat = 0.05
    max_new_tokens: PositiveInt = 64
