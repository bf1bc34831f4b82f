"""What may be set: one frozen pydantic class for each section of a config, checked when the config is loaded.

A command's config is the class that names it, such as `EvalConfig` for `eval/run.py`; `configs.runtime.loading` reads one.
"""
