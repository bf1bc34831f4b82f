"""A real engine: vLLM's answers are the local target's up to numerical ties, and its hidden states are the target's. All
compute in float32.

Slow: `make serve-check` installs the engine into an environment of its own and runs this. Where answers differ, the project's
own comparison (`eval.lossless`) says whether the tokens were equally good as far as float32 can tell.
"""

import json
import shutil

import pytest
import torch
from accelerate import PartialState

from configs.schema.data import AnswersConfig, DataConfig, ServerConfig
from configs.schema.evaluation import LosslessConfig
from configs.schema.target import EngineStatesConfig, TargetConfig
from distill.dataset.conversations import read_conversations
from distill.generation.make_dataset import make_dataset
from distill.generation.server_answers import ServerAnswerJob
from distill.server.connection import Connection
from distill.server.states import SERVED_AS, StateServer
from eval.decoder.records import Generation
from eval.teacher_forcing import check_tokens
from heads.frozen.hidden_states import read_states
from heads.frozen.loading import load_target
from heads.inference.model_checks import relative_error
from scripts.serve_states import states_options
from tests.support.vllm_engine import CPU_CONNECTOR, ON_CPU, vllm_serving

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

MAX_NEW_TOKENS = 40
SERVED = {"model": "smollm2", "concurrency": 4, "timeout_seconds": 300.0}
PROMPTS = [
    ["List three fruits and their colours."],
    ["Write a Python function that reverses a list.", "Now do it without slicing."],
    ["Why is the sky blue?"],
    ["Translate 'good morning' into French and Spanish."],
    ["A train covers 120 km in 90 minutes. What is its speed in km/h?", "And in miles an hour?"],
    ["What is the capital of Portugal? Answer in one word."],
    ["Name a prime number above 50."],
    ["Say yes."],
    ["Give a synonym for 'quick'."],
    ["Who wrote Hamlet?"],
    ["Continue: one, two, three,"],
    ["Explain what a hash table is in two sentences."],
]


@pytest.fixture(scope="module")
def target():
    return load_target(TargetConfig(dtype="float32", device="cpu"))


@pytest.fixture(scope="module")
def engine(target, tmp_path_factory):
    with vllm_serving(target, tmp_path_factory.mktemp("engine"), dtype="float32") as url:
        yield url


@pytest.fixture(scope="module")
def made(engine, tmp_path_factory):
    """Conversations by prompt and turn, as the server and as the local target answer them, and the server's manifest."""
    folder = tmp_path_factory.mktemp("data")
    rows = [{"question_id": f"q{number}", "turns": turns} for number, turns in enumerate(PROMPTS)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = {}
    for writer in ("server", "target"):
        config = DataConfig.model_validate(
            {
                "target": {"dtype": "float32", "device": "cpu"},
                "prompts": {"source": "file", "path": str(folder / "prompts.jsonl"), "num_prompts": len(PROMPTS)},
                "answers": {"written_by": writer, "max_new_tokens": MAX_NEW_TOKENS},
                "server": {"url": engine, **SERVED} if writer == "server" else None,
                "held_out_share": 0.2,
                "output": str(folder / writer),
            }
        )
        make_dataset(config)
        PartialState._reset_state()
        files = [folder / writer / name for name in ("train.jsonl", "held_out.jsonl")]
        found[writer] = {(row.prompt_id, row.turn): row for file in files for row in read_conversations(file)}
    return found["server"], found["target"], json.loads((folder / "server" / "manifest.json").read_text())


def generation(row):
    return Generation(
        prompt_id=row.prompt_id,
        category=row.category,
        mode="autoregressive",
        prompt_tokens=row.prompt_ids,
        tokens=row.answer_ids,
        rounds=(),
        stop_reason="eos" if row.ended else "length",
        turn=row.turn,
    )


def test_the_engines_greedy_answers_are_the_targets_up_to_ties(made, target):
    served, local, manifest = made
    assert manifest["server"] == {"model": "smollm2"}
    assert served.keys() == local.keys()
    # A later turn follows the answers before it, which may differ by a tie.
    keys = [key for key in served if served[key].prompt_ids == local[key].prompt_ids]
    assert len(keys) >= len(PROMPTS)
    sides = [[generation(side[key]) for key in keys] for side in (local, served)]
    found = check_tokens(target, *sides, LosslessConfig().tie_noise)
    num_tokens, ended = sum(len(each.tokens) for each in sides[0]), sum(served[key].ended for key in keys)
    print(f"\n{len(keys)} answers, {num_tokens} tokens, {ended} ended by themselves; they differ in {found.divergences}")
    assert found.wrong_answers == set()
    assert 0 < ended < len(keys)
    different = {(each.prompt_id, each.turn) for each in found.divergences}
    assert all(served[key].ended == local[key].ended for key in keys if key not in different)


def test_a_seed_of_its_own_gives_a_request_the_same_draws_again(engine, target, tmp_path):
    prompt = target.encode_chat([{"role": "user", "content": PROMPTS[0][0]}])
    sampling = AnswersConfig(temperature=1.0, top_k=50, top_p=0.95)
    with Connection(ServerConfig(url=engine, **SERVED)) as server:
        job = {"server": server, "target": target, "prompts": [], "config": sampling, "folder": tmp_path, "fingerprint": "job"}
        jobs = [ServerAnswerJob(seed=seed, max_positions=512, **job) for seed in (0, 0, 1)]
        first, again, other = [each.write(prompt, 7, 24) for each in jobs]
    assert first == again
    assert first != other


# --- hidden states ------------------------------------------------------------------------------------------------

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
    flags = ["--skip-tokenizer-init", *states_options(TAPS, str(disk), ON_CPU)]
    folder = tmp_path_factory.mktemp("engine")
    shutil.copy(CPU_CONNECTOR, folder)
    variables = {"PYTHONPATH": str(folder)}
    with vllm_serving(whole, folder, dtype="float32", flags=flags, name=name, variables=variables) as url:
        yield {"urls": [url], "path": str(disk), "concurrency": 4}


def test_every_tap_is_the_targets(states, whole):
    server = StateServer(EngineStatesConfig.model_validate(states), states["urls"][0])
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
