"""Training data: prompts, the target's answers to them, a cache of its outputs, and the server that may run the target.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from configs.schema.base import (
    Dtype,
    NonNegativeInt,
    Policy,
    PositiveFloat,
    PositiveInt,
    PositiveShare,
    Settings,
    Share,
    unless_a_variable,
    unless_plain_url,
    unless_rising,
)
from configs.schema.decoding import SamplingConfig
from configs.schema.target import TargetConfig

DEFAULT_ANSWER = 128  # tokens
LONGEST_TURN = 96  # tokens of a self-seeded prompt
SELF_SEEDED = "self_seeded"  # the category of prompts that the target wrote itself


class ServerConfig(Settings):
    """An OpenAI-compatible API that runs the target, and writes its answers."""

    url: str  # of the API, such as http://host:8000/v1
    model: str  # what the server calls the target
    api_key_variable: str | None = None  # name of the environment variable that holds the key
    concurrency: PositiveInt = 64  # requests in flight, a process; a server that has no room lets them wait
    timeout_seconds: PositiveFloat = 120.0  # of one request
    retries: NonNegativeInt = 5  # further attempts after a failed connection, a timeout, 429 or 5xx
    # Nats: how far log-probabilities may lie from the target's on average. SmolLM2 in vLLM was 0.01 to 0.03 off in bfloat16, in
    # 8 bits 0.03 to 0.07, in 4 bits 0.2 to 0.7
    probe_tolerance: PositiveFloat = 0.1

    def objections(self) -> Iterator[str]:
        yield from unless_plain_url(self.url, "url", "; name the variable with the key in api_key_variable")
        yield from unless_a_variable(self.api_key_variable)


class PromptsConfig(Settings):
    """Where prompts come from: the target itself, files, or a `datasets` data set."""

    source: Literal["self_seeded", "file", "dataset"] = "self_seeded"  # where prompts come from
    num_prompts: PositiveInt = 500  # self_seeded: prompts to write; file, dataset: prompts to take, drawn by a hash
    # file: JSON lines, a JSON array, CSV, TSV, Parquet or text, .gz or not, or a folder of them; dataset: a Hub id or folder
    path: str | None = None
    revision: str | None = None  # dataset: of the Hub, a commit or a tag; None: the newest
    subset: str | None = None  # dataset: configuration name
    split: str = "train"  # dataset
    # The column that holds the prompt, as a text, a list of turns or chat messages; where it is not named, in rows that are no
    # chat (distill/generation/row_forms.py)
    field: str = "prompt"
    answer_field: str | None = None  # the column where the answer to it stands, if there is one
    # In place of a column: a text made of several, as by Python's str.format, such as "{passage}\n\n{doc[question]}"
    template: str | None = None
    on_too_long: Policy = "refuse"  # a prompt that is longer than max_prompt_tokens, or fills the target's context
    # A row that cannot be a prompt: no known key, an unknown role, no question, no UTF-8, refused by the chat template. Of two
    # prompts with one id the second is refused, or gets one of its own
    on_bad_row: Policy = "refuse"
    max_bad_share: Share = 1.0  # skip: of the rows; more of them end the run
    category: str = ""  # of prompts without one; empty: self_seeded, or uncategorised where they are read
    system: str | None = None  # the system message of prompts that have none; None: none, so that of the chat template
    # file, dataset: a longer one is too long; self_seeded: a turn that has not ended by then is dropped (None: `LONGEST_TURN`)
    max_prompt_tokens: PositiveInt | None = None
    temperature: PositiveFloat = 1.0  # self_seeded
    top_p: PositiveShare = 0.95  # self_seeded

    def objections(self) -> Iterator[str]:
        if (self.source == "self_seeded") == (self.path is not None):
            yield "path is needed for source 'file' and 'dataset', and only there"
        if self.revision is not None and self.source != "dataset":
            yield f"revision is for source 'dataset' only, got source {self.source!r}"
        if self.template is not None and self.answer_field is not None:
            yield "template takes the place of answer_field: leave it out"

    @property
    def names_a_column(self) -> bool:
        """Whether a column is named that has the prompt, or its answer."""
        return self.template is None and (self.field != "prompt" or self.answer_field is not None)


class AnswersConfig(SamplingConfig):
    """Who writes the answers, and how the target samples them."""

    # dataset: the assistant message that a prompt's chat ends with is kept
    # server: the target, run by the server that `server` describes
    written_by: Literal["target", "server", "dataset"] = "target"
    max_new_tokens: PositiveInt | None = None  # longer answers are cut off; None: at `DEFAULT_ANSWER`, a data set's own at none
    batch_size: PositiveInt = 32  # of the local target

    @property
    def longest(self) -> int | None:
        """Tokens at which an answer is cut off; None: at the end of the context."""
        return DEFAULT_ANSWER if self.max_new_tokens is None and self.written_by != "dataset" else self.max_new_tokens


class DataConfig(Settings):
    """`scripts/data.py`: prompts, answered by the target, split into train and held-out."""

    target: TargetConfig = TargetConfig()
    prompts: PromptsConfig = PromptsConfig()
    answers: AnswersConfig = AnswersConfig()
    server: ServerConfig | None = None  # answers.written_by server; the local target writes self-seeded prompts
    held_out_share: Share = 0.1  # decided by a hash of the prompt, so that it never moves between runs
    seed: NonNegativeInt = 0  # of sampled prompts and answers
    output: str = "runs/data"  # folder: train.jsonl, held_out.jsonl, manifest.json

    def objections(self) -> Iterator[str]:
        written_by = self.answers.written_by
        if written_by == "dataset" and self.prompts.source == "self_seeded":
            yield (
                "answers.written_by 'dataset' needs prompts that bring answers, and prompts.source 'self_seeded' brings none: "
                "give source 'file' or 'dataset'"
            )
        yield from unless_served(written_by, self.server)


def unless_served(written_by: str, server: ServerConfig | None) -> Iterator[str]:
    """Object to answers by a server without one, and to a server without such answers."""
    if (written_by == "server") != (server is not None):
        with_one = "without" if server is None else "with"
        yield (
            "answers.written_by 'server' and a section server (url, model) go together: "
            f"got written_by '{written_by}' {with_one} a server"
        )


class CacheConfig(Settings):
    """`scripts/cache.py`: the target's outputs on training conversations, computed once and kept."""

    target: TargetConfig = TargetConfig()
    data: str = "runs/data/train.jsonl"  # conversations written by `scripts/data.py`
    max_length: PositiveInt = 512  # tokens; longer conversations are cut at the end. Training may cut shorter, not longer
    # The states after these blocks too (h_0 is the embedding output), for heads; [] where the final state alone is read
    taps: list[NonNegativeInt] = []
    dtype: Dtype = "bfloat16"  # of hidden states
    batch_size: PositiveInt = 8  # conversations a forward of the target
    shard_megabytes: PositiveFloat = 64.0  # size of a file; a cut-off run loses the files under way
    output: str = "runs/cache"  # folder: manifest.json, shard-00000.safetensors, ...

    def objections(self) -> Iterator[str]:
        yield from unless_rising("taps", self.taps, "state")
