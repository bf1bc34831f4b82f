"""The speculative decoder: propose, verify, commit. Enter with `generate` (token ids) or `decode` (records and timings).

Plain decoding is the same loop without a proposer. Both are lossless unless `config.lossy` is set.
"""

from eval.decoder.decode import decode, generate
from eval.decoder.records import Generation, Request

__all__ = ["Generation", "Request", "decode", "generate"]
