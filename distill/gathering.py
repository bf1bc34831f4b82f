"""Weights that processes hold in parts, whole for a while: what a module asks for that reads them past the module owning them.

Engines that split weights gather a module's own when that module runs. The chunked loss does not run the output head, whose
weights it takes itself, so `distill.objective` puts them into such a context. No engine is known here; who trains sets one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

# In all processes together, with the same parameters: what they hold is exchanged. What is read inside may be differentiated,
# as long as its backward needs no weights any more.
Gather = Callable[[Iterable[nn.Parameter]], AbstractContextManager[Any]]


def as_they_are(parameters: Iterable[nn.Parameter]) -> AbstractContextManager[None]:
    """Leave parameters as they are: every process has all of them."""
    return nullcontext()
