"""The draft LM before and during training: its initialisation, its vocabulary, the rows that it writes itself.

`initial_draft` makes the draft; `Rewriter` is the data policy of a run.
"""

from distill.student.init import initial_draft
from distill.student.on_policy import Rewriter
from distill.student.vocabulary import most_frequent_answer_tokens

__all__ = ["Rewriter", "initial_draft", "most_frequent_answer_tokens"]
