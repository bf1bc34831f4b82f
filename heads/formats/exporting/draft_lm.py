"""A draft LM as an ordinary model folder, for every engine that takes one: transformers' assistant, vLLM, SGLang.

The artifact is such a folder already. What is added are the settings by which transformers drafts a fixed number of tokens:
by itself it starts at 20 and stops where the draft is unsure, and it reads both from the draft's own generation config only.
A draft of a reduced vocabulary gets an output head of its own, which is the draft's with rows for all other tokens that are
never the likeliest: with the rows it was not trained for, the demo's draft brought 1.46 tokens a step where 1.66 were measured.
"""

from __future__ import annotations

from torch import Tensor

from configs.runtime.errors import InputError
from configs.runtime.files import read_object
from heads.formats.exporting.source import (
    APART,
    EMBEDDING,
    HEAD,
    UNTRIED,
    Serve,
    Source,
    sglang_command,
    transformers_lines,
    vllm_command,
)
from heads.formats.layout import ExportLayout
from heads.frozen.weights import SINGLE_FILE, Weights
from heads.metadata import METADATA_FILE, PROMPTS_FILE, VOCABULARY_FILE

CONFIG, GENERATION = "config.json", "generation_config.json"
BIAS = "lm_head.bias"
ATTENTION_KINDS = {"full_attention", "sliding_attention", "chunked_attention"}  # vLLM can keep all their keys and values alike
WRITTEN = {CONFIG, GENERATION, SINGLE_FILE, METADATA_FILE, PROMPTS_FILE, VOCABULARY_FILE}


def transformers(source: Source) -> ExportLayout:
    notes = (
        "The number of drafts stands in generation_config.json; as an argument of `generate` it is ignored.",
        "One prompt at a time.",
    )
    return _folder(source, transformers_lines(source, "AutoModelForCausalLM", ""), notes)


def vllm(source: Source) -> ExportLayout:
    """Return the folder for vLLM.

    Release 0.32 (`GPUModelRunner._build_attention_metadata`) gives a draft model the cache blocks of the first kind of layer.
    In a target of several kinds it writes over theirs, and changes what the target says. Without the hybrid cache manager all
    layers that attend are of one kind.
    """
    kinds = set(getattr(source.target.config, "layer_types", None) or ())
    if len(kinds) < 2:
        return _folder(source, vllm_command(source, "draft_model"), ())
    if kinds <= ATTENTION_KINDS:
        note = f"Without {APART} vLLM 0.32 mixes the caches of draft and target: outputs change."
        return _folder(source, vllm_command(source, "draft_model", APART), (note,))
    note = f"Not tried: in a target with layers of {len(kinds)} kinds vLLM 0.32 may mix the caches of the draft and the target."
    return _folder(source, vllm_command(source, "draft_model"), (note,))


def sglang(source: Source) -> ExportLayout:
    return _folder(source, sglang_command(source, "STANDALONE", source.num_speculative_tokens), (UNTRIED,))


def vocabulary_note(source: Source) -> tuple[str, ...]:
    if source.vocabulary is None:
        return ()
    return (f"It drafts the {source.draft_vocab_size} tokens it was trained for; rows of other tokens never win.",)


def _folder(source: Source, serve: Serve, notes: tuple[str, ...]) -> ExportLayout:
    config = read_object(source.folder / CONFIG, "config of the draft")
    size = config.get("vocab_size")
    if size != source.target.vocab_size:
        raise InputError(f"its vocabulary has {size} rows, the target's {source.target.vocab_size}; engines ask for the same")
    weights, notes = source.weights, (*notes, *vocabulary_note(source))
    if source.vocabulary is not None:
        weights = weights | _head_that_keeps_to_its_vocabulary(source, source.vocabulary.token_ids_W)
        config |= {"tie_word_embeddings": False}
    path = source.folder / GENERATION
    generation = read_object(path, "generation config of the draft") if path.is_file() else {}
    drafting = {
        "num_assistant_tokens": source.num_speculative_tokens,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    }
    return ExportLayout(
        config=config | {"dtype": source.dtype_name},
        weights=weights,
        serve=serve,
        notes=notes,
        files={path.name: path for path in source.folder.iterdir() if path.is_file() and path.name not in WRITTEN},
        json_files={GENERATION: generation | drafting},
    )


def _head_that_keeps_to_its_vocabulary(source: Source, ids_W: Tensor) -> Weights:
    """Return the draft's whole output head, and its bias if it has one, without the tokens it was not trained for."""
    head = source.weights.get(HEAD, source.weights.get(EMBEDDING))
    if head is None:
        raise InputError(f"it holds neither {HEAD} nor {EMBEDDING}, of which the rows of other tokens are to be replaced")
    whole = {HEAD: source.whole_head(head[ids_W])}
    if (bias := source.weights.get(BIAS)) is not None:
        whole[BIAS] = source.whole_head(bias[ids_W].unsqueeze(1)).squeeze(1)
    return whole
