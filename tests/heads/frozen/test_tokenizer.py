"""The chat template that the config names: encoded with, part of the identity, refused where it is none."""

import pytest

from configs.runtime.errors import InputError
from configs.schema.target import TargetConfig
from heads.frozen.loading import load_target
from heads.frozen.tokenizer import set_chat_template

HELLO = [{"role": "user", "content": "hello there"}]


def test_a_named_template_encodes_and_is_part_of_the_identity(tiny_run):
    own, plain = (load_target(TargetConfig(name=str(tiny_run / "target"), chat_template=name)) for name in (None, "plain"))
    assert plain.encode_chat(HELLO) == plain.tokenizer("hello there").input_ids
    assert own.identity.differences(plain.identity) == ["chat template"]


@pytest.mark.parametrize(
    ("text", "complaint"), [(None, r"is neither a file here nor one of chatml, plain"), ("{% for %}", r"is no chat template: ")]
)
def test_what_is_no_template_is_refused(tmp_path, tiny_tokenizer, text, complaint):
    path = tmp_path / "mine.jinja"
    if text is not None:
        path.write_text(text)
    tokenizer = tiny_tokenizer.__class__(tokenizer_object=tiny_tokenizer.backend_tokenizer)
    with pytest.raises(InputError, match=complaint):
        set_chat_template(tokenizer, str(path))
