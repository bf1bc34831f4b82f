"""The configs of `draftsmith export`, `draftsmith check`, `draftsmith import` and `draftsmith push`. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Literal, get_args

from pydantic import Field

from configs.schema.base import Dtype, NonNegativeFloat, PositiveFloat, PositiveInt, Settings, unless_once
from configs.schema.decoding import SamplingConfig
from configs.schema.target import TargetConfig

# What an id of a hidden state in a draft's config means: a block's output (SGLang, SpecForge, z-lab, transformers), or h_i as
# in artifacts (speculators, vLLM's EAGLE-3).
LayerIds = Literal["block_output", "h"]
TAP_OF_ID: dict[LayerIds, int] = {"block_output": 1, "h": 0}  # added to an id, gives the artifact's
# Weights that some programs keep pickled; read with `weights_only`. A Hub's repository is asked for them for an import only.
PublishedEngine = Literal["vllm", "transformers", "speculators", "sglang"]
# The others' files are written by another program, and `serve.txt` beside them names folders of the machine.
Engine = Literal[PublishedEngine, "gguf", "openvino"]
ENGINES: tuple[Engine, ...] = get_args(Engine)
# Settings of the target that an engine is told, too
OF_TARGET = ("chat_template", "chat_template_kwargs", "trust_remote_code")
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
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
    """`draftsmith export`: write an artifact in the form that an engine loads."""

    dtype: Dtype | None = None  # of the weights; None: as they are in the artifact
    num_speculative_tokens: PositiveInt | None = None  # drafts a round; None: what the artifact says, of DFlash a whole block
    allow_target_mismatch: bool = False  # the target's weights may be others than those of the target trained for
    trust_remote_code: bool = False  # run Python code that comes with the target, here and in the engine


class CheckConfig(Settings):
    """`draftsmith check`: try an export in its engine, with the draft and without."""

    num_prompts: PositiveInt = 8  # at most, spread over the file's categories
    max_new_tokens: PositiveInt = 64
    # None: float32 on a CPU, in which answers should be the same; elsewhere vLLM's own choice, bfloat16 in transformers
    dtype: Dtype | None = None
    # As it is served, above temperature 0, in vLLM: its acceptance is counted after the greedy answers. None: greedy only
    sampling: SamplingConfig | None = None
    chat_template: str | None = None  # as target.chat_template; None: the target's own
    chat_template_kwargs: dict[str, bool | int | float | str] | None = None  # as target.chat_template_kwargs
    trust_remote_code: bool = False  # as target.trust_remote_code
    start_seconds: PositiveFloat = 900.0  # for a server to be ready
    answer_seconds: PositiveFloat = 600.0  # without a word from a server

    def objections(self) -> Iterator[str]:
        if self.sampling is not None and self.sampling.temperature == 0:
            yield "sampling.temperature must be above 0: answers at 0 are compared in any case"

    def target_at(self, place: str) -> TargetConfig:
        """Return the target in a folder or of a Hub id, with its chat template."""
        return TargetConfig(name=place, **{name: getattr(self, name) for name in OF_TARGET})


class ImportConfig(Settings):
    """`draftsmith import`: turn another program's draft into an artifact."""

    target: TargetConfig = TargetConfig()
    # Which of the target's last states an MTP head was trained on; None: before the final norm in a checkpoint named as MiMo's,
    # after it in all others, if that fits.
    reads: Literal["post_norm", "pre_norm"] | None = None
    layer_ids: LayerIds | None = None  # what ids in the draft's config mean; None: what they mean in its form, if that fits
    num_speculative_tokens: PositiveInt | None = None  # drafts a round; None: what the draft's config says, or 3
    # Decoded with the draft before anything is written. Acceptance below the limit refuses the import, 0 skips the trial.
    prompts: Annotated[list[str], Field(min_length=1)] = list(PROMPTS)
    min_accepted_per_round: NonNegativeFloat = 0.05
    max_new_tokens: PositiveInt = 96


class PushConfig(Settings):
    """`draftsmith push`: publish an artifact with its report and a model card made from it."""

    private: bool = True  # of a repository that is made by this push; one that exists keeps its visibility
    exports: list[PublishedEngine] = []  # each into its own folder
    # What the card says of the target. None: as the artifact and the target's own card have it, and nothing where they have not
    base_model: str | None = None  # Hub id
    license: str | None = None  # an identifier of the Hub's, such as apache-2.0
    allow_failed_gate: bool = False  # the card then says that the gate failed, and why

    def objections(self) -> Iterator[str]:
        yield from unless_once("exports", self.exports, "engine")
        if self.base_model is not None and not HUB_ID.fullmatch(self.base_model):
            yield f"base_model: expected a Hub id (owner/name), got {self.base_model!r}"
