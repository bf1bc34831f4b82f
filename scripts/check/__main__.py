"""Try an export in the engine it is for: `draftsmith check EXPORT --engine vllm --prompts FILE --out DIR`.

The engine answers chat prompts greedily, plainly and with the draft, as the export's `serve.txt` says. Writes `check.json`:
both speeds, acceptance by the engine's own counters, and whether the answers are the target's, judged as an evaluation judges
its own; with `sampling` also its acceptance as it is served, above temperature 0. It ends with 1 where the engine refuses the
draft, accepts nothing of it, or gives worse answers with it. An engine that is not installed, or does not serve the target
without the draft, is no failure: of the draft nothing was learnt.
`draftsmith gate --check` judges the draft by it.
"""

from __future__ import annotations

import argparse
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from configs.runtime.command import DONE, GATE_FAILED, run_command
from configs.runtime.errors import InputError
from configs.runtime.files import read_text, write_json
from configs.runtime.terminal import say
from configs.schema.commands.release import ENGINES, PROMPTS, CheckConfig
from configs.schema.evaluation import SuiteConfig

if TYPE_CHECKING:
    from distill.generation.prompts import Prompt


def main(config: CheckConfig, args: argparse.Namespace) -> int:
    """Check an export, write and print the result; return the exit code."""
    # torch and transformers take seconds to import: a mistyped key is reported before that.
    from heads.formats.exporting.exporter import made_of
    from scripts.check.comparison import EngineCheck
    from scripts.check.vllm_check import check_vllm
    from scripts.run.steps import stop

    signal.signal(signal.SIGTERM, stop)
    out = Path(args.out)
    serve = read_text(Path(args.export) / "serve.txt", "the export's serve.txt")
    sha256, drafts = made_of(serve)
    prompts, prompts_sha256 = chat_prompts(args.prompts, config.num_prompts)
    result = EngineCheck(
        engine=args.engine,
        checked=True,
        draft_sha256=sha256,
        num_speculative_tokens=drafts,
        prompts_sha256=prompts_sha256,
        max_new_tokens=config.max_new_tokens,
    )
    out.mkdir(parents=True, exist_ok=True)
    match args.engine:
        case "vllm":
            check_vllm(result, serve, prompts, config, vllm=args.vllm, out=out)
        case engine if config.sampling is not None:
            raise InputError(f"sampling: {engine} is checked greedily only; set it to null")
        case "transformers":
            from scripts.check.transformers_check import check_transformers

            check_transformers(result, serve, prompts, config)
        case _:
            result.checked = False
            result.reason = "the export was read back as it was written; the engine itself is tried by `make serve-check` only"
    write_json(out / "check.json", asdict(result))
    say(result.table())
    return GATE_FAILED if result.passed is False else DONE


def chat_prompts(path: str | None, number: int) -> tuple[list[Prompt], str | None]:
    """Return so many chats of text alone of a file, and its hash; general ones and None where it has none of text alone."""
    from distill.generation.prompts import UNCATEGORISED, Prompt
    from eval.measure.suite import load_suite, spread_over_categories

    suite = None if path is None else load_suite(SuiteConfig(path=path))
    given = () if suite is None else suite.prompts
    texts = [each for each in given if not each.tools and not each.media and all(len(said) == 2 for said in each.messages)]
    if suite is not None and texts:
        return spread_over_categories(texts, number), suite.sha256
    if suite is not None:
        say(f"{path} holds no chat without tools, images and sounds: general prompts take their place", sys.stderr)
    general = [Prompt(prompt_id=str(place), category=UNCATEGORISED, turns=(text,)) for place, text in enumerate(PROMPTS)]
    return spread_over_categories(general, number), None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's own arguments."""
    parser.add_argument("export", metavar="EXPORT", help="folder written by draftsmith export, with serve.txt")
    parser.add_argument("--engine", choices=ENGINES, required=True, help="the engine that it was written for")
    parser.add_argument(
        "--prompts", metavar="FILE", help="prompts in any form that an evaluation takes; default: some general ones"
    )
    parser.add_argument("--vllm", metavar="PATH", help="vLLM's program; default: vllm on the PATH, or that of the checkout")
    parser.add_argument("--out", metavar="DIR", required=True, help="folder for check.json and the servers' logs")


if __name__ == "__main__":
    description = "Try an export in the engine that it is for."
    sys.exit(run_command(CheckConfig, main, description=description, add_arguments=add_arguments))
