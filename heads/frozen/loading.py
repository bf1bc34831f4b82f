"""Loading the target from a Hub id, a folder, a `.gguf` file, or the embedded model, as one `Target` whichever it was."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate.utils import patch_environment
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from configs.runtime.errors import ConfigError, InputError, first_line
from configs.runtime.files import read_json
from configs.runtime.redaction import redact
from configs.schema.target import AudioConfig, ImagesConfig, TargetConfig
from heads.device import choose_device
from heads.frozen.hidden_states import TargetStates
from heads.frozen.identity import TargetIdentity, hash_chat_template, hash_tokenizer, hash_weights, load_gguf, locate
from heads.frozen.media import MediaPrompt, MediaReader, load_reader, shown
from heads.frozen.placement import load_ends, place_parts
from heads.frozen.processes import Share, join_group, split_arguments
from heads.frozen.tokenizer import SOUND, in_template, load_tokenizer, no_chat_template
from heads.frozen.weights import UNREADABLE, cause_of, loader_of, quantization_of
from heads.inference.causal_lm import MediaInputs
from heads.inference.lean_forward import make_fastest, make_lean
from heads.inference.model_checks import check_split
from heads.inference.runner import Runner, rope_limit, runner_of

log = logging.getLogger("draftsmith")

UNLIMITED = 2**31 - 1  # positions
GENERATION_CONFIG = "generation_config.json"
OFF = {"top_k": (0, -1), "top_p": (1,), "min_p": (0,), "repetition_penalty": (1,)}  # the values by which each is off
Sampling = dict[str, float | None]  # keys of `configs.schema.decoding.DecodeConfig`


class StateSource(Protocol):
    """Who computes a target's states in place of its blocks here (`distill.server.states.EngineStates`)."""

    def ahead(self, batches: Iterator[Any]) -> Iterator[Any]: ...

    def states(self, batch: Any, taps: Sequence[int] = ()) -> TargetStates: ...

    def serve(self, taps: Sequence[int]) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Target:
    """A frozen target, ready to run, with its tokenizer and its identity."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    identity: TargetIdentity
    eos_token_ids: tuple[int, ...]  # every id that ends an answer
    spread_by: TargetConfig | None = None  # by which its blocks were spread over devices or processes; None: it is on one
    group: Share | None = None  # the processes that it is split over; None: each has a target of its own
    states_from: StateSource | None = None  # servers that run it; None: it is run here
    media: MediaReader | None = None  # makes its inputs of the images or sounds of prompts; None: it reads text alone

    @property
    def device(self) -> torch.device:
        """The device of the weights; of a spread target that of embedding, final norm and head, on which states come out."""
        return self.model.device

    @property
    def runner(self) -> Runner:
        return runner_of(self.model)

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding; may be more than the tokenizer has tokens."""
        return self.model.config.get_text_config().vocab_size

    @property
    def max_positions(self) -> int:
        """The longest prompt and answer together, in tokens; `UNLIMITED` where the model names none (ALiBi)."""
        config = self.model.config.get_text_config()
        limits = [getattr(config, name, None) for name in ("max_position_embeddings", "max_seq_len")]  # the latter: MPT
        return min((limit for limit in (*limits, rope_limit(config)) if limit is not None and limit > 0), default=UNLIMITED)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        answer_follows: bool = True,
        media: Sequence[str] = (),
    ) -> list[int]:
        """Return the token ids of a conversation in the chat template (`heads.frozen.tokenizer.in_template`)."""
        return self.encode(self.chat_text(messages, tools=tools, answer_follows=answer_follows, media=media), media)

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        answer_follows: bool = True,
        media: Sequence[str] = (),
    ) -> str:
        """Return the text whose ids `encode_chat` returns."""
        given: dict[str, Any] = {"tools": tools, "answer_follows": answer_follows}
        if media:
            given |= {"media": media, "template": self._reader(media).template}
        else:
            given["in_parts"] = self.model.config.get_text_config() is not self.model.config
        return in_template(self.tokenizer, self.identity.name, messages, **given)

    def encode(self, text: str, media: Sequence[str] = ()) -> list[int]:
        """Return the token ids of a text that was made by the chat template, with places for its media."""
        if media:
            return self._reader(media).ids(MediaPrompt(text=text, media=tuple(media)))
        # The template brings its own special tokens; the tokenizer must not add another set.
        try:
            ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        except Exception as error:  # tokenizers raises no narrower one
            raise InputError(
                f"target {self.identity.name} has no token for some of the prompt {text[:60]!r}: {first_line(error)}; with "
                f"target.tokens ids a prompt is numbers from 0 to {self.vocab_size - 1}"
            ) from error
        if (highest := max(ids, default=0)) >= self.vocab_size:
            token = self.tokenizer.convert_ids_to_tokens(highest)
            raise InputError(
                f"target {self.identity.name} has {self.vocab_size} embeddings, and a conversation holds token {highest}, "
                f"{token!r}: leave it out, or resize the model (resize_token_embeddings)"
            )
        return list(ids)

    def media_prompt(self, messages: Sequence[Mapping[str, Any]], media: Sequence[str], **settings: Any) -> MediaPrompt | None:
        """Return what a conversation's media are read by, None where it has none; arguments are those of `encode_chat`."""
        return MediaPrompt(text=self.chat_text(messages, media=media, **settings), media=tuple(media)) if media else None

    def media_inputs(self, prompts: Sequence[MediaPrompt | None], ids: Sequence[Sequence[int]]) -> MediaInputs | None:
        """Return what the model reads beside the ids of rows that begin with these prompts; None where none has media."""
        first = next((prompt for prompt in prompts if prompt is not None), None)
        return None if first is None else self._reader(first.media).inputs(prompts, ids)

    def _reader(self, media: Sequence[str]) -> MediaReader:
        for reference in media:
            kind = AudioConfig if reference.startswith(SOUND) else ImagesConfig
            if self.media is None or not isinstance(self.media.config, kind):
                raise InputError(
                    f"a prompt brings {kind.what} {shown(reference)}, and {kind.key} is null: give {{}} there for a target "
                    f"that reads {kind.what}s, or leave the prompt out"
                )
        assert self.media is not None
        return self.media


