"""The pages that people work by: their commands parse, their plans are the planner's, and what they name exists."""

from __future__ import annotations

import argparse
import ast
import importlib
import re
import shlex
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel

from configs.runtime.key_list import keys_of, models_in
from configs.schema.commands.release import CheckConfig, ImportConfig, PushConfig
from configs.schema.commands.running import STAGES, RunConfig
from configs.schema.training import DivergenceName
from eval.report.schema import Report
from heads.families.registry import FAMILIES
from heads.formats.exporting.exporter import engines_of
from scripts.check.comparison import EngineCheck
from scripts.cli import COMMANDS
from tests.test_house import SCHEMAS, config_of
from train.plan.memory import GIBIBYTE
from train.plan.models import count
from train.plan.plan import make_plan

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("walks", "troubleshooting", "coming-from")
WRITTEN = {"metrics.jsonl", "report.json", "check.json", "serve.txt", "train.jsonl", "held_out.jsonl", "gate.md", "draft.yaml"}
ENGINES_OWN = {
    *("generation_config.json", "temperature: 0", "enable_thinking", "draft_sample_method", '"method"', "/metrics", ".gguf"),
    *("vllm:spec_decode_num_accepted_tokens_total", "vllm:spec_decode_num_drafts_total"),
    *("vllm:spec_decode_num_accepted_tokens_per_pos_total", "--no-enable-prefix-caching", "--chat-template", "--enforce-eager"),
    "--default-chat-template-kwargs",
    *("--max-model-len", "--max-num-seqs", "--gpu-memory-utilization", "eagle3", "dflash", "auto", "not_lossless"),
}


