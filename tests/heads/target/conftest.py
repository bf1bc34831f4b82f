"""The byte-level target of the data-making tests, loaded here too."""

from tests.distill.conftest import byte_target, byte_target_folder, byte_tokenizer

__all__ = ["byte_target", "byte_target_folder", "byte_tokenizer"]
