"""What an export is made from, an artifact and the folder of its target; and the lines by which engines serve the two.

Of the target only its config is read, and single tensors of its file where a format wants them. The model that stands for it
here lies on torch's `meta` device: it knows classes and sizes, and has no weights.
W draft vocabulary.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel

from configs.runtime.errors import InputError, first_line
from configs.schema.heads import DFlashSettings
from heads.artifact import head_settings
from heads.families.registry import FAMILIES
from heads.formats.layout import check_names
from heads.frozen.weights import UNREADABLE, FloatWeights, Weights, auto_class, read_float_weights, read_weights
from heads.metadata import VOCABULARY_FILE, Metadata, read_metadata
from heads.modules.layers import LayerShape, layer_shape, shape_like
from heads.vocabulary import DraftVocabulary, read_draft_vocabulary

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
# And as models that also take images have them.
HEADS = (HEAD, "language_model.lm_head.weight")
EMBEDDINGS = (EMBEDDING, "model.language_model.embed_tokens.weight", "language_model.model.embed_tokens.weight")
Serve = Callable[[str], str]
# vLLM 0.32 gives a draft the cache blocks of one kind of layer; without the hybrid manager layers that attend are of one kind
APART = "--disable-hybrid-kv-cache-manager"
UNTRIED = "Format-checked only: names, shapes and ids were compared with what the engine reads; it was not run."


@dataclass(frozen=True)
class TargetFolder:
    """A target's folder, and its name as an engine is given it: a Hub id or the folder."""

    folder: Path
    name: str
    trust_remote_code: bool = False  # here and where it is served

    @cached_property
    def model(self) -> PreTrainedModel:
        """The target without weights; an InputError where the folder holds no config of a causal LM."""
        try:
            trust = self.trust_remote_code
            config = AutoConfig.from_pretrained(self.folder, local_files_only=True, trust_remote_code=trust)
            with torch.device("meta"):
                model: PreTrainedModel = auto_class(config).from_config(config, trust_remote_code=trust)
        except UNREADABLE as error:
            raise InputError(f"{self.folder} holds no config of a causal LM: {first_line(error)}") from error
        return model

    @property
    def config(self) -> Any:
        return self.model.config.get_text_config()

    @property
    def options(self) -> tuple[str, ...]:
        """What vLLM and SGLang must be told of it."""
        return ("--trust-remote-code",) if self.trust_remote_code else ()

    @property
    def shape(self) -> LayerShape:
        return shape_like(self.model)

    @property
    def vocab_size(self) -> int:
        """Rows of its embedding."""
        return int(self.config.vocab_size)

    @cached_property
    def weights(self) -> FloatWeights:
        """Its tensors by name; of a quantised target as they are run."""
        return read_float_weights(self.folder)

    def head(self) -> Tensor:
        tied = self.config.tie_word_embeddings or self.model.config.tie_word_embeddings
        return self._first_of((*HEADS, *EMBEDDINGS) if tied else HEADS)

    def embedding(self) -> Tensor:
        return self._first_of(EMBEDDINGS)

    def _first_of(self, names: tuple[str, ...]) -> Tensor:
        for name in names:
            if name in self.weights:
                return self.weights[name][...]
        raise InputError(f"{self.folder} holds none of {', '.join(names)}")

    def check_plain(self) -> None:
        """Refuse a target with a scaled embedding, or a head with a bias: engines give drafts the weights only."""
        embedding, head = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        if type(embedding) is not nn.Embedding:
            raise InputError(
                f"the target's embedding is a {type(embedding).__name__}, of which engines share only the weights with a draft"
            )
        if type(head) is not nn.Linear or head.bias is not None:
            raise InputError("the target's output head is not a matrix alone, and engines share only the matrix with a draft")


@dataclass(frozen=True, kw_only=True)
class Source:
    """An artifact to be exported."""

    folder: Path
    metadata: Metadata
    settings: Any  # of the head's family (`configs.schema.heads`); None for a draft LM
    weights: Weights  # in the dtype to be written
    vocabulary: DraftVocabulary | None  # the tokens it can propose; None: all of the target's
    target: TargetFolder
    num_speculative_tokens: int  # that an engine is to draft a round; of DFlash a whole block, as it was trained

    @property
    def dtype(self) -> torch.dtype:
        """What its floating weights are written as."""
        return next(stored.dtype for stored in self.weights.values() if stored.dtype.is_floating_point)

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def shape(self) -> LayerShape:
        return layer_shape(self.target.model, getattr(self.settings, "layer", None))

    @property
    def draft_vocab_size(self) -> int:
        return self.target.vocab_size if self.vocabulary is None else len(self.vocabulary)

    def own_head(self) -> Weights:
        return {name: stored for name, stored in self.weights.items() if name.startswith("lm_head")}

    def body(self) -> Weights:
        return {name: stored for name, stored in self.weights.items() if not name.startswith("lm_head")}

    def check_complete(self) -> None:
        """Refuse a head whose tensors are not exactly those that its settings call for on its target."""
        if self.settings is None:
            return
        with torch.device("meta"):
            head = FAMILIES[self.metadata.kind].build(self.settings, self.target.model, self.vocabulary)
        check_names(self.weights, head)

    def whole_head(self, head_WD: Tensor) -> Tensor:
        """Return an output head of the draft vocabulary as one of the target's whole, in which the other tokens never win.

        Each of them gets the mean of the rows, whose logit is never above the largest, as that of zeros could be.
        """
        if self.vocabulary is None:
            return head_WD
        whole_VD = head_WD.double().mean(0).to(head_WD.dtype).repeat(self.target.vocab_size, 1)
        whole_VD[self.vocabulary.token_ids_W] = head_WD
        return whole_VD

    def offsets(self) -> Weights:
        """Return `d2t` (int64 `[W]`, the target's id of each draft token less its own) and `t2d` (bool `[V]`), if any."""
        if self.vocabulary is None:
            return {}
        ids_W = self.vocabulary.token_ids_W
        return {"d2t": ids_W - torch.arange(len(ids_W)), "t2d": self.vocabulary.is_drafted_V}

    def whole_vocabulary_note(self, engine: str) -> tuple[str, ...]:
        """Return a note for an engine that drafts from the target's whole vocabulary, if the draft has another one."""
        if self.vocabulary is None:
            return ()
        return (
            f"{engine} drafts from the target's whole vocabulary of {self.target.vocab_size} tokens; draftsmith measured this "
            f"draft with the {self.draft_vocab_size} it was trained for, so acceptance may differ a little.",
        )

    def window_note(self, engine: str) -> tuple[str, ...]:
        """Return a note for an engine whose attention knows no window, if the draft's has one."""
        if (window := self.settings.window) is None:
            return ()
        return (
            f"{engine} attends to all of a text, training to {window} tokens of it: in longer texts fewer drafts are accepted.",
        )

    def require_three_taps(self, engine: str) -> None:
        if len(taps := self.settings.taps or ()) != 3:
            raise InputError(f"head.taps names {len(taps)} of the target's states, and {engine} has a place for three")

    def require(self, engine: str, **wanted: Any) -> None:
        """Refuse other settings than these, False and None alike, which are all that an engine has a place for."""
        for key, value in wanted.items():
            if (own := getattr(self.settings, key)) != value and (own or value):
                raise InputError(f"head.{key} is {own!r}, and {engine} has a place for {value!r} alone")


