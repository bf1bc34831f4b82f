"""Decoding with sounds in the prompt: greedy tokens are those of transformers' `generate`, given sounds that the test reads."""

import base64
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoProcessor

from configs.runtime.errors import InputError
from configs.schema.decoding import DecodeConfig
from configs.schema.target import TargetConfig
from eval.decoder.decode import Request, decode
from heads.frozen.loading import Target, load_target
from heads.frozen.tokenizer import OBJECT, SOUND
from scripts.lab.models_check.architectures import tiny_model
from scripts.lab.models_check.media_models import PLACEHOLDER, save_processor, sound
from scripts.lab.models_check.media_stage import media_requests
from tests.support.media import assert_decodes_to

NEW_TOKENS = 16
URL = "data:audio/wav;base64," + base64.b64encode(sound(1, rate=16000)).decode()
# Equal texts with other sounds, two sounds of unequal lengths, and none: one batch. Numbers are seeds.
ASKED = [
    (f"w20 {OBJECT} w30 w31", {"a.wav": 0}),
    (f"w20 {OBJECT} w30 w31", {URL: 1}),
    (f"w40 {OBJECT} w41 {OBJECT} w45", {"a.wav": 0, "long.wav": 2}),
    ("w20 w21 w22", {}),
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = tmp_path_factory.mktemp("sounds")
    tiny_model("qwen2_audio").save_pretrained(folder)
    save_processor("qwen2_audio", folder)
    (folder / "a.wav").write_bytes(sound(0, rate=16000))
    (folder / "long.wav").write_bytes(sound(2, 0.8, rate=16000))
    settings = {"name": str(folder), "dtype": "float32", "device": "cpu", "audio": {"folder": str(folder)}}
    return load_target(TargetConfig.model_validate(settings))


def requests_of(target: Target) -> list[Request]:
    return media_requests(target, [(text, [SOUND + name for name in named]) for text, named in ASKED])


def reference(target: Target, request: Request, seeds: list[int]) -> list[int]:
    """Continue a prompt by transformers alone."""
    processor = AutoProcessor.from_pretrained(target.identity.name)
    samples = [np.frombuffer(sound(seed, 0.8 if seed == 2 else 0.3, 16000)[44:], "<i2") / 2**15 for seed in seeds]
    given = {"input_ids": torch.tensor([request.tokens])}
    if seeds:
        text = request.media_prompt.text
        given = processor(
            text=[text], audio=[each.astype(np.float32) for each in samples], sampling_rate=16000, return_tensors="pt"
        )
    assert given["input_ids"][0].tolist() == list(request.tokens)
    text_1T = tiny_model("qwen2_audio").generate(**given, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
    return text_1T[0, len(request.tokens) :].tolist()


def test_greedy_tokens_are_those_of_generate_with_the_same_sounds(target: Target) -> None:
    requests = requests_of(target)
    assert [request.tokens.count(PLACEHOLDER) for request in requests] == [7, 7, 27, 0]
    expected = [reference(target, request, [*seeds.values()]) for request, (_, seeds) in zip(requests, ASKED, strict=True)]
    assert expected[0] != expected[1]  # the sound decides
    assert_decodes_to(target, requests, expected, NEW_TOKENS)


def test_a_sound_longer_than_the_model_reads_is_refused_and_never_cut(target: Target) -> None:
    (Path(target.identity.name) / "longer.wav").write_bytes(sound(3, 2.5))  # the model reads 2 seconds
    messages, references = [{"role": "user", "content": OBJECT}], [SOUND + "longer.wav"]
    prompt, tokens = target.media_prompt(messages, references), tuple(target.encode_chat(messages, media=references))
    request = Request(prompt_id="0", category="", tokens=tokens, media_prompt=prompt)
    with pytest.raises(
        InputError, match=r"Qwen2AudioForConditionalGeneration cannot read these images or sounds: .* length 200"
    ):
        decode(target, [request], DecodeConfig(num_speculative_tokens=0, max_new_tokens=2))
