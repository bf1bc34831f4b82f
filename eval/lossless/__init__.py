"""Whether speculation changed the output.

Enter with `judge_lossless`, which returns the report's section; `check_tokens` judges greedy answers alone.
"""

from eval.lossless.teacher_forcing import check_tokens
from eval.lossless.verdict import judge_lossless

__all__ = ["check_tokens", "judge_lossless"]
