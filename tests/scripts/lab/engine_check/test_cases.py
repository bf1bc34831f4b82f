"""The serving check: how an engine is run and judged; with stand-ins for engines, and with transformers itself."""

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from configs.runtime.command import DONE, GATE_FAILED
from configs.runtime.errors import InputError
from configs.schema.training import HeadsConfig
from heads.formats.exporting.exporter import FORMS
from heads.formats.exporting.source import vllm_command
from scripts.lab.engine_check import engines as serve_engines
from scripts.lab.engine_check import run_transformers as serve_transformers
from scripts.lab.engine_check import run_vllm as serve_vllm
from scripts.lab.engine_check.cases import AGREES, CHECKED, DISAGREES, NO_ENGINE, run_checks
from scripts.lab.engine_check.engines import EngineDriver, run_engine
from scripts.lab.engine_check.ours import count_ours
from scripts.lab.settings import ServeCheckConfig
from scripts.lab.trained_runs import TrainingRun
from tests.scripts.lab.engine_check.conftest import PROMPTS, K
from tests.support.caches import conversation


@pytest.fixture(autouse=True)
def threads():
    """Put the number of threads back, which the check sets."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def settings(tiny_run, tmp_path):
    """Settings of a check on the tiny target, one case of its draft; for a config."""
    rows = [conversation(ids, (1,), f"p{number}") for number, ids in enumerate(PROMPTS)]
    (tmp_path / "held_out.jsonl").write_text("".join(row.to_line() for row in rows))
    return {
        "cases": [{"engine": "transformers", "artifact": str(tiny_run / "artifact")}],
        "target": {"name": str(tiny_run / "target"), "dtype": "float32", "device": "cpu"},
        "prompts": str(tmp_path / "held_out.jsonl"),
        "num_prompts": 4,
        "max_new_tokens": 20,
        "environments": str(tmp_path / "venvs"),
        "output": str(tmp_path / "serve.json"),
    }


def run(settings, **changes):
    """Run a check; return its code and rows."""
    config = ServeCheckConfig.model_validate({**settings, **changes})
    code = run_checks(config)
    return code, json.loads(Path(config.output).read_text())["rows"]


# --- engines ------------------------------------------------------------------------------------------------------

FAKE = """
import json, os, sys, time
from pathlib import Path
job = json.loads(Path(sys.argv[1]).read_text())
known = json.loads({known!r})
{before}
name = "plain" if job["draft"] is None else "served"
answers = [dict(zip(("tokens", "rounds", "accepted", "seconds"), [*each, 1.0])) for each in known[name]]
Path(sys.argv[2]).write_text(json.dumps({{"version": "9.9", "answers": answers}}))
"""


@pytest.fixture
def fake(bench, tiny_run, tmp_path, monkeypatch):
    """A function that puts a stand-in in place of an engine, with right answers and counts, then changed."""
    counts = count_ours(bench, tiny_run / "artifact", K, cut=False)
    right = [[list(one.tokens), each.rounds, each.accepted] for one, each in zip(bench.plain, counts, strict=True)]

    def install(change=lambda served: None, before="", **more):
        served = json.loads(json.dumps(right))
        change(served)
        known = json.dumps({"plain": [[tokens, 0, 0] for tokens, *_ in right], "served": served})
        (tmp_path / "driver.py").write_text(FAKE.format(known=known, before=before))
        engine = EngineDriver(driver=tmp_path / "driver.py", form="transformers", **more)
        monkeypatch.setitem(serve_engines.ENGINES, "transformers", engine)

    return install


def test_an_engine_that_agrees(fake, settings, bench):
    fake()
    code, (row,) = run(settings)
    assert (code, row["verdict"]) == (DONE, AGREES)
    assert (row["family"], row["engine"], row["engine_version"]) == ("draft_lm", "transformers", "9.9")
    assert row["tau_ours"] == row["tau_engine"]
    assert row["tau_low"] < row["tau_ours"] < row["tau_high"]
    assert (row["tau_inside"], row["same_tokens"], row["near_ties"], row["same_counts"]) == (True, 1.0, 0, 1.0)
    assert (row["prompts"], row["num_speculative_tokens"], row["speedup_engine"]) == (4, K, 1.0)


def wrong_token(served):
    served[2][0][5] = (served[2][0][5] + 1) % 64


def add(*gains):
    """Return a change of the counts by (rounds, accepted) of the first answers."""

    def change(served):
        for answer, gain in zip(served, gains, strict=False):
            answer[1:] = [answer[1] + gain[0], answer[2] + gain[1]]

    return change


@pytest.mark.parametrize(
    ("change", "found", "tolerated_by"),
    [
        (wrong_token, {"same_tokens": 0.75, "near_ties": 0, "tau_inside": True}, {}),
        (add(*4 * [(8, 0)]), {"tau_inside": False, "same_tokens": 1.0}, {}),
        # As those of a draft that reads hidden states one block off: within the interval, as prompts differ more than that.
        (add((1, -1)), {"tau_inside": True, "same_counts": 0.75}, {"tau_tolerance": 0.06}),
        (add((0, 1), (0, -1)), {"tau_ratio": 1.0, "same_counts": 0.5}, {"same_counts_share": 0.5}),
    ],
    ids=["wrong token", "other counters", "a few per cent off", "off here and there"],
)
def test_an_engine_that_answers_or_counts_otherwise_disagrees(fake, settings, change, found, tolerated_by):
    fake(change)
    code, (row,) = run(settings)
    assert (code, row["verdict"]) == (GATE_FAILED, DISAGREES)
    assert row | found == row
    if "same_counts_share" in tolerated_by:
        tolerated_by = {"cases": [settings["cases"][0] | tolerated_by]}
    assert not tolerated_by or run(settings, **tolerated_by)[0] == DONE


@pytest.mark.parametrize(
    ("before", "words"),
    [
        ("sys.exit('no such thing')", "driver.py ended with code 1:\nno such thing"),
        ("time.sleep(60)", "driver.py was still running after 1 s"),
        ("known['plain'].pop()", "transformers answered 3 of 4 prompts"),
    ],
)
def test_an_engine_that_fails_says_how(fake, settings, before, words):
    fake(before=before)
    with pytest.raises(RuntimeError, match=words):
        run(settings, timeout_seconds=1.0 if "sleep" in before else 60.0)


def test_what_an_engine_leaves_running_is_ended(tmp_path, monkeypatch):
    child = "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
    (tmp_path / "driver.py").write_text(
        child + "import json; open(sys.argv[2], 'w').write(json.dumps({'version': str(p.pid), 'answers': []}))"
    )
    monkeypatch.setitem(serve_engines.ENGINES, "fake", EngineDriver(driver=tmp_path / "driver.py", form="vllm"))
    done = run_engine("fake", {"prompts": []}, tmp_path / "run", environments=tmp_path, threads=1, timeout_seconds=60)
    child = Path(f"/proc/{done.version}/stat")
    deadline = time.monotonic() + 20
    while child.exists() and child.read_text().split()[2] != "Z":  # Linux may still list it, ended
        assert time.monotonic() < deadline, "it is still at work"
        time.sleep(0.05)


# --- transformers itself ------------------------------------------------------------------------------------------


def test_transformers_drafts_what_we_draft(settings, monkeypatch):
    monkeypatch.setattr(  # here, where transformers is imported already
        serve_engines, "_run", lambda engine, place, folder, files, *_: serve_transformers.main(*map(str, files))
    )
    code, (row,) = run(settings)
    assert (code, row["verdict"], row["family"]) == (DONE, AGREES, "draft_lm")
    assert (row["same_tokens"], row["same_counts"]) == (1.0, 1.0)
    assert 1.1 < row["tau_engine"] < 4


# --- cases --------------------------------------------------------------------------------------------------------


def test_heads_that_cases_name_by_recipe_are_trained_once_and_tried(fake, settings, tiny_run, monkeypatch):
    def train(heads, output):
        asked.append((heads.recipes, heads.runs))
        return [TrainingRun(name="eagle3", recipe=HeadsConfig(output=str(tiny_run)))]

    asked = []
    monkeypatch.setattr("scripts.lab.engine_check.cases.train_recipes", train)
    fake()
    case = {"engine": "transformers", "recipe": "configs/heads/eagle3.yaml"}
    code, rows = run(settings, cases=[case, *settings["cases"], case], heads={"runs": "there"})
    assert (code, [row["verdict"] for row in rows]) == (DONE, 3 * [AGREES])
    assert asked == [(["configs/heads/eagle3.yaml"], "there")]


def test_engines_that_are_not_run_are_checked_by_the_export(settings, tiny_run):
    code, (row,) = run(settings, cases=[{"engine": "sglang", "artifact": str(tiny_run / "artifact")}])
    assert (code, row["verdict"], row["tau_engine"], row["dtype"]) == (DONE, CHECKED, None, "float32")


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ("llama_cpp", "bin/llama-server is missing; `make serve-check` installs it"),
        ("sglang", "has no form for draft_lm"),
        ("none", "cases is empty"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_runs(fake, settings, monkeypatch, engine, words):
    fake(before="sys.exit('it was run')")
    monkeypatch.setitem(FORMS, "sglang", {})
    case = {"artifact": settings["cases"][0]["artifact"], "engine": engine}
    cases = [] if engine == "none" else [*settings["cases"], case]
    with pytest.raises(InputError, match=words):
        run(settings, cases=cases)


def test_no_engine_is_said_of_a_kind_that_none_takes(settings, tiny_run, monkeypatch):
    cases = [{"engine": None, "artifact": str(tiny_run / "artifact")}]
    with pytest.raises(InputError, match=r"cases\[0\].engine is null, and draft_lm goes to .*vllm"):
        run(settings, cases=cases)
    monkeypatch.setattr("heads.formats.exporting.exporter.FORMS", {"vllm": {"eagle3": None}})
    code, (row,) = run(settings, cases=cases)
    assert (code, row["verdict"], row["engine"]) == (DONE, NO_ENGINE, None)


def test_vllm_is_called_by_the_line_of_the_export():
    folder = "/a folder's/draft"
    method = {"method": "mtp", "model": folder, "num_speculative_tokens": 2}
    overrides = {"num_nextn_predict_layers": 1}
    source = SimpleNamespace(target=SimpleNamespace(name="T"), num_speculative_tokens=2)
    line = vllm_command(source, "mtp", "--hf-overrides", json.dumps(overrides))(folder)
    serve = f"Serve with vllm:\n\n{line}\n\n- A note."
    assert serve_vllm.speculation(serve) == {"speculative_config": method, "hf_overrides": overrides}
    assert sys.modules.get("vllm") is None
