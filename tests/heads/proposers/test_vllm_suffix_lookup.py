"""The proposer class that an export gives vLLM drafts what `SuffixLookup` does, wherever vLLM puts a request."""

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from configs.runtime.errors import InputError
from heads.formats.exporting.exporter import PACKAGE, SERVE_FILE, export_suffix_lookup
from heads.formats.exporting.source import TargetFolder
from heads.proposers.lookup import SuffixLookup
from scripts.check.vllm_check import read_line

TARGET = TargetFolder(Path("target"), "some/target", trust_remote_code=True)
ANSWERS = [[1, 2, 3, 4, 5, 6], [9, 2, 3, 7], [5, 6, 1]]
MAX_LENGTH = 40


@pytest.fixture
def exported(tmp_path, monkeypatch):
    out = tmp_path / "export"
    export_suffix_lookup(ANSWERS, TARGET, out, num_speculative_tokens=3)
    monkeypatch.syspath_prepend(out)
    yield out
    for name in [name for name in sys.modules if name.startswith(PACKAGE)]:
        del sys.modules[name]


def test_the_export_names_a_class_that_stands_in_it_and_needs_nothing_of_this_project(exported):
    line = read_line((exported / SERVE_FILE).read_text())
    assert line.variables == {"PYTHONPATH": str(exported)}
    assert line.plain == ("some/target", "--trust-remote-code")
    module, _, name = line.draft["model"].rpartition(".")
    assert hasattr(importlib.import_module(module), name)
    source = "".join(path.read_text() for path in (exported / PACKAGE).glob("*.py"))
    assert not [line for line in source.splitlines() if line.startswith(("from heads", "from configs", "import torch"))]
    assert (line.draft["method"], line.draft["num_speculative_tokens"]) == ("custom_class", 3)
    with pytest.raises(InputError, match="exists already"):
        export_suffix_lookup(ANSWERS, TARGET, exported)
    with pytest.raises(InputError, match="for vllm only, not for sglang"):
        export_suffix_lookup(ANSWERS, TARGET, exported / "other", engine="sglang")


def test_requests_that_change_places_end_and_begin_are_drafted_for_as_by_suffix_lookup(exported):
    module = importlib.import_module(PACKAGE)
    settings = SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=3), model_config=SimpleNamespace(max_model_len=MAX_LENGTH)
    )
    proposer = module.VllmSuffixLookup(settings)
    proposer.load_model()
    rng = np.random.default_rng(0)
    texts = {name: rng.integers(1, 8, 6).tolist() for name in "abc"}
    texts["twin of a"] = list(texts["a"])
    order, seen = list(texts), 0
    for step in range(20):
        ids, lengths, sampled = np.zeros((len(order), MAX_LENGTH), np.int32), np.zeros(len(order), np.int32), []
        for place, name in enumerate(order):
            added = rng.integers(1, 8, 1 + step % 2).tolist()
            texts[name] += added
            ids[place, : len(texts[name])], lengths[place] = texts[name], len(texts[name])
            sampled.append([] if (step, place) == (3, 1) else added)  # one whose prompt is still being read
        drafts = proposer.propose(sampled, lengths, ids, slot_mappings=None)
        for place, name in enumerate(order):
            lookup = SuffixLookup(torch.device("cpu"), ANSWERS)
            lookup.start([texts[name]], 64, None)
            room = min(3, MAX_LENGTH - len(texts[name]) - 1)
            expected = lookup.look_up([texts[name]], room)[0] if room > 0 and sampled[place] else []
            assert drafts[place] == expected
            seen += len(expected)
        rng.shuffle(order)
        if step == 9:
            texts["late"] = [1, 2, 3]
            order = ["late", *order[1:]]
    assert seen > 20
    assert json.dumps(drafts)  # plain numbers, as vLLM sends them between processes
