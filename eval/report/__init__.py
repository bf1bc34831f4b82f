"""The report: its schema, how it is built, and how it is rendered.

Start with `build` and `schema`.
"""
