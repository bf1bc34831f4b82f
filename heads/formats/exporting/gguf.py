"""Drafts as GGUF files for llama.cpp: draft LMs, EAGLE-3 and DFlash.

llama.cpp's own converter makes the file from the form that it reads, so every architecture that it knows is taken, and what it
refuses is refused here in its words. It comes with llama.cpp's source (`scripts/setup_llama_cpp.sh`), not with any package.
Ids of hidden states: the converter takes EAGLE-3's as they stand, which are ours, and adds one to DFlash's.
"""

from __future__ import annotations

import math
import os
import shlex
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import gguf

from configs.runtime.errors import InputError
from heads.formats.exporting import draft_lm as plain
from heads.formats.exporting import flat, speculators
from heads.formats.exporting.converter import find_converter, run_converter
from heads.formats.exporting.source import Source
from heads.formats.layout import ExportLayout

FILE = "draft.gguf"
CONVERTER = "convert_hf_to_gguf.py"
VARIABLE = "LLAMA_CPP"  # names the folder of another source of llama.cpp
OUT_TYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
NOT_STORED = {"t2d"}  # follows from d2t


def draft_lm(source: Source) -> ExportLayout:
    return _converted(source, plain.transformers(source), "draft-simple", plain.vocabulary_note(source))


def eagle3(source: Source) -> ExportLayout:
    """Return EAGLE-3 for llama.cpp: with one layer, three taps and none of the norms that it does not know."""
    settings = source.settings
    if settings.num_layers != 1:
        raise InputError(f"it has {settings.num_layers} layers, and llama.cpp's converter knows EAGLE-3 with one")
    if settings.qk_norm:
        raise InputError("it norms queries and keys (qk_norm), which llama.cpp's EAGLE-3 does not")
    if len(settings.taps or ()) != 3:
        raise InputError(f"it reads {len(settings.taps or ())} of the target's states, and llama.cpp's EAGLE-3 reads three")
    whole = replace(source, settings=settings.model_copy(update={"window": None}))
    return _converted(whole, speculators.eagle(whole), "draft-eagle3", source.window_note("llama.cpp"))


def dflash(source: Source) -> ExportLayout:
    note = source.whole_vocabulary_note("llama.cpp")
    return _converted(source, flat.sglang_dflash(source), "draft-dflash", note)


def _converted(source: Source, layout: ExportLayout, kind: str, notes: tuple[str, ...]) -> ExportLayout:
    converter = find_converter(CONVERTER, VARIABLE, "llama_cpp/source", "run `CONVERTER=1 sh scripts/setup_llama_cpp.sh`")
    target, outtype = source.target.folder, OUT_TYPES[source.dtype_name]
    options = ["--spec-type", kind, "--spec-draft-n-max", str(source.num_speculative_tokens)]
    how = shlex.join(["python", str(converter), str(target), "--outfile", "target.gguf", "--outtype", outtype])
    return replace(
        layout,
        serve=lambda out: shlex.join(["llama-server", "--model", "target.gguf", "--model-draft", f"{out}/{FILE}", *options]),
        notes=(f"The target as GGUF, if need be: {how}", *notes),
        convert=partial(_convert, converter=converter, target=target, outtype=outtype),
    )


def _convert(folder: Path, layout: ExportLayout, *, converter: Path, target: Path, outtype: str) -> None:
    """Turn a written folder into a GGUF file that holds all of its numbers; everything else in it is removed."""
    before = list(folder.iterdir())
    command = [sys.executable, str(converter), str(folder), "--outfile", str(folder / FILE), "--outtype", outtype]
    # Beside the source stands what the converter imports and this project does not.
    packages = os.pathsep.join(filter(None, [str(converter.parent.parent / "python"), os.environ.get("PYTHONPATH")]))
    run_converter(
        "llama.cpp's converter",
        [*command, "--target-model-dir", str(target)],
        folder / FILE,
        {"PYTHONPATH": packages},
    )
    numbers = sum(int(tensor.n_elements) for tensor in gguf.GGUFReader(folder / FILE).tensors)
    planned = sum(math.prod(stored.shape) for name, stored in layout.weights.items() if name not in NOT_STORED)
    if numbers < planned:
        raise RuntimeError(f"{FILE} was written with {numbers} numbers of {planned}")
    for path in before:
        path.unlink()
