"""Reading a target cache: what the target said about a batch, from memory-mapped shards instead of a forward.

A cache is opened for one data file and one target, and refused for any other. Each shard is checked against its checksum
when it is first needed. Hidden states in the target's own dtype are those of the online forward up to rounding by batch
shape (another padding, another order of the same sums); top-k rows are what `distill.losses.sparse_pair` makes of them.

Left out on purpose: conversations that change during training; a cache knows those of its data file only.
B batch, T positions, N label rows of a batch, E width of the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from configs.errors import ConfigError, InputError
from configs.files import sha256_of
from configs.schema import DistillConfig
from distill.batches import Batch, ConversationDataset
from distill.cache_format import MANIFEST, REMAKE, Manifest, read_manifest
from distill.cache_rows import unpack_ids
from distill.losses import SparseTarget
from distill.target import Target
from heads.identity import TargetIdentity


class TargetCache:
    """What a target said about the conversations of one data file. Made by `open_cache`.

    Args:
        folder: where the shards lie.
        manifest: what the folder holds.
        dtype: of the hidden states handed out, the target's own.
    """

    def __init__(self, folder: Path, manifest: Manifest, dtype: torch.dtype) -> None:
        self.folder, self.manifest, self.dtype = folder, manifest, dtype
        self._open: dict[int, Any] = {}  # safetensors files by number of the shard, once their checksums were right

    def signal(self, batch: Batch) -> Tensor | SparseTarget:
        """Return what the target says about a batch, on the batch's device.

        Returns:
            last_hidden: hidden states `[B, T, E]` in the target's dtype, those before a label; 0 at all other positions.
            top_k: a sparse target of the N rows before a label, in the order of the batch's mask.

        Raises:
            InputError: a shard is damaged.
        """
        predicts_label_BT = batch.loss_mask_BT[:, 1:]
        kept = self.rows(batch.conversation_B.tolist(), predicts_label_BT.sum(1).tolist())
        kept = {name: tensor.to(batch.input_ids_BT.device) for name, tensor in kept.items()}
        if self.manifest.layout.kind == "top_k":
            return SparseTarget(log_probs=kept["log_probs"], token_ids=kept["token_ids"], log_tail=kept["log_tail"])
        hidden_NE = kept["hidden"].to(self.dtype)
        hidden_BTE = hidden_NE.new_zeros(*batch.input_ids_BT.shape, hidden_NE.shape[-1])
        hidden_BTE[:, :-1][predicts_label_BT] = hidden_NE
        return hidden_BTE

    def rows(self, numbers: Sequence[int], lengths: Sequence[int]) -> dict[str, Tensor]:
        """Return the first `lengths` rows of conversations, one after the other, by name; token ids unpacked.

        Args:
            numbers: places of the conversations in the data file, from 0.
            lengths: rows wanted of each.

        Raises:
            InputError: a shard is damaged.
            ValueError: more rows are asked for than a conversation has.
        """
        layout = self.manifest.layout
        parts = [self._conversation(number, length) for number, length in zip(numbers, lengths, strict=True)]
        kept = {name: torch.cat([part[name] for part in parts]) for name in layout.tensors(0)}
        if layout.kind == "top_k":
            kept["token_ids"] = unpack_ids(kept["token_ids"], layout.width, layout.bits)
        return kept

    def _conversation(self, number: int, length: int) -> dict[str, Tensor]:
        place = self.manifest.conversations[number]
        if length > place.length:
            raise ValueError(f"conversation {number} has {place.length} cached rows, asked for {length}")
        shard = self._shard(place.shard)
        rows = slice(place.offset, place.offset + length)
        return {name: shard.get_slice(name)[rows] for name in self.manifest.layout.tensors(0)}

    def _shard(self, number: int) -> Any:
        """Return a shard's open file, checked at its first use."""
        if number not in self._open:
            shard = self.manifest.shards[number]
            path = self.folder / shard.file
            if not path.is_file():
                raise InputError(f"target cache shard {path} is missing; {REMAKE}")
            if sha256_of(path) != shard.sha256:
                raise InputError(f"target cache shard {path} is damaged: its checksum is not that of {MANIFEST}; {REMAKE}")
            self._open[number] = self._opened(path, shard.num_rows)
        return self._open[number]

    def _opened(self, path: Path, num_rows: int) -> Any:
        try:
            file = safe_open(path, framework="pt")
            for name, (shape, dtype) in self.manifest.layout.tensors(num_rows).items():
                part = file.get_slice(name)
                if part.get_shape() != shape or part[:0].dtype != dtype:
                    raise InputError(f"target cache shard {path}: {name} is not {dtype} of shape {shape}; {REMAKE}")
        except SafetensorError as error:
            raise InputError(f"target cache shard {path} cannot be read: {error}; {REMAKE}") from error
        return file


def open_cache(folder: Path, data_file: Path, target: Target) -> TargetCache:
    """Open a cache for a data file and a target.

    Raises:
        InputError: there is no whole cache of this format version, or it was made of another data file or by a target of
            other weights, tokenizer or chat template.
    """
    manifest = read_manifest(folder)
    writer = TargetIdentity.from_dict(dict(manifest.target), str(folder / MANIFEST))
    if differences := writer.differences(target.identity):
        raise InputError(
            f"target cache {folder} was made by {writer.name}, which differs from target {target.identity.name} in "
            f"{' and '.join(differences)}; {REMAKE}"
        )
    if sha256_of(data_file) != manifest.data_sha256:
        raise InputError(f"target cache {folder} was made of {manifest.data_file}, and {data_file} is not that file; {REMAKE}")
    width = target.model.config.get_text_config().hidden_size
    if manifest.layout.kind == "last_hidden" and manifest.layout.width != width:
        raise InputError(f"target cache {folder} keeps hidden states of width {manifest.layout.width}, not {width}; {REMAKE}")
    return TargetCache(folder, manifest, target.model.dtype)


def check_fits(cache: TargetCache, dataset: ConversationDataset, config: DistillConfig) -> None:
    """Refuse early what training from a cache cannot do.

    Raises:
        ConfigError: conversations are longer than those of the cache, or a top-k cache is asked for what it cannot answer.
    """
    manifest = cache.manifest
    for example in dataset.examples:
        if len(example.input_ids) - example.answer_start > manifest.conversations[example.conversation].length:
            raise ConfigError(
                f"data.max_length: expected at most {manifest.max_length}, which target cache {cache.folder} was made with, "
                f"got {config.data.max_length}"
            )
    if manifest.layout.kind == "last_hidden":
        return
    if config.loss.temperature != 1:
        raise ConfigError(
            f"loss.temperature: expected 1, at which top_k cache {cache.folder} was recorded, got {config.loss.temperature}; "
            "a last_hidden cache serves any"
        )
    if config.student.draft_vocab_size is not None:
        raise ConfigError(
            f"student.draft_vocab_size: expected null with top_k cache {cache.folder}, whose tail cannot be split, got "
            f"{config.student.draft_vocab_size}; a last_hidden cache serves any"
        )
