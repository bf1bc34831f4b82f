"""Whether speculation changed the output.

Enter with `judge_lossless`, which returns the report's section; `find_divergences` compares greedy answers alone.
"""

from eval.lossless.verdict import find_divergences, is_tie, judge_lossless

__all__ = ["find_divergences", "is_tie", "judge_lossless"]
