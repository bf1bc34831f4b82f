"""Statistics over prompts: intervals, tests, power, paired comparison. Imports no torch.

Enter at `ratio_interval` for a number with its interval, at `compare_sides` for a change.
"""

from eval.stats.bootstrap import Interval, ratio_interval
from eval.stats.paired import compare_sides

__all__ = ["Interval", "compare_sides", "ratio_interval"]
