"""The demos on pictures and speech: recipes that agree with what makes the target, functions that judge and show."""

import base64
import io
import json
import wave
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import LlamaForCausalLM

from configs.runtime.errors import InputError
from configs.runtime.loading import load_config
from configs.schema.data import DataConfig
from configs.schema.evaluation import EvalConfig, GateConfig
from configs.schema.training import HeadsConfig
from scripts.lab.modalities import digits, speech
from scripts.lab.modalities.code_model import train_code_model
from scripts.lab.modalities.demo import NUM_CODES, RECIPES, main, steps

ROOT = Path(__file__).resolve().parents[4]
SCHEMAS = {"data": DataConfig, "heads": HeadsConfig, "eval": EvalConfig, "gates": GateConfig}


@pytest.mark.parametrize("kind", RECIPES)
def test_a_demos_steps_name_files_that_are_there_and_one_target(kind):
    made = [part for command in steps(kind).values() for part in command]
    recipes = [Path(part) for part in made if part.endswith(".yaml")]
    assert all((ROOT / part).is_file() for part in made if part.endswith((".py", ".yaml")))
    own = [each for each in recipes if each.parent.name in SCHEMAS]
    configs = [load_config(SCHEMAS[each.parent.name], ROOT / each) for each in own]
    targets = [each.target for each in configs if not isinstance(each, GateConfig)]
    assert len(targets) == 4
    assert all(each == targets[0] for each in targets)
    strict, relaxed = (each.decode for each in configs if isinstance(each, EvalConfig))
    assert relaxed.model_copy(update={"lossy": None}) == strict
    codes, longest = {"images": (digits.NUM_CODES, digits.LENGTH), "speech": (speech.NUM_CODES, speech.LONGEST + 1)}[kind]
    assert NUM_CODES[kind] == codes
    assert strict.max_new_tokens == longest == configs[0].answers.max_new_tokens


def test_a_code_model_learns_its_rows_and_where_they_end(tmp_path):
    rows = torch.tensor([[9, 0, 1, 2, 8, -1], [9, 0, 1, 2, 8, -1], [10, 3, 4, 5, 6, 8]] * 40)
    loss = train_code_model(rows, rows[:9], null=11, epochs=25, folder=tmp_path, end=8)
    assert loss < 0.1
    model = LlamaForCausalLM.from_pretrained(tmp_path)
    assert (model.config.vocab_size, model.generation_config.eos_token_id) == (12, 8)
    assert model.generate(torch.tensor([[10]]), max_new_tokens=9, pad_token_id=8).tolist() == [[10, 3, 4, 5, 6, 8]]


# --- pictures -----------------------------------------------------------------------------------------------------


@pytest.fixture
def grey_codes(monkeypatch):
    """A codebook whose code c is a patch of level c, and a classifier that says whether a picture is dark."""
    codebook = np.repeat(np.arange(digits.NUM_CODES)[:, None], 4, 1).astype(np.float32)
    weights = {"w0": np.ones((64, 1)), "b0": np.zeros(1), "w1": np.array([[1.0, 0.0]]), "b1": np.array([0.0, 32.0])}
    monkeypatch.setattr(digits, "_codec", lambda: (codebook, weights))


def test_an_answer_is_judged_and_drawn_as_its_picture(grey_codes):
    dark, bright = " ".join(["16"] * 16), " ".join(["0"] * 16)
    asked = [f"{digits.FIRST_CLASS + label} #7" for label in (0, 1)]
    answers = (dark, bright, "", f"{digits.NUM_CODES} " * 16)
    judged = [[digits.accuracy(prompt, answer, None) for answer in answers] for prompt in asked]
    assert judged == [[1, 0, 0, 0], [0, 1, 0, 0]]
    assert (digits.features(dark), digits.features("")) == ([64.0], [0.0])
    checked = np.array(Image.open(io.BytesIO(base64.b64decode(digits.picture("16 0 " * 8).partition(",")[2]))))
    assert checked.shape == (64, 64)
    assert [int(level) for level in checked[0, ::16]] == [0, 255, 0, 255]
    assert digits.picture("").startswith("data:image/png;base64,")


