"""`draftsmith check` as a person runs it: on a server that speaks and counts as vLLM does, and on transformers itself."""

import importlib
import json
import os
import re
import shutil
import sys
from pathlib import Path

import psutil
import pytest
import torch

from configs.runtime.command import BAD_INPUT, DONE, GATE_FAILED, run_command
from configs.runtime.files import write_json
from configs.schema.commands.release import CheckConfig, ExportConfig
from eval.release import read_artifact
from heads.frozen.tokenizer import NAMED
from scripts.check import vllm_server
from scripts.check.vllm_check import write_template

NUM_TOKENS, F = 9, "f" * 64
STAND_IN = Path(__file__).resolve().parents[1] / "support" / "stand_in_vllm.py"
checking, exporting = importlib.import_module("scripts.check.__main__"), importlib.import_module("scripts.export")


@pytest.fixture(scope="module")
def served(tiny_llama, tiny_tokenizer, tmp_path_factory):
    """A folder with `target/`, of whose tokens 2n and 2n + 1 always tie and none ends an answer, and its `answers.json`."""
    folder, model = tmp_path_factory.mktemp("served"), tiny_llama(seed=1, dtype=torch.float32)
    with torch.no_grad():
        for weight in (model.model.embed_tokens.weight, model.lm_head.weight):
            weight[1::2] = weight[::2]
        model.lm_head.weight[[0, 1, 60, 61, 62, 63]] = 0
    model.save_pretrained(folder / "target")
    tiny_tokenizer.save_pretrained(folder / "target")
    answers = {}
    for text in ("w4 w5 w6", "w9 w2 w7?"):
        ids = tiny_tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)["input_ids"]
        answers[text] = {"prompt": list(ids), "tokens": []}
        for _ in range(NUM_TOKENS):
            logits_1TV = model(torch.tensor([answers[text]["prompt"] + answers[text]["tokens"]])).logits
            answers[text]["tokens"].append(int(logits_1TV[0, -1].argmax()))
    write_json(folder / "answers.json", answers)
    return folder


@pytest.fixture
def export(served, tmp_path, monkeypatch):
    """A folder with `vllm`, `target/` and `draft/`, an export for it; what the draft makes vLLM do is in `draft/behaviour`."""
    program = tmp_path / "vllm"
    program.write_text(f"#!{sys.executable}\n" + STAND_IN.read_text())
    program.chmod(0o755)
    packages = tmp_path / "packages"
    (packages / "vllm-9.1.dist-info").mkdir(parents=True)
    (packages / "vllm-9.1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 9.1+cpu\n")
    monkeypatch.setenv("PYTHONPATH", str(packages))
    monkeypatch.setenv("VLLM_API_KEY", "of other servers")
    monkeypatch.setattr(vllm_server, "GRACE_SECONDS", 0.3)
    shutil.copytree(served, tmp_path, dirs_exist_ok=True)
    (tmp_path / "draft").mkdir()
    draft = json.dumps({"method": "eagle3", "model": str(tmp_path / "draft"), "num_speculative_tokens": 3})
    line = f"vllm serve {tmp_path / 'target'} --speculative-config '{draft}'"
    (tmp_path / "draft" / "serve.txt").write_text(
        f"Serve with vllm:\n\n{line}\n\n- A note.\n- Made of the artifact {F}, to draft 3 tokens a round.\n"
    )
    (tmp_path / "prompts.txt").write_text("w4 w5 w6\nw9 w2 w7?\n")
    return tmp_path


def check(folder, behaviour="", *more):
    (folder / "draft" / "behaviour").write_text(behaviour)
    prompts, out, vllm = folder / "prompts.txt", folder / "out", folder / "vllm"
    given = [folder / "draft", "--engine", "vllm", "--prompts", prompts, "--out", out, "--vllm", vllm]
    return run(*given, "--set", f"max_new_tokens={NUM_TOKENS}", *more)


def run(*argv, schema=CheckConfig, module=checking):
    return run_command(schema, module.main, description="", argv=list(map(str, argv)), add_arguments=module.add_arguments)


def result_of(folder):
    return json.loads((folder / "out" / "check.json").read_text())


def left_running(folder):
    """Return which processes of the servers do not end."""
    ids = [int(number) for number in (folder / "processes").read_text().split()]
    _, alive = psutil.wait_procs([psutil.Process(number) for number in ids if psutil.pid_exists(number)], timeout=5)
    return [each.pid for each in alive if each.status() != psutil.STATUS_ZOMBIE]


def test_both_speeds_and_the_engines_counts_of_the_prompts_alone_are_written(export, capsys):
    assert check(export) == DONE
    found = result_of(export)
    assert (found["checked"], found["passed"], found["reason"]) == (True, True, None)
    assert (found["engine"], found["version"], found["dtype"]) == ("vllm", "9.1+cpu", "float32")
    # Each prompt: rounds that keep 0, 1, 2 and 1 drafts. Those of the warm-up are left out.
    assert found["tokens_per_target_step"] == 1 + 8 / 8
    assert found["acceptance"] == [6 / 8, 2 / 8, 0.0]
    assert (found["num_prompts"], found["same_answers"], found["lossless"]["verdict"]) == (2, 2, "lossless")
    assert (found["draft_sha256"], found["num_speculative_tokens"]) == (F, 3)
    assert list(found["per_prompt"].values()) == [[8, 4], [8, 4]]
    assert found["speedup"] == pytest.approx(found["tokens_per_second"] / found["tokens_per_second_plain"])
    assert (found["speedup_low"], found["speedup_high"]) == (None, None)  # two prompts are too few for an interval
    assert "vllm 9.1+cpu, float32: 2 prompts" in capsys.readouterr().out
    assert left_running(export) == []


