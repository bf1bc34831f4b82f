"""What a tree of drafts is worth, by its definition."""

import numpy as np


def expected_tokens(paths, profile):
    """Return the expected tokens a round of a tree, the target's own counted: every path by the product of its entries."""
    return 1.0 + sum(float(np.prod([profile[depth, rank] for depth, rank in enumerate(path)])) for path in paths)
