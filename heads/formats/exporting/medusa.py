"""Medusa as vLLM and TensorRT-LLM read it: residual blocks, and output heads of the target's whole vocabulary.

Neither loads a reduced vocabulary for Medusa (vLLM 0.32: tried). The heads of such a draft are therefore widened to all tokens,
with rows for the others that never have the largest logit (`LazyTensor.full_vocabulary_head`): a draft that proposes tokens it
was not trained for is accepted less.
"""

from __future__ import annotations

import json
import shlex

from configs.schema.heads import MedusaSettings
from heads.formats.exporting.serving import UNTRIED, vllm_command
from heads.formats.exporting.source import Source
from heads.formats.layout import ExportLayout
from heads.frozen.checkpoint_files import Weights

MEDUSA_FILE = "medusa_lm_head.safetensors"


def vllm_medusa(source: Source) -> ExportLayout:
    """Return Medusa for vLLM."""
    settings: MedusaSettings = source.settings
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": source.target.shape.width,
        "vocab_size": source.target.vocab_size,
        # No other key may hold both "num" and "heads": vLLM would take it for this one.
        "medusa_num_heads": settings.num_depths,
        "medusa_num_layers": settings.num_layers,
        "medusa_fc_bias": True,
        "original_lm_head": not settings.own_output_heads,
        "dtype": source.dtype_name,
    }
    return ExportLayout(
        config=config,
        weights=source.body() | _heads(source),
        serve=vllm_command(source, "medusa"),
        notes=("vLLM takes each head's likeliest token; no tree.",),
    )


def tensorrt_medusa(source: Source) -> ExportLayout:
    """Return Medusa under the published names, as TensorRT-LLM's converter reads it: an output head for each depth."""
    settings: MedusaSettings = source.settings
    heads = _heads(source)
    weights: Weights = {}
    for name, stored in source.body().items():
        _, depth, _, number, leaf = name.split(".")
        weights[f"{depth}.{number}.linear.{leaf}"] = stored
    for head in range(settings.num_depths):
        own = f"lm_heads.{head}.weight" if settings.own_output_heads else "lm_head.weight"
        weights[f"{head}.{settings.num_layers}.weight"] = heads[own]
    run: list[str] = []
    if source.tree is not None:
        tokenizer, choices = shlex.quote(source.target.name), shlex.quote(json.dumps(source.tree))
        run = [f"python run.py --engine_dir ENGINE --tokenizer_dir {tokenizer} --medusa_choices {choices}"]
    sizes = {"medusa_num_heads": settings.num_depths, "medusa_num_layers": settings.num_layers}
    return ExportLayout(
        config=sizes | {"hidden_size": source.target.shape.width},
        weights=weights,
        serve=lambda out: "\n".join(
            [
                f"python convert_checkpoint.py --model_dir {shlex.quote(source.target.name)} "
                f"--medusa_model_dir {shlex.quote(out)} --output_dir CHECKPOINT "
                f"--dtype {source.dtype_name} --num_medusa_heads {settings.num_depths}",
                "trtllm-build --checkpoint_dir CHECKPOINT --output_dir ENGINE --speculative_decoding_mode medusa",
                *run,
            ]
        ),
        notes=(UNTRIED, "convert_checkpoint.py lies in TensorRT-LLM's examples/medusa, run.py in examples."),
        weights_file=MEDUSA_FILE,
    )


def _heads(source: Source) -> Weights:
    """Return the output heads to be written."""
    own = {name: source.whole_head(stored) for name, stored in source.own_head().items()}
    return own or {"lm_head.weight": source.target.head().cast(source.dtype)}
