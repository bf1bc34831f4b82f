"""The target's outputs kept on disk, so that training need not run it.

Start with `writer.make_cache` and `reader.TargetCache`.
"""

from distill.cache.reader import TargetCache, open_cache
from distill.cache.writer import make_cache

__all__ = ["TargetCache", "make_cache", "open_cache"]
