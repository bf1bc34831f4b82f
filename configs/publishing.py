"""Config of `scripts/push.py`: what goes into the repository on the Hub, and what is let pass that is refused otherwise."""

from __future__ import annotations

import re
from typing import Literal, Self

from pydantic import field_validator, model_validator

from configs.settings import PositiveInt, Settings

HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
COMMIT = re.compile(r"[0-9a-f]{40}")


class PushConfig(Settings):
    """`scripts/push.py`: publish an artifact with its report and a model card made from it."""

    private: bool = True  # of a repository that is made by this push; one that exists keeps its visibility
    exports: list[Literal["vllm", "transformers", "speculators", "sglang", "tensorrt_llm"]] = []  # each into its own folder
    # What the card says of the target. None: as the artifact and the target's own card have it, and nothing where they have not
    base_model: str | None = None  # Hub id
    base_model_relation: Literal["adapter", "finetune", "quantized", "merge"] | None = None  # None: by the kind of draft
    license: str | None = None  # an identifier of the Hub's, such as apache-2.0
    samples: bool = False  # prompts and answers out of the report are published too
    # What is refused unless named here
    allow_failed_gate: bool = False  # the card then says that the gate failed, and why
    allow_lossy: bool = False  # the report is of decoding that changes answers; the card says so
    # Exports that hold the whole target are published with it: MTP for transformers; for vLLM, in a target with MTP weights
    allow_target_files: bool = False
    replace_commit: str | None = None  # full hash of the commit that this push may replace, whatever it holds
    attempts: PositiveInt = 3  # at a push that the network or the Hub breaks off

    @model_validator(mode="after")
    def _exports_are_named_once(self) -> Self:
        if len(set(self.exports)) < len(self.exports):
            raise ValueError(f"exports must name each engine once, got {self.exports}")
        return self

    @field_validator("base_model")
    @classmethod
    def _is_a_hub_id(cls, value: str | None) -> str | None:
        if value is not None and not HUB_ID.fullmatch(value):
            raise ValueError(f"expected a Hub id (owner/name), got {value!r}")
        return value

    @field_validator("replace_commit")
    @classmethod
    def _is_a_commit(cls, value: str | None) -> str | None:
        if value is not None and not COMMIT.fullmatch(value):
            raise ValueError(f"expected the 40 characters of a commit's hash, got {value!r}")
        return value
