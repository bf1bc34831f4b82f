"""Conversations on disk, and the batches made of them.

Start with `conversations` for a row and `batches` for what a training step gets.
"""

from distill.dataset.batches import ConversationDataset, Example, make_loader
from distill.dataset.conversations import Conversation, open_conversations, read_conversations
from distill.dataset.packing import make_packed_loader

__all__ = [
    "Conversation",
    "ConversationDataset",
    "Example",
    "make_loader",
    "make_packed_loader",
    "open_conversations",
    "read_conversations",
]
