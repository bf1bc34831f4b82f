"""Spoken words as tokens: the first step of `make demo-speech WAVS=folder`, and what its evaluation calls on answers.

Two frames of a log-mel spectrogram (32 ms) are the nearest of a codebook found by k-means, and a token ends a recording.
N recordings, T codes, M mel bands.
"""

from __future__ import annotations

import argparse
import base64
import itertools
import math
import sys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: the checkout's root takes the place of this folder, which Python put first
    sys.path[0] = str(Path(__file__).resolve().parents[3])
    from configs.startup import guard_imports

    guard_imports()

import io
import wave
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from transformers.audio_utils import mel_filter_bank

from configs.runtime.command import exit_code
from configs.runtime.errors import InputError
from configs.runtime.terminal import say
from heads.frozen.media import wav_samples
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

FOLDER = Path("runs/demo_speech")
RATE, WINDOW, HOP, BANDS = 8000, 256, 128, 40  # samples a second, of a frame, between frames; mel bands
QUIET = 1e-6  # power below which everything is silence
ROUNDS = 32  # of Griffin-Lim
LARGEST = 2**24  # bytes of a file
FRAMES = 2  # of a code
NUM_CODES, LONGEST = 256, 39  # codes; codes of a recording, of which longer ones are cut
END, FIRST_CLASS = NUM_CODES, NUM_CODES + 1
PARTS = 8  # of a recording, whose mean spectra are compared
TRAIN_SHARE, EPOCHS = 0.8, 16
NUM_PROMPTS, NUM_ASKED = 6000, 1000  # to train the draft on, and to evaluate with
DECIBELS = 10 / math.log(10)  # of a nat of power
SECONDS = (LONGEST * FRAMES + 1) * HOP / RATE  # of a recording that are read


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Recordings to codes, a classifier and a target.")
    parser.add_argument("wavs", type=Path, help="folder of WAV files whose names begin with the word and an underscore")
    return exit_code(lambda: _prepare(parser.parse_args(argv).wavs))


def _prepare(wavs: Path) -> int:
    check_installed()
    spectra, words = _load(wavs)
    names = sorted(set(words))
    labels = np.array([names.index(word) for word in words])
    train, held_out = np.split(np.random.default_rng(0).permutation(len(words)), [int(TRAIN_SHARE * len(words))])
    FOLDER.mkdir(parents=True, exist_ok=True)
    codebook = fit_codebook(np.concatenate([spectra[each] for each in train]), NUM_CODES)
    np.save(FOLDER / "codebook.npy", codebook)
    codes = [nearest(each, codebook) for each in spectra]
    heard = np.stack([_heard(each) for each in spectra])
    save_file(fit_classifier(heard[train], labels[train]), FOLDER / "classifier.safetensors")
    _codec.cache_clear()
    texts = [" ".join(map(str, [*each, END])) for each in codes]
    _judge_the_data(heard[held_out], labels[held_out], [texts[each] for each in held_out])
    rows = np.full((len(codes), LONGEST + 2), -1)
    for row, label, own in zip(rows, labels, codes, strict=True):
        row[: len(own) + 2] = [FIRST_CLASS + label, *own, END]
    null = FIRST_CLASS + len(names)
    train_rows, others = torch.from_numpy(rows[train]), torch.from_numpy(rows[held_out])
    loss = train_code_model(train_rows, others, null=null, end=END, epochs=EPOCHS, folder=FOLDER / "target")
    say(f"the target needs {loss:.3f} nats a code of the held-out recordings")
    prompts = [{"prompt_ids": [FIRST_CLASS + n % len(names)], "sample": n} for n in range(NUM_PROMPTS)]
    write_rows(FOLDER / "prompts.jsonl", prompts)
    asked = [(NUM_PROMPTS + n, held_out[n % len(held_out)]) for n in range(NUM_ASKED)]
    suite = [
        {
            "prompt_ids": [FIRST_CLASS + int(labels[each])],
            "sample": sample,
            "category": names[labels[each]],
            "reference": texts[each],
        }
        for sample, each in asked
    ]
    write_rows(FOLDER / "suite.jsonl", suite)
    return 0


def _judge_the_data(heard: np.ndarray, labels: np.ndarray, texts: Sequence[str]) -> None:
    right = [classify(_codec()[1], each) == label for each, label in zip(heard, labels, strict=True)]
    coded = [accuracy(str(FIRST_CLASS + label), text, None) for label, text in zip(labels, texts, strict=True)]
    apart = []
    for label in sorted(set(labels)):
        alike = [text for own, text in zip(labels, texts, strict=True) if own == label]
        apart += [mel_closeness("", one, other) for one, other in itertools.pairwise(alike)]
    say(f"the classifier is right on {np.mean(right):.1%} of the held-out recordings, on {np.mean(coded):.1%} as codes")
    if apart:
        say(f"two held-out recordings of a word lie {-np.mean(apart):.2f} dB apart as codes")


# --- sound and spectra -----------------------------------------------------------------------------------------------


def read_wav(path: Path, seconds: float) -> np.ndarray:
    """Return the first samples of a recording, from -1 to 1, its channels averaged, at `RATE`."""
    size = path.stat().st_size
    if size > LARGEST:
        raise InputError(f"{path} has {size} bytes; recordings of at most {LARGEST} are taken")
    return wav_samples(path.read_bytes(), str(path), RATE)[: int(seconds * RATE)]


