"""The configs of the benchmarks that train heads: which, on what data, and what they are decoded on. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from configs.schema.base import PositiveInt, PositiveShare, Settings, Temperature
from configs.schema.evaluation import FreeDraft, LosslessConfig, SuiteConfig

OVERNIGHT = ["scripts/lab/configs/heads/hydra_overnight.yaml", "scripts/lab/configs/heads/eagle3_overnight.yaml"]
HOME_SUITE = "home"  # what tables call held-out prompts of the kinds that the drafts were trained on


class HeadsSettings(Settings):
    """Heads trained on one target and one set of data, and the prompts that they are decoded on."""

    # Of `scripts/data.py`, run where its output is not there; None: never
    data: str | None = "scripts/lab/configs/data/curve.yaml"
    # of `scripts/cache.py`, made once of that data and read by every head's training; None: the target runs on every batch
    cache: str | None = "scripts/lab/configs/cache/curve.yaml"
    recipes: list[str] = OVERNIGHT  # of `train/heads.py`, all on the same target and data
    runs: str = "runs/curve/bench"  # folder: what was trained, kept for the next time
    num_prompts: PositiveInt = 48  # held-out prompts decoded, the last of the file: the first chose the checkpoints
    # Suites of held-out prompts by name, so many prompts each, as many of each of the sources named (`prompts.sources` of the
    # data); []: of all
    held_out: dict[str, list[str]] = {
        HOME_SUITE: ["own"],
        "mixed": ["code", "completion", "maths", "questions", "reading", "stories", "requests"],
    }
    suites: list[SuiteConfig] = [SuiteConfig(name="house", num_prompts=48)]  # decoded as well, rows of their own
    # The prompts of the first of `held_out` again: under other system messages and in other chat templates (Jinja), by the name
    # of the suite; and some of them at the end of chats of about so many tokens, made of other held-out conversations
    systems: dict[str, str] = {}
    templates: dict[str, str] = {}
    lengths: list[PositiveInt] = []
    num_long_prompts: PositiveInt = 16  # by length
    max_new_tokens: PositiveInt = 64
    bootstrap_samples: PositiveInt = 2000
    output: str = "docs/results/heads.json"

    def objections(self) -> Iterator[str]:
        names = [*(suite.label for suite in self.suites), *self.systems, *self.templates]
        if len({*self.held_out, *names}) < len(self.held_out) + len(names):
            held_out = " or ".join(map(repr, self.held_out))
            yield f"suites must have different names, and none may be {held_out}, got {names}: give each a `name`"


class BenchHeadsConfig(HeadsSettings):
    """`scripts/lab/benchmark.py heads`: head families trained and measured on one target and one set of data."""

    recipes: list[str] = [
        *OVERNIGHT,
        "scripts/lab/configs/heads/eagle3_short.yaml",
        "scripts/lab/configs/heads/eagle3_long.yaml",
    ]
    temperature: Temperature = 0.0
    baselines: list[FreeDraft] = ["prompt_lookup", "suffix_lookup"]  # measured beside the first head
    with_lookup: bool = True  # heads are also measured with suffix lookup, which knows the answers trained on
    # Recipes, by the names of their files, that are measured with a tree as well: the one expected to be fastest, fitted on the
    # prompts that chose checkpoints
    trees: list[str] = ["hydra_overnight", "eagle3_overnight", "eagle3_short", "eagle3_long"]
    repeats: PositiveInt = 1  # timed runs of every prompt
    lossless: LosslessConfig = LosslessConfig()


# Heads of a few minutes, trained on what the target writes alone: those that other benchmarks and the checks of engines take
OWN_HEADS = BenchHeadsConfig(
    data="configs/data/heads.yaml",
    cache="configs/cache/heads.yaml",
    recipes=["configs/heads/hydra.yaml", "configs/heads/eagle3.yaml"],
    runs="runs/heads/bench",
)


class CurvePoint(Settings):
    """A training of the curve."""

    share: PositiveShare  # of the conversations
    epochs: PositiveInt | None = None  # None: the recipe's own


class BenchCurveConfig(HeadsSettings):
    """`scripts/lab/benchmark.py curve`: tokens per target step by the answer tokens trained on, and the law of it."""

    # Every recipe is trained at each; the fewer the conversations, the more epochs they bear
    points: list[CurvePoint] = [
        CurvePoint(share=1 / 16, epochs=6),
        CurvePoint(share=1 / 8, epochs=5),
        CurvePoint(share=1 / 4, epochs=4),
        CurvePoint(share=1),
    ]
    systems: dict[str, str] = {"another system message": "You are a careful expert. Answer in short, plain sentences."}
    batch_size: PositiveInt = 16  # prompts decoded together, which tokens per target step do not depend on
    plot: str | None = "docs/curve.svg"  # None: none, as of a single size
    output: str = "docs/results/curve.json"

    def objections(self) -> Iterator[str]:
        yield from super().objections()
        if self.plot is not None and len({point.share for point in self.points}) < 2:
            yield "points need two shares at least for a line through them; give more, or set plot to null"