def read(page: str) -> str:
    return (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")


def commands_in(text: str) -> list[list[str]]:
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [shlex.split(line, comments=True) for line in lines]


def rows_under(text: str, title: str) -> list[list[str]]:
    """Return the cells of the first table under a title, without its header."""
    section = text.partition(f"{title}\n")[2]
    lines = re.search(r"^(?:\|.*\n)+", section, re.MULTILINE)[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def spans(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))


def parser_of(name: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(exit_on_error=False)
    getattr(importlib.import_module(COMMANDS[name][0]), "add_arguments", lambda _: None)(parser)
    parser.add_argument("--config")
    parser.add_argument("--set", nargs="+", action="extend")
    parser.add_argument("--keys", nargs="?")
    return parser


@pytest.mark.parametrize("page", PAGES)
def test_every_draftsmith_command_of_a_page_parses(page):
    named = [words[words.index("draftsmith") + 1 :] for words in commands_in(read(page)) if "draftsmith" in words]
    assert named
    for name, *arguments in named:
        of_a_run = name in STAGES and arguments[0].endswith(".yaml")
        if not of_a_run and name not in ("watch", "doctor"):  # those have a parser of their own
            parser_of(name).parse_args(arguments)


# --- walks ----------------------------------------------------------------------------------------------------------


def planned(words: list[str]) -> list[str]:
    plan = make_plan(config_of(words))
    assert plan.fitting is not None
    return [
        f"`{plan.fitting.engine.name}`",
        f"{plan.fitting.num_bytes / GIBIBYTE:.0f} GiB",
        f"{count(plan.models.draft, trained=True) / 1e6:,.0f} million",
        f"{plan.cache_row_bytes * plan.cache_rows / 1e12:.1f} TB",
        f"{plan.checkpoint_bytes / 1e9:.1f} GB",
        f"{plan.steps:,}",
        f"{plan.times.total:.2g} s",
        f"{plan.hours:.1f}",
    ]


def test_the_plans_of_the_walks_are_the_planners(monkeypatch):
    """Takes seconds: it runs the drafts of three large targets without their weights."""
    monkeypatch.chdir(ROOT)
    plans = [planned(words) for words in commands_in(read("walks")) if words[:2] == ["draftsmith", "plan"]]
    rows = rows_under(read("walks"), "## What the plans say")
    assert [row[1:] for row in rows] == plans


def test_the_table_of_families_has_all_and_names_the_engines_that_take_each():
    rows = rows_under(read("walks"), "## Which draft")
    assert {spans(row[0])[0] for row in rows} == {*FAMILIES, "draft_lm"}
    assert {row[0]: set(spans(row[-1])) for row in rows} == {row[0]: set(engines_of(spans(row[0])[0])) for row in rows}


def test_the_options_of_the_one_command_are_those_that_it_has():
    named = [span.split()[0] for row in rows_under(read("walks"), "# From a model to a served draft") for span in spans(row[0])]
    options = parser_of("run")._option_string_actions.keys()
    assert [name for name in named if name.startswith("--") and name not in options] == []


# --- names ----------------------------------------------------------------------------------------------------------


def paths_in(model: type[BaseModel], above: str = "") -> Iterator[str]:
    """Yield the dotted paths of a report, `*` for the keys of a mapping."""
    for name, field in model.model_fields.items():
        yield above + name
        inner = "*." if "dict[" in str(field.annotation) else ""
        for section, _ in models_in(field.annotation):
            yield from paths_in(section, f"{above}{name}.{inner}")


@cache
def known_keys() -> re.Pattern[str]:
    settings = {
        key.path for schema in (*SCHEMAS.values(), CheckConfig, ImportConfig, PushConfig, RunConfig) for key in keys_of(schema)
    }
    keys = {*settings, *paths_in(Report), *(each.name for each in fields(EngineCheck))}
    return re.compile("|".join(re.escape(key).replace(r"\*", "[^.]+") for key in keys))


@cache
def texts(*folders: str) -> tuple[str, ...]:
    """Return the texts that the code holds, NUL for each value put into one."""
    found = []
    for path in [path for folder in folders for path in (ROOT / folder).rglob("*.py") if "lab" not in path.parts]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(str(each.value) if isinstance(each, ast.Constant) else "\0" for each in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return tuple(found)


def is_key(span: str) -> bool:
    key = span.partition("=")[0]
    if known_keys().fullmatch(key):
        return True
    metric = re.sub(r"_\d$", "", key.removeprefix("held_out/"))
    return not {metric, f"{metric}_"}.isdisjoint(texts("train"))


def is_sentence(span: str) -> bool:
    sentence = re.compile(".*".join(map(re.escape, span.split("..."))), re.DOTALL)
    return span.count(" ") > 1 and any(map(sentence.search, texts("configs", "heads", "distill", "eval", "train", "scripts")))


def is_command(span: str) -> bool:
    words = shlex.split(span.replace("'", "")) or [""]
    if words[0] == "draftsmith":
        return words[1] in COMMANDS or words[1] in STAGES
    return words[0] in own_options() or (ROOT / words[0]).exists() or words == ["accelerate", "launch"]


@cache
def own_options() -> frozenset[str]:
    return frozenset(option for name in COMMANDS for option in parser_of(name)._option_string_actions)


def unknown_in(text: str) -> list[str]:
    named = [span for span in spans(text) if span not in WRITTEN | ENGINES_OWN]
    return [span for span in named if not (is_key(span) or is_sentence(span) or is_command(span))]


def test_every_key_file_command_and_sentence_that_troubleshooting_names_is_there():
    """Takes seconds: it reads the texts of all code."""
    assert unknown_in(read("troubleshooting")) == []


def test_our_side_of_the_tables_of_other_trainers_is_there():
    rows = [line.split("|") for line in read("coming-from").partition("\n## Artifacts")[0].splitlines() if line.startswith("|")]
    rows += [line.split("|") for line in read("coming-from").partition("\n## TRL")[2].splitlines() if line.startswith("|")]
    ours = " ".join(row[2] for row in rows)
    assert unknown_in(ours) == []
    assert {each.removeprefix("loss.divergence=") for each in spans(ours) if "divergence=" in each} == {
        *get_args(DivergenceName)
    }


@pytest.mark.parametrize(
    "wrong", ["head.tap", "speed.predicted.best", "held_out/tau", "the gate asks for at least ... answers"]
)
def test_a_name_that_is_not_there_is_seen(wrong):
    assert unknown_in(f"`{wrong}`") == [wrong]
