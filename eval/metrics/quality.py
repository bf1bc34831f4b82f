"""The quality of the answers, with the draft and without: perplexity under the target, and scorers, side by side.

A lossy mode may be faster at a price, and these numbers are the price. Both modes answered the same prompts, so what is
compared is the change prompt by prompt, and every interval draws whole prompts (`eval.stats.bootstrap`). Failed requests have
no score. The free baselines' answers are not scored: they are as lossless as the rule they are decoded by.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics.image.fid import FrechetInceptionDistance

from configs.runtime.errors import InputError, first_line
from configs.schema.evaluation import EvalConfig, QualityConfig
from distill.generation.prompts import Prompt
from eval.decoder.records import AUTOREGRESSIVE, ENDED, FAILED, SPECULATIVE, Generation
from eval.metrics.likelihood import mean_log_likelihood, pair_answers
from eval.metrics.scorers import Scorer, import_function, load_scorers, reference_of
from eval.metrics.tally import Tally
from eval.stats.bootstrap import LEVEL, Floats, Interval, statistic_interval
from heads.frozen.loading import Target

Pair = tuple[Generation, Generation]  # plain, speculative
Numbers = Sequence[float]  # of one pair, to be added up by prompt
Column = Callable[[Floats], Floats]
EXACT_TEMPERATURE = 1.0


class Quality:
    """The scorers of one evaluation, loaded before it decodes.

    Raises:
        InputError: a scorer cannot be used (`eval.metrics.scorers`).
    """

    def __init__(self, config: EvalConfig, prompts: Sequence[Prompt]) -> None:
        self.asked: QualityConfig | None = config.quality
        self.bootstrap = {"samples": config.bootstrap_samples, "seed": config.decode.seed}
        self.prompts = {prompt.prompt_id: prompt for prompt in prompts}
        self.scorers = {} if config.quality is None else load_scorers(config.quality, prompts)
        name = None if config.quality is None else config.quality.features
        self.features: Callable[..., Any] | None = None if name is None else import_function(name, "quality.features")

    def judge(self, target: Target, records: Tally) -> dict[str, Any] | None:
        """Return the report's `quality` section; `None` where it is not asked for."""
        if self.asked is None:
            return None
        pairs = pair_answers(records.of(AUTOREGRESSIVE), records.of(SPECULATIVE))
        complete = [pair for pair in pairs if not FAILED.intersection(answer.stop_reason for answer in pair)]
        return {
            "num_answers": len(complete),
            "num_identical": sum(plain.tokens == speculative.tokens for plain, speculative in complete),
            "num_failed": len(pairs) - len(complete),
            "num_cut": sum(any(answer.stop_reason not in ENDED for answer in pair) for pair in complete),
            "perplexity": self._perplexity(target, complete) if self.asked.perplexity and complete else None,
            "scores": {name: self._scores(target, complete, name) for name in self.scorers} if complete else {},
            "feature_distance": self._distances(target, complete) if self.features is not None and len(complete) > 1 else None,
        }

    def _perplexity(self, target: Target, pairs: Sequence[Pair]) -> dict[str, Any]:
        """Return exp(mean negative log-probability of a token), pooled over all tokens of all answers."""

        rows = []
        for plain, speculative in pairs:
            nats = nats_of(target, plain)
            other = nats if plain.tokens == speculative.tokens else nats_of(target, speculative)
            rows.append((nats, len(plain.tokens), other, len(speculative.tokens)))
        columns = sums_by_prompt(pairs, rows)
        return self._side_by_side(
            columns,
            autoregressive=lambda sums: np.exp(sums[0] / sums[1]),
            speculative=lambda sums: np.exp(sums[2] / sums[3]),
            ratio=lambda sums: np.exp(sums[2] / sums[3] - sums[0] / sums[1]),
        )

    def _scores(self, target: Target, pairs: Sequence[Pair], name: str) -> dict[str, Any]:
        """Return the mean score of an answer in both modes; every answer weighs the same."""
        scored = [self._score_pair(target, pair, self.scorers[name]) for pair in pairs]
        columns = sums_by_prompt(pairs, [(*scores, 1.0) for scores in scored])
        num_changed = sum(plain != speculative for plain, speculative in scored)
        section = self._side_by_side(
            columns,
            autoregressive=lambda sums: sums[0] / sums[2],
            speculative=lambda sums: sums[1] / sums[2],
            difference=lambda sums: (sums[1] - sums[0]) / sums[2],
        )
        if num_changed == 0:
            section["difference_ci"] = unseen_change(len(columns[0]), [score for scores in scored for score in scores])
        return {**section, "num_changed": num_changed}

    def _distances(self, target: Target, pairs: Sequence[Pair]) -> dict[str, Any]:
        """Return the Fréchet distances between the answers of both modes, and of each from the references."""
        name, function = str(cast(QualityConfig, self.asked).features), cast(Callable[..., Any], self.features)
        plain_NF, speculative_NF = (
            featurised(name, function, [_text(target, pair[side]) for pair in pairs]) for side in (0, 1)
        )
        references = [reference_of(self.prompts[plain.prompt_id], plain.turn) for plain, _ in pairs]
        known = [reference for reference in references if reference is not None]
        own = featurised(name, function, known) if len(known) == len(pairs) else None
        return {
            "autoregressive": None if own is None else frechet_distance(own, plain_NF),
            "speculative": None if own is None else frechet_distance(own, speculative_NF),
            "between": frechet_distance(plain_NF, speculative_NF),
        }

    def _score_pair(self, target: Target, pair: Pair, scorer: Scorer) -> tuple[float, float]:
        prompt, turn = self.prompts[pair[0].prompt_id], pair[0].turn
        texts = [_text(target, answer) for answer in pair]
        plain, speculative = (scorer(prompt.turns[turn], text, reference_of(prompt, turn)) for text in texts)
        return plain, speculative

    def _side_by_side(self, columns: Sequence[Floats], **statistics: Column) -> dict[str, Any]:
        """Return each statistic of the columns' sums as a number and its `_ci`."""
        section: dict[str, Any] = {}
        for name, statistic in statistics.items():
            found: Interval = statistic_interval(statistic, *columns, **self.bootstrap)
            section |= {name: found.point, f"{name}_ci": found.bounds}
        return section


