"""Pictures or spoken words as tokens, decoded strictly and relaxed: `python -m scripts.bench.modalities --set kind=images`.

A codebook found by k-means turns patches of pictures, or frames of a spectrogram, into codes; a small causal LM is trained to
write them after the class that is asked for. Then data, an EAGLE-3 head, and its evaluation without loss and by LANTERN's
neighbourhoods (2410.03355), by the commands a person would give; at last a classifier says how many answers are what was asked
for. Pictures are digits, drawn here; words are your recordings: `--set kind=speech wavs=FOLDER`, files named WORD_....wav.
N examples, T codes, E numbers of what a code stands for.
"""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from scipy.cluster.vq import kmeans2, vq
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.audio_utils import mel_filter_bank, spectrogram, window_function

from configs.runtime.command import DONE, run_command
from configs.runtime.errors import InputError
from configs.runtime.files import read_json
from configs.schema.base import PositiveInt, Settings, Share
from configs.schema.target import AudioConfig
from eval.decoder.records import AUTOREGRESSIVE, RECORDS, SPECULATIVE, read_records
from heads.frozen.media import read_sound
from scripts.bench.harness import evaluate, run_config, write_results

log = logging.getLogger("draftsmith")

SIDE, PATCH = 8, 2  # pixels of a picture and of a code
RATE, WINDOW, HOP, BANDS, FRAMES = 8000, 256, 128, 40, 2  # of a log-mel spectrogram; frames of a code
LONGEST, QUIET = 39, 2.56e-4  # codes of a recording; power of a window below which everything is silence
PARTS = 8  # of an example, whose means the classifier reads


class ModalitiesConfig(Settings):
    """`python -m scripts.bench.modalities`: what is drawn or spoken, and how far decoding is relaxed."""

    kind: Literal["images", "speech"] = "images"
    wavs: str | None = None  # speech: a folder of WAV files, named WORD_....wav
    num_drawn: PositiveInt = 4000  # images: pictures that the target is trained on
    num_codes: PositiveInt = 128
    epochs: PositiveInt = 8  # of the target's training
    num_prompts: PositiveInt = 6000  # whose answers the head is trained on
    num_asked: PositiveInt = 1000  # prompts of the evaluation
    neighbours: PositiveInt = 16  # nearest codes that may give probability to a draft
    delta: Share = 0.2  # the most that is moved in a step
    output: str | None = None  # folder; None: runs/modalities/KIND

    def objections(self) -> Iterator[str]:
        if (self.kind == "speech") != (self.wavs is not None):
            yield f"wavs is the folder of the recordings of kind speech, and of no other, got {self.kind} and {self.wavs}"

    @property
    def folder(self) -> Path:
        return Path(self.output or f"runs/modalities/{self.kind}")


class Examples(NamedTuple):
    vectors_TE: list[np.ndarray]  # of each example, what its codes stand for
    labels_N: np.ndarray
    names: list[str]  # of the classes


def show_modality(config: ModalitiesConfig) -> int:
    folder, examples = config.folder, draw_digits(config) if config.kind == "images" else read_words(Path(str(config.wavs)))
    folder.mkdir(parents=True, exist_ok=True)
    codebook_CE, _ = kmeans2(np.concatenate(examples.vectors_TE), config.num_codes, minit="++", seed=0)
    np.save(folder / "codebook.npy", codebook_CE.astype(np.float32))
    centres_CF = find_centres(examples)
    length = train_target(config, examples, codebook_CE)
    run_commands(config, length)
    rows = list(rows_of(config, centres_CF, codebook_CE))
    write_results(folder / "modalities.json", "modalities", rows=rows, ratios={}, config=config)
    for row in rows:
        log.info("%(way)s: tau %(tau).2f, speedup %(speedup).2f, accuracy %(accuracy).3f", row)
    return DONE


# --- pictures and recordings ------------------------------------------------------------------------------------------


