"""The speculative decoder: propose, verify, commit.

Start with `decode.decode`; plain decoding is the same loop without a proposer.
"""
