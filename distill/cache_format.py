"""The target cache on disk: what is kept of each position, the shards it lies in, and the manifest that says so.

A cache is a folder: `manifest.json` and `shard-00000.safetensors`, ... Its rows are the positions whose **next** token is a
label: row j of a conversation is position `len(prompt_ids) - 1 + j` and stands for the answer token j. Two kinds:

    last_hidden   `hidden [N, E]`: the target's final, normed hidden state; its head makes the exact logits of it again.
    top_k         `log_probs [N, K]` at temperature 1, likeliest first, `log_tail [N]`, the log mass of all other tokens, and
                  `token_ids [N, ceil(K b / 8)]`, uint8: ids of b = ceil(log2 V) bits, packed, lowest bit first.

Beside each shard lies `shard-00000.json`, by which a cut-off run knows a finished shard; readers need the manifest only.
N rows, E width of the target, K kept tokens, V tokens.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Literal, Self

import torch
from pydantic import Field, ValidationError, model_validator

from configs.errors import InputError
from configs.files import read_json
from configs.settings import Dtype, NonNegativeInt, PositiveInt, Settings

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
SHARD = "shard-{number:05d}.safetensors"
RECORD = "shard-{number:05d}.json"  # says that the shard beside it is finished
REMAKE = "make the cache again with scripts/make_cache.py"

# A shard's name is a plain one: whatever a manifest says, nothing outside its folder is opened.
ShardName = Annotated[str, Field(pattern=r"^shard-[0-9]+\.safetensors$")]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Layout(Settings):
    """What is kept of each row."""

    kind: Literal["last_hidden", "top_k"]
    dtype: Dtype  # of hidden states, or of log-probabilities
    width: PositiveInt  # last_hidden: E; top_k: K
    vocab_size: PositiveInt  # tokens the target's law is over: V without padded rows that no token has

    @model_validator(mode="after")
    def _keeps_no_more_than_there_is(self) -> Self:
        if self.kind == "top_k" and self.width > self.vocab_size:
            raise ValueError(f"{self.width} tokens cannot be kept of a vocabulary of {self.vocab_size}")
        return self

    @property
    def bits(self) -> int:
        """Bits of a packed token id."""
        return max(1, (self.vocab_size - 1).bit_length())

    @property
    def bytes_per_row(self) -> int:
        """Bytes that a row takes, the file's header apart."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.tensors(1).values())

    def tensors(self, num_rows: int) -> dict[str, tuple[list[int], torch.dtype]]:
        """Return the shape and type of each tensor of a shard."""
        dtype = getattr(torch, self.dtype)
        if self.kind == "last_hidden":
            return {"hidden": ([num_rows, self.width], dtype)}
        return {
            "log_probs": ([num_rows, self.width], dtype),
            "log_tail": ([num_rows], dtype),
            "token_ids": ([num_rows, math.ceil(self.width * self.bits / 8)], torch.uint8),
        }


class Shard(Settings):
    """One file of rows."""

    file: ShardName
    sha256: Sha256
    num_rows: PositiveInt


class Place(Settings):
    """Where a conversation's rows lie. One without an answer within the length has none: length 0."""

    prompt_id: str
    turn: NonNegativeInt
    shard: NonNegativeInt
    offset: NonNegativeInt
    length: NonNegativeInt


class Manifest(Settings):
    """What a cache holds, and what it was made of."""

    format_version: PositiveInt = FORMAT_VERSION
    layout: Layout
    target: dict[str, str | None]  # heads.identity.TargetIdentity
    data_file: str
    data_sha256: Sha256
    max_length: PositiveInt  # tokens that conversations were cut at
    shards: list[Shard]
    conversations: list[Place]  # in the order of the data file

    @model_validator(mode="after")
    def _rows_lie_in_their_shards(self) -> Self:
        for number, place in enumerate(self.conversations):
            rows = self.shards[place.shard].num_rows if place.shard < len(self.shards) else 0
            if place.length and place.offset + place.length > rows:
                raise ValueError(f"conversation {number} lies outside shard {place.shard}")
        return self


def read_manifest(folder: Path) -> Manifest:
    """Return a cache's manifest.

    Raises:
        InputError: there is none, it is of another format version, or it cannot be right.
    """
    path = folder / MANIFEST
    if folder.is_dir() and not path.exists():
        raise InputError(f"target cache {folder} has no {MANIFEST}, so making it was cut off; run scripts/make_cache.py again")
    content = read_json(path, "target cache manifest")
    version = content.get("format_version") if isinstance(content, dict) else None
    if version != FORMAT_VERSION:
        raise InputError(f"target cache {path}: format_version must be {FORMAT_VERSION}, got {version!r}; {REMAKE}")
    try:
        return Manifest.model_validate(content)
    except ValidationError as error:
        finding = error.errors()[0]
        key = ".".join(str(part) for part in finding["loc"])
        raise InputError(f"target cache {path}: {key or 'rows'}: {finding['msg']}; {REMAKE}") from error
