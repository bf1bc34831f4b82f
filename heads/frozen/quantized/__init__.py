"""Quantised checkpoints as ordinary models: what is packed (`schemes`), what it means (`formulas`), loading."""

from heads.frozen.quantized.checkpoint import loader_of, quantization_of, read_float_weights

__all__ = ["loader_of", "quantization_of", "read_float_weights"]
