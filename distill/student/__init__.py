"""The draft LM before and during training: its initialisation, its vocabulary, the rows that it writes itself.

Start with `init`.
"""
