"""The head families, one file each, named by `registry`; those made of DFlash lie in `block`.

docs/adding-a-head-family.md adds one step by step.
"""
