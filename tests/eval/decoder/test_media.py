"""Prompts with images or sounds: what cannot be read is refused, and sounds in a URL are those of a file.

That decoding gives what transformers' `generate` gives with the same media is in `tests/models`.
"""

import base64
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from configs.runtime.errors import InputError
from configs.schema.decoding import DecodeConfig
from configs.schema.target import TargetConfig
from eval.decoder.decode import decode
from heads.frozen.loading import load_target
from heads.frozen.tokenizer import OBJECT, SOUND
from heads.inference.kv_cache import RowCache
from tests.models.cases import Case
from tests.models.media_stage import media_requests, media_target
from tests.support.architectures import tiny_model
from tests.support.media_models import sound

pytest.importorskip("PIL")
SHORT = DecodeConfig(num_speculative_tokens=0, max_new_tokens=8)
TEXT = f"w20 {OBJECT} w30 w31"


def target_of(name, folder):
    return media_target(Case(name=name, model=tiny_model(name), folder=folder))


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return target_of("qwen2_5_vl", tmp_path_factory.mktemp("images"))


def test_a_place_for_an_image_without_it_a_changed_image_and_a_target_without_images_are_refused(images):
    (request,) = media_requests(images, [(TEXT, ["a.png"])])
    with pytest.raises(InputError, match="token 250, which stands for an image or a sound, and is read without one"):
        decode(images, [replace(request, media_prompt=None)], SHORT)
    other = replace(request.media_prompt, text=request.media_prompt.text.replace("w30", "w33"))
    with pytest.raises(InputError, match="give other tokens than when it was made"):
        decode(images, [replace(request, media_prompt=other)], SHORT)
    without = load_target(TargetConfig(name=images.identity.name, dtype="float32", device="cpu"))
    with pytest.raises(InputError, match=r"a prompt brings image a\.png, and target\.images is null"):
        without.encode_chat([{"role": "user", "content": TEXT}], media=["a.png"])


def test_positions_behind_an_image_leave_the_batch_with_their_row():
    cache = RowCache(1, 4)
    cache.offsets_B = torch.tensor([0, -3, -5])
    cache.place([0, 0, 0], 1, torch.device("cpu"))
    cache.rows[0].update(torch.zeros(3, 1, 1, 2), torch.zeros(3, 1, 1, 2))
    cache.keep_rows([2, 0])
    assert cache.offsets_B.tolist() == [-5, 0]


def test_a_sound_in_a_url_is_that_of_a_file_and_one_longer_than_the_model_reads_is_refused(tmp_path):
    target = target_of("qwen2_audio", tmp_path)
    url = "data:audio/wav;base64," + base64.b64encode((tmp_path / "media" / "b.wav").read_bytes()).decode()
    requests = media_requests(target, [(TEXT, [SOUND + "b.wav"]), (TEXT, [SOUND + url]), (TEXT, [SOUND + "a.wav"])])
    by_file, by_url, other = (each.tokens for each in decode(target, requests, SHORT)[0])
    assert by_file == by_url != other
    (Path(target.identity.name) / "longer.wav").write_bytes(sound(3, 2.5))  # the model reads 2 seconds
    with pytest.raises(
        InputError, match=r"Qwen2AudioForConditionalGeneration cannot read these images or sounds: .* length 200"
    ):
        decode(target, media_requests(target, [(OBJECT, [SOUND + "longer.wav"])]), SHORT)
