"""Every head family on one target, and EAGLE-3's training beside speculators'.

Start with `benchmark`.
"""
