"""A target that reads images, from chats in OpenAI's form to a report: nothing in between reads a row without its pictures."""

import base64
import io
import json
from pathlib import Path

import pytest
import torch

from configs.runtime.errors import InputError
from configs.schema.data import DataConfig
from configs.schema.evaluation import EvalConfig
from configs.schema.training import HeadsConfig
from distill.dataset.batches import ConversationDataset, collate
from distill.dataset.conversations import read_conversations
from distill.generation.make_dataset import make_dataset
from eval.evaluation import evaluate
from heads.target.hidden_states import read_states
from heads.target.loading import load_target
from scripts.models_check.architectures import tiny_model
from scripts.models_check.image_models import IMAGE, picture, save_processor
from train.launch import run_heads

pytest.importorskip("PIL")
NUM_PROMPTS = 12


def data_url(seed: int) -> str:
    file = io.BytesIO()
    picture(seed).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def chat(number: int, text: str = "w20 w21") -> dict[str, object]:
    """Return a logged request on a picture; every other one is a file. The questions are the same, the pictures are not."""
    url = data_url(number) if number % 2 else f"{number}.png"
    parts = [{"type": "text", "text": text}, {"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": " w30"}]
    return {"id": f"p{number}", "messages": [{"role": "user", "content": parts}]}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data, a head and a report, made one after the other."""
    run = tmp_path_factory.mktemp("images")
    tiny_model("qwen2_5_vl").save_pretrained(run / "target")
    save_processor("qwen2_5_vl", run / "target")
    for number in range(0, NUM_PROMPTS + 4, 2):
        picture(number).save(run / f"{number}.png")
    for name, numbers in (("prompts", range(NUM_PROMPTS)), ("suite", range(NUM_PROMPTS, NUM_PROMPTS + 4))):
        (run / f"{name}.jsonl").write_text("".join(json.dumps(chat(number)) + "\n" for number in numbers))
    target = {"name": str(run / "target"), "dtype": "float32", "device": "cpu", "images": {"folder": str(run)}}
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
    run_heads(
        HeadsConfig.model_validate(
            {
                "target": target,
                "data": {"train": str(run / "data/train.jsonl"), "held_out": str(run / "data/held_out.jsonl")},
                "head": {"kind": "eagle3", "taps": [1, 2, 4], "num_depths": 2, "draft_vocab_size": None},
                "schedule": {"batch_size": 3, "max_steps": 4, "trackers": [], "mixed_precision": "no"},
                "held_out": {"num_prompts": 2, "decode": {"num_speculative_tokens": 2, "max_new_tokens": 8}},
                "sanity": {"enabled": False},
                "output": str(run / "head"),
            }
        )
    )
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
    return run


def test_the_report_on_pictures_is_lossless(run: Path) -> None:
    report = json.loads((run / "report/report.json").read_text())
    assert report["lossless"]["verdict"] == "lossless"
    assert report["prompts"]["num_prompts"] == 4


def test_training_reads_the_states_of_the_pictures_and_predicts_answers_only(run: Path) -> None:
    target = load_target(
        HeadsConfig.model_validate(
            {"target": {"name": str(run / "target"), "dtype": "float32", "device": "cpu", "images": {"folder": str(run)}}}
        ).target
    )
    rows = read_conversations(run / "data/train.jsonl")
    dataset = ConversationDataset(rows, 64)
    batch = collate([dataset[0], dataset[1], dataset[2]])
    places = [row.prompt_ids.count(IMAGE) for row in rows]
    assert places == [6] * len(rows)  # 2 x 3 states of a picture of 56 x 84
    assert not (batch.loss_mask_BT & (batch.input_ids_BT == IMAGE)).any()
    found = read_states(target.model, batch.input_ids_BT, (2,), None, batch.image_inputs(target))
    for number, row in enumerate(rows[:3]):
        ids_1T = torch.tensor([row.prompt_ids + row.answer_ids])
        inputs = target.images.inputs([row.image_prompt], ids_1T.tolist())
        types_1T = torch.nn.functional.pad(inputs.of_tokens["mm_token_type_ids"], (0, len(row.answer_ids)))
        with torch.no_grad():
            states = target.model.model(input_ids=ids_1T, mm_token_type_ids=types_1T, **inputs.of_images).last_hidden_state
        torch.testing.assert_close(found.final_BTE[number, : ids_1T.shape[1]], states[0], rtol=1e-4, atol=1e-4)


def test_a_part_that_is_no_image_of_the_user_is_refused_by_its_line(run: Path) -> None:
    row = {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]}
    (run / "sound.jsonl").write_text(json.dumps(row) + "\n")
    settings = {"prompts": {"source": "file", "path": str(run / "sound.jsonl")}, "output": str(run / "none")}
    with pytest.raises(InputError, match=r"sound\.jsonl, line 1: a message of user has a part of type input_audio"):
        make_dataset(DataConfig.model_validate(settings))
