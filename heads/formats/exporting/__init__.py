"""An artifact, written for the engine that serves it.

Start with `exporter.export`; `table` says which engine takes which kind of draft, and in what form.
"""
