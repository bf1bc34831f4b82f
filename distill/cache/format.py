"""The target cache on disk: the tensors kept of each position, the shards that hold them, and the manifest.

A cache is a folder: `manifest.json` and `shard-00000.safetensors`, ... Its rows are the positions whose **next** token is a
label: row j of a conversation is position `len(prompt_ids) - 1 + j` and predicts the answer token j. Two kinds:

    last_hidden   `hidden [N, E]`: the target's final, normed hidden state; its head computes the exact logits from it.
    top_k         `log_probs [N, K]` at temperature 1, most likely first, `log_tail [N]`, the log mass of all other tokens, and
                  `token_ids [N, ceil(K b / 8)]`, uint8: ids of b = ceil(log2 V) bits, packed, lowest bit first.

For heads, which read **every** position, a last_hidden cache has taps, possibly none but the final state, and row j is position
j. Beside `hidden` there are `h_2 [N, E]`, ... for each tap (`heads.target.hidden_states` has the convention), `log_sum [N]`,
float32, the log of the sum of exp(logits) over all rows of the target's head, and `top1 [N]`, int32, the most likely token.
`shard-00000.json` beside a shard tells an interrupted run that it is finished. N rows, E width, K kept tokens, V tokens.
"""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Annotated, Literal, Self

import torch
from pydantic import Field, ValidationError, model_validator

from configs.runtime.errors import InputError
from configs.runtime.files import LOCK_FILE, read_json
from configs.schema.base import Dtype, NonNegativeInt, PositiveInt, Settings
from heads.artifact import HiddenStates

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
SHARD = "shard-{number:05d}.safetensors"
RECORD = "shard-{number:05d}.json"  # marks the shard beside it as finished
REMAKE = "make the cache again with scripts/make_cache.py"
CONVENTION = str(HiddenStates.model_fields["convention"].default)  # what a tap's number means, here and in artifacts

# File patterns that a run may leave behind (scratch files of a killed one among them) and may delete.
DISPOSABLE = (MANIFEST, "shard-[0-9]*.safetensors", "shard-[0-9]*.json", ".shard-[0-9]*", f".{MANIFEST}.*", ".run.json.*")
OURS = (*DISPOSABLE, "run.json", LOCK_FILE)

# Plain file names only, so that no manifest can name a file outside its folder.
ShardName = Annotated[str, Field(pattern=r"^shard-[0-9]+\.safetensors$")]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class RowLayout(Settings):
    """The tensors that are kept of each row."""

    kind: Literal["last_hidden", "top_k"]
    dtype: Dtype  # of hidden states, or of log-probabilities
    width: PositiveInt  # last_hidden: E; top_k: K
    vocab_size: PositiveInt  # tokens the target's distribution is over: V without padded rows that no token has
    taps: list[NonNegativeInt] | None = None  # last_hidden: states kept beside the final one; None: rows before labels only
    convention: str | None = None  # what the numbers in `taps` mean
    target_dtype: str | None = None  # of the target whose logits were normalised

    @model_validator(mode="after")
    def _keeps_no_more_than_there_is(self) -> Self:
        if self.kind == "top_k" and self.width > self.vocab_size:
            raise ValueError(f"{self.width} tokens cannot be kept of a vocabulary of {self.vocab_size}")
        if self.kind == "top_k" and self.taps is not None:
            raise ValueError("a top_k cache keeps no hidden states, so it has no taps")
        if len({value is None for value in (self.taps, self.convention, self.target_dtype)}) > 1:
            raise ValueError("taps, their convention and the target's dtype go together")
        return self

    @property
    def every_position(self) -> bool:
        """Whether every position of a conversation has a row, and not only those before labels."""
        return self.taps is not None

    def num_rows(self, length: int, answer_start: int) -> int:
        """Return how many rows a conversation of `length` tokens has: one a label, or one a token."""
        return length - (0 if self.every_position else answer_start)

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
            states = ["hidden", *map(tap_name, self.taps or [])]
            normalisers = {"log_sum": ([num_rows], torch.float32), "top1": ([num_rows], torch.int32)}
            return {name: ([num_rows, self.width], dtype) for name in states} | (normalisers if self.every_position else {})
        return {
            "log_probs": ([num_rows, self.width], dtype),
            "log_tail": ([num_rows], dtype),
            "token_ids": ([num_rows, math.ceil(self.width * self.bits / 8)], torch.uint8),
        }


def tap_name(tap: int) -> str:
    """Return the name of a tapped state's tensor."""
    return f"h_{tap}"


class Shard(Settings):
    """One file of rows."""

    file: ShardName
    sha256: Sha256
    num_rows: PositiveInt


class ConversationRows(Settings):
    """Where a conversation's rows lie. One without an answer within `max_length` has none: length 0."""

    prompt_id: str
    turn: NonNegativeInt
    shard: NonNegativeInt
    offset: NonNegativeInt
    length: NonNegativeInt


class Server(Settings):
    """A server that wrote a cache in the target's place."""

    url: str
    model: str


class CacheManifest(Settings):
    """The contents of a cache, and the data and target that it was made of."""

    format_version: PositiveInt = FORMAT_VERSION
    layout: RowLayout
    target: dict[str, str | None]  # heads.target.identity.TargetIdentity
    server: Server | None = None  # None: the target itself wrote it
    data_file: str
    data_sha256: Sha256
    max_length: PositiveInt  # tokens that conversations were cut at
    shards: list[Shard]
    conversations: list[ConversationRows]  # in the order of the data file

    @model_validator(mode="after")
    def _rows_lie_in_their_shards(self) -> Self:
        for number, place in enumerate(self.conversations):
            rows = self.shards[place.shard].num_rows if place.shard < len(self.shards) else 0
            if place.length and place.offset + place.length > rows:
                raise ValueError(f"conversation {number} lies outside shard {place.shard}")
        return self


def read_manifest(folder: Path) -> CacheManifest:
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
        return CacheManifest.model_validate(content)
    except ValidationError as error:
        finding = error.errors()[0]
        key = ".".join(str(part) for part in finding["loc"])
        raise InputError(f"target cache {path}: {key or 'rows'}: {finding['msg']}; {REMAKE}") from error


def check_folder(folder: Path) -> None:
    """Raise `InputError` for a file, or a folder that holds anything but a cache: what lies there may be overwritten."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"output: {folder} is a file; name a folder that is new or holds a target cache")
    ours = {path.name for pattern in OURS for path in folder.glob(pattern)}
    others = sorted({path.name for path in folder.glob("*")} - ours)
    if others:
        raise InputError(f"output: {folder} holds {others[0]}, which is no part of a target cache; name a folder of its own")


def check_room(folder: Path, num_bytes: int) -> None:
    """Raise `InputError` where the disk has fewer than `num_bytes` bytes free."""
    above = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(above).free
    if free < num_bytes:
        raise InputError(
            f"output: {folder} needs {num_bytes / 1e6:.1f} MB more, and its disk has {free / 1e6:.1f} MB free; name a folder "
            "elsewhere, or keep less (kind: top_k for a draft LM, fewer taps for a head, a smaller max_length)"
        )
