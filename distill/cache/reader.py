"""Reading a target cache: the target's outputs for a batch, from shards (`distill.cache.shards`) instead of a forward.

A cache is opened for one data file and one target, and refused for any other. Hidden states in the target's own dtype are
those of the online forward up to rounding by batch shape. Conversations are known by their number in the data file, so rows
that a policy rewrites cannot be served.
B batch, T positions, C documents of a row at most, P = B * T flat places, N kept positions of a batch, E width of the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from configs.runtime.errors import ConfigError, InputError
from configs.schema.training import DistillConfig, HeadsConfig
from distill.cache.format import (
    MANIFEST,
    REMAKE,
    CacheManifest,
    Places,
    read_manifest,
    read_places,
    scale_name,
    tap_name,
    unpack_ids,
)
from distill.cache.shards import Shards, Wanted
from distill.cache.storage import Folder
from distill.dataset.batches import ConversationDataset
from distill.loss.pairs import SparseTarget
from heads.device import can_pin, upload
from heads.frozen.hidden_states import TargetStates
from heads.frozen.identity import TargetIdentity, remembered_sha256
from heads.frozen.loading import Target
from heads.modules.interface import NO_DOCUMENT, Batch, Normalisers, before_labels


class TargetCache:
    """The target's outputs for the conversations of one data file. Made by `open_cache`; `dtype` is that of returned states.

    Every method that reads rows raises `InputError` where a shard is damaged.
    """

    def __init__(self, folder: Folder, manifest: CacheManifest, places: Places, dtype: torch.dtype) -> None:
        self.folder, self.manifest, self.places, self.dtype = folder, manifest, places, dtype
        self._shards = Shards(folder, manifest)

    def signal(self, batch: Batch) -> Tensor | SparseTarget:
        """Return the target's side of the distillation loss for a batch, on its device.

        They are hidden states `[B, T, E]` in the target's dtype, 0 at positions not kept, or, by a top_k cache, a sparse target
        of the N rows before a label, in the order of the batch's mask.
        """
        before_label_BT = before_labels(batch.on_host)
        kept = self._rows_of(batch, before_label_BT)
        if self.manifest.layout.kind == "top_k":
            return SparseTarget(log_probs=kept["log_probs"], token_ids=kept["token_ids"], log_tail=kept["log_tail"])
        return _placed(kept["hidden"].to(self.dtype), before_label_BT)

    def states(self, batch: Batch, taps: Sequence[int] = ()) -> TargetStates:
        """Return the target's states at every position, on the batch's device and in the target's dtype; 0 on padding.

        `taps` are some of the cache's (`check_keeps`), in the order in which they are wanted.
        """
        inside_BT = batch.on_host.document_ids_BT != NO_DOCUMENT
        names = ["hidden", *map(tap_name, taps)]
        scales = dict(zip(names[1:], map(scale_name, taps), strict=True)) if self.manifest.layout.scaled else {}
        kept = self._rows_of(batch, inside_BT, [*names, *scales.values()])
        for name, scale in scales.items():
            kept[name] = kept[name].float() * kept[scale].unsqueeze(1)
        final_BTE, *taps_ABTE = (_placed(kept[name].to(self.dtype), inside_BT) for name in names)
        return TargetStates(final_BTE=final_BTE, taps_ABTE=tuple(taps_ABTE))

    def normalisers(self, batch: Batch) -> Normalisers:
        """Return the normalisers of the target's logits at every position of a batch, on its device; 0 on padding."""
        inside_BT = batch.on_host.document_ids_BT != NO_DOCUMENT
        kept = self._rows_of(batch, inside_BT, ["log_sum", "top1"])
        log_sum_BT, top1_BT = (_placed(kept[name], inside_BT) for name in ("log_sum", "top1"))
        return Normalisers(log_sum_P=log_sum_BT.flatten(), top1_P=top1_BT.flatten().long())

    def check_keeps(self, taps: Sequence[int]) -> None:
        """Raise `InputError` where the cache does not keep the states that a head reads, or was made in another dtype."""
        layout = self.manifest.layout
        if layout.taps is None:
            raise InputError(
                f"target cache {self.folder} (kind {layout.kind}, without taps) knows positions before answer tokens only, and "
                f"a head reads all of them; make one with kind: last_hidden and taps: {list(taps)}, or set data.cache to null"
            )
        if missing := [tap for tap in taps if tap not in layout.taps]:
            raise InputError(
                f"target cache {self.folder} keeps taps {layout.taps}, and the head reads {list(taps)}: {missing} are "
                "missing; make the cache with these taps, or change head.taps"
            )
        if layout.target_dtype != (here := str(self.dtype).removeprefix("torch.")):
            made = f"target cache {self.folder} was made with target.dtype {layout.target_dtype}"
            raise InputError(f"{made}, and the target is in {here} here: their logits differ; set target.dtype, or {REMAKE}")

    def rows(
        self, numbers: Sequence[int], lengths: Sequence[int], names: Sequence[str] | None = None, *, pinned: bool = False
    ) -> dict[str, Tensor]:
        """Return the first `lengths` rows of conversations, by their places in the data file, one after the other.

        They come by the `names` of their tensors (None: all), token ids unpacked; `pinned`: in page-locked memory.
        """
        layout, wanted = self.manifest.layout, list[Wanted]()
        for number, length in zip(numbers, lengths, strict=True):
            shard, offset, kept_rows = (int(column[number]) for column in self.places)
            if length > kept_rows:
                raise ValueError(f"conversation {number} has {kept_rows} cached rows, asked for {length}")
            if length:
                wanted.append(Wanted(shard=shard, offset=offset, kept=kept_rows, length=length))
        kept = self._shards.rows(wanted, list(layout.tensors(0)) if names is None else names, pinned=pinned)
        if "token_ids" in kept:
            kept["token_ids"] = unpack_ids(kept["token_ids"], layout.width, layout.bits)
        return kept

    def _rows_of(self, batch: Batch, kept_BT: Tensor, names: Sequence[str] | None = None) -> dict[str, Tensor]:
        """Return the rows of the positions where `kept_BT` (on the host) is True, the first ones of each conversation."""
        device, batch = batch.input_ids_BT.device, batch.on_host
        documents_BT = batch.document_ids_BT.clamp(min=0)
        counts_BC = torch.zeros_like(batch.conversations_BC).scatter_add_(1, documents_BT, kept_BT.long())
        there_BC = batch.conversations_BC != NO_DOCUMENT
        numbers, counts = batch.conversations_BC[there_BC].tolist(), counts_BC[there_BC].tolist()
        kept = self.rows(numbers, counts, names, pinned=can_pin(device))
        return {name: upload(values, device) for name, values in kept.items()}


