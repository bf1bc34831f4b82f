"""Statistics over prompts: intervals, tests, power, paired comparison. Imports no torch.

Enter at `ratio_interval` for a number with its interval, at `compare_sides` for a change.
"""

from eval.stats.bootstrap import Interval, median_interval, paired_ratio_interval, ratio_interval, statistic_interval
from eval.stats.paired import compare_sides
from eval.stats.power import detectable_mean, detectable_percent, prompts_needed
from eval.stats.significance import g_test, holm, sign_flip_test

__all__ = [
    "Interval",
    "compare_sides",
    "detectable_mean",
    "detectable_percent",
    "g_test",
    "holm",
    "median_interval",
    "paired_ratio_interval",
    "prompts_needed",
    "ratio_interval",
    "sign_flip_test",
    "statistic_interval",
]
