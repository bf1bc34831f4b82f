"""A compiled forward gives the logits of the forward it was made of, whatever the shapes, and compiles each shape once.

Most tests run the captured graphs as they are: what the compiler makes of a graph takes half a minute.
"""

from copy import deepcopy

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, Gemma3TextConfig

from configs.schema.decoding import DecodeConfig
from configs.schema.target import TargetConfig
from eval.decoder.decode import generate
from heads.artifact import load_draft
from heads.device import row_ints
from heads.frozen.hidden_states import forward_states
from heads.frozen.loading import load_target
from heads.inference import compiled_forward
from heads.inference.causal_lm import forward_rows, head_logits, new_cache
from heads.inference.compiled_forward import CompiledForward, TransformersForward, forward_name, make_compiled
from heads.inference.lean_forward import LeanForward
from heads.inference.runner import runner_of
from heads.sampling.token_tree import TreeAttention, ancestor_mask
from tests.heads.inference.test_lean_forward import IDS_BT, model_of
from tests.support.family_checks import SMALL

GEMMA = Gemma3TextConfig(
    **SMALL | {"num_key_value_heads": 2, "pad_token_id": None, "num_hidden_layers": 2},
    head_dim=8,
    sliding_window=5,
    layer_types=["sliding_attention", "full_attention"],
)
PIECES = [(5, [0, 0]), (1, [5, 5]), (3, [6, 6]), (4, [9, 7]), (3, [10, 4]), (1, [12, 7])]


@pytest.fixture
def captured(monkeypatch):
    """Graphs are captured and run without being compiled further; yields how many there were."""
    torch._dynamo.reset()
    counters.clear()
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda run, **options: compile(run, **options | {"backend": "eager"}))
    yield lambda: counters["stats"]["unique_graphs"]
    torch._dynamo.reset()


def gemma():
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(GEMMA, dtype=torch.float32).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.mul_(4.0)
    return model


def logits_of(model, pieces=PIECES):
    with torch.inference_mode():
        # A tensor made outside of inference mode, which the decoder has none of, would be another graph's.
        store, ids_BT = new_cache(model, 24), IDS_BT.clone()
        return [head_logits(model, forward_rows(model, store, ids_BT[:, :length], starts)) for length, starts in pieces]


@pytest.mark.parametrize("name", ["llama", "qwen3, sliding", "gemma"])
def test_logits_at_any_place_and_width_are_those_of_the_forward_inside(name, captured):
    plain = gemma() if name == "gemma" else deepcopy(model_of(name))
    expected = logits_of(plain)
    make_compiled(plain)
    for ours_BTV, theirs_BTV in zip(logits_of(plain), expected, strict=True):
        torch.testing.assert_close(ours_BTV, theirs_BTV, atol=1e-5, rtol=1e-5)
    inner = runner_of(plain).forward.inner
    assert type(inner) is (TransformersForward if name == "gemma" else LeanForward)
    assert captured() == 2  # one token and four, three of which may be the real ones


def test_tokens_of_a_tree_see_their_own_path(captured):
    visible_BKK = ancestor_mask(torch.tensor([[0, 0, 1, 2], [0, 1, 1, 3]]))
    attention = TreeAttention(
        roots=row_ints([6, 5], torch.device("cpu")), depths_BX=visible_BKK.sum(-1) - 1, visible_BTX=visible_BKK
    )
    model, outputs = deepcopy(model_of("llama")), []
    for compiled in (False, True):
        if compiled:
            make_compiled(model)
        with torch.inference_mode():
            store = new_cache(model, 24)
            forward_rows(model, store, IDS_BT[:, :6], [0, 0])
            tree_BTD = forward_rows(model, store, IDS_BT[:, 6:11], [6, 5], attention)
            store.keep_path([6, 5], [[0, 2, 4], [0, 1, 3]])
            outputs.append(torch.cat([tree_BTD, forward_rows(model, store, IDS_BT[:, 3:4], [9, 8])], 1))
    assert captured() == 2
    torch.testing.assert_close(*outputs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_tapped_states_are_the_models(name, captured):
    model, states = gemma() if name == "gemma" else deepcopy(model_of(name)), []
    for compiled in (False, True):
        if compiled:
            make_compiled(model)
        with torch.inference_mode():
            store = new_cache(model, 24)
            forward_rows(model, store, IDS_BT[:, :6], [0, 0])
            for place in (6, 9):  # what is watched once must not be what was watched before
                states.append(forward_states(model, store, IDS_BT[:, place : place + 3], [place, place - 1], [0, 1]))
    for theirs, ours in zip(states[:2], states[2:], strict=True):
        torch.testing.assert_close(ours.taps_ABTE, theirs.taps_ABTE, atol=1e-5, rtol=1e-5)
    assert captured() == (0 if name == "gemma" else 1)  # transformers' own is watched uncompiled


def test_a_loaded_target_and_its_draft_run_compiled_and_answer_as_before(tiny_run, captured):
    settings = {"name": str(tiny_run / "target"), "dtype": "float32", "device": "cpu"}
    prompts, config = [[5, 9, 6], [7, 12, 3, 44, 9, 20]], DecodeConfig(max_new_tokens=12, batch_size=2)
    expected = generate(load_target(TargetConfig(**settings)), prompts, config)
    target = load_target(TargetConfig(**settings, forward="compiled"))
    draft = load_draft(tiny_run / "artifact", target.identity, target.model)
    for model in (target.model, draft.proposer.model):
        assert isinstance(runner_of(model).forward, CompiledForward)
    assert generate(target, prompts, config) == expected
    assert generate(target, prompts, config, draft.proposer) == expected
    # Plainly 1 token; with drafts 4, 2 and 1; the draft reads 1 or 2; each with two rows and with one.
    assert captured() <= 10


@pytest.mark.parametrize(
    ("graphs", "memory", "attention", "expected"),
    [
        (False, 0.5, "sdpa", "lean"),
        (True, 0.0, "sdpa", "compiled"),
        (False, 0.0, "sdpa", "transformers"),
        (False, 0.5, "eager", "transformers"),
    ],
)
def test_auto_takes_the_fastest_forward_that_device_memory_and_model_have(
    tiny_run, monkeypatch, graphs, memory, attention, expected
):
    monkeypatch.setattr(compiled_forward, "has_graphs", lambda device: graphs)
    monkeypatch.setattr(compiled_forward, "MEMORY_SHARE", memory)
    config = TargetConfig(name=str(tiny_run / "target"), dtype="float32", device="cpu", attention=attention, forward="auto")
    assert forward_name(load_target(config).model) == expected


def test_auto_leaves_a_target_of_several_devices_to_transformers(tiny_run):
    config = TargetConfig(name=str(tiny_run / "target"), dtype="float32", device="cpu", device_map={"": "cpu"}, forward="auto")
    assert forward_name(load_target(config).model) == "transformers"


@pytest.mark.slow
def test_what_the_compiler_makes_computes_the_same():
    torch._dynamo.reset()
    model = deepcopy(model_of("llama"))
    expected = logits_of(model, PIECES[:2])
    make_compiled(model)
    torch.testing.assert_close(logits_of(model, PIECES[:2]), expected, atol=1e-5, rtol=1e-5)
