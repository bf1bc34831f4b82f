"""Writing an artifact for an engine: refuse, write tensor by tensor, read back and check, then put in place."""

from __future__ import annotations

from pathlib import Path

import torch

from configs.runtime.errors import InputError
from configs.runtime.files import new_folder, write_json, write_text
from heads.formats.exporting.source import Source
from heads.formats.exporting.table import PROGRAMS, check_norms, check_path, form_of
from heads.formats.layout import ExportLayout
from heads.frozen.checkpoint_files import SINGLE_FILE, link_or_copy, read_weights, write_weights
from heads.frozen.identity import hash_weights

SERVE_FILE = "serve.txt"


def export(
    source: Source, engine: str, out: Path, *, allow_target_mismatch: bool = False, served_from: str | None = None
) -> ExportLayout:
    """Write an artifact as a new folder that an engine of `FORMS` loads, with the line that serves it from there.

    `served_from` is the path at which engines will find the folder; None: `out`. An InputError says why it cannot be written.
    """
    if out.exists():
        raise InputError(f"{out} exists already; give a new folder")
    if out.resolve().is_relative_to(source.target.folder.resolve()):
        raise InputError(f"{out} lies in the target's folder, which an export may copy; give a folder outside it")
    place = str(out.resolve()) if served_from is None else served_from
    check_path(engine, source.metadata.kind, place)
    known = source.metadata.target
    if not allow_target_mismatch and hash_weights(source.target.folder) != known.get("weights_sha256"):
        raise InputError(
            f"{source.folder} was trained for {known.get('name')}, and the weights in {source.target.folder} are others "
            "(--set allow_target_mismatch=true exports it anyway)"
        )
    form = form_of(engine, source.metadata.kind)
    try:
        source.check_complete()
        check_norms(engine, source.settings)
        layout = form(source)
    except InputError as error:
        raise InputError(f"{source.folder} cannot be written for {engine}: {error}") from error
    with new_folder(out) as scratch:
        _write(layout, scratch)
        _check_written(layout, scratch, source)
        if layout.convert is not None:
            layout.convert(scratch, layout)
        notes = [f"- {note}" for note in layout.notes]
        lines = [f"Serve with {PROGRAMS.get(engine, engine)}:", "", layout.serve(place), "", *notes]
        write_text(scratch / SERVE_FILE, "\n".join(lines).rstrip() + "\n")
    return layout


def _write(layout: ExportLayout, folder: Path) -> None:
    if layout.make is not None:
        layout.make(folder)
        return
    for name, path in layout.files.items():
        link_or_copy(path, folder / name)
    write_weights(folder / layout.weights_file, layout.weights)
    write_json(folder / "config.json", dict(layout.config))
    for name, value in layout.json_files.items():
        write_json(folder / name, value)


def _check_written(layout: ExportLayout, folder: Path, source: Source) -> None:
    """Read the folder back: every tensor is there as planned, and the offsets lead to the draft's tokens."""
    there = read_weights(folder)
    for name, stored in layout.weights.items():
        if name not in there or (there[name].shape, there[name].dtype) != (stored.shape, stored.dtype):
            raise RuntimeError(f"{folder} was written without {name} as planned")
    if layout.make is None and layout.weights_file == SINGLE_FILE and there.keys() != layout.weights.keys():
        raise RuntimeError(f"{folder} was written with tensors that were not planned")
    if source.vocabulary is not None and "d2t" in there:
        named_W = there["d2t"] + torch.arange(len(source.vocabulary))
        marked_W = there["t2d"].nonzero().squeeze(1)
        if not torch.equal(named_W, source.vocabulary.token_ids_W) or not torch.equal(marked_W, named_W):
            raise RuntimeError("d2t and t2d as written do not name the tokens of the draft vocabulary")
