"""A real engine: vLLM writes answers, greedily and in float32, and they are the local target's up to numerical ties.

Slow: `make serve-check` installs the engine into an environment of its own and runs this. Where the two differ, the project's
own comparison (`eval.lossless.verdict`) says whether the tokens were equally good as far as float32 can tell.
"""

import json

import pytest
from accelerate import PartialState

from configs.schema.data import AnswersConfig, DataConfig, ServerConfig
from configs.schema.evaluation import LosslessConfig
from configs.schema.target import TargetConfig
from distill.dataset.conversations import read_conversations
from distill.generation.make_dataset import make_dataset
from distill.generation.server_answers import ServerAnswerJob
from distill.server.connection import Connection
from eval.decoder.records import Generation
from eval.lossless.teacher_forcing import check_tokens
from heads.frozen.loading import load_target
from tests.support.vllm_engine import vllm_serving

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
