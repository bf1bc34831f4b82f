"""The head families, named by `registry`; docs/adding-a-head-family.md adds one step by step."""
