"""Measuring a draft: the decoder, acceptance metrics, losslessness, the report and the gate."""
