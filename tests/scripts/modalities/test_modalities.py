"""The demo on pictures: recipes that agree with what makes the target, functions that judge and show."""

import base64
import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import LlamaForCausalLM

from configs.runtime.loading import load_config
from configs.schema.data import DataConfig
from configs.schema.evaluation import EvalConfig, GateConfig
from configs.schema.training import HeadsConfig
from scripts.modalities import digits
from scripts.modalities.code_model import train_code_model
from scripts.modalities.demo import STEPS

ROOT = Path(__file__).resolve().parents[3]
SCHEMAS = {"data": DataConfig, "heads": HeadsConfig, "eval": EvalConfig, "gates": GateConfig}


def test_the_demos_steps_name_files_that_are_there_and_one_target():
    made = [part for command in STEPS.values() for part in command]
    recipes = [Path(part) for part in made if part.endswith(".yaml")]
    assert all((ROOT / part).is_file() for part in made if part.endswith((".py", ".yaml")))
    own = [each for each in recipes if each.parent.name in SCHEMAS]
    configs = [load_config(SCHEMAS[each.parent.name], ROOT / each) for each in own]
    targets = [each.target for each in configs if not isinstance(each, GateConfig)]
    assert len(targets) == 4
    assert all(each == targets[0] for each in targets)
    strict, relaxed = (each.decode for each in configs if isinstance(each, EvalConfig))
    assert relaxed.model_copy(update={"lossy": None}) == strict
    assert f"output={relaxed.lossy.table}" in made
    assert f"vocab_size={digits.NUM_CODES}" in made
    assert strict.max_new_tokens == digits.LENGTH == configs[0].answers.max_new_tokens
    guidance = targets[0].guidance
    assert (guidance.condition, guidance.null) == ([digits.FIRST_CLASS, digits.NULL - 1], digits.NULL)


def test_a_code_model_learns_its_rows_and_ends_by_length(tmp_path):
    rows = torch.tensor([[9, 0, 1, 2, 8], [9, 0, 1, 2, 8], [10, 3, 4, 5, 6]] * 40)
    loss = train_code_model(rows, rows[:9], null=11, epochs=25, folder=tmp_path)
    assert loss < 0.1
    model = LlamaForCausalLM.from_pretrained(tmp_path)
    assert (model.config.vocab_size, model.generation_config.eos_token_id) == (12, None)
    assert model.generate(torch.tensor([[10]]), max_new_tokens=4, pad_token_id=8).tolist() == [[10, 3, 4, 5, 6]]


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
    assert [
        digits.accuracy(prompt, answer, None)
        for prompt in asked
        for answer in (dark, bright, "", "3", f"{digits.NUM_CODES} " * 16)
    ] == [
        *(1, 0, 0, 0, 0),
        *(0, 1, 0, 0, 0),
    ]
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
