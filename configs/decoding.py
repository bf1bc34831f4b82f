"""What every command that runs the target asks for: which one, how tokens are chosen, how they are decoded. Imports no torch.

Rules that the settings come to, and what contradicts what, are in `configs.rules`.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from configs.device_map import DeviceMap, MaxMemory, check_device_map
from configs.lossy import LossyConfig
from configs.rules import Rule, Verification, check_lossy, check_tree_rule, draws_drafts, rule_of
from configs.settings import Dtype, NonNegativeFloat, NonNegativeInt, PositiveInt, Settings
from configs.stopping import CostStopping, StoppingConfig
from configs.trees import TreeConfig

LEAST_TEMPERATURE = 1e-4


class TargetConfig(Settings):
    """The language model that is to become faster."""

    name: str = "embedded:smollm2-135m-instruct"  # or a Hub id, a local folder, a .gguf file
    revision: str | None = None  # a Hub revision; only for Hub ids
    dtype: Dtype = "bfloat16"
    attention: Literal["sdpa", "eager"] = "sdpa"
    # lean: decode by a forward of draftsmith's own (Llama, Mistral, Qwen2, Qwen3), which packs the weights a second time in the
    # form that a CPU reads fastest. The draft then runs by one too, where it is of such a family.
    # compiled: that forward, or transformers' for other families, by torch.compile for fixed shapes: faster by a little after
    # half a minute or more for each shape, so for long runs. The draft runs the same way.
    forward: Literal["transformers", "lean", "compiled"] = "transformers"
    device: str = "auto"  # auto takes the GPU where there is one
    trust_remote_code: bool = False
    # For a target larger than one GPU: its blocks are spread over this process's GPUs, then the CPU's memory, then the disk;
    # embedding, final norm and head stay on `device`. auto and balanced: as even as can be; sequential: fill one after another;
    # a map of module names (model.layers.0: 1; also cpu, disk): by hand, what it does not name stays on `device`.
    device_map: DeviceMap = None
    max_memory: MaxMemory = None  # by GPU's number or cpu, as 0: 60GiB; None: what is free there
    offload_folder: str | None = None  # with disk: for weights that are kept otherwise than they run, as of most MoE models

    @model_validator(mode="after")
    def _the_device_map_can_be_followed(self) -> Self:
        check_device_map(self)
        return self


class SamplingConfig(Settings):
    """How tokens are chosen from logits: temperature, then top-k, then top-p. Temperature 0 is greedy."""

    temperature: NonNegativeFloat = 0.0
    top_k: PositiveInt | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None

    @model_validator(mode="after")
    def _logits_can_be_divided(self) -> Self:
        if 0 < self.temperature < LEAST_TEMPERATURE:
            raise ValueError(
                f"temperature must be 0 (greedy) or at least {LEAST_TEMPERATURE:g}, below which logits overflow; "
                f"got {self.temperature:g}"
            )
        return self


class DecodeConfig(SamplingConfig):
    """One way of decoding. `num_speculative_tokens: 0` is plain decoding through the same loop."""

    num_speculative_tokens: NonNegativeInt = 3
    stopping: StoppingConfig = None  # when a round drafts fewer; None: never by choice
    # At temperature 0 all three are the greedy rule. None: block for chains; for trees token, or match where nothing is drawn
    verification: Verification | None = None
    max_new_tokens: PositiveInt = 128
    batch_size: PositiveInt = 1
    seed: NonNegativeInt = 0
    # Strings in the answer's text that end it with the token that completes the first of them; None: only ends of text do.
    stop: list[str] | None = None
    # int8: the target keeps keys and values in 8 bits, for half the memory; None: in its dtype. It changes the target's law a
    # little, for plain decoding as for speculative; the draft's cache stays as it is.
    kv_cache: Literal["int8"] | None = None
    # Several candidates for each position, down to num_speculative_tokens; None: a chain. At a temperature above 0, `token`
    # judges siblings as `tree.candidates` says, `match` takes the draft's likeliest, as a dynamic tree always does.
    tree: TreeConfig = None
    # Above temperature 0: give up the target's law for speed; needs the quality measured beside it. None: lossless
    lossy: LossyConfig = None

    @property
    def rule(self) -> Rule:
        """The verification rule that these settings come to."""
        return rule_of(self)

    @property
    def draws(self) -> bool:
        """Whether drafts are drawn from the draft's law; else they are its likeliest tokens."""
        return draws_drafts(self)

    @model_validator(mode="after")
    def _the_tree_can_be_drafted_and_judged(self) -> Self:
        if self.tree is None or self.num_speculative_tokens == 0:
            return self
        if self.tree.kind == "static" and self.tree.depth > self.num_speculative_tokens:
            raise ValueError(
                f"tree is {self.tree.depth} tokens deep, and num_speculative_tokens allows {self.num_speculative_tokens}; "
                "raise that, or cut the tree"
            )
        if self.stopping is not None:
            raise ValueError("stopping cuts chains only: set it to null, or tree to null")
        check_tree_rule(self)
        return self

    @model_validator(mode="after")
    def _the_lossy_mode_goes_with_the_rest(self) -> Self:
        check_lossy(self)
        return self

    @model_validator(mode="after")
    def _stops_can_be_found(self) -> Self:
        if self.stop is None:
            return self
        if not self.stop or not all(self.stop):
            raise ValueError(f"stop must hold strings of one character or more, got {self.stop}; null is for none")
        if unknown := [stop for stop in self.stop if "\ufffd" in stop]:
            raise ValueError(f"stop: {unknown[0]!r} holds U+FFFD, as which every unfinished character is shown; leave it out")
        return self

    @model_validator(mode="after")
    def _costs_are_known_for_every_length(self) -> Self:
        if isinstance(self.stopping, CostStopping):
            known, needed = len(self.stopping.target_step_milliseconds), self.num_speculative_tokens + 1
            if known < needed:
                raise ValueError(
                    f"stopping.target_step_milliseconds must have {needed} entries or more, for 1 to {needed} rows "
                    f"(num_speculative_tokens + 1), got {known}"
                )
        return self
