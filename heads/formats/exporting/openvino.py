"""Drafts as OpenVINO models for OpenVINO GenAI: draft LMs and EAGLE-3.

optimum-intel converts them, with the tokenizer, from the form that it reads. It needs other packages than this project, so it
has an environment of its own (`scripts/setup_engine.sh`) and is run as a process. It does not say in an EAGLE-3 model which
of the target's states that reads, and OpenVINO GenAI would take those of other blocks than ours; they are added here, in the
model's XML file. Ids of hidden states name the block whose output it is.
"""

from __future__ import annotations

import math
import shlex
import shutil
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from configs.runtime.errors import InputError
from heads.formats.exporting import draft_lm as plain
from heads.formats.exporting import flat
from heads.formats.exporting.converter import find_converter, run_converter
from heads.formats.exporting.source import Source
from heads.formats.layout import ExportLayout

MODEL, NUMBERS = "openvino_model.xml", "openvino_model.bin"
CONVERTER = "bin/optimum-cli"
VARIABLE = "OPENVINO"  # names the folder of another environment
WEIGHT_FORMATS = {"float32": ("fp32", 4), "float16": ("fp16", 2)}  # the converter's name, and bytes a number
# The class of EAGLE-3 is in a file of optimum-intel's, which it has transformers load like one that lies beside a model.
OWN_CODE = "--trust-remote-code"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.model", "chat_template.jinja")
PRECISION_NOTE = (
    "By itself OpenVINO rounds cached keys and values to 8 bits, and computes in bfloat16 where the CPU has it; to compare "
    "with other decoders give both models INFERENCE_PRECISION_HINT='f32' and KV_CACHE_PRECISION='f32'."
)


def draft_lm(source: Source) -> ExportLayout:
    return _converted(source, plain.transformers(source), None, plain.vocabulary_note(source))


def eagle3(source: Source) -> ExportLayout:
    """Return EAGLE-3 for OpenVINO GenAI: with one layer, three taps and none of the norms that it does not know."""
    layout, ids = flat.sglang_eagle(source), flat.block_ids(source)
    # The engine puts the target's in its place; without one, and without a tokenizer, the converter would make them up.
    embedding = source.target.embedding().to(source.dtype)
    layout = replace(
        layout,
        weights=layout.weights | {"embed_tokens.weight": embedding},
        files={name: source.target.folder / name for name in TOKENIZER if (source.target.folder / name).is_file()},
    )
    return _converted(source, layout, ids, source.window_note("OpenVINO GenAI"))


def _converted(source: Source, layout: ExportLayout, block_ids: Sequence[int] | None, notes: tuple[str, ...]) -> ExportLayout:
    converter = find_converter(CONVERTER, VARIABLE, "openvino", "run `sh scripts/setup_engine.sh openvino`")
    if source.dtype_name not in WEIGHT_FORMATS:
        raise InputError(
            f"its weights are {source.dtype_name}, and OpenVINO models are written in {' or '.join(WEIGHT_FORMATS)}: "
            "say which with --set dtype=float32"
        )
    how = [*_command(converter, source.target.folder, source.dtype_name), "target_openvino"]

    def lines(out: str) -> str:
        return "\n".join(
            [
                f"draft = openvino_genai.draft_model({out!r}, 'CPU')",
                "pipeline = openvino_genai.LLMPipeline('target_openvino', 'CPU', draft_model=draft)",
                f"pipeline.generate(prompt, max_new_tokens=256, num_assistant_tokens={source.num_speculative_tokens})",
            ]
        )

    return replace(
        layout,
        serve=lines,
        notes=(f"The target as an OpenVINO model, if need be: {shlex.join(how)}", PRECISION_NOTE, *notes),
        convert=partial(_convert, converter=converter, dtype_name=source.dtype_name, block_ids=block_ids),
    )


def _convert(folder: Path, layout: ExportLayout, *, converter: Path, dtype_name: str, block_ids: Sequence[int] | None) -> None:
    """Turn a written folder into an OpenVINO model in it; everything else in it is removed.

    `block_ids` are the blocks whose outputs an EAGLE-3 model reads; None: it is a draft LM.
    """
    before, made = list(folder.iterdir()), folder / "made"
    command = _command(converter, folder, dtype_name) + ([] if block_ids is None else [OWN_CODE]) + [str(made)]
    run_converter("optimum-intel", command, made / MODEL, {"HF_HUB_OFFLINE": "1"})
    # Of matrices only: vectors that are equal, as norms may be, are stored once.
    planned = WEIGHT_FORMATS[dtype_name][1] * sum(
        math.prod(stored.shape) for stored in layout.weights.values() if len(stored.shape) > 1
    )
    if (written := (made / NUMBERS).stat().st_size) < planned:
        raise RuntimeError(f"{NUMBERS} was written with {written} bytes of {planned}")
    if block_ids is not None:
        _name_the_states(made / MODEL, block_ids)
    for path in before:
        path.unlink()
    for path in list(made.iterdir()):
        shutil.move(path, folder / path.name)
    made.rmdir()


def _command(converter: Path, model: Path, dtype_name: str) -> list[str]:
    command = [str(converter), "export", "openvino", "--model", str(model), "--task", "text-generation-with-past"]
    return [*command, "--weight-format", WEIGHT_FORMATS[dtype_name][0]]


def _name_the_states(model: Path, block_ids: Sequence[int]) -> None:
    tree = ElementTree.parse(model)
    info = tree.getroot().find("rt_info")
    if info is None or info.find("eagle3_mode") is None:
        raise RuntimeError(f"{model.name} was not written as an EAGLE-3 model: its rt_info lacks eagle3_mode")
    ElementTree.SubElement(info, "hidden_layers_list", value=" ".join(map(str, block_ids)))
    tree.write(model, encoding="utf-8", xml_declaration=True)
