"""Text from elsewhere cannot command a terminal, in errors, in the log, in tracebacks and in what commands print."""

import io
import logging

import pytest

from configs.runtime.command import BAD_INPUT, FAILED, run_command
from configs.runtime.errors import InputError
from configs.runtime.progress import setup_logging
from configs.runtime.terminal import one_line, printable, say
from configs.schema.decoding import DecodeConfig

NAME = "a\x1b[2J\x1b]0;title\x07\x9b1A\r\u202eb\u2066\U000e0041\u200b\u2060"
SHOWN = r"a\x1b[2J\x1b]0;title\x07\x9b1A\r\u202eb\u2066\U000e0041\u200b\u2060"


def test_controls_are_written_out_and_every_other_character_stays():
    assert printable(NAME) == SHOWN
    plain = "tab\there\nτ = 1.42×, naïve 日本語 שלום 👩\u200d👩\u200d👧"
    assert printable(plain) == plain
    assert one_line("a\n\x1cgate: pass\u2028b") == "a gate: pass b"
    assert printable("\ud800") == r"\ud800"


def test_say_also_masks_secrets():
    stream = io.StringIO()
    say(f"{NAME} hf_{'A' * 30}", stream)
    assert stream.getvalue() == f"{SHOWN} ***\n"


@pytest.mark.parametrize(("kind", "code"), [(InputError, BAD_INPUT), (RuntimeError, FAILED)])
def test_errors_and_tracebacks_are_printable(kind, code, capsys):
    def main(config):
        raise kind(f"unknown tensor {NAME}")

    assert run_command(DecodeConfig, main, description="", argv=[]) == code
    shown = capsys.readouterr().err
    assert r"tensor a\x1b[2J" in shown
    assert "\x1b" not in shown


def test_the_log_is_printable(capsys):
    setup_logging()
    logging.getLogger("draftsmith").warning("%s", NAME)
    shown = capsys.readouterr().err
    assert r"\x1b[2J" in shown
    assert "\x1b" not in shown
