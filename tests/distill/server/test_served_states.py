"""A real engine: hidden states from vLLM are the target's, and a head trained from them is that of the local target.

Slow: `make serve-check` installs the engine into an environment of its own and runs this. Both sides compute in float32.
"""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from configs.schema.target import EngineStatesConfig, TargetConfig
from configs.schema.training import HeadsConfig
from distill.dataset.conversations import FORMAT_VERSION, MANIFEST
from distill.server.states import SERVED_AS, StateServer
from heads.frozen.hidden_states import read_states
from heads.frozen.loading import load_target
from heads.inference.model_checks import relative_error
from scripts.serve_states.__main__ import CONNECTOR, states_options
from tests.support.caches import conversation, write_rows
from tests.support.vllm_engine import vllm_serving
from train.launch import run_heads

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

TAPS = [0, 1, 2, 3]
RELATIVE_DIFFERENCE = 1e-5


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory, tiny_llama, tiny_tokenizer):
    """A target of three blocks, with heads as wide as vLLM's attention on a CPU wants them."""
    folder = tmp_path_factory.mktemp("target")
    tiny_llama(seed=1, dtype=torch.float32, layers=3, head_dim=32, max_position_embeddings=512).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def whole(model_folder):
    return load_target(TargetConfig(name=str(model_folder), dtype="float32", device="cpu"))


@pytest.fixture(scope="module")
def states(whole, tmp_path_factory):
    """The settings of `target.states` for vLLM at work on the target."""
    disk = tmp_path_factory.mktemp("states")
    name = SERVED_AS.format(taps="-".join(map(str, TAPS)))
    flags = ["--skip-tokenizer-init", *states_options(TAPS, str(disk), cpu=True)]
    variables = {"PYTHONPATH": str(CONNECTOR.parent)}
    folder = tmp_path_factory.mktemp("engine")
    with vllm_serving(whole, folder, dtype="float32", flags=flags, name=name, variables=variables) as url:
        yield {"urls": [url], "path": str(disk), "concurrency": 4}


def test_every_tap_is_the_targets(states, whole):
    server = StateServer(EngineStatesConfig.model_validate(states), states["urls"][0], 1)
    generator, worst = torch.Generator().manual_seed(0), 0.0
    for length in (1, 17, 64, 64, 200):
        ids_1T = torch.randint(64, (1, length), generator=generator)
        served_TAE = server.fetch(ids_1T[0].tolist()).states_TAE
        expected = read_states(whole.model, ids_1T, TAPS).taps_ABTE
        errors = [relative_error(served_TAE[:, tap], expected[tap][0]) for tap in TAPS]
        print(f"{length} tokens, relative difference by tap: {', '.join(f'{error:.1e}' for error in errors)}")
        worst = max(worst, *errors)
    server.connection.close()
    print(f"engine_states_relative_difference {worst:.2g}")
    assert worst <= RELATIVE_DIFFERENCE


def test_a_head_trained_from_vllm_is_the_one_trained_from_the_local_target(states, model_folder, whole, tmp_path):
    rows = torch.randint(5, 64, (16, 24), generator=torch.Generator().manual_seed(0)).tolist()
    conversations = [conversation(ids[:6], ids[6 : 12 + number % 12], f"p{number}") for number, ids in enumerate(rows)]
    data = {"train": tmp_path / "train.jsonl", "held_out": tmp_path / "held_out.jsonl"}
    write_rows(data["train"], conversations[:12])
    others = [replace(row, messages=({"role": "user", "content": row.prompt_id},)) for row in conversations[12:]]
    write_rows(data["held_out"], others)
    (tmp_path / MANIFEST).write_text(json.dumps({"format_version": FORMAT_VERSION, "target": whole.identity.to_dict()}))
    found = []
    for name in ("local", "served"):
        target = {
            "name": str(model_folder),
            "dtype": "float32",
            "device": "cpu",
            "states": states if name == "served" else None,
        }
        torch.manual_seed(0)
        config = {
            "target": target,
            "data": {key: str(path) for key, path in data.items()},
            "head": {"kind": "eagle3", "taps": [0, 2, 3], "num_depths": 3},
            "schedule": {"batch_size": 4, "max_steps": 12, "mixed_precision": "no", "trackers": []},
            "held_out": {"num_prompts": 4, "decode": {"max_new_tokens": 12, "batch_size": 2}},
            "sanity": {"learning_rate": 1e-2},
            "output": str(tmp_path / name),
        }
        assert run_heads(HeadsConfig.model_validate(config)) == 0
        outcome = json.loads((tmp_path / name / "outcome.json").read_text())
        found.append((load_file(tmp_path / name / "artifact" / "model.safetensors"), outcome["best_score"]))
    (expected, tau), (weights, served_tau) = found
    largest = max(float((weights[name] - expected[name]).abs().max()) for name in expected)
    print(f"tokens per target step {tau:.4f} and {served_tau:.4f}; largest difference of a weight {largest:.2g}")
    torch.testing.assert_close(weights, expected, rtol=1e-3, atol=1e-4)
    assert served_tau == tau
