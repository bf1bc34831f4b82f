"""Secrets that a person lets slip into a command line, a setting or the environment are in nothing that a command leaves."""

import logging
import sys

import pytest

from configs.runtime.command import DONE
from configs.schema.evaluation import EvalConfig
from distill.cache.writer import make_cache
from distill.generation.make_dataset import make_dataset
from eval.evaluation import evaluate
from train.launch import run_distillation, run_heads

HUB, VARIABLE, ARGUMENT, PASSWORD = "hf_" + "Ab1" * 11, "w4ndb-k3y-0f-m1ne", "s3cret-argument", "pa55w0rd"
SECRETS = {"hub": HUB, "variable": VARIABLE, "argument": ARGUMENT, "password": PASSWORD}
SLIP = f"https://me:{PASSWORD}@hub/{HUB}"  # of no effect where the target is a folder


def plant() -> None:
    """Start the command as somebody careless would, and let it speak of what it knows."""
    header = f"headers=Authorization: Bearer {ARGUMENT}"
    sys.orig_argv = ["python", "x.py", "--set", f"hub_token={ARGUMENT}", f"--set=target.revision={SLIP}", "--set", header]
    sys.argv = sys.orig_argv[1:]
    logging.getLogger("draftsmith").addFilter(_with_secrets)


def _with_secrets(record: logging.LogRecord) -> bool:
    record.msg, record.args = f"{record.getMessage()} {SLIP} {VARIABLE} hub_token={ARGUMENT}", ()
    return True


def evaluation(project, output, draft):
    return EvalConfig.model_validate(
        {
            "target": project.target,
            "draft": str(draft / "artifact"),
            "suite": {"path": str(project.folder / "prompts.jsonl"), "num_prompts": 2},
            "decode": {"num_speculative_tokens": 2, "max_new_tokens": 6},
            "repeats": 1,
            "output": str(output),
        }
    )


@pytest.mark.parametrize("command", ["data", "cache", "distill", "heads", "eval"])
def test_no_file_and_no_line_of_the_log_holds_a_secret(project, undisturbed, tmp_path, start, command):
    output = tmp_path / "output"
    main, config = {
        "data": lambda: (make_dataset, project.data(output)),
        "cache": lambda: (make_cache, project.cache(output)),
        "distill": lambda: (run_distillation, project.distill(output, max_steps=2, trackers=["tensorboard"])),
        "heads": lambda: (run_heads, project.heads(output, max_steps=2)),
        "eval": lambda: (evaluate, evaluation(project, output, undisturbed["distill"])),
    }[command]()
    config = config.model_copy(update={"target": config.target.model_copy(update={"revision": SLIP})})
    child = start(main, config, before=plant, environment={"WANDB_API_KEY": VARIABLE})
    assert child.end() == DONE, child.said
    said = child.said
    assert "***" in said
    files = {path.relative_to(output): path.read_bytes() for path in output.rglob("*") if path.is_file()}
    assert b"***" in next(content for path, content in files.items() if path.name == "run.json")
    assert [name for name, secret in SECRETS.items() if secret in said] == []
    leaks = {
        str(path): name for path, content in files.items() for name, secret in SECRETS.items() if secret.encode() in content
    }
    assert leaks == {}
