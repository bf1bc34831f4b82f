"""The release gate: whether a report passes a gate's rules. Enter with `judge`, which returns a `GateVerdict`."""