def test_patches_are_encoded_by_the_nearest_code_and_put_back(grey_codes):
    image = np.kron(np.arange(16).reshape(4, 4), np.ones((2, 2)))
    (codes,) = digits._encode(image[None])
    assert codes.tolist() == list(range(16))
    assert np.array_equal(digits._picture_of(codes), image)
    assert np.array_equal(digits._shifted(image[None])[1][:, 1:], image[:, :-1])


# --- speech -------------------------------------------------------------------------------------------------------


def written(path, samples, *, rate=8000, width=2, channels=1):
    """A file of samples from -1 to 1, the same in every channel."""
    data = (np.repeat(samples, channels) * (2**31 - 1)).astype("<i4").view(np.uint8).reshape(-1, 4)[:, 4 - width :]
    with wave.open(str(path), "wb") as file:
        file.setparams((channels, width, rate, 0, "NONE", ""))
        file.writeframes((data ^ 0x80 if width == 1 else data).tobytes())
    return path


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_recordings_of_all_widths_rates_and_channels_are_read_alike(tmp_path, width):
    tone = np.sin(2 * np.pi * 440 * np.arange(16000) / 16000) / 2
    read = speech.read_wav(written(tmp_path / "a.wav", tone, rate=16000, width=width, channels=2), 0.5)
    assert read.shape == (4000,)
    expected = np.sin(2 * np.pi * 440 * np.arange(4000) / 8000) / 2
    assert np.abs(read - expected)[100:-100].max() < (0.02 if width == 1 else 0.005)


def test_a_tone_comes_back_from_its_codes(monkeypatch, tmp_path):
    tone = np.sin(2 * np.pi * 1000 * np.arange(6400) / 8000) / 2
    frames = speech._in_codes(speech.spectrum(speech.read_wav(written(tmp_path / "a.wav", tone), 2)))
    assert frames.shape == (25, speech.FRAMES * speech.BANDS)
    inputs = speech.PARTS * speech.BANDS
    weights = {"w0": np.zeros((inputs, 1)), "b0": np.ones(1), "w1": np.array([[0.0, 1.0]]), "b1": np.zeros(2)}
    codebook = np.concatenate([frames, frames + np.log(10)])  # codes 25 to 49 are 0 to 24 at ten times the power
    monkeypatch.setattr(speech, "_codec", lambda: (codebook, weights))
    answer = " ".join(map(str, [*range(25), speech.END]))
    with wave.open(io.BytesIO(base64.b64decode(speech.sound(answer).removeprefix("data:audio/wav;base64,")))) as file:
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2")
        heard = np.fft.rfftfreq(len(samples), 1 / file.getframerate())[np.abs(np.fft.rfft(samples)).argmax()]
    assert abs(heard - 1000) < 100
    asked = f"{speech.FIRST_CLASS + 1} #3"
    assert [speech.accuracy(asked, each, None) for each in (answer, "0", str(speech.END), str(speech.END + 1))] == [1, 1, 0, 0]
    assert speech.mel_closeness("", answer, answer) == 0
    louder = " ".join(map(str, range(25, 50)))
    assert speech.mel_closeness("", louder, answer) == pytest.approx(-10)
    assert json.dumps(speech.features("")) == "[1.0]"


def test_what_is_no_recording_is_named_in_one_sentence(tmp_path, monkeypatch, capsys):
    path = written(tmp_path / "x_1.wav", np.zeros(800))
    monkeypatch.setattr(speech, "LARGEST", 1000)
    with pytest.raises(InputError, match=r"x_1\.wav has 1644 bytes"):
        speech.read_wav(path, 1.0)
    with pytest.raises(InputError, match="0 WAV files of 0 words"):
        speech._load(tmp_path / "none")
    assert main(["speech"]) == 2
    assert "make demo-speech WAVS=folder" in capsys.readouterr().err
