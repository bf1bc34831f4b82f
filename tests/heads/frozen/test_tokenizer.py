"""The chat template that the config names: encoded with, part of the identity, refused where it is none."""

import pytest

from configs.runtime.errors import InputError
from configs.schema.target import TargetConfig
from heads.frozen.loading import load_target
from heads.frozen.tokenizer import load_tokenizer, set_chat_template

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


THINKS = (
    "\n  {% if enable_thinking is defined and enable_thinking is false %}w1 {% endif %}"
    "{% for message in messages %}{% if depth %}{{ depth }} {% endif %}{{ message['content'] }} {% endfor %}\n"
)


def test_variables_of_the_template_are_rendered_and_part_of_the_identity(tiny_run, tmp_path):
    path = tmp_path / "thinks.jinja"
    path.write_text(THINKS)

    def target(kwargs):
        config = TargetConfig(name=str(tiny_run / "target"), chat_template=str(path), chat_template_kwargs=kwargs)
        return load_target(config)

    own, off, deep = target(None), target({"enable_thinking": False}), target({"enable_thinking": True, "depth": "w3"})
    said = [{"role": "user", "content": "w8"}]
    assert [each.encode_chat(said) for each in (own, off, deep)] == [
        own.tokenizer(text, add_special_tokens=False).input_ids for text in ("w8", "w1 w8", "w3 w8")
    ]
    # As if they had been handed to the template.
    given = own.tokenizer.apply_chat_template(said, tokenize=False, enable_thinking=False)
    assert off.tokenizer.apply_chat_template(said, tokenize=False) == given
    assert own.identity.differences(off.identity) == off.identity.differences(deep.identity) == ["chat template"]


def test_variables_of_no_template_are_refused(tiny_run, tmp_path):
    tokenizer = load_target(TargetConfig(name=str(tiny_run / "target"))).tokenizer
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"chat_template_kwargs: the tokenizer of .* has no chat template"):
        load_tokenizer(tmp_path, TargetConfig(name=str(tmp_path), chat_template_kwargs={"enable_thinking": False}))
