"""Drafts that another project's converter writes: GGUF files for llama.cpp, and OpenVINO models for OpenVINO GenAI.

A converter is found on this machine and run as a process on a folder that was written in a form that it reads; every
architecture that it knows is taken, and what it refuses is refused here in its words. llama.cpp's comes with its source
(`scripts/setup_llama_cpp.sh`), optimum-intel has an environment of its own (`scripts/setup_engine.sh`). Ids of hidden states:
llama.cpp's converter takes EAGLE-3's as they stand, which are ours, and adds one to DFlash's. optimum-intel does not say in an
EAGLE-3 model which states that reads, and OpenVINO GenAI would take those of other blocks; they are added here, in the model's
XML file, as the numbers of the blocks whose output they are.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import gguf

from configs.runtime.errors import InputError
from configs.runtime.files import downloads_folder
from heads.formats.exporting import draft_lm as plain
from heads.formats.exporting import flat, speculators
from heads.formats.exporting.source import Source
from heads.formats.layout import ExportLayout

GGUF_FILE, GGUF_CONVERTER, GGUF_VARIABLE = "draft.gguf", "convert_hf_to_gguf.py", "LLAMA_CPP"
OUT_TYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
NOT_STORED = {"t2d"}  # follows from d2t
MODEL, NUMBERS = "openvino_model.xml", "openvino_model.bin"
OPTIMUM, OPENVINO_VARIABLE = "bin/optimum-cli", "OPENVINO"
WEIGHT_FORMATS = {"float32": ("fp32", 4), "float16": ("fp16", 2)}  # the converter's name, and bytes a number
# The class of EAGLE-3 is in a file of optimum-intel's, which it has transformers load like one that lies beside a model.
OWN_CODE = "--trust-remote-code"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.model", "chat_template.jinja")
PRECISION_NOTE = (
    "By itself OpenVINO rounds cached keys and values to 8 bits, and computes in bfloat16 where the CPU has it; to compare "
    "with other decoders give both models INFERENCE_PRECISION_HINT='f32' and KV_CACHE_PRECISION='f32'."
)


def gguf_draft_lm(source: Source) -> ExportLayout:
    return _as_gguf(source, plain.transformers(source), "draft-simple", plain.vocabulary_note(source))


def gguf_eagle3(source: Source) -> ExportLayout:
    """Return EAGLE-3 for llama.cpp: with one layer, three taps and none of the norms that it does not know."""
    source.require("llama.cpp's EAGLE-3", num_layers=1, qk_norm=False)
    source.require_three_taps("llama.cpp's EAGLE-3")
    whole = replace(source, settings=source.settings.model_copy(update={"window": None}))
    return _as_gguf(whole, speculators.eagle(whole), "draft-eagle3", source.window_note("llama.cpp"))


def gguf_dflash(source: Source) -> ExportLayout:
    return _as_gguf(source, flat.sglang_dflash(source), "draft-dflash", source.whole_vocabulary_note("llama.cpp"))


def openvino_draft_lm(source: Source) -> ExportLayout:
    return _as_openvino(source, plain.transformers(source), None, plain.vocabulary_note(source))


def openvino_eagle3(source: Source) -> ExportLayout:
    """Return EAGLE-3 for OpenVINO GenAI: with one layer, three taps and none of the norms that it does not know."""
    layout, ids = flat.sglang_eagle(source), flat.block_ids(source)
    # The engine puts the target's in its place; without one, and without a tokenizer, the converter would make them up.
    embedding = source.target.embedding().to(source.dtype)
    layout = replace(
        layout,
        weights=layout.weights | {"embed_tokens.weight": embedding},
        files={name: source.target.folder / name for name in TOKENIZER if (source.target.folder / name).is_file()},
    )
    return _as_openvino(source, layout, ids, source.window_note("OpenVINO GenAI"))


def _as_gguf(source: Source, layout: ExportLayout, kind: str, notes: tuple[str, ...]) -> ExportLayout:
    converter = _find(GGUF_CONVERTER, GGUF_VARIABLE, "llama_cpp/source", "run `CONVERTER=1 sh scripts/setup_llama_cpp.sh`")
    target, outtype = source.target.folder, OUT_TYPES[source.dtype_name]
    options = ["--spec-type", kind, "--spec-draft-n-max", str(source.num_speculative_tokens)]
    how = shlex.join(["python", str(converter), str(target), "--outfile", "target.gguf", "--outtype", outtype])
    return replace(
        layout,
        serve=lambda out: shlex.join(
            ["llama-server", "--model", "target.gguf", "--model-draft", f"{out}/{GGUF_FILE}", *options]
        ),
        notes=(f"The target as GGUF, if need be: {how}", *notes),
        convert=partial(_make_gguf, converter=converter, target=target, outtype=outtype),
    )


def _make_gguf(written: Path, out: Path, layout: ExportLayout, *, converter: Path, target: Path, outtype: str) -> None:
    """Turn a written folder into a GGUF file in `out` that holds all of its numbers."""
    made = out / GGUF_FILE
    command = [sys.executable, str(converter), str(written), "--outfile", str(made), "--outtype", outtype]
    # Beside the source stands what the converter imports and this project does not.
    packages = os.pathsep.join(filter(None, [str(converter.parent.parent / "python"), os.environ.get("PYTHONPATH")]))
    command += ["--target-model-dir", str(target)]
    _run("llama.cpp's converter", command, made, {"PYTHONPATH": packages})
    numbers = sum(int(tensor.n_elements) for tensor in gguf.GGUFReader(made).tensors)
    planned = sum(stored.numel() for name, stored in layout.weights.items() if name not in NOT_STORED)
    if numbers < planned:
        raise RuntimeError(f"{GGUF_FILE} was written with {numbers} numbers of {planned}")


def _as_openvino(source: Source, layout: ExportLayout, block_ids: Sequence[int] | None, notes: tuple[str, ...]) -> ExportLayout:
    converter = _find(OPTIMUM, OPENVINO_VARIABLE, "openvino", "run `sh scripts/setup_engine.sh openvino`")
    if source.dtype_name not in WEIGHT_FORMATS:
        raise InputError(
            f"its weights are {source.dtype_name}, and OpenVINO models are written in {' or '.join(WEIGHT_FORMATS)}: "
            "say which with --set dtype=float32"
        )
    how = [*_optimum_command(converter, source.target.folder, source.dtype_name), "target_openvino"]
    tokens = source.num_speculative_tokens
    return replace(
        layout,
        serve=lambda out: (
            f"draft = openvino_genai.draft_model({out!r}, 'CPU')\n"
            "pipeline = openvino_genai.LLMPipeline('target_openvino', 'CPU', draft_model=draft)\n"
            f"pipeline.generate(prompt, max_new_tokens=256, num_assistant_tokens={tokens})"
        ),
        notes=(f"The target as an OpenVINO model, if need be: {shlex.join(how)}", PRECISION_NOTE, *notes),
        convert=partial(_make_openvino, converter=converter, dtype_name=source.dtype_name, block_ids=block_ids),
    )


def _make_openvino(
    written: Path, out: Path, layout: ExportLayout, *, converter: Path, dtype_name: str, block_ids: Sequence[int] | None
) -> None:
    """Turn a written folder into an OpenVINO model in `out`.

    `block_ids` are the blocks whose outputs an EAGLE-3 model reads; None: it is a draft LM.
    """
    command = _optimum_command(converter, written, dtype_name) + ([] if block_ids is None else [OWN_CODE]) + [str(out)]
    _run("optimum-intel", command, out / MODEL, {"HF_HUB_OFFLINE": "1"})
    # Of matrices only: vectors that are equal, as norms may be, are stored once.
    planned = WEIGHT_FORMATS[dtype_name][1] * sum(stored.numel() for stored in layout.weights.values() if stored.ndim > 1)
    if (size := (out / NUMBERS).stat().st_size) < planned:
        raise RuntimeError(f"{NUMBERS} was written with {size} bytes of {planned}")
    if block_ids is not None:
        _name_the_states(out / MODEL, block_ids)


def _optimum_command(converter: Path, model: Path, dtype_name: str) -> list[str]:
    command = [str(converter), "export", "openvino", "--model", str(model), "--task", "text-generation-with-past"]
    return [*command, "--weight-format", WEIGHT_FORMATS[dtype_name][0]]


def _name_the_states(model: Path, block_ids: Sequence[int]) -> None:
    tree = ElementTree.parse(model)
    info = tree.getroot().find("rt_info")
    if info is None or info.find("eagle3_mode") is None:
        raise RuntimeError(f"{model.name} was not written as an EAGLE-3 model: its rt_info lacks eagle3_mode")
    ElementTree.SubElement(info, "hidden_layers_list", value=" ".join(map(str, block_ids)))
    tree.write(model, encoding="utf-8", xml_declaration=True)


def _find(file: str, variable: str, usual: str, how: str) -> Path:
    """Return a converter's path: in the folder that an environment variable names, else in the usual download."""
    named = os.environ.get(variable)
    converter = (Path(named) if named else downloads_folder() / "venvs" / usual).absolute() / file
    if not converter.is_file():
        raise InputError(
            f"{converter} is missing, which writes this form: {how}, or name its folder in the environment variable {variable}"
        )
    return converter


def _run(name: str, command: Sequence[str], made: Path, environment: Mapping[str, str]) -> None:
    """Run a converter that is to leave the file `made`; an InputError has the last line that it writes to stderr."""
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    if done.returncode != 0 or not made.is_file():
        words = (done.stderr.strip().splitlines() or ["it says nothing"])[-1]
        raise InputError(f"{name} refuses it: {words}")
