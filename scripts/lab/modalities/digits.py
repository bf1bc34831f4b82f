"""scikit-learn's handwritten digits as tokens: the first step of `make demo-images`, and what its evaluation calls on answers.

A picture of 8 by 8 grey levels is 16 patches of 2 by 2, each the nearest of a codebook found by k-means. N pictures, C codes.
"""

from __future__ import annotations

import base64
import io
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: the checkout's root takes the place of this folder, which Python put first
    sys.path[0] = str(Path(__file__).resolve().parents[3])
    from configs.startup import guard_imports

    guard_imports()

import numpy as np
import torch
from safetensors.numpy import load_file, save_file

from configs.runtime.terminal import say
from scripts.lab.modalities.code_model import train_code_model
from scripts.lab.modalities.fitted import (
    Weights,
    check_installed,
    classify,
    fit_classifier,
    fit_codebook,
    hidden_units,
    nearest,
    write_rows,
)

FOLDER = Path("runs/demo_images")
NUM_CODES, NUM_CLASSES, PATCH, SIDE = 128, 10, 2, 8
FIRST_CLASS, NULL = NUM_CODES, NUM_CODES + NUM_CLASSES
LENGTH = (SIDE // PATCH) ** 2  # tokens of a picture
TRAIN_SHARE, EPOCHS = 0.8, 8
NUM_PROMPTS, NUM_ASKED = 6000, 2000  # to train the draft on, and to evaluate with
SCALE = 8  # pixels of a page for one of the picture


def main() -> None:
    check_installed()
    images, labels = _load()
    order = np.random.default_rng(0).permutation(len(images))
    train, held_out = np.split(order, [int(TRAIN_SHARE * len(order))])
    shifted, shifted_labels = _shifted(images[train]), np.tile(labels[train], 3)
    codebook = fit_codebook(_patches(images[train]).reshape(-1, PATCH * PATCH), NUM_CODES)
    FOLDER.mkdir(parents=True, exist_ok=True)
    np.save(FOLDER / "codebook.npy", codebook)
    save_file(fit_classifier(shifted.reshape(len(shifted), -1) / 16, shifted_labels), FOLDER / "classifier.safetensors")
    _codec.cache_clear()
    codes = _encode(images)
    _, weights = _codec()
    right = [classify(weights, _flat(images[each])) == labels[each] for each in held_out]
    coded = [classify(weights, _flat(_picture_of(codes[each]))) == labels[each] for each in held_out]
    say(f"the classifier is right on {np.mean(right):.1%} of the held-out pictures, on {np.mean(coded):.1%} as codes")
    rows, others = _rows(_encode(shifted), shifted_labels), _rows(codes[held_out], labels[held_out])
    loss = train_code_model(rows, others, null=NULL, epochs=EPOCHS, folder=FOLDER / "target")
    say(f"the target needs {loss:.3f} nats a code of the held-out pictures")
    write_rows(FOLDER / "prompts.jsonl", [{"prompt_ids": [FIRST_CLASS + n % 10], "sample": n} for n in range(NUM_PROMPTS)])
    asked = []
    for n in range(NUM_ASKED):
        reference = codes[held_out[n % len(held_out)]]
        digit = int(labels[held_out[n % len(held_out)]])
        asked.append(
            {
                "prompt_ids": [FIRST_CLASS + digit],
                "sample": NUM_PROMPTS + n,
                "category": f"digit {digit}",
                "reference": " ".join(map(str, reference)),
            }
        )
    write_rows(FOLDER / "suite.jsonl", asked)


# --- what the evaluation calls --------------------------------------------------------------------------------------


def accuracy(prompt: str, answer: str, reference: str | None) -> float:
    """Return 1 where the classifier sees the digit that was asked for, else 0."""
    del reference
    image = _picture_in(answer)
    return float(image is not None and classify(_codec()[1], _flat(image)) == int(prompt.split()[0]) - FIRST_CLASS)


def features(answer: str) -> list[float]:
    """Return the classifier's hidden units for a picture; a blank one's where there is none."""
    image = _picture_in(answer)
    units: list[float] = hidden_units(_codec()[1], _flat(np.zeros((SIDE, SIDE)) if image is None else image)).tolist()
    return units


def picture(answer: str) -> str:
    from PIL import Image

    image = _picture_in(answer)
    levels = np.zeros((SIDE, SIDE)) if image is None else image
    grey = (255 - np.clip(levels, 0, 16) * 255 / 16).astype(np.uint8)
    drawn = Image.fromarray(np.kron(grey, np.ones((SCALE, SCALE), dtype=np.uint8)))
    with io.BytesIO() as file:
        drawn.save(file, "PNG")
        return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


# --- pictures and codes ---------------------------------------------------------------------------------------------


def _load() -> tuple[np.ndarray, np.ndarray]:
    from sklearn.datasets import load_digits

    found: Any = load_digits()
    return found.images, found.target


def _shifted(images: np.ndarray) -> np.ndarray:
    """Return the pictures, and behind them the same shifted by a pixel to the right and to the left: there are few of them."""
    padded = np.pad(images, ((0, 0), (0, 0), (1, 1)))
    return np.concatenate([images, padded[:, :, :SIDE], padded[:, :, 2:]])


def _rows(codes: np.ndarray, labels: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([FIRST_CLASS + labels[:, None], codes], 1))


def _patches(images: np.ndarray) -> np.ndarray:
    side = SIDE // PATCH
    cut = images.reshape(-1, side, PATCH, side, PATCH).transpose(0, 1, 3, 2, 4)
    return cut.reshape(len(images), LENGTH, PATCH * PATCH)


@lru_cache(maxsize=1)
def _codec() -> tuple[np.ndarray, Weights]:
    return np.load(FOLDER / "codebook.npy"), load_file(FOLDER / "classifier.safetensors")


def _encode(images: np.ndarray) -> np.ndarray:
    return nearest(_patches(images), _codec()[0])


def _picture_of(codes: Any) -> np.ndarray:
    codebook, _ = _codec()
    side = SIDE // PATCH
    patches = codebook[np.asarray(codes)].reshape(side, side, PATCH, PATCH)
    return patches.transpose(0, 2, 1, 3).reshape(SIDE, SIDE)


def _picture_in(answer: str) -> np.ndarray | None:
    codes = [int(token) for token in answer.split()]
    return _picture_of(codes) if len(codes) == LENGTH and max(codes) < NUM_CODES else None


def _flat(image: np.ndarray) -> np.ndarray:
    return image.reshape(-1) / 16


if __name__ == "__main__":
    main()
