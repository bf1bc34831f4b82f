"""WAV files, log-mel spectrograms, and sound from these again."""

from __future__ import annotations

import io
import math
import wave
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from transformers.audio_utils import mel_filter_bank

from configs.runtime.errors import InputError
from heads.frozen.media import wav_samples

RATE, WINDOW, HOP, BANDS = 8000, 256, 128, 40  # samples a second, of a frame, between frames; mel bands
QUIET = 1e-6  # power below which everything is silence
ROUNDS = 32  # of Griffin-Lim
LARGEST = 2**24  # bytes of a file


def read_wav(path: Path, seconds: float) -> np.ndarray:
    """Return the first samples of a recording, from -1 to 1, its channels averaged, at `RATE`."""
    size = path.stat().st_size
    if size > LARGEST:
        raise InputError(f"{path} has {size} bytes; recordings of at most {LARGEST} are taken")
    return wav_samples(path.read_bytes(), str(path), RATE, seconds)


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
