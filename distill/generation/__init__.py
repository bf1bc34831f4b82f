"""Prompts in, conversations out: written by the target here, by a server, or brought by the data set.

Start with the module `make_dataset`; everything that is written locally comes from `continue_rows`.
"""

from distill.generation.answers import answer_prompts
from distill.generation.continuation import continue_rows
from distill.generation.prompts import Prompt, read_prompts

__all__ = ["Prompt", "answer_prompts", "continue_rows", "read_prompts"]
