"""What a reader of Markdown makes of a text."""

from markdown_it import MarkdownIt

READER = MarkdownIt("commonmark").enable(["table", "strikethrough"])


def tokens_of(text):
    """Return the kinds of everything in a text, blocks and what stands in them."""
    blocks = READER.parse(text)
    return {token.type for block in blocks for token in (block, *(block.children or ()))}


def shape_of(text):
    """Return the kinds of the blocks of a text, in order."""
    return [block.type for block in READER.parse(text)]


def read_back(text):
    """Return the text that a reader sees of the first paragraph or cell; asserts that it is text or code alone."""
    (first, *_) = [block for block in READER.parse(text) if block.type == "inline"]
    assert {token.type for token in first.children} <= {"text", "code_inline"}, first.children
    return "".join(token.content for token in first.children)
