"""The target: which model, how it runs, over which devices or processes it is spread, which servers run it. Imports no torch.

The device map is made and checked against the model in `heads.frozen.placement`, the split in `heads.frozen.processes`,
servers in `distill.server.states`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import ClassVar, Literal

from configs.schema.base import Dtype, NonNegativeInt, PositiveFloat, PositiveInt, Settings, unless_a_variable, unless_plain_url

MaxMemory = dict[int | str, int | str] | None

# The hashes that make two targets one for a draft (`heads.frozen.identity.TargetIdentity`), in words
IDENTITY = {"weights_sha256": "target weights", "tokenizer_sha256": "tokenizer", "chat_template_sha256": "chat template"}
BYTES = re.compile(r"\d+(\.\d+)?\s*[KMGT]i?B", re.IGNORECASE)


class MediaConfig(Settings):
    """Where the images or sounds of prompts are, and up to which size one is read."""

    what: ClassVar[str]  # is read, in messages
    key: ClassVar[str]  # of these settings

    folder: str | None = None  # of relative paths, out of which none may lead; None: they stand in the working folder
    max_bytes: PositiveInt = 20_000_000  # of a file or a data URL


class ImagesConfig(MediaConfig):
    """How the images of prompts are read, by a target that reads images."""

    what, key = "image", "target.images"

    max_pixels: PositiveInt = 50_000_000  # width times height, before the processor makes an image smaller


class AudioConfig(MediaConfig):
    """How the sounds of prompts, WAV files, are read, by a target that reads sound."""

    what, key = "sound", "target.audio"

    max_seconds: PositiveFloat = 30.0  # of one sound; a longer one is refused. Qwen2-Audio reads no more


class EngineStatesConfig(Settings):
    """Servers that run the target and hand out its hidden states, in place of a forward here."""

    kind: Literal["vllm"] = "vllm"  # vLLM from 0.32 on, started by the lines that draftsmith serve-states prints
    urls: list[str]  # of their APIs, as http://node1:8000/v1; work goes to whichever has time
    path: str  # a folder that servers and training share; files in it are deleted once read
    api_key_variable: str | None = None  # name of the environment variable that holds the servers' key
    concurrency: PositiveInt = 16  # requests in flight at each server, of one process
    # micro-batches whose states are requested ahead, and wait in memory; scripts/cache.py requests those of a shard
    prefetch: PositiveInt = 4
    timeout_seconds: PositiveFloat = 120.0  # of a request, and of waiting for its file
    retries: NonNegativeInt = 2  # further attempts after a failed connection or timeout; a server that fails them is left out
    # Nats: how far a server's log-probabilities after a probe may lie from those that norm and head here make of its last state
    probe_tolerance: PositiveFloat = 0.1

    def objections(self) -> Iterator[str]:
        for url in self.urls:
            yield from unless_plain_url(url, "urls")
        yield from unless_a_variable(self.api_key_variable)
        if not self.urls or len({url.rstrip("/") for url in self.urls}) < len(self.urls):
            yield f"urls must name at least one server, and each once, got {self.urls}"


class TargetConfig(Settings):
    """The language model that is to become faster."""

    # Embedded, a Hub id, a local folder, or a .gguf file; FP8 and MXFP4 ones are dequantised
    name: str = "embedded:smollm2-135m-instruct"
    revision: str | None = None  # a Hub revision; only for Hub ids
    dtype: Dtype = "bfloat16"  # of the weights as they are run
    attention: Literal["sdpa", "eager"] = "sdpa"  # transformers' attention; others take no masks by row and by tree
    # lean: decode by a forward of draftsmith's own (Llama, Mistral, Qwen2, Qwen3), which packs the weights as a CPU reads them
    # fastest. auto: that one where the family and the memory have it, else transformers'. The draft runs the same way
    forward: Literal["transformers", "lean", "auto"] = "transformers"
    device: str = "auto"  # auto takes the GPU where there is one
    # ids: the tokens are no text but codes of pictures or sound, called by their numbers; no tokenizer is read
    tokens: Literal["text", "ids"] = "text"
    trust_remote_code: bool = False  # run Python code that comes with the model
    # In place of the tokenizer's own: a Jinja file; chatml; or plain, the texts alone, for base models
    chat_template: str | None = None
    # Variables that the chat template reads, as {enable_thinking: false}. With them it counts as another template
    chat_template_kwargs: dict[str, bool | int | float | str] | None = None
    # For targets that read images, prompts with images; {}: with these defaults. None: text alone
    images: ImagesConfig | None = None
    audio: AudioConfig | None = None  # for targets that read sound, prompts with sounds; as images, and in their place
    # For a target larger than one GPU. auto: its blocks are spread evenly over this process's GPUs, then the CPU's memory, then
    # the disk; embedding, final norm and head stay on `device`
    device_map: Literal["auto"] | None = None
    max_memory: MaxMemory = None  # by GPU's number or cpu, as 0: 60GiB; None: what is free there
    offload_folder: str | None = None  # with disk: for weights that are kept otherwise than they run, as of most MoE models
    # Hidden states from servers: then only embedding, final norm and head are loaded, and blocks where device_map places them
    states: EngineStatesConfig | None = None
    # For a target larger than one GPU: so many processes hold equal shares of each block, which is gathered while it runs
    # (FSDP2); each trains the draft on batches of its own. 1: each process has a target of its own
    shards: PositiveInt = 1

    @property
    def is_split(self) -> bool:
        """Whether processes split it between them."""
        return self.shards > 1

    @property
    def is_whole_text(self) -> bool:
        """Whether one device of this process runs all of it, on a text alone."""
        return not self.is_split and (self.device_map, self.states, self.images, self.audio) == (None,) * 4

    def objections(self) -> Iterator[str]:
        is_split, is_gguf = self.is_split, self.name.endswith(".gguf")
        for name, is_on in (("shards", is_split), ("device_map", self.device_map is not None)):
            if is_on and self.forward == "lean":
                yield f"{name}: forward {self.forward} packs all weights on one device; give transformers, or leave out {name}"
            if is_on and is_gguf:
                yield f"{name}: {self.name} is unpacked whole; give a folder of safetensors, or leave out {name}"
        for name, what in (("device_map", "spreads it over the devices of one"), ("states", "has it run by servers")):
            if is_split and getattr(self, name) is not None:
                yield f"shards: processes split the target, and {name} {what}; leave out one of the two"
        if self.tokens == "ids" and (self.chat_template is not None or self.chat_template_kwargs is not None or is_gguf):
            yield (
                "tokens ids takes a folder or Hub id, and prompts as they are: set chat_template to null, its kwargs too, or "
                "tokens to text"
            )
        for name in self.chat_template_kwargs or {}:
            if not name.isidentifier():
                yield f"chat_template_kwargs: {name!r} can be no variable of a template"
        if self.states is not None and (self.forward == "lean" or is_gguf):
            yield f"states of servers are those of forward transformers and of safetensors, got {self.forward} and {self.name}"
        yield from self._objections_to_media()
        yield from self._objections_to_places()

    def _objections_to_media(self) -> Iterator[str]:
        given = "images" if self.images is not None else "audio"
        if getattr(self, given) is None:
            return
        others = ("device_map", "states", *(["audio"] if given == "images" else []))
        found = [f"{name} null" for name in others if getattr(self, name) is not None] + ["shards 1"] * self.is_split
        if self.forward == "lean" or self.tokens != "text":
            found.append("forward transformers and tokens text")
        if found:
            yield (
                f"{given}: prompts with them are read by a whole target of this process, one kind at a time: set "
                f"{', '.join(found)}, or {given} to null"
            )

    def _objections_to_places(self) -> Iterator[str]:
        for name in ("max_memory", "offload_folder"):
            if self.device_map is None and getattr(self, name) is not None:
                yield f"{name} says how a target is spread, and device_map is null: give auto there, or drop {name}"
        for where, size in (self.max_memory or {}).items():
            if where != "cpu" and not str(where).isdigit():
                yield f"max_memory: {where!r} is no GPU's number and not 'cpu'"
            if size < 0 if isinstance(size, int) else BYTES.fullmatch(size) is None:
                yield f"max_memory: {where!r} has {size!r}; bytes, or a string as '70GiB', are accepted"