def open_cache(name: str | Path, data_file: Path, target: Target) -> TargetCache:
    """Open a cache, by its folder or URL, for a data file and a target; any other data or target are an `InputError`."""
    folder = Folder(name)
    manifest = read_manifest(folder)
    writer = TargetIdentity.from_dict(dict(manifest.target), folder.place(MANIFEST))
    if differences := writer.differences(target.identity):
        raise InputError(
            f"target cache {folder} was made by {writer.name}, which differs from target {target.identity.name} in "
            f"{' and '.join(differences)}; {REMAKE}"
        )
    if remembered_sha256(data_file) != manifest.data_sha256:
        raise InputError(f"target cache {folder} was made of {manifest.data_file}, and {data_file} is not that file; {REMAKE}")
    return TargetCache(folder, manifest, read_places(folder, manifest), target.model.dtype)


def check_fits(cache: TargetCache, dataset: ConversationDataset, config: DistillConfig | HeadsConfig) -> None:
    """Refuse a dataset or config that the cache cannot serve; for the taps of a head see `TargetCache.check_keeps`."""
    manifest = cache.manifest
    needed_N = manifest.layout.num_rows(dataset.lengths, dataset.answer_starts)
    if bool((needed_N > cache.places.length_C.numpy()[dataset.numbers]).any()):
        raise ConfigError(
            f"data.max_length: expected at most {manifest.max_length}, which target cache {cache.folder} was made with, "
            f"got {config.data.max_length}"
        )
    if manifest.layout.kind == "last_hidden" or isinstance(config, HeadsConfig):
        return
    serves = f"with top_k cache {cache.folder}; a last_hidden cache serves any"
    if config.loss.temperature != 1:
        raise ConfigError(f"loss.temperature: expected 1, got {config.loss.temperature}, {serves}")
    if config.student.draft_vocab_size is not None:
        raise ConfigError(f"student.draft_vocab_size: expected null {serves}")


def _placed(values_N: Tensor, where_BT: Tensor) -> Tensor:
    """Return values `[B, T, ...]` of the positions where `where_BT`, in host memory, is True, 0 elsewhere."""
    placed_BT = values_N.new_zeros(*where_BT.shape, *values_N.shape[1:])
    placed_BT.flatten(0, 1)[upload(where_BT.flatten().nonzero().squeeze(1), values_N.device)] = values_N
    return placed_BT
