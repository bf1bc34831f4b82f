"""The target behind an OpenAI-compatible API.

Start with `logprobs.TargetServer`.
"""

from distill.server.logprobs import TargetServer

__all__ = ["TargetServer"]
