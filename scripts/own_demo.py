"""The demo's steps for a target, prompts or data of one's own: its command lines, with `--set` for all that differs.

The demo's configs assume a target of thirty blocks and its own prompts. The draft LM takes a tenth of the target's blocks, the
first ones; the Hydra head fits any family as it is. No more prompts are held out than the demo's evaluation decodes.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from configs.runtime.errors import InputError
from configs.runtime.loading import load_config
from configs.runtime.resumable import files_fingerprint
from configs.schema.commands.planning import PlanConfig, PlanDistillConfig, PlanHeadsConfig
from configs.schema.data import DataConfig

HELD_OUT = 32  # prompts that are evaluated on, besides those of configs/eval/demo.yaml's further suite
MAX_LENGTH = 1024  # tokens of a conversation that are trained on; people's prompts are longer than the target's own
ANSWER_TOKENS = 128  # about as many as an answer has
DRAFT_VOCABULARY = 4096  # as in the demo's recipes, for targets with more
DEPTH_SHARE = 10  # the draft LM has a block for so many of the target's
CPU_LAUNCH = "configs/accelerate/one_process_cpu.yaml"
GPU_LAUNCH = "configs/accelerate/one_gpu.yaml"
DEMO_RUN = "runs/demo/"
TRAININGS: dict[str, type[PlanConfig]] = {
    "configs/distill/demo.yaml": PlanDistillConfig,
    "configs/heads/demo.yaml": PlanHeadsConfig,
}
GIB = 2**30


class OwnLoop:
    """The demo on somebody's target, by its arguments; of the target, its config is read or fetched, but no weights."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        from heads.device import CPU, default_device
        from train.plan.models import read_model_config

        if others := [each for each in arguments.set if not each.startswith(("target.", "prompts."))]:
            raise InputError(f"--set {others[0]}: the demo takes settings of target and prompts only, as target.dtype=float32")
        if arguments.num_prompts is not None and arguments.num_prompts < 4:
            raise InputError(
                f"--num-prompts must be 4 or more, to train on some and judge by others, got {arguments.num_prompts}"
            )
        self.on_gpu = (default_device().type if arguments.device is None else arguments.device) != CPU.type
        name = _absolute(arguments.target) if arguments.target else DataConfig().target.name
        target = [
            _set("target.name", name),
            *([_set("target.device", arguments.device)] if arguments.device else []),
            *_section("target", arguments),
        ]
        known = load_config(DataConfig, None, target).target
        model = read_model_config(name, known.revision, trust_remote_code=known.trust_remote_code).get_text_config()
        self.run = run = Path("runs") / f"demo-{re.sub(r'[^A-Za-z0-9_.-]+', '-', Path(name).name.removesuffix('.gguf'))}"
        data = Path(_absolute(arguments.data)) if arguments.data else None
        if data is not None:
            if missing := [each for each in (data, data.with_name("held_out.jsonl")) if not each.is_file()]:
                raise InputError(
                    f"--data: {missing[0]} is not there; train.jsonl and held_out.jsonl are written by scripts/make_data.py"
                )
            prompts, self.num_prompts, self.workload = list[str](), _lines(data), list[str]()
        else:
            prompts, self.num_prompts, self.workload = _prompts(arguments)
        train = run / "data" / "train.jsonl" if data is None else data
        held_out = train.with_name("held_out.jsonl")
        context = getattr(model, "max_position_embeddings", None) or MAX_LENGTH
        training = [*target, _set("data.train", train), _set("data.held_out", held_out)]
        training.append(_set("data.max_length", min(MAX_LENGTH, context)))
        words = DRAFT_VOCABULARY if model.vocab_size > DRAFT_VOCABULARY else None
        layers = list(range(max(1, model.num_hidden_layers // DEPTH_SHARE)))
        draft_lm = [_set("student.layers", layers), _set("student.draft_vocab_size", words)]
        judged = None if data is None else min(HELD_OUT, _lines(held_out))
        evaluation = [*target, _set("suite.path", held_out), _set("suite.num_prompts", judged)]
        evaluation.append(_set("cost.context_tokens", [min(128, context // 4), min(512, context // 2)]))
        given = (name, arguments.prompts and _absolute(arguments.prompts), data)
        self.settings: dict[str, list[str]] = {
            "configs/data/demo.yaml": [*target, *prompts, _set("output", run / "data")],
            "configs/distill/demo.yaml": [*training, *draft_lm, _set("output", run / "distill")],
            "configs/heads/demo.yaml": [*training, _set("head.draft_vocab_size", words), _set("output", run / "heads")],
            "configs/eval/demo.yaml": [*evaluation, _set("draft", run / "distill" / "artifact"), _set("output", run / "eval")],
            "configs/eval/demo_head.yaml": [
                *evaluation,
                _set("draft", run / "heads" / "artifact"),
                _set("output", run / "eval_head"),
            ],
        }
        self.target, self.has_data = name, data is not None
        self.given = tuple(Path(each) for each in given if each is not None)
        self.made_of = files_fingerprint(self.given)  # steps run again after these changed

    def check_removable(self, folder: Path) -> None:
        """Refuse to remove a folder that holds what was given."""
        for given in self.given:
            if given.exists() and given.resolve().is_relative_to(folder.resolve()):
                raise InputError(f"--fresh removes {folder}, which holds {given}: put that elsewhere first")

    def steps(self, demo: Mapping[str, list[str]]) -> dict[str, list[str]]:
        """Return the demo's steps for this target, but for those that fetch the demo's or write data made before."""
        return {
            name: self._arguments(arguments)
            for name, arguments in demo.items()
            if not name.startswith("target:") and not (name.startswith("data:") and self.has_data)
        }

    def _arguments(self, arguments: list[str]) -> list[str]:
        own = [each.replace(DEMO_RUN, f"{self.run}/") for each in arguments]
        own = [GPU_LAUNCH if self.on_gpu and each == CPU_LAUNCH else each for each in own]
        changes = [change for each in arguments for change in self.settings.get(each, [])]
        return [*own, "--set", *changes] if changes else own

    def plan_text(self, steps: Iterable[str]) -> str:
        """Return the steps by name and what the planner says of training, as text."""
        from train.plan.plan import make_plan

        lines = [f"the demo on {self.target}: {self.num_prompts:,} prompts; output in {self.run}", ""]
        lines += [f"   {name}" for name in steps]
        for recipe, schema in TRAININGS.items():
            plan = make_plan(load_config(schema, recipe, [*self.settings[recipe], *self.workload]))
            memory = sum(vars(plan.memory).values()) / GIB + 1
            spent = "" if self.on_gpu else f" and about {max(1, round(60 * plan.hours))} minutes"  # no GPU was measured
            lines += ["", f"training by {recipe}: about {memory:.1f} GiB{spent}"]
        return "\n".join([*lines, "", "Answers and evaluation come on top; each step shows the time left."])


def add_own_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what makes the demo one on a model of one's own."""
    parser.add_argument("--target", metavar="NAME", help="a Hub id, a folder or a .gguf file, in place of the embedded model")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompts", metavar="FILE", help="prompts that the target answers: JSONL, CSV, Parquet, text, ...")
    source.add_argument("--data", metavar="FILE", help="train.jsonl made for the target before, held_out.jsonl beside it")
    parser.add_argument("--num-prompts", metavar="N", type=int, help="of the file, or that the target writes (default: 520)")
    parser.add_argument(
        "--device", metavar="NAME", help="cpu, or torch's name of an accelerator; default: the one that is there"
    )
    parser.add_argument(
        "--set",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help="more of target and prompts, e.g. target.chat_template=plain prompts.field=question",
    )
    parser.add_argument("--yes", action="store_true", help="do not ask before the first step")


def is_own(arguments: argparse.Namespace) -> bool:
    """Return whether the arguments ask for another loop than the demo's."""
    own = (arguments.target, arguments.prompts, arguments.data, arguments.num_prompts, arguments.device)
    return bool(arguments.set) or any(each is not None for each in own)


def _prompts(arguments: argparse.Namespace) -> tuple[list[str], int, list[str]]:
    """Return the settings of the prompts, how many there are, and what a plan is told of the answers to them."""
    given = load_config(DataConfig, "configs/data/demo.yaml").prompts
    number = arguments.num_prompts or given.num_prompts
    changes = [_set("prompts.num_prompts", number)]
    if arguments.prompts is None:
        changes += [*_section("prompts", arguments), _set("held_out_share", min(0.5, HELD_OUT / number))]
        return changes, number, _workload(number, given.max_prompt_tokens / 2)
    from distill.generation.sources import read_prompts
    from distill.generation.split import split_positions

    path = _absolute(arguments.prompts)
    file = {"source": "file", "path": path, "on_too_long": "skip"}
    changes += [*(_set(f"prompts.{key}", value) for key, value in file.items()), *_section("prompts", arguments)]
    read = read_prompts(load_config(DataConfig, None, changes).prompts)[:number]
    positions = sorted(set(split_positions(read)))
    if len(positions) < 4:
        raise InputError(
            f"--prompts: {path} holds {len(positions)} different prompts; at least 4 are needed to train and to judge"
        )
    held_out = min(HELD_OUT, max(2, len(positions) // 5))
    share = (positions[held_out - 1] + positions[held_out]) / 2  # the split is by this hash
    prompt_tokens = sum(len(each.user_text) for each in read) / 4 / len(read)
    return [*changes, _set("held_out_share", share)], len(read), _workload(len(read), prompt_tokens)


def _workload(num_prompts: int, prompt_tokens: float) -> list[str]:
    tokens = prompt_tokens + ANSWER_TOKENS
    train = max(1, num_prompts - HELD_OUT)
    workload = {"num_conversations": train, "mean_tokens": tokens, "label_share": ANSWER_TOKENS / tokens}
    return [f"workload.{key}={value}" for key, value in workload.items()]


def _section(name: str, arguments: argparse.Namespace) -> list[str]:
    return [each for each in arguments.set if each.startswith(f"{name}.")]


def _lines(path: Path) -> int:
    with path.open("rb") as file:
        return sum(1 for line in file if line.strip())


def _absolute(name: str) -> str:
    """Return a path that holds from the checkout too, where the steps run; any other name as it is."""
    return str(Path(name).absolute()) if Path(name).exists() else name


def _set(key: str, value: Any) -> str:
    """Return an override; JSON is YAML in which nothing is taken for what it is not."""
    return f"{key}={json.dumps(str(value) if isinstance(value, Path) else value)}"
