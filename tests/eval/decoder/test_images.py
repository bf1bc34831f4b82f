"""Decoding with images in the prompt: greedy tokens are those of transformers' `generate`, which is given the same pictures."""

from pathlib import Path

import pytest
import torch

from configs.runtime.errors import InputError
from configs.schema.decoding import DecodeConfig
from configs.schema.target import ImagesConfig, TargetConfig
from eval.cost.tree_choice import row_seconds
from eval.decoder.decode import Request, decode
from heads.frozen.loading import Target, load_target
from heads.frozen.media import MediaPrompt
from heads.frozen.tokenizer import OBJECT
from scripts.lab.models_check.architectures import tiny_model
from scripts.lab.models_check.media_models import picture, save_processor
from scripts.lab.models_check.media_stage import media_requests
from tests.support.media import assert_decodes_to, assert_matching_changes_nothing

pytest.importorskip("PIL")
NEW_TOKENS = 20
# Equal texts with other pictures, two pictures of unequal shapes, and none: one batch.
ASKED = [
    (f"w20 {OBJECT} w30 w31", ["a.png"]),
    (f"w20 {OBJECT} w30 w31", ["b.png"]),
    (f"w40 {OBJECT} w41 {OBJECT} w45", ["tall.jpg", "a.png"]),
    ("w20 w21 w22", []),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen")
    tiny_model("qwen2_5_vl").save_pretrained(folder)
    save_processor("qwen2_5_vl", folder)
    for number, name in enumerate(("a.png", "b.png")):
        picture(number).save(folder / name)
    picture(2, height=84, width=56).save(folder / "tall.jpg")
    return folder


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    return load_target(TargetConfig(name=str(folder), dtype="float32", device="cpu", images=ImagesConfig(folder=str(folder))))


def requests_of(target: Target) -> list[Request]:
    return media_requests(target, ASKED)


def reference(target: Target, request: Request) -> list[int]:
    """Continue a prompt by transformers alone."""
    model = tiny_model("qwen2_5_vl")
    ids_1T = torch.tensor([request.tokens])
    given = {}
    if request.media_prompt is not None:
        inputs = target.media.inputs([request.media_prompt], [request.tokens])
        given = {**inputs.of_media, **inputs.of_tokens}
    text_1T = model.generate(ids_1T, **given, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
    return text_1T[0, ids_1T.shape[1] :].tolist()


def test_greedy_tokens_are_those_of_generate_with_the_same_pictures(target: Target) -> None:
    requests = requests_of(target)
    expected = [reference(target, request) for request in requests]
    assert expected[0] != expected[1]  # the picture decides
    assert_decodes_to(target, requests, expected, NEW_TOKENS)


def test_a_tree_can_be_chosen_by_prompts_with_pictures(target: Target) -> None:
    seconds = row_seconds(target, requests_of(target)[0], 2)
    assert len(seconds) == 2
    assert min(seconds) > 0


def test_sampled_tokens_by_matching_are_those_without_drafts(target: Target) -> None:
    assert_matching_changes_nothing(target, requests_of(target), NEW_TOKENS)


def test_a_place_for_an_image_without_it_and_a_changed_image_are_refused(target: Target, folder: Path) -> None:
    request = requests_of(target)[0]
    config = DecodeConfig(num_speculative_tokens=0, max_new_tokens=2)
    with pytest.raises(InputError, match="token 250, which stands for an image or a sound, and is read without one"):
        decode(target, [Request(prompt_id="0", category="", tokens=request.tokens)], config)
    assert request.media_prompt is not None
    other = MediaPrompt(text=request.media_prompt.text.replace("w30", "w33"), media=request.media_prompt.media)
    with pytest.raises(InputError, match="give other tokens than when it was made"):
        decode(target, [Request(prompt_id="0", category="", tokens=request.tokens, media_prompt=other)], config)


def test_images_for_a_target_without_them_are_refused(folder: Path) -> None:
    target = load_target(TargetConfig(name=str(folder), dtype="float32", device="cpu"))
    with pytest.raises(InputError, match=r"a prompt brings image a\.png, and target\.images is null"):
        target.encode_chat([{"role": "user", "content": f"w20 {OBJECT}"}], media=["a.png"])
