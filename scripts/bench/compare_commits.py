"""Do two commits train and decode to the same bits? And how fast is one beside the other?

`python -m scripts.bench.compare_commits BASE [HEAD] [--speed REPEATS]`: commits of this repository, or folders; HEAD is this
checkout by default. Each does the same seeded work: data for a tiny random target, a draft LM and four heads trained for 20
steps, 16 answers decoded with each. Exit code 1 where data, losses, weights, tokens or rounds differ in one bit. `--speed` does
it in turns and prints times of BASE over those of HEAD.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.util
import json
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[2]
DRAFTS: dict[str, dict[str, Any]] = {
    "draft_lm": {"student": {"layers": [0, 2]}},
    "eagle3": {"head": {"kind": "eagle3", "taps": [1, 2, 4], "num_depths": 3}},
    "hydra": {"head": {"kind": "hydra"}, "schedule": {"mixed_precision": "bf16"}},
    "medusa": {"head": {"kind": "medusa"}},
    "dflash": {"head": {"kind": "dflash", "taps": [1, 2, 4], "mask_token_id": 0}, "schedule": {"mixed_precision": "bf16"}},
}
TREE: dict[str, Any] = {"kind": "static", "branching": [2, 2, 1]}  # which block heads do not draft
WAYS: dict[str, Any] = {"greedy": {}, "sampled": {"temperature": 1.0, "batch_size": 4}}
DRAWN: dict[str, Any] = {"temperature": 0.7, "batch_size": 4, "tree": TREE}
TREES: dict[str, Any] = {"a tree, greedy": {"tree": TREE}, "a tree, sampled": DRAWN}
DECODINGS: dict[str, dict[str, Any]] = {name: WAYS | ({} if name == "dflash" else TREES) for name in DRAFTS}
TEMPLATE = "{% for m in messages %}{{ m['content'] }} <end> {% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base")
    parser.add_argument("head", nargs="?", default=str(HERE))
    parser.add_argument("--speed", type=int, metavar="REPEATS", help="time both in turns, as often as this")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        runs: tuple[list[Path], list[Path]] = ([], [])
        importlib.import_module("transformers")  # once, for all children
        _in_a_child(lambda: make_target(work / "target", width=256 if given.speed else 64))
        roots = [_checkout(name, work / f"tree-{number}") for number, name in enumerate((given.base, given.head))]
        try:
            for turn in range(given.speed or 1):
                for side in (0, 1):
                    runs[side].append(work / f"run-{turn}-{side}")
                both = [do_work(roots[side], runs[side][-1]) for side in ((0, 1) if turn % 2 == 0 else (1, 0))]
                for _ in zip(*both, strict=True):  # command by command: the machine's speed drifts within minutes
                    pass
            return print_speed(*runs) if given.speed else print_differences(results(runs[0][0]), results(runs[1][0]))
        finally:
            for root in roots:
                if root.is_relative_to(work):
                    _git("worktree", "remove", "--force", str(root))


def _git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", "-C", str(HERE), *arguments], capture_output=True, text=True)


def _checkout(name: str, folder: Path) -> Path:
    if Path(name).is_dir():
        return Path(name).resolve()
    if (made := _git("worktree", "add", "--detach", str(folder), name)).returncode:
        sys.exit(f"error: {name!r} is neither a folder nor a commit: {made.stderr.strip()}")
    return folder


def make_target(folder: Path, width: int) -> None:
    """Write a random Llama with a tokenizer of words, and prompts beside it."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate(["<pad>", "<end>", "<assistant>", *(f"w{n}" for n in range(125))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"eos_token": "<end>", "pad_token": "<pad>", "unk_token": "<pad>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE, **special).save_pretrained(folder)
    torch.manual_seed(0)
    blocks: dict[str, Any] = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    values: dict[str, Any] = {"vocab_size": 128, "eos_token_id": 1, "hidden_size": width, "intermediate_size": 2 * width}
    model = LlamaForCausalLM(LlamaConfig(**values, **blocks))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0 if parameter.ndim == 2 else 1.0)  # as they are initialised, nearly every token is a tie
    model.save_pretrained(folder)
    rows = [{"question_id": n, "turns": [f"w{n} w{7 * n % 120} w{3 * n % 110}"]} for n in range(60)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def do_work(root: Path, output: Path) -> Iterator[None]:
    """Make data, train and evaluate with a checkout's code; yield after each command."""
    target = {"name": str(output.parent / "target"), "dtype": "float32", "device": "cpu"}
    prompts = f"{target['name']}/prompts.jsonl"
    source = {"source": "file", "path": prompts, "num_prompts": 60}
    answers = {"max_new_tokens": 32, "temperature": 1.0, "batch_size": 8}
    data = {"target": target, "prompts": source, "answers": answers, "held_out_share": 0.3}
    _run(root, ("scripts.data", "scripts.make_data"), output / "data", data)
    yield
    files = {name: str(output / "data" / f"{name}.jsonl") for name in ("train", "held_out")}
    for name, draft in DRAFTS.items():
        schedule = {"batch_size": 4, "max_steps": 20, "log_every_steps": 1, "mixed_precision": "no", "trackers": []}
        config: dict[str, Any] = {"target": target, "data": files, **draft}
        config["schedule"] = schedule | draft.get("schedule", {})
        config |= {} if name == "draft_lm" else {"sanity": {"enabled": False}}
        _run(root, ("train.distill" if name == "draft_lm" else "train.heads",), output / name, config)
        yield
        for way, decode in DECODINGS[name].items():
            config = {"target": target, "draft": str(output / name / "artifact"), "baselines": []}
            config |= {"decode": {"max_new_tokens": 32, **decode}, "suite": {"path": prompts, "num_prompts": 16}, "repeats": 1}
            _run(root, ("eval.run",), output / f"{name}, {way}", config)
            yield


def _run(root: Path, modules: tuple[str, ...], output: Path, config: dict[str, Any]) -> None:
    """Run a command of a checkout, the first that it has, in a process forked from this one."""
    output.parent.mkdir(exist_ok=True)
    config_file, log = (output.with_name(output.name + ending) for ending in (".yaml", ".log"))
    config_file.write_text(json.dumps({**config, "output": str(output)}))

    def command() -> None:
        with log.open("w") as stream:
            os.dup2(stream.fileno(), 1)
            os.dup2(stream.fileno(), 2)
        os.chdir(root)
        sys.path[0] = str(root)
        module = next(name for name in modules if importlib.util.find_spec(name) is not None)
        sys.argv = [module, "--config", str(config_file)]
        runpy.run_module(module, run_name="__main__", alter_sys=True)

    if code := _in_a_child(command):
        sys.exit(f"error: {modules[0]} in {root} ended with {code}:\n{log.read_text()[-3000:]}")


def _in_a_child(work: Callable[[], None]) -> int:
    """Do some work in a forked process and return its exit code; this one starts no threads, which a fork would lose."""
    if (child := os.fork()) == 0:
        code = 70
        try:
            work()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        except Exception:
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def results(output: Path) -> dict[str, Any]:
    """Return what is compared, by what it is; losses and tokens are values, weights a hash."""
    rows = [row for name in ("train", "held_out") for row in _lines(output / "data" / f"{name}.jsonl")]
    found: dict[str, Any] = {"data: tokens": [[row["prompt_ids"], row["answer_ids"]] for row in rows]}
    for name in DRAFTS:
        found[f"{name}: losses"] = [row["loss"] for row in _lines(output / name / "metrics.jsonl") if "loss" in row]
        weights = (output / name / "artifact" / "model.safetensors").read_bytes()
        found[f"{name}: weights"] = hashlib.sha256(weights).hexdigest()
        for way in DECODINGS[name]:
            answers = [row["generation"] for row in _lines(output / f"{name}, {way}" / "records.jsonl") if "generation" in row]
            found[f"{name}, {way}: tokens"] = [each["tokens"] for each in answers]
            found[f"{name}, {way}: tokens of each round"] = [each["rounds"]["committed"] for each in answers]
    return found


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def print_differences(base: dict[str, Any], head: dict[str, Any]) -> int:
    for what, values in base.items():
        apart = ""
        if what.endswith("losses") and values != head[what]:
            apart = f", by up to {max(abs(new / old - 1) for old, new in zip(values, head[what], strict=True)):.1g} of one"
        print(f"{'equal' if values == head[what] else 'DIFFERENT':9}  {what} ({len(values)}){apart}")
    return int(base != head)


def print_speed(base: list[Path], head: list[Path]) -> int:
    pairs = [(_seconds(one), _seconds(other)) for one, other in zip(base, head, strict=True)]
    for what in pairs[0][0]:
        ratios = [one[what] / other[what] for one, other in pairs]
        print(f"{statistics.median(ratios):6.3f} (from {min(ratios):.3f} to {max(ratios):.3f})  {what}")
    return 0


def _seconds(output: Path) -> dict[str, float]:
    found = {}
    for name in DRAFTS:
        steps = [row["seconds"] for row in _lines(output / name / "metrics.jsonl") if "loss" in row]
        found[f"{name}: training after its first step"] = steps[-1] - steps[0]
        for way in DECODINGS[name]:
            timings = [row["timing"] for row in _lines(output / f"{name}, {way}" / "records.jsonl") if "timing" in row]
            found[f"{name}, {way}: decoding"] = sum(each["decode_seconds"] for each in timings if each["mode"] == "speculative")
    return found


if __name__ == "__main__":
    sys.exit(main())