def wav_bytes(samples: np.ndarray) -> bytes:
    loud = (samples / max(1e-6, float(np.abs(samples).max())) * 0.8 * 32767).astype("<i2")
    with io.BytesIO() as buffer:
        with wave.open(buffer, "wb") as file:
            file.setparams((1, 2, RATE, len(loud), "NONE", ""))
            file.writeframes(loud.tobytes())
        return buffer.getvalue()


@lru_cache(maxsize=1)
def _bank() -> np.ndarray:
    filters: np.ndarray = mel_filter_bank(WINDOW // 2 + 1, BANDS, 50, RATE / 2, RATE, mel_scale="slaney")
    return filters


def spectrum(samples: np.ndarray) -> np.ndarray:
    """Return the log-mel spectrogram `[frames, BANDS]` of a recording, of two frames at least."""
    padded = np.pad(samples, (0, max(0, 2 * HOP - len(samples))))
    window = torch.hann_window(WINDOW)
    found = torch.stft(torch.from_numpy(padded).float(), WINDOW, HOP, window=window, return_complex=True, pad_mode="constant")
    power = found.abs().square().numpy().T / WINDOW
    mel: np.ndarray = np.log(np.maximum(power @ _bank(), QUIET))
    return mel


def griffin_lim(mel: np.ndarray) -> np.ndarray:
    """Return samples whose spectrogram is near this one `[frames, BANDS]` (Griffin and Lim, 1984)."""
    power = np.maximum(np.exp(mel) @ np.linalg.pinv(_bank()), 0) * WINDOW
    size, window = torch.from_numpy(np.sqrt(power)).float().T, torch.hann_window(WINDOW)
    phase = torch.rand(size.shape, generator=torch.Generator().manual_seed(0)) * 2 * math.pi
    for _ in range(ROUNDS):
        samples = torch.istft(torch.polar(size, phase), WINDOW, HOP, window=window)
        phase = torch.stft(samples, WINDOW, HOP, window=window, return_complex=True, pad_mode="constant").angle()
    return samples.numpy()


# --- what the evaluation calls --------------------------------------------------------------------------------------


def accuracy(prompt: str, answer: str, reference: str | None) -> float:
    """Return 1 where the classifier hears the word that was asked for, else 0."""
    del reference
    frames = _frames_in(answer)
    return float(frames is not None and classify(_codec()[1], _heard(frames)) == int(prompt.split()[0]) - FIRST_CLASS)


def mel_closeness(prompt: str, answer: str, reference: str | None) -> float:
    """Return minus the mean distance in dB of an answer's bands from the reference's, over `PARTS` equal parts of each."""
    del prompt
    ours, theirs = (_parts(_or_silence(_frames_in(each))) for each in (answer, reference or ""))
    return -float(np.abs(ours - theirs).mean() * DECIBELS)


def features(answer: str) -> list[float]:
    """Return the classifier's hidden units for a sound; silence's where there is none."""
    units: list[float] = hidden_units(_codec()[1], _heard(_or_silence(_frames_in(answer)))).tolist()
    return units


def sound(answer: str) -> str:
    frames = _frames_in(answer)
    samples = np.zeros(HOP) if frames is None else griffin_lim(frames.reshape(-1, BANDS))
    return "data:audio/wav;base64," + base64.b64encode(wav_bytes(samples)).decode()


# --- recordings and codes -------------------------------------------------------------------------------------------


def _load(folder: Path) -> tuple[list[np.ndarray], list[str]]:
    paths = sorted(path for path in folder.rglob("*.[wW][aA][vV]") if path.is_file())
    words = [path.name.partition("_")[0] for path in paths]
    if len(paths) < 2 * NUM_CODES or len(set(words)) < 2:
        raise InputError(
            f"{folder} holds {len(paths)} WAV files of {len(set(words))} words; at least {2 * NUM_CODES} of two words "
            "are needed, named WORD_....wav"
        )
    return [_in_codes(spectrum(read_wav(path, SECONDS))) for path in paths], words


def _in_codes(mel: np.ndarray) -> np.ndarray:
    length = min(len(mel) // FRAMES, LONGEST)
    return mel[: length * FRAMES].reshape(length, FRAMES * BANDS)


def _parts(frames: np.ndarray) -> np.ndarray:
    mel = frames.reshape(-1, BANDS)
    bounds = np.linspace(0, len(mel), PARTS + 1)
    return np.stack([mel[int(low) : max(int(low) + 1, math.ceil(high))].mean(0) for low, high in itertools.pairwise(bounds)])


def _heard(frames: np.ndarray) -> np.ndarray:
    """Return what the classifier hears of a spectrogram: its parts, whatever its loudness."""
    return (_parts(frames) - frames.mean()).reshape(-1) / 3


@lru_cache(maxsize=1)
def _codec() -> tuple[np.ndarray, Weights]:
    return np.load(FOLDER / "codebook.npy"), load_file(FOLDER / "classifier.safetensors")


def _frames_in(answer: str) -> np.ndarray | None:
    codes = [int(token) for token in answer.split()]
    codes = codes[: codes.index(END)] if END in codes else codes
    if not codes or max(codes) >= NUM_CODES:
        return None
    frames: np.ndarray = _codec()[0][codes]
    return frames


def _or_silence(frames: Any) -> np.ndarray:
    return np.full((1, FRAMES * BANDS), math.log(QUIET)) if frames is None else frames


if __name__ == "__main__":
    sys.exit(main())