def load_target(config: TargetConfig, *, for_chats: bool = False, takes_states: bool = False) -> Target:
    """Load, freeze and identify a target; an InputError where it cannot be found, or not be run as configured.

    With `for_chats` a tokenizer without a chat template is refused, before weights are read. `takes_states`: the caller has its
    states from servers where the config names some (`distill.server.states`).
    """
    if config.states is not None and not takes_states:
        raise ConfigError(
            "target.states is for training and scripts/cache.py; this command runs the target itself: set it to null"
        )
    if not sys.stderr.isatty():
        disable_progress_bar()  # in a log, redrawn bars hide the other lines
    path, device = locate(config), choose_device(config.device)
    model, tokenizer = _read(path, config, device, for_chats=for_chats)
    # accelerate's hooks place the weights of a spread target, and blocks that servers run have none.
    if config.device_map is None and config.states is None:
        move(model, device)
    model.eval().requires_grad_(False)
    group = join_group(model, config) if config.is_split else None
    check_split(model)
    if (tokens := len(tokenizer)) > (rows := model.config.get_text_config().vocab_size):
        log.warning(
            "the tokenizer has %d tokens, the model %d embeddings: texts with one of the last are refused", tokens, rows
        )
    if (limit := rope_limit(model.config.get_text_config())) is not None:
        log.warning(
            "texts end at %d tokens, where %s changes its rotary embedding (longrope); for longer ones, set short_factor to "
            "the values of long_factor in its config.json",
            limit,
            type(model).__name__,
        )
    if config.forward == "lean":
        make_lean(model)
    elif config.forward == "auto" and config.is_whole_text:
        make_fastest(model)
    return Target(
        model=model,
        tokenizer=tokenizer,
        identity=TargetIdentity(
            name=redact(config.name),  # the identity is written into everything
            revision=None if config.revision is None else redact(config.revision),
            weights_sha256=hash_weights(path),
            tokenizer_sha256=hash_tokenizer(tokenizer),
            chat_template_sha256=hash_chat_template(tokenizer),
        ),
        eos_token_ids=_eos_token_ids(model, tokenizer),
        spread_by=None if config.device_map is None and group is None else config,
        group=group,
        media=load_reader(path, config, model, tokenizer),
    )