def draw_digits(config: ModalitiesConfig) -> Examples:
    """Draw digits at random sizes, places and strokes; a picture is 16 patches of 2 by 2 grey levels from 0 to 1."""
    from PIL import Image, ImageDraw, ImageFilter, ImageFont

    dice = np.random.default_rng(0)
    vectors, labels = [], dice.integers(10, size=config.num_drawn)
    for label in labels:
        canvas = Image.new("L", (8 * SIDE, 8 * SIDE))
        font, place = ImageFont.load_default(float(dice.uniform(52, 72))), tuple(dice.uniform(0, 18, 2) - (0, 10))
        ImageDraw.Draw(canvas).text(place, str(label), 255, font, stroke_width=int(dice.integers(0, 3)))
        turned = canvas.rotate(float(dice.uniform(-12, 12))).filter(ImageFilter.BoxBlur(2)).resize((SIDE, SIDE))
        cut = np.asarray(turned, np.float64).reshape(SIDE // PATCH, PATCH, SIDE // PATCH, PATCH) / 255
        vectors.append(cut.transpose(0, 2, 1, 3).reshape(-1, PATCH * PATCH))
    return Examples(vectors, labels, [f"digit {number}" for number in range(10)])


def read_words(folder: Path) -> Examples:
    """Return the log-mel spectrograms of recordings, two frames (32 ms) a vector."""
    paths = sorted(path for path in folder.rglob("*.[wW][aA][vV]") if path.is_file())
    words = [path.name.partition("_")[0] for path in paths]
    names = sorted(set(words))
    if len(names) < 2:
        raise InputError(f"wavs: {folder} holds WAV files of {len(names)} words; at least two are needed, named WORD_....wav")
    bank = mel_filter_bank(WINDOW // 2 + 1, BANDS, 50, RATE / 2, RATE, mel_scale="slaney")
    window, sounds = window_function(WINDOW), AudioConfig(folder=str(folder))
    vectors = []
    for path in paths:
        heard = np.pad(read_sound(str(path.relative_to(folder)), sounds, RATE)[: 2 * RATE], (0, 2 * HOP))
        mel = spectrogram(heard, window, WINDOW, HOP, power=2.0, mel_filters=bank, mel_floor=QUIET, log_mel="log").T
        length = min(len(mel) // FRAMES, LONGEST)
        vectors.append(mel[: length * FRAMES].reshape(length, FRAMES * BANDS))
    return Examples(vectors, np.array([names.index(word) for word in words]), names)


# --- the classifier and the target --------------------------------------------------------------------------------------


def heard_as(vectors_TE: np.ndarray) -> Tensor:
    """Return what the classifier reads of an example: the means of its parts, whatever its loudness."""
    bounds = np.linspace(0, len(vectors_TE), PARTS + 1)
    parts = [vectors_TE[int(low) : max(int(low) + 1, math.ceil(high))].mean(0) for low, high in pairwise(bounds)]
    return torch.from_numpy((np.stack(parts) - vectors_TE.mean()).reshape(-1)).float()


def find_centres(examples: Examples) -> Tensor:
    """Return the mean of each class [classes, features]; an example is taken for the class whose mean is nearest."""
    inputs_NF, labels_N = torch.stack(list(map(heard_as, examples.vectors_TE))), torch.from_numpy(examples.labels_N)
    return torch.stack([inputs_NF[labels_N == label].mean(0) for label in range(len(examples.names))])


def train_target(config: ModalitiesConfig, examples: Examples, codebook_CE: np.ndarray) -> int:
    """Train a causal LM on class, codes and an end, and write it and prompts for it; return the tokens of an answer at most."""
    torch.manual_seed(0)
    codes = [vq(each, codebook_CE)[0] for each in examples.vectors_TE]
    end, first_class, longest = config.num_codes, config.num_codes + 1, max(map(len, codes))
    rows_NT = torch.full((len(codes), longest + 2), -1)
    for row_T, label, own in zip(rows_NT, examples.labels_N, codes, strict=True):
        row_T[: len(own) + 2] = torch.tensor([first_class + int(label), *own.tolist(), end])
    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4}
    sizes |= {"vocab_size": first_class + len(examples.names), "max_position_embeddings": 2 * rows_NT.shape[1]}
    model = LlamaForCausalLM(LlamaConfig(**sizes, attention_dropout=0.1, bos_token_id=None, eos_token_id=end))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1, betas=(0.9, 0.95))

    for _ in range(config.epochs):
        for rows_BT in rows_NT[torch.randperm(len(codes))].split(64):
            logits_BTV = model(input_ids=rows_BT[:, :-1].clamp(min=0)).logits
            loss = cross_entropy(logits_BTV.flatten(0, 1), rows_BT[:, 1:].flatten(), ignore_index=-1)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    model.eval().save_pretrained(config.folder / "target")
    classes = len(examples.names)
    for name, first, number in (("prompts", 0, config.num_prompts), ("suite", config.num_prompts, config.num_asked)):
        rows = [
            {"prompt_ids": [first_class + n % classes], "sample": first + n, "category": examples.names[n % classes]}
            for n in range(number)
        ]
        (config.folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return longest + 1


# --- draftsmith ---------------------------------------------------------------------------------------------------------


def run_commands(config: ModalitiesConfig, length: int) -> None:
    """Make data, train a head, and evaluate it strictly and relaxed."""
    folder = config.folder
    target = {"name": str(folder / "target"), "tokens": "ids", "dtype": "float32"}
    prompts = {"source": "file", "path": str(folder / "prompts.jsonl"), "num_prompts": config.num_prompts}
    answers = {"temperature": 1.0, "max_new_tokens": length, "batch_size": 64}
    run_config(
        "scripts.data", folder / "data", {"target": target, "prompts": prompts, "answers": answers, "held_out_share": 0.1}
    )
    decode = {"num_speculative_tokens": 5, "max_new_tokens": length, "temperature": 1.0, "batch_size": 32}
    files = {name: str(folder / "data" / f"{name}.jsonl") for name in ("train", "held_out")}
    recipe: dict[str, Any] = {"target": target, "data": files | {"max_length": length + 2}, "num_speculative_tokens": 5}
    recipe |= {
        "head": {"kind": "eagle3", "taps": [1, 2, 3]},
        "schedule": {"batch_size": 32, "epochs": 4},
        "sanity": {"enabled": False},
    }
    run_config("train.heads", folder / "heads", recipe | {"held_out": {"num_prompts": 32, "decode": decode}})
    suite = {"name": config.kind, "path": str(folder / "suite.jsonl")}
    evaluation = {"target": target, "draft": str(folder / "heads" / "artifact"), "suite": suite, "repeats": 1, "baselines": []}
    evaluation["quality"] = {"perplexity": True}
    codebook = str(folder / "codebook.npy")
    relaxed = {"kind": "neighbourhood", "k": config.neighbours, "delta": config.delta, "codebook": codebook}
    for name, lossy in (("strict", None), ("relaxed", relaxed)):
        evaluate(folder / name, evaluation | {"decode": decode | {"lossy": lossy}})


def rows_of(config: ModalitiesConfig, centres_CF: Tensor, codebook_CE: np.ndarray) -> Iterator[dict[str, Any]]:
    """Yield tau, speedup and the share of answers that the classifier takes for what was asked, for each way of decoding."""
    for way in ("strict", "relaxed"):
        folder = config.folder / way
        report, right = read_json(folder / "report.json", "report"), dict[str, list[bool]]()
        for answer in read_records(folder / RECORDS).generations:
            codes = [token for token in answer.tokens if token < config.num_codes]
            asked = answer.prompt_tokens[0] - config.num_codes - 1
            seen = bool(codes) and int((centres_CF - heard_as(codebook_CE[codes])).norm(dim=-1).argmin()) == asked
            right.setdefault(answer.mode, []).append(seen)
        accuracy = {mode: sum(own) / len(own) for mode, own in right.items()}
        if way == "strict":
            yield {"way": "plain", "tau": 1.0, "speedup": 1.0, "accuracy": accuracy[AUTOREGRESSIVE]}
        figures = {"tau": report["acceptance"]["tokens_per_target_step"], "speedup": report["speed"]["decode_speedup"]}
        yield {"way": way, **figures, "accuracy": accuracy[SPECULATIVE]}


if __name__ == "__main__":
    sys.exit(run_command(ModalitiesConfig, show_modality, description=__doc__))
