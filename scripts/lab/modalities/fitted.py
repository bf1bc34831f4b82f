"""What the demos fit with scikit-learn: a codebook by k-means, and a classifier whose hidden units are a space of features."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from configs.runtime.errors import InputError
from configs.runtime.files import write_text

Weights = dict[str, np.ndarray]
HIDDEN_UNITS, MOST_PASSES = 48, 200


def check_installed() -> None:
    try:
        import sklearn  # noqa: F401
    except ImportError as error:
        raise InputError("this demo needs scikit-learn: pip install -c constraints.txt scikit-learn") from error


def fit_codebook(vectors_NE: np.ndarray, num_codes: int) -> np.ndarray:
    from sklearn.cluster import KMeans

    means: np.ndarray = KMeans(num_codes, n_init=1, random_state=0).fit(vectors_NE).cluster_centers_
    return means.astype(np.float32)


def nearest(vectors_NE: np.ndarray, codebook_CE: np.ndarray) -> np.ndarray:
    distances_NC = np.square(codebook_CE).sum(-1) - 2 * vectors_NE @ codebook_CE.T
    return distances_NC.argmin(-1)


def fit_classifier(inputs_NE: np.ndarray, labels_N: np.ndarray) -> Weights:
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.neural_network import MLPClassifier

    network = MLPClassifier((HIDDEN_UNITS,), alpha=1e-2, max_iter=MOST_PASSES, random_state=0)
    with warnings.catch_warnings(action="ignore", category=ConvergenceWarning):
        fitted = network.fit(inputs_NE, labels_N)
    return {"w0": fitted.coefs_[0], "b0": fitted.intercepts_[0], "w1": fitted.coefs_[1], "b1": fitted.intercepts_[1]}


def hidden_units(weights: Weights, input_E: np.ndarray) -> np.ndarray:
    return np.maximum(input_E @ weights["w0"] + weights["b0"], 0)


def classify(weights: Weights, input_E: np.ndarray) -> int:
    return int((hidden_units(weights, input_E) @ weights["w1"] + weights["b1"]).argmax())


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))
