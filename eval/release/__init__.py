"""The release gate: whether a report passes a gate's rules. Enter with `judge`, which returns a `GateVerdict`.

Nothing here imports torch but `eval.release.artifact_hash`, which reads the artifact that is to be released.
"""
