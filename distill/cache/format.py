"""The target cache in its folder: the tensors kept of each position, the shards that hold them, the index and the manifest.

A cache is a folder: `manifest.json`, `index-00000.safetensors`, ... and `shard-00000.safetensors`, ... Its rows are the
positions whose **next** token is a label: row j of a conversation is position `len(prompt_ids) - 1 + j` and predicts the answer
token j. Two kinds:

    last_hidden   `hidden [N, E]`: the target's final, normed hidden state; its head computes the exact logits from it.
    top_k         `log_probs [N, K]` at temperature 1, most likely first, `log_tail [N]`, the log mass of all other tokens, and
                  `token_ids [N, ceil(K b / 8)]`, uint8: ids of b = ceil(log2 V) bits, packed, lowest bit first.

For heads, which read **every** position, a last_hidden cache has taps, possibly none but the final state, and row j is position
j. Beside `hidden` there are `h_2 [N, E]`, ... for each tap (`heads.frozen.hidden_states` has the convention), `log_sum [N]`,
float32, the log of the sum of exp(logits) over all rows of the target's head, and `top1 [N]`, int32, the most likely token.
Taps in 8 bits have `h_2_scale [N]`, float32, by which a row is multiplied; `hidden`, of which logits are made, is bfloat16.

A shard also has `offsets [C]`, the first row of each of its conversations, and `checksums [C, tensors]`, CRC-32 of that
conversation's bytes in each tensor, in the order of `RowLayout.tensors`; its metadata say which `job` made it, so that no shard
of a cache that was remade passes. The index has a conversation's `shard`, `offset` and
`length`, in the order of the data file.
N rows, E width, K kept tokens, V tokens, C conversations.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field, ValidationError
from safetensors.torch import load
from torch import Tensor

from configs.runtime.errors import InputError
from configs.runtime.files import LOCK_FILE, json_object
from configs.schema.base import NonNegativeInt, PositiveInt, Settings
from configs.schema.data import CacheDtype
from distill.cache.storage import Folder
from heads.metadata import HiddenStates

FORMAT_VERSION = 2
MANIFEST = "manifest.json"
SHARD = "shard-{number:05d}.safetensors"
INDEX = "index-00000.safetensors"
CLAIM = "claim-{number:05d}"  # of the process that is making a shard
JOB = "job.json"  # what the shards beside it are made of
INDEX_COLUMNS = ("shard", "offset", "length")
OFFSETS, CHECKSUMS = "offsets", "checksums"
JOB_OF_SHARD = "job"  # metadata of a shard: what it is made of, as in the manifest
FP8 = "float8_e4m3fn"
REMAKE = "make the cache again with scripts/cache.py"
CONVENTION = str(HiddenStates.model_fields["convention"].default)  # what a tap's number means, here and in artifacts

# Files that a run may leave behind (scratch files of a killed one among them) and may delete.
DISPOSABLE = re.compile(
    r"manifest\.json|job\.json|(shard|index)-\d+\.safetensors|claim-\d+|\.(shard|index)-\d.*|\.(manifest|job|run)\.json\..*"
)

# Plain file names only, so that no manifest can name a file outside its folder.
IndexName = Annotated[str, Field(pattern=r"^index-[0-9]+\.safetensors$")]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class RowLayout(Settings):
    """The tensors that are kept of each row."""

    kind: Literal["last_hidden", "top_k"]
    dtype: CacheDtype  # of hidden states, or of log-probabilities; in 8 bits only taps are kept
    width: PositiveInt  # last_hidden: E; top_k: K
    vocab_size: PositiveInt  # tokens the target's distribution is over: V without padded rows that no token has
    taps: list[NonNegativeInt] | None = None  # last_hidden: states kept beside the final one; None: rows before labels only
    convention: str | None = None  # what the numbers in `taps` mean
    target_dtype: str | None = None  # of the target whose logits were normalised

    @property
    def every_position(self) -> bool:
        """Whether every position of a conversation has a row, and not only those before labels."""
        return self.taps is not None

    def num_rows(self, lengths_C: Any, answer_starts_C: Any) -> Any:
        """Return how many rows conversations of so many tokens have: one a label, or one a token."""
        return lengths_C if self.every_position else lengths_C - answer_starts_C

    @property
    def scaled(self) -> bool:
        """Whether taps are kept in 8 bits, each row with a scale."""
        return self.dtype == FP8

    @property
    def bits(self) -> int:
        return max(1, (self.vocab_size - 1).bit_length())

    @property
    def bytes_per_row(self) -> int:
        """Bytes that a row takes, the file's header apart."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.tensors(1).values())

    def tensors(self, num_rows: int) -> dict[str, tuple[list[int], torch.dtype]]:
        dtype = getattr(torch, self.dtype)
        if self.kind == "last_hidden":
            kept = {"hidden": ([num_rows, self.width], torch.bfloat16 if self.scaled else dtype)}
            kept |= {tap_name(tap): ([num_rows, self.width], dtype) for tap in self.taps or []}
            kept |= {scale_name(tap): ([num_rows], torch.float32) for tap in self.taps or [] if self.scaled}
            normalisers = {"log_sum": ([num_rows], torch.float32), "top1": ([num_rows], torch.int32)}
            return kept | (normalisers if self.every_position else {})
        return {
            "log_probs": ([num_rows, self.width], dtype),
            "log_tail": ([num_rows], dtype),
            "token_ids": ([num_rows, math.ceil(self.width * self.bits / 8)], torch.uint8),
        }


