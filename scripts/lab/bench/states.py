"""Training from servers of hidden states beside training from a cache: `scripts/lab/benchmark.py states`.

The servers run already, by the line of `scripts/serve_states.py`, on devices that training does not use.
"""

from __future__ import annotations

import logging
from contextlib import closing
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from configs.runtime.command import DONE
from configs.runtime.errors import ConfigError
from configs.runtime.loading import load_config
from configs.schema.training import HeadsConfig
from distill.dataset.batches import ConversationDataset
from distill.dataset.conversations import open_conversations
from distill.server.engine import EngineStates
from eval.stats.bootstrap import Interval
from heads.frozen.hidden_states import read_states
from heads.frozen.loading import load_target
from heads.inference.model_checks import relative_error
from scripts.lab.bench.harness import add_ratios
from scripts.lab.bench.scale import measure, tokens_a_second
from scripts.lab.bench.turns import take_turns
from scripts.lab.settings import BenchScaleConfig, BenchStatesConfig
from train.resolve import resolve

log = logging.getLogger("draftsmith")


def compare_states(config: BenchStatesConfig) -> int:
    recipe = load_config(HeadsConfig, config.recipe)
    served = recipe.target.model_copy(update={"states": config.states or recipe.target.states})
    if served.states is None:
        raise ConfigError("states: neither the benchmark nor the recipe names servers; give urls and path")
    if not config.num_compared + config.repeats:
        raise ConfigError("num_compared and repeats are both 0, which leaves nothing to measure")
    cached = recipe.data.model_copy(update={"cache": config.cache})
    sides = {
        "served": recipe.model_copy(update={"target": served, "data": recipe.data.model_copy(update={"cache": None})}),
        "cached": recipe.model_copy(update={"data": cached, "target": recipe.target.model_copy(update={"states": None})}),
    }
    if config.num_compared:
        difference = relative_difference(config, sides["served"])
        add_ratios(config.output, "states_compared", config, {"engine_states_relative_difference": difference})
    if config.repeats:
        add_ratios(config.output, "states_timed", config, {"engine_states_speed_vs_cache": speed_vs_cache(config, sides)})
    return DONE


def relative_difference(config: BenchStatesConfig, recipe: HeadsConfig) -> float:
    """Return by how much the states of any tap differ from the local target's at most, in a share of their size."""
    target = load_target(recipe.target.model_copy(update={"states": None}))
    assert recipe.target.states is not None
    rows, worst = open_conversations(Path(recipe.data.train)), 0.0
    dataset = ConversationDataset(rows, resolve(recipe, target.model, rows).data.max_length)
    with closing(EngineStates(recipe.target.states, target)) as engine:
        taps = engine.servers.taps
        texts = [dataset[number].input_ids for number in range(min(config.num_compared, len(dataset)))]
        for ids, found in zip(texts, engine.of_each(texts, taps), strict=True):
            expected = read_states(target.model, torch.tensor([ids], device=target.device), taps)
            pairs = zip((*found.taps_ABTE, found.final_BTE), (*expected.taps_ABTE, expected.final_BTE), strict=True)
            worst = max(worst, *(relative_error(*pair) for pair in pairs))
    return worst


def speed_vs_cache(config: BenchStatesConfig, sides: dict[str, HeadsConfig]) -> Interval:
    timing = BenchScaleConfig(steps=config.steps)
    with TemporaryDirectory(prefix="bench-states-") as scratch:
        called = {name: partial(measure, timing, recipe, 1, Path(scratch) / name) for name, recipe in sides.items()}
        turns = take_turns(called, range(config.repeats), 1, description="training runs", unit="repeats", warm_up=False)
    served, cached = ([turn.result for (turn,) in turns[name]] for name in ("served", "cached"))
    return tokens_a_second(served, cached, config.bootstrap_samples)