def read_source(
    folder: Path, target: TargetFolder, *, num_speculative_tokens: int | None = None, dtype: torch.dtype | None = None
) -> Source:
    """Read an artifact's metadata, and where its weights are; an InputError where it is damaged or drafts another number.

    `num_speculative_tokens` None: the artifact's, of DFlash a whole block; `dtype` None: weights are written as they are.
    """
    metadata = read_metadata(folder)
    weights = read_weights(folder)
    if dtype is not None:
        weights = {name: each.to(dtype) if each.is_floating_point() else each for name, each in weights.items()}
    reduced = metadata.draft_vocabulary == "reduced"
    settings = None if metadata.kind == "draft_lm" else head_settings(folder, metadata)
    wanted = num_speculative_tokens or metadata.num_speculative_tokens
    longest = getattr(settings, "longest_draft", None)
    if longest is not None and wanted > longest:
        raise InputError(f"num_speculative_tokens {wanted}: {folder} drafts at most {longest} tokens a round")
    if isinstance(settings, DFlashSettings):  # engines fill the block, and another number changes what each slot predicts
        wanted = settings.longest_draft
        if num_speculative_tokens not in (None, wanted):
            raise InputError(
                f"num_speculative_tokens {num_speculative_tokens}: {folder} fills blocks of {wanted} drafts, and engines draft "
                f"whole blocks; ask for {wanted}, or leave it out"
            )
    return Source(
        folder=folder,
        metadata=metadata,
        settings=settings,
        weights=weights,
        vocabulary=read_draft_vocabulary(folder / VOCABULARY_FILE) if reduced else None,
        target=target,
        num_speculative_tokens=wanted,
    )


def vllm_command(source: Source, method: str, *options: str, stitched: bool = False, **more: Any) -> Serve:
    """Return how vLLM serves a target with a draft, or, stitched, a target that has the draft in it.

    `options` go into the command, `more` joins the method in its config.
    """
    options = (*options, *source.target.options)

    def line(out: str) -> str:
        model = {} if stitched else {"model": out}
        config = {"method": method, **model, "num_speculative_tokens": source.num_speculative_tokens, **more}
        target = out if stitched else source.target.name
        return shlex.join(["vllm", "serve", target, *options, "--speculative-config", json.dumps(config, ensure_ascii=False)])

    return line


def sglang_command(source: Source, algorithm: str, tokens: int | None) -> Serve:
    """Return how SGLang serves a target with a draft; `tokens` are drafted a round in a chain (None: the draft's own)."""
    words = ["python", "-m", "sglang.launch_server", "--model-path", source.target.name, "--speculative-algorithm", algorithm]
    chain: list[str] = []
    if tokens is not None:
        chain = ["--speculative-num-steps", str(tokens), "--speculative-eagle-topk", "1"]
        chain += ["--speculative-num-draft-tokens", str(tokens + 1)]
    return lambda out: shlex.join([*words, "--speculative-draft-model-path", out, *chain, *source.target.options])


def transformers_lines(source: Source, draft_class: str, options: str) -> Serve:
    dtype, trust = source.dtype_name, ", trust_remote_code=True" if source.target.trust_remote_code else ""

    def lines(out: str) -> str:
        target = f"target = AutoModelForCausalLM.from_pretrained({source.target.name!r}, dtype=torch.{dtype}{trust})"
        draft = f"draft = {draft_class}.from_pretrained({out!r}, dtype=torch.{dtype})"
        return "\n".join([target, draft, f"target.generate(**inputs, assistant_model=draft{options})"])

    return lines


def speculators_line(out: str) -> str:
    return shlex.join(
        ["python", "-c", f"from speculators import SpeculatorModel; SpeculatorModel.from_pretrained({json.dumps(out)})"]
    )
