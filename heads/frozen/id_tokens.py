"""The tokenizer of a target whose tokens are no text: every token is called by its number.

Codes of images, codec tokens of speech, class ids: their models come without a tokenizer and without a chat template. With
this one in its place (`target.tokens: ids`), a prompt is a text of numbers such as `1034 17 2`, and all that reads prompts,
answers and hashes stays as it is. What follows a `#` to the end of its line is left out, so that `1034 #17` is the prompt
`1034` once more, under another name.
"""

from __future__ import annotations

from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.normalizers import Replace
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


def id_tokenizer(vocab_size: int) -> PreTrainedTokenizerBase:
    """Return the tokenizer of `vocab_size` tokens that are called 0, 1, 2 and so on; it has no special ones."""
    tokenizer = Tokenizer(WordLevel({str(number): number for number in range(vocab_size)}))
    tokenizer.normalizer = Replace(Regex("#[^\n]*"), "")
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE)
