"""Begin here: a model, data that it writes, a draft trained on them, its report, its gate, and other programs that load it.

Each step is the function behind a command: `draftsmith data`, `heads`, `eval`, `gate`, `export`. The model is tiny and random.
"""

import json
from importlib.util import find_spec

import pytest
import torch
from accelerate.state import AcceleratorState
from transformers import AutoModel, AutoModelForCausalLM

from configs.runtime.command import DONE
from configs.schema.data import DataConfig
from configs.schema.evaluation import EvalConfig, GateConfig
from configs.schema.training import HeadsConfig
from distill.dataset.conversations import read_conversations
from distill.generation.make_dataset import make_dataset
from eval.evaluation import evaluate
from eval.release import judge, read_artifact
from eval.report.schema import load_report
from heads.formats.exporting.exporter import export
from heads.formats.exporting.source import TargetFolder, read_source
from tests.conftest import make_llama, make_tokenizer
from train.launch import run_heads

NUM_DRAFTS = 3


@pytest.fixture(autouse=True)
def _own_process():
    """Leave no choice of precision or devices behind, which accelerate keeps for a whole process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.filterwarnings("ignore")  # of the programs that load the draft
def test_a_model_gets_a_draft_that_is_measured_judged_and_loaded_elsewhere(tmp_path):
    model = tmp_path / "model"
    answering = make_llama(layers=3, dtype=torch.float32, spread=4.0)
    answering.config.eos_token_id = answering.generation_config.eos_token_id = 1
    answering.save_pretrained(model)
    make_tokenizer().save_pretrained(model)
    target = {"name": str(model), "dtype": "float32", "device": "cpu"}

    asked = [{"question_id": n, "turns": [f"w{n % 58} w{7 * n % 57} w{3 * n % 50}"]} for n in range(64)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    data = {
        "target": target,
        "prompts": {"source": "file", "path": str(tmp_path / "prompts.jsonl")},
        "answers": {"max_new_tokens": 24, "batch_size": 16},
        "held_out_share": 0.25,
        "output": str(tmp_path / "data"),
    }
    make_dataset(DataConfig.model_validate(data))
    train, held_out = (str(tmp_path / "data" / f"{side}.jsonl") for side in ("train", "held_out"))
    assert len(read_conversations(tmp_path / "data" / "train.jsonl")) > 30

    training = {
        "target": target,
        "data": {"train": train, "held_out": held_out, "max_length": 64},
        "head": {"kind": "dflash", "block_size": NUM_DRAFTS + 1, "taps": [1, 2], "num_layers": 1, "train_head": False},
        "optimizer": {"learning_rate": 1e-2},
        "schedule": {"max_steps": 60, "batch_size": 16, "mixed_precision": "no", "trackers": []},
        "held_out": {"num_prompts": 8, "decode": {"num_speculative_tokens": NUM_DRAFTS, "max_new_tokens": 12}},
        "output": str(tmp_path / "training"),
    }
    assert run_heads(HeadsConfig.model_validate(training)) == DONE
    artifact = tmp_path / "training" / "artifact"

    evaluation = {
        "target": target,
        "draft": str(artifact),
        "suite": {"path": held_out},
        "decode": {"num_speculative_tokens": NUM_DRAFTS, "max_new_tokens": 24, "batch_size": 4},
        "output": str(tmp_path / "eval"),
    }
    assert evaluate(EvalConfig.model_validate(evaluation)) == DONE
    report = load_report(tmp_path / "eval" / "report.json")
    assert report.lossless.verdict in ("lossless", "lossless_up_to_ties")

    gate = {"rules": [{"metric": "acceptance.tokens_per_target_step", "min": 1.05}], "min_prompts": 8}
    verdict = judge(report, GateConfig.model_validate(gate), None, read_artifact([artifact]))
    assert verdict.outcome == "pass"

    source = read_source(artifact, TargetFolder(model, str(model)))
    for engine in ("transformers", "speculators"):
        export(source, engine, tmp_path / engine)
    plain, draft = AutoModelForCausalLM.from_pretrained(model), AutoModel.from_pretrained(tmp_path / "transformers")
    widths = []
    plain.register_forward_hook(lambda _, __, given, ___: widths.append(given["input_ids"].shape[1]), with_kwargs=True)
    prompt = torch.tensor([read_conversations(tmp_path / "data" / "held_out.jsonl")[0].prompt_ids])
    settings = {"max_new_tokens": 16, "do_sample": False}
    answer = plain.generate(prompt, assistant_model=draft, speculation_type="dflash", **settings)
    assert max(widths[1:]) == NUM_DRAFTS + 1  # the pending token and a block of drafts
    assert torch.equal(answer, plain.generate(prompt, **settings))
    if find_spec("speculators") is not None:
        from speculators import SpeculatorModel

        theirs = SpeculatorModel.from_pretrained(tmp_path / "speculators")
        assert theirs.config.block_size == NUM_DRAFTS + 1