def tap_name(tap: int) -> str:
    return f"h_{tap}"


def scale_name(tap: int) -> str:
    """Return the name of the tensor by which the rows of a tap in 8 bits are multiplied."""
    return f"h_{tap}_scale"


class IndexPiece(Settings):
    """A file of the index."""

    file: IndexName
    sha256: Sha256


class CacheManifest(Settings):
    """The content of `manifest.json`."""

    format_version: Literal[2] = 2
    layout: RowLayout
    target: dict[str, str | None]  # heads.frozen.identity.TargetIdentity
    server: dict[str, str] | None = None  # of a release in which a server of log-probabilities may have written it
    data_file: str
    data_sha256: Sha256
    max_length: PositiveInt  # tokens that conversations were cut at
    exact_target: Literal[True] = True  # written by a release whose forward of the target rounds nothing
    job: Sha256  # a hash of all that decides the shards' bytes
    num_shards: NonNegativeInt
    index: list[IndexPiece]  # one; a release before cut it in pieces


class Places(NamedTuple):
    """Where each conversation's rows lie, by its place in the data file; int32 `[C]`. One without rows has length 0."""

    shard_C: Tensor
    offset_C: Tensor
    length_C: Tensor


def read_manifest(folder: Folder | Path) -> CacheManifest:
    folder = Folder(folder) if isinstance(folder, Path) else folder
    where, content = f"target cache {folder.place(MANIFEST)}", folder.read(MANIFEST)
    if content is None:
        cut_off = f"target cache {folder} has no {MANIFEST}, so making it was cut off; run scripts/cache.py again"
        raise InputError(cut_off if folder.names() else f"target cache not found: {folder}")
    value = json_object(content, where)
    if (version := value.get("format_version")) != FORMAT_VERSION:
        raise InputError(f"{where}: format_version must be {FORMAT_VERSION}, got {version!r}; {REMAKE}")
    try:
        return CacheManifest.model_validate(value)
    except ValidationError as error:
        finding = error.errors()[0]
        key = ".".join(str(part) for part in finding["loc"])
        raise InputError(f"{where}: {key or 'rows'}: {finding['msg']}; {REMAKE}") from error


def read_places(folder: Folder, manifest: CacheManifest) -> Places:
    pieces: list[dict[str, Tensor]] = []
    for piece in manifest.index:
        content = folder.read(piece.file)
        if content is None or hashlib.sha256(content).hexdigest() != piece.sha256:
            state = "missing" if content is None else "damaged"
            raise InputError(f"target cache {folder.place(piece.file)} is {state}; {REMAKE}")
        pieces.append(load(content))
    return Places(*(torch.cat([piece[name] for piece in pieces]) for name in INDEX_COLUMNS))


def pack_ids(token_ids_NK: Tensor, bits: int) -> Tensor:
    """Return token ids as bytes `[N, ceil(K bits / 8)]`, uint8, lowest bit first; each id must be below 2^bits."""
    ids = token_ids_NK.cpu().numpy()
    single = (ids[..., None] >> np.arange(bits)) & 1
    return torch.from_numpy(np.packbits(single.reshape(len(ids), -1).astype(np.uint8), axis=-1, bitorder="little"))


def unpack_ids(packed: Tensor, num_ids: int, bits: int) -> Tensor:
    """Return the token ids `[N, K]`, int64, of packed bytes `[N, ceil(K bits / 8)]`."""
    single = np.unpackbits(packed.numpy(), axis=-1, count=num_ids * bits, bitorder="little")
    return torch.from_numpy(single.reshape(len(packed), num_ids, bits).astype(np.int64) @ (1 << np.arange(bits)))


def as_json(value: Any) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()


def check_folder(folder: Folder) -> None:
    """Raise `InputError` for a file, or a folder that holds anything but a cache: what lies there may be overwritten."""
    if folder.path is not None and folder.path.exists() and not folder.path.is_dir():
        raise InputError(f"output: {folder} is a file; name a folder that is new or holds a target cache")
    others = sorted({name for name in folder.names() if not DISPOSABLE.fullmatch(name)} - {"run.json", LOCK_FILE})
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
