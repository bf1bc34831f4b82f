"""What a tiny model that reads images needs beside its weights: token ids for its marks, a tokenizer, a processor, pictures.

Of each family the vision part's sizes are those at which a picture of 56 x 84 pixels takes a few tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from configs.runtime.files import write_json
from heads.target.chat_template import OBJECT

IMAGE, START, END, VIDEO = 250, 251, 252, 253
HEIGHT, WIDTH = 56, 84
ASKED = [{"role": "user", "content": f"w20 w21 {OBJECT} w30 w31 w32"}]
TEMPLATE = (
    "{% for message in messages %}{{ 'w1 ' if message.role == 'user' else 'w2 ' }}"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{{ ' PLACE ' if part.type == 'image' else part.text }}{% endfor %}{% endif %} w3 {% endfor %}"
    "{% if add_generation_prompt %}w2 {% endif %}"
)


@dataclass(frozen=True)
class Pictured:
    """How one family reads pictures.

    Args:
        processor: its class.
        place: what its chat template writes where an image stands.
        marks: its marks by id.
        changes: of the tiny config.
        named: marks that its tokenizer has as attributes.
        image_processor: its class.
        sizes: settings of it.
        settings: of the processor.
    """

    processor: str
    place: str
    marks: dict[int, str]
    changes: dict[str, Any]
    image_processor: str
    sizes: dict[str, Any]
    named: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)


QWEN_MARKS = {IMAGE: "<|image_pad|>", START: "<|vision_start|>", END: "<|vision_end|>", VIDEO: "<|video_pad|>"}
QWEN_IDS = {"image_token_id": IMAGE, "vision_start_token_id": START, "vision_end_token_id": END, "video_token_id": VIDEO}


def _qwen(processor: str, vision: dict[str, Any]) -> Pictured:
    pixels = {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 64}
    return Pictured(
        processor=processor,
        place="<|vision_start|><|image_pad|><|vision_end|>",
        marks=QWEN_MARKS,
        changes=QWEN_IDS | {"vision_config": vision},
        image_processor="Qwen2VLImageProcessor",
        sizes={"patch_size": 14, "merge_size": 2, "size": pixels},
    )


PICTURED = {
    "qwen2_vl": _qwen("Qwen2VLProcessor", {}),
    "qwen2_5_vl": _qwen("Qwen2_5_VLProcessor", {"window_size": 56, "fullatt_block_indexes": [1]}),
    "qwen3_vl": _qwen("Qwen3VLProcessor", {"deepstack_visual_indexes": [0, 1]}),
    "gemma3": Pictured(
        processor="Gemma3Processor",
        place="<start_of_image>",
        marks={IMAGE: "<image_soft_token>", START: "<start_of_image>", END: "<end_of_image>"},
        changes={
            "image_token_index": IMAGE,
            "boi_token_index": START,
            "eoi_token_index": END,
            "mm_tokens_per_image": 4,
            "vision_config": {"image_size": 56},
        },
        image_processor="Gemma3ImageProcessor",
        sizes={"size": {"height": 56, "width": 56}},
        named={"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
        settings={"image_seq_length": 4},
    ),
    "llava": Pictured(
        processor="LlavaProcessor",
        place="<image>",
        marks={IMAGE: "<image>"},
        changes={"image_token_index": IMAGE, "image_seq_length": 4},
        image_processor="CLIPImageProcessor",
        sizes={"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}},
        settings={"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    ),
}


def save_processor(name: str, folder: Path) -> None:
    """Write the tokenizer and the processor of a family into the folder of its model."""
    family = PICTURED[name]
    words = {family.marks.get(number, f"w{number}"): number for number in range(256)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=TEMPLATE.replace("PLACE", family.place), extra_special_tokens=family.named
    )
    fast.add_special_tokens({"additional_special_tokens": list(family.marks.values())})
    fast.save_pretrained(folder)
    write_json(folder / "preprocessor_config.json", {"image_processor_type": family.image_processor, **family.sizes})
    write_json(folder / "processor_config.json", {"processor_class": family.processor, **family.settings})


def picture(seed: int, height: int = HEIGHT, width: int = WIDTH) -> Any:
    """Return a `PIL.Image.Image` of smooth colours, others for each seed."""
    from PIL import Image

    levels = np.random.default_rng(seed).uniform(0, 255, (3, 3, 3)).astype(np.uint8)
    return Image.fromarray(levels).resize((width, height))
