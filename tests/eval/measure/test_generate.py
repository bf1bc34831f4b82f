"""transformers' `generate` is timed on the work that plain decoding does, after a pair that warms up; or not at all."""

from itertools import count
from types import SimpleNamespace

import pytest
from transformers import GPT2Config, GPT2LMHeadModel

from configs.schema.decoding import DecodeConfig
from eval.decoder.decode import Request, generate
from eval.measure import generate as timing
from heads.frozen.loading import load_target
from tests.support.evaluations import tiny_evaluation

REQUESTS = [Request(prompt_id=f"q{number}", category="c", tokens=(5, 6 + number, 7)) for number in range(3)]


@pytest.fixture
def config(tiny_run, tmp_path):
    return tiny_evaluation(tiny_run, tmp_path / "out", generate_prompts=2)


def test_both_sides_write_the_same_tokens_and_the_first_pair_is_not_counted(config, monkeypatch):
    target, own, written = load_target(config.target), timing._generate, []
    monkeypatch.setattr(timing, "_generate", lambda *args: written.append(own(*args)) or written[-1])
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=count().__next__))  # each side takes a second
    found = timing.time_generate(target, REQUESTS, config)
    plain = generate(target, [each.tokens for each in REQUESTS[:2]], DecodeConfig(num_speculative_tokens=0, max_new_tokens=8))
    assert written == [len(plain[0]), *map(len, plain)]
    pace = pytest.approx(1000 * 2 / sum(map(len, plain)))
    assert found == {"num_prompts": 2, "milliseconds_per_token_autoregressive": pace, "milliseconds_per_token_generate": pace}
    assert not any(parameter.requires_grad for parameter in target.model.parameters())


def test_an_answer_ends_with_the_context_on_both_sides(config, as_target, monkeypatch):
    settings = GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=4, bos_token_id=None, eos_token_id=None)
    own, written = timing._generate, []
    monkeypatch.setattr(timing, "_generate", lambda *args: written.append(own(*args)) or written[-1])
    target = as_target(GPT2LMHeadModel(settings).eval())
    longer = config.model_copy(update={"decode": DecodeConfig(num_speculative_tokens=0, max_new_tokens=40)})
    assert timing.time_generate(target, REQUESTS, longer)["num_prompts"] == 2
    (plain,) = generate(target, [REQUESTS[0].tokens], longer.decode)
    assert (written, len(plain)) == ([29, 29, 29], 29)


@pytest.mark.parametrize("changes", [{"generate_prompts": 0}, {"decode": DecodeConfig(temperature=1.0)}])
def test_work_that_generate_does_not_do_is_not_timed(config, changes):
    assert timing.time_generate(load_target(config.target), REQUESTS, config.model_copy(update=changes)) is None
