"""Targets that read images or sounds, from chats in OpenAI's form to a report: nothing in between reads a row without them."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

from configs.schema.data import CacheConfig, DataConfig
from configs.schema.evaluation import EvalConfig
from configs.schema.target import TargetConfig
from configs.schema.training import HeadsConfig
from distill.cache.writer import make_cache
from distill.dataset.batches import ConversationDataset, collate
from distill.dataset.conversations import read_conversations
from distill.generation.make_dataset import make_dataset
from eval.evaluation import evaluate
from heads.frozen.hidden_states import read_states
from heads.frozen.loading import load_target
from tests.support.architectures import tiny_model
from tests.support.media_models import PLACEHOLDER, picture, save_processor, sound
from train.launch import run_heads

pytest.importorskip("PIL")
NUM_PROMPTS = 12
TAPS = [1, 2, 4]


def part(kind: str, number: int) -> dict[str, object]:
    """Return the picture or sound of a prompt, a file."""
    if kind == "audio":
        return {"type": "audio_url", "audio_url": {"url": f"{number}.wav"}}
    return {"type": "image_url", "image_url": {"url": f"{number}.png"}}


def chat(kind: str, number: int) -> dict[str, object]:
    """Return a logged request; the questions are the same, the pictures or sounds are not."""
    parts = [{"type": "text", "text": "w20 w21"}, part(kind, number), {"type": "text", "text": " w30"}]
    return {"id": f"p{number}", "messages": [{"role": "user", "content": parts}]}


@dataclass(frozen=True)
class Run:
    """Data, a head and a report, made one after the other in `folder`."""

    folder: Path
    target: dict[str, Any]
    places: int  # tokens of each picture or sound

    def heads_config(self, output: str, **data: str) -> HeadsConfig:
        folder = self.folder
        return HeadsConfig.model_validate(
            {
                "target": self.target,
                "data": {"train": str(folder / "data/train.jsonl"), "held_out": str(folder / "data/held_out.jsonl"), **data},
                "head": {"kind": "eagle3", "taps": TAPS, "num_depths": 2, "draft_vocab_size": None},
                "schedule": {"batch_size": 3, "max_steps": 4, "trackers": [], "mixed_precision": "no"},
                "held_out": {"num_prompts": 2, "decode": {"num_speculative_tokens": 2, "max_new_tokens": 8}},
                "sanity": {"enabled": False},
                "output": str(folder / output),
            }
        )


@pytest.fixture(scope="module", params=["images", "audio"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    kind, run = request.param, tmp_path_factory.mktemp(request.param)
    family, places = {"images": ("qwen2_5_vl", 6), "audio": ("qwen2_audio", 7)}[kind]  # 2 x 3 states of a picture
    tiny_model(family).save_pretrained(run / "target")
    save_processor(family, run / "target")
    for number in range(NUM_PROMPTS + 4):
        picture(number).save(run / f"{number}.png")
        (run / f"{number}.wav").write_bytes(sound(number))
    for name, numbers in (("prompts", range(NUM_PROMPTS)), ("suite", range(NUM_PROMPTS, NUM_PROMPTS + 4))):
        (run / f"{name}.jsonl").write_text("".join(json.dumps(chat(kind, number)) + "\n" for number in numbers))
    target = {"name": str(run / "target"), "dtype": "float32", "device": "cpu", kind: {"folder": str(run)}}
    made = Run(run, target, places)
    make_dataset(
        DataConfig.model_validate(
            {
                "target": target,
                "prompts": {"source": "file", "path": str(run / "prompts.jsonl"), "num_prompts": NUM_PROMPTS},
                "answers": {"max_new_tokens": 12, "batch_size": 3},
                "held_out_share": 0.3,
                "output": str(run / "data"),
            }
        )
    )
    run_heads(made.heads_config("head"))
    evaluate(
        EvalConfig.model_validate(
            {
                "target": target,
                "draft": str(run / "head/artifact"),
                "suite": {"path": str(run / "suite.jsonl")},
                "decode": {"num_speculative_tokens": 2, "max_new_tokens": 10, "batch_size": 2},
                "repeats": 1,
                "warmup_prompts": 0,
                "output": str(run / "report"),
            }
        )
    )
    return made


def test_the_report_is_lossless(run: Run) -> None:
    report = json.loads((run.folder / "report/report.json").read_text())
    assert report["lossless"]["verdict"] == "lossless"
    assert report["prompts"]["num_prompts"] == 4


def test_training_reads_the_states_of_the_media_and_predicts_answers_only(run: Run) -> None:
    target = load_target(TargetConfig.model_validate(run.target))
    rows = read_conversations(run.folder / "data/train.jsonl")
    dataset = ConversationDataset(rows, 64)
    batch = collate([dataset[0], dataset[1], dataset[2]])
    assert [row.prompt_ids.count(PLACEHOLDER) for row in rows] == [run.places] * len(rows)
    assert not (batch.loss_mask_BT & (batch.input_ids_BT == PLACEHOLDER)).any()
    found = read_states(target.model, batch.input_ids_BT, (2,), None, batch.media_inputs(target))
    for number, row in enumerate(rows[:3]):
        ids_1T = torch.tensor([row.prompt_ids + row.answer_ids])
        inputs = target.media.inputs([row.media_prompt], ids_1T.tolist())
        types = {name: functional.pad(each, (0, len(row.answer_ids))) for name, each in inputs.of_tokens.items()}
        with torch.no_grad():
            states = target.model.model(input_ids=ids_1T, **types, **inputs.of_media).last_hidden_state
        torch.testing.assert_close(found.final_BTE[number, : ids_1T.shape[1]], states[0], rtol=1e-4, atol=1e-4)


def test_a_head_trained_from_a_cache_is_the_one_trained_online(run: Run) -> None:
    given = {"data": str(run.folder / "data/train.jsonl"), "output": str(run.folder / "cache")}
    make_cache(CacheConfig.model_validate({"target": run.target, "taps": TAPS, "dtype": "float32", **given}))
    run_heads(run.heads_config("cached", cache=given["output"]))
    online, cached = (load_file(run.folder / name / "artifact/model.safetensors") for name in ("head", "cached"))
    torch.testing.assert_close(cached, online, rtol=1e-3, atol=1e-4)