def _text(target: Target, answer: Generation) -> str:
    return str(target.tokenizer.decode(list(answer.tokens), skip_special_tokens=True))


def nats_of(target: Target, answer: Generation) -> float:
    """Return the negative log-probability of all an answer's tokens by the target's own distribution, in nats.

    At temperature 1 and without top-k or top-p, whatever was decoded with; log-softmax in float32. The token that ends the
    text is one of them.
    """
    return -mean_log_likelihood(target, answer, EXACT_TEMPERATURE) * len(answer.tokens)


def sums_by_prompt(pairs: Sequence[Pair], rows: Sequence[Numbers]) -> list[Floats]:
    """Add up the numbers of each prompt's turns, a row a pair; return them as columns, each [prompts]."""
    sums: dict[str, Floats] = {}
    for (plain, _), row in zip(pairs, rows, strict=True):
        sums[plain.prompt_id] = sums.get(plain.prompt_id, np.zeros(len(row))) + np.asarray(row, dtype=np.float64)
    return list(np.stack(list(sums.values()), axis=1))


def unseen_change(num_prompts: int, scores: Sequence[float], level: float = LEVEL) -> list[float] | None:
    """Return the interval of a mean difference where no score changed on so many prompts; `None` for unbounded scores.

    The bootstrap would say that nothing can ever change. Were a share x of prompts to change, none of n would with probability
    (1 - x)^n; the bound is where that is (1 - level) / 2 (Clopper and Pearson, 1934), for scores from 0 to 1.
    """
    if min(scores) < 0 or max(scores) > 1:
        return None
    bound = 1 - ((1 - level) / 2) ** (1 / num_prompts)
    return [-bound, bound]


# --- distance of features -----------------------------------------------------------------------------------------


class _AsGiven(nn.Module):
    """The network of torchmetrics' distance where the features have been computed already."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.num_features = num_features

    def forward(self, features_NF: Tensor) -> Tensor:
        return features_NF


def frechet_distance(one_NF: Tensor, other_NF: Tensor) -> float:
    """Return the Fréchet distance (Heusel et al., 1706.08500) of two sets of at least two answers' features.

    Both sets are taken for normal distributions. The distance falls with the number of answers, so that only distances of sets
    of the same sizes can be compared.
    """
    metric: Any = FrechetInceptionDistance(feature=_AsGiven(one_NF.shape[1]))
    metric.set_dtype(torch.float64)
    metric.update(one_NF, real=True)
    metric.update(other_NF, real=False)
    return max(0.0, float(metric.compute()))


def featurised(name: str, function: Callable[[str], Sequence[float]], answers: Sequence[str]) -> Tensor:
    """Return the features of answers, `[N, F]`.

    Raises:
        InputError: the user's function failed, or gave no finite numbers or not as many each time.
    """
    try:
        features_NF = torch.tensor([list(function(answer)) for answer in answers], dtype=torch.float64)
    except Exception as error:  # the user's function, which may fail in any way
        raise InputError(f"quality.features: {name} failed: {type(error).__name__}: {first_line(error)}") from error
    if features_NF.ndim != 2 or not torch.isfinite(features_NF).all():
        raise InputError(f"quality.features: {name} must return a list of finite numbers, as many for each answer")
    return features_NF


# --- pictures and sound -------------------------------------------------------------------------------------------


class Rendering:
    """Renders answers as pictures or sound by the user's function, which takes an answer and returns a data URL.

    Raises:
        InputError: it cannot be imported, or is no function.
    """

    def __init__(self, config: EvalConfig) -> None:
        self.name, self.max_answers = config.render, config.num_rendered
        self.function = None if self.name is None else import_function(self.name, "render")

    def of(self, target: Target, records: Tally, texts: Mapping[str, str]) -> list[dict[str, str]]:
        """Return the first prompts' plain and speculative answers, rendered; nothing where no function is named."""
        if self.function is None:
            return []
        pairs = pair_answers(records.of(AUTOREGRESSIVE), records.of(SPECULATIVE))
        complete = [
            pair for pair in pairs if not FAILED.intersection(answer.stop_reason for answer in pair) and not pair[0].turn
        ]
        rendered = []
        for pair in complete[: self.max_answers]:
            plain, speculative = (str(target.tokenizer.decode(list(each.tokens), skip_special_tokens=True)) for each in pair)
            urls = {AUTOREGRESSIVE: self._url(plain), SPECULATIVE: self._url(speculative)}
            rendered.append({"prompt_id": pair[0].prompt_id, "prompt": texts[pair[0].prompt_id], **urls})
        return rendered

    def _url(self, answer: str) -> str:
        try:
            url: Any = self.function(answer) if self.function is not None else None
        except Exception as error:  # the user's function, which may fail in any way
            raise InputError(f"render: {self.name} failed: {type(error).__name__}: {first_line(error)}") from error
        if not isinstance(url, str) or not url.startswith("data:"):
            raise InputError(f"render: {self.name} must return a data URL of a picture or of sound, got {str(url)[:40]!r}")
        return url