def load_with(attention: str, load: Callable[[str], PreTrainedModel]) -> PreTrainedModel:
    """Return the model that `load` makes with this attention, or with eager where its family has no sdpa."""
    try:
        return load(attention)
    except ValueError as error:
        if attention != "sdpa" or "scaled_dot_product_attention" not in str(error):
            raise
    model = load("eager")
    log.info("%s has no sdpa in transformers; attention is eager", type(model).__name__)
    return model


def move(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """Move a model to a device, in place; transformers wraps `to` in a way that type checkers cannot follow."""
    torch.nn.Module.to(model, device=device)
    return model


def _read(
    path: Path, config: TargetConfig, device: torch.device, *, for_chats: bool
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    try:
        tokenizer = load_tokenizer(path, config)
        if for_chats and tokenizer.chat_template is None:
            raise InputError(no_chat_template(redact(config.name)))
        with patch_environment(ACCELERATE_USE_FSDP="false"):  # else transformers takes the target for what is to be sharded
            return _load_model(path, config, device), tokenizer
    except InputError:
        raise
    except UNREADABLE as error:
        has_text = path.is_file() or any(path.glob("tokenizer*"))
        hint = "" if has_text else "; where its tokens are no text, set target.tokens to ids"
        raise InputError(
            f"target.name: {path} does not hold a causal LM and its tokenizer: {cause_of(path, error)}{hint}"
        ) from error


def _load_model(path: Path, config: TargetConfig, device: torch.device) -> PreTrainedModel:
    if path.suffix == ".gguf":
        return load_with(config.attention, partial(load_gguf, path, getattr(torch, config.dtype)))
    if config.states is not None and config.device_map is None:
        return load_ends(path, config, device)
    spread: dict[str, Any] = {}
    if config.is_split:
        spread = split_arguments(path, config, device)
    elif config.device_map is not None:
        spread = {"device_map": place_parts(path, config, device), "offload_folder": config.offload_folder}
    if config.offload_folder is None and "disk" in spread.get("device_map", {}).values() and quantization_of(path) is not None:
        raise InputError(
            f"target.offload_folder: {path} is quantised, and what lies on disk of it is written there dequantised; name "
            "a folder, or give more of target.max_memory"
        )
    load = loader_of(path, getattr(torch, config.dtype), trust_remote_code=config.trust_remote_code)
    return load_with(config.attention, lambda attention: load(attn_implementation=attention, **spread))


def _eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return every id that ends an answer: those of the generation config and of the tokenizer."""
    declared = model.generation_config.eos_token_id if model.generation_config is not None else None
    ids = {declared} if isinstance(declared, int) else set(declared or ())
    if tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return tuple(sorted(ids))


def served_sampling(target: Path) -> Sampling:
    """Return how engines sample the target where a request does not say: by its `generation_config.json`.

    vLLM and SGLang take these values by default, whatever its `do_sample` says, and temperature 1 where it names none. None is
    what is off; a single file has none of its own.
    """
    said = read_json(target / GENERATION_CONFIG, "generation config") if (target / GENERATION_CONFIG).is_file() else {}
    sampling = {key: None if (value := said.get(key)) in (None, *off) else value for key, off in OFF.items()}
    temperature = said.get("temperature")
    return {"temperature": 1.0 if temperature is None else temperature} | sampling


def in_words(sampling: Sampling) -> str:
    """Name what a sampling sets; nothing where that is temperature 1 alone."""
    named = {key: value for key, value in sampling.items() if value is not None}
    return "" if named == {"temperature": 1.0} else ", ".join(f"{key} {value:g}" for key, value in named.items())
