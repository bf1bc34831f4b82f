"""A cost rule fitted to rounds and rows measured here keeps the answers."""

from types import SimpleNamespace

import pytest

from configs.schema.decoding import DecodeConfig
from eval.decoder.decode import decode
from heads.proposers.draft_lm import DraftLM
from scripts.lab.bench.stopping import choose_stopping
from tests.support import family_checks
from tests.support.decoding import PROMPTS, head_proposer, requests_for


@pytest.mark.parametrize(("kind", "by"), [("draft_lm", "distribution"), ("dspark", "estimate")])
def test_a_rule_is_chosen_by_rounds_and_rows_measured_here(kind, by, tiny_llama, as_target, monkeypatch):
    target = as_target(family_checks.tiny_target("llama"))
    draft = DraftLM(tiny_llama(seed=2), 64) if kind == "draft_lm" else head_proposer(kind, target.model)
    loaded = SimpleNamespace(proposer=draft, metadata=SimpleNamespace(kind=kind))
    monkeypatch.setattr(
        "scripts.lab.bench.stopping.row_seconds", lambda target, request, most: [0.001 * row for row in range(1, most + 1)]
    )
    config, requests = DecodeConfig(num_speculative_tokens=3, max_new_tokens=12), requests_for(PROMPTS)
    chosen = choose_stopping(target, loaded, requests, config)
    assert (chosen.by, chosen.target_step_milliseconds) == (by, pytest.approx([1, 2, 3, 4]))
    assert (chosen.draft_step_milliseconds > 0, chosen.round_milliseconds > 0) == (kind == "draft_lm", kind == "dspark")
    generations, _ = decode(target, requests, config.model_copy(update={"stopping": chosen}), draft)
    assert [each.tokens for each in generations] == [each.tokens for each in decode(target, requests, config, draft)[0]]
