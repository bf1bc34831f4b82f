"""What the loop trains: a draft LM or a head.

Start with `draft` or `head`.
"""