def test_as_it_is_served_acceptance_alone_is_counted(export, capsys):
    sampling = ["sampling.temperature=0.7", "sampling.top_p=0.9"]
    assert check(export, "", "--set", *sampling) == DONE  # though no token is the greedy one
    found = result_of(export)
    assert found["sampling"] == {"temperature": 0.7, "top_p": 0.9, "top_k": None, "min_p": None}
    assert list(found["sampled_per_prompt"].values()) == [[8, 4], [8, 4]]
    assert "at temperature 0.7" in capsys.readouterr().out
    assert check(export, "useless when sampled", "--set", *sampling) == GATE_FAILED
    assert run(export / "draft", "--engine", "transformers", "--out", export / "out", "--set", *sampling) == BAD_INPUT


@pytest.mark.parametrize(
    ("plain", "drafted", "code", "verdict", "passed"),
    [
        ("", "tie", DONE, "lossless_up_to_ties", True),
        ("", "wrong", GATE_FAILED, "not_lossless", False),
        ("wrong", "wrong", DONE, "not_lossless", None),  # the engine is at fault, and of the draft nothing was learnt
    ],
)
def test_answers_are_judged_as_an_evaluations_are_by_the_engines_plain_ones(export, plain, drafted, code, verdict, passed):
    (export / "target" / "behaviour").write_text(plain)
    assert check(export, drafted) == code
    found = result_of(export)
    assert (found["lossless"]["verdict"], found["passed"], found["checked"]) == (verdict, passed, passed is not None)
    assert found["same_answers"] == (1 if plain != drafted else 2)


def test_without_the_target_at_hand_answers_are_not_judged_and_what_was_counted_is_kept(export):
    (export / "target" / "model.safetensors").unlink()
    assert check(export) == DONE
    found = result_of(export)
    assert (found["checked"], found["passed"], found["tokens_per_target_step"]) == (False, None, 2.0)


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        (
            "refused",
            r"vLLM with the draft ended with code 1: the draft has 3 taps, and the target 2 blocks; its log is .*draft.log",
        ),
        ("dies", r"vLLM with the draft does not answer: .*"),
        ("useless", r"no drafted token was accepted.*"),
        ("hangs", r"vLLM with the draft was not ready after 5 s \(start_seconds\).*"),
    ],
)
def test_a_draft_that_the_engine_cannot_use_fails_in_one_sentence(export, behaviour, reason, capsys):
    assert check(export, behaviour, "--set", "start_seconds=5.0") == GATE_FAILED
    found = result_of(export)
    assert (found["checked"], found["passed"]) == (True, False)
    assert re.fullmatch(reason, found["reason"])
    assert left_running(export) == []
    if behaviour == "refused":
        assert "Traceback" in capsys.readouterr().err


def test_a_target_that_the_engine_does_not_serve_alone_says_nothing_of_the_draft(export, capsys):
    serve = export / "draft" / "serve.txt"
    serve.write_text(serve.read_text().replace(f"vllm serve {export / 'target'}", "vllm serve ann/needs-more-gpus"))
    assert check(export) == DONE
    found = result_of(export)
    assert (found["checked"], found["passed"]) == (False, None)
    assert "vllm: not checked; vLLM without the draft ended with code 1" in capsys.readouterr().out


def test_an_engine_that_is_not_installed_is_no_failure(export, monkeypatch, capsys):
    monkeypatch.setenv("PATH", os.devnull)
    monkeypatch.setattr(vllm_server, "ENVIRONMENT", export / "none")
    assert run(export / "draft", "--engine", "vllm", "--out", export / "out") == DONE
    assert (result_of(export)["checked"], result_of(export)["passed"]) == (False, None)
    assert "vllm: not checked; not installed: " in capsys.readouterr().out
    assert run(export / "draft", "--engine", "vllm", "--out", export / "out", "--vllm", export / "nosuch") == BAD_INPUT
    assert run(export / "draft", "--engine", "sglang", "--out", export / "out") == DONE
    assert "read back" in result_of(export)["reason"]


def test_an_export_for_another_engine_or_from_another_place_is_refused(export, capsys):
    path = export / "draft" / "serve.txt"
    path.write_text(path.read_text().replace(str(export / "draft"), "/nosuch/draft"))
    assert check(export) == BAD_INPUT
    path.write_text("Serve with sglang:\n\npython -m sglang.launch_server\n")
    assert check(export) == BAD_INPUT
    moved, other = capsys.readouterr().err.splitlines()
    assert "names /nosuch/draft, which is not there" in moved
    assert "export the draft with --to vllm" in other


def test_a_chat_template_that_is_not_the_targets_is_handed_to_vllm(tiny_run, tmp_path):
    path = write_template(str(tiny_run / "target"), CheckConfig(chat_template="plain"), tmp_path)
    assert Path(path).read_text().endswith(NAMED["plain"])


def test_transformers_decodes_an_export_to_plain_decodings_tokens(tiny_run, tmp_path):
    out = ["--to", "transformers", "--out", tmp_path / "export"]
    assert run(tiny_run / "artifact", *out, schema=ExportConfig, module=exporting) == DONE
    given = ["--prompts", tiny_run / "suite.jsonl", "--out", tmp_path / "out", "--set", "num_prompts=4", "max_new_tokens=16"]
    assert run(tmp_path / "export", "--engine", "transformers", *given) == DONE
    found = result_of(tmp_path)
    assert (found["checked"], found["passed"], found["same_answers"]) == (True, True, 4)
    assert found["draft_sha256"] == read_artifact([tiny_run / "artifact"]).sha256
    assert 1.0 < found["tokens_per_target_step"] <= 4.0
