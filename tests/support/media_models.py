"""What a tiny model that reads images or sounds needs beside its weights: ids of its marks, tokenizer, processor, examples."""

from __future__ import annotations

import io
import wave
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from configs.runtime.files import write_json

PLACEHOLDER, START, END, VIDEO = 250, 251, 252, 253
HEIGHT, WIDTH = 56, 84
SOUND_RATE = 8000  # other than that of the feature extractors, 16,000
TEMPLATE = (
    "{% for message in messages %}{{ 'w1 ' if message.role == 'user' else 'w2 ' }}"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{{ ' PLACE ' if part.type in ('image', 'audio') else part.text }}{% endfor %}{% endif %} w3 {% endfor %}"
    "{% if add_generation_prompt %}w2 {% endif %}"
)


@dataclass(frozen=True)
class MediaFamily:
    processor: str
    place: str  # what its chat template writes where one stands
    marks: dict[int, str]
    changes: dict[str, Any]  # of the tiny config
    part: str  # the class of the image processor, or of the feature extractor
    sizes: dict[str, Any]  # settings of it
    named: dict[str, str] = field(default_factory=dict)  # marks that its tokenizer has as attributes
    settings: dict[str, Any] = field(default_factory=dict)  # of the processor
    reads: Literal["images", "audio"] = "images"
    at_most: int = 2  # in a prompt


QWEN_MARKS = {PLACEHOLDER: "<|image_pad|>", START: "<|vision_start|>", END: "<|vision_end|>", VIDEO: "<|video_pad|>"}
QWEN_IDS = {"image_token_id": PLACEHOLDER, "vision_start_token_id": START, "vision_end_token_id": END, "video_token_id": VIDEO}


def _qwen(processor: str, vision: dict[str, Any]) -> MediaFamily:
    pixels = {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 64}
    return MediaFamily(
        processor=processor,
        place="<|vision_start|><|image_pad|><|vision_end|>",
        marks=QWEN_MARKS,
        changes=QWEN_IDS | {"vision_config": vision},
        part="Qwen2VLImageProcessor",
        sizes={"patch_size": 14, "merge_size": 2, "size": pixels},
    )


def _with_sound(processor: str, named: str, encoder: dict[str, Any], at_most: int) -> MediaFamily:
    return MediaFamily(
        processor=processor,
        place="<|AUDIO|>",
        marks={PLACEHOLDER: "<|AUDIO|>"},
        changes={named: PLACEHOLDER, "audio_config": {"num_mel_bins": 16} | encoder},
        part="WhisperFeatureExtractor",
        sizes={"feature_size": 16, "chunk_length": 2},
        settings={"audio_token": "<|AUDIO|>"},
        reads="audio",
        at_most=at_most,
    )


MEDIA_FAMILIES = {
    "qwen2_vl": _qwen("Qwen2VLProcessor", {}),
    "qwen2_5_vl": _qwen("Qwen2_5_VLProcessor", {"window_size": 56, "fullatt_block_indexes": [1]}),
    "qwen3_vl": _qwen("Qwen3VLProcessor", {"deepstack_visual_indexes": [0, 1]}),
    "gemma3": MediaFamily(
        processor="Gemma3Processor",
        place="<start_of_image>",
        marks={PLACEHOLDER: "<image_soft_token>", START: "<start_of_image>", END: "<end_of_image>"},
        changes={
            "image_token_index": PLACEHOLDER,
            "boi_token_index": START,
            "eoi_token_index": END,
            "mm_tokens_per_image": 4,
            "vision_config": {"image_size": 56},
        },
        part="Gemma3ImageProcessor",
        sizes={"size": {"height": 56, "width": 56}},
        named={"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
        settings={"image_seq_length": 4},
    ),
    "llava": MediaFamily(
        processor="LlavaProcessor",
        place="<image>",
        marks={PLACEHOLDER: "<image>"},
        changes={"image_token_index": PLACEHOLDER, "image_seq_length": 4},
        part="CLIPImageProcessor",
        sizes={"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}},
        settings={"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    ),
    "qwen2_audio": _with_sound(
        "Qwen2AudioProcessor",
        "audio_token_index",
        {"encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 96, "max_source_positions": 100},
        at_most=2,
    ),
    "glmasr": _with_sound("GlmAsrProcessor", "audio_token_id", {"num_hidden_layers": 2, "intermediate_size": 256}, at_most=1),
}


def save_processor(name: str, folder: Path) -> None:
    family = MEDIA_FAMILIES[name]
    words = {family.marks.get(number, f"w{number}"): number for number in range(256)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=TEMPLATE.replace("PLACE", family.place), extra_special_tokens=family.named
    )
    fast.add_special_tokens({"additional_special_tokens": list(family.marks.values())})
    fast.save_pretrained(folder)
    part = {"images": "image_processor_type", "audio": "feature_extractor_type"}[family.reads]
    write_json(folder / "preprocessor_config.json", {part: family.part, **family.sizes})
    write_json(folder / "processor_config.json", {"processor_class": family.processor, **family.settings})


def picture(seed: int, height: int = HEIGHT, width: int = WIDTH) -> Any:
    from PIL import Image

    levels = np.random.default_rng(seed).uniform(0, 255, (3, 3, 3)).astype(np.uint8)
    return Image.fromarray(levels).resize((width, height))


def sound(seed: int, seconds: float = 0.3, rate: int = SOUND_RATE) -> bytes:
    heights, time = np.random.default_rng(seed).uniform(100, 3000, 5), np.arange(round(seconds * rate)) / rate
    samples = np.sin(2 * np.pi * np.outer(heights, time)).mean(0)
    with io.BytesIO() as buffer:
        with wave.open(buffer, "wb") as file:
            file.setparams((1, 2, rate, len(samples), "NONE", ""))
            file.writeframes((samples * 32767).astype("<i2").tobytes())
        return buffer.getvalue()
