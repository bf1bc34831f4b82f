"""Configs of `scripts/export.py` and `scripts/import.py`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from configs.decoding import TargetConfig
from configs.settings import Dtype, NonNegativeFloat, PositiveInt, Settings

# What an id of a hidden state in a draft's config means: a block's output (SGLang, SpecForge, z-lab, transformers), or h_i as
# in artifacts (speculators, vLLM's EAGLE-3).
LayerIds = Literal["block_output", "h"]
TAP_OF_ID: dict[LayerIds, int] = {"block_output": 1, "h": 0}  # what is to be added to an id to get ours
# Weights that some programs keep pickled; read with `weights_only`. A Hub's repository is asked for them for an import only.
TORCH_FILES = ("pytorch_model.bin", "medusa_lm_head.pt", "hydra_lm_head.pt")
ENGINES = ("vllm", "transformers", "speculators", "sglang", "tensorrt_llm", "gguf")


PROMPTS = (
    "Explain in a few sentences why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number, with a docstring.",
    "List five things to check before a long journey by car.",
    "What is the difference between a virus and a bacterium?",
    "Tell a short story about a lighthouse keeper and a lost ship.",
    "Solve step by step: a train covers 180 km in 2.5 hours. How fast is it on average?",
    "Write a polite letter to a neighbour about noise at night.",
    "Summarise the causes of the First World War in one paragraph.",
)


class ExportConfig(Settings):
    """`scripts/export.py`: write an artifact in the form that an engine loads."""

    dtype: Dtype | None = None  # of the weights; None: as they are in the artifact
    num_speculative_tokens: PositiveInt | None = None  # drafts a round; None: what the artifact says, of DFlash a whole block
    allow_target_mismatch: bool = False  # the target's weights may be others than those of the target trained for


class ImportConfig(Settings):
    """`scripts/import.py`: turn another program's draft into an artifact."""

    target: TargetConfig = TargetConfig()
    # Which of the target's last states an MTP head was trained on; None: before the final norm in a checkpoint named as MiMo's,
    # after it in all others, if that fits.
    reads: Literal["post_norm", "pre_norm"] | None = None
    layer_ids: LayerIds | None = None  # what ids in the draft's config mean; None: what they mean in its form, if that fits
    num_speculative_tokens: PositiveInt | None = None  # drafts a round; None: what the draft's config says, or 3
    # Decoded with it before anything is written; two or more, as how they differ says what chance does. Acceptance below the
    # limit refuses the import, 0 leaves the trial out.
    prompts: Annotated[list[str], Field(min_length=1)] = list(PROMPTS)
    min_accepted_per_round: NonNegativeFloat = 0.05
    max_new_tokens: PositiveInt = 96
