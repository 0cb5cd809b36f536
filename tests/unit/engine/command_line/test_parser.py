"""Every command's wrong flags and values are told in one line; the commands' own tests look at what they refuse."""

import argparse
import re

import pytest

from pilotfish.engine.command_line.parser import Parser
from pilotfish.server import cli

TAKES_ANY_TEXT = {None, "Path", "words"}
"""Types of flags that no text is wrong for."""


def refused(args: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The line that the command ends with."""
    with pytest.raises(SystemExit) as caught:
        cli.main(args)
    out, said = capsys.readouterr()
    assert (caught.value.code, out) == (2, "")
    assert said.startswith(f"pilotfish {args[0]}: ") and said.count("\n") == 1, said
    return said


@pytest.mark.parametrize("name", ["serve", "generate", "key", *cli.OWN_PARSERS])
def test_wrong_flags_and_values_are_told_in_a_line(name, monkeypatch, capsys):
    parsers = []
    error = Parser.error

    def noted(self, message):
        parsers.append(self)
        error(self, message)

    monkeypatch.setattr(Parser, "error", noted)
    needed = [name]
    refused([name, "--zzz=1"], capsys)
    parser = parsers[0]
    for action in parser._actions:
        if action.required:
            needed += [*action.option_strings[:1], "1"]
    assert "unknown flag --zzz (" in refused([*needed, "--zzz=1"], capsys)

    for action in parser._actions:
        if not action.option_strings or isinstance(action, argparse._HelpAction):
            continue
        flag = max(action.option_strings, key=len)
        if len(flag) > 4:
            near = f"--x{flag[2:]}"
            assert f"unknown flag {near}: did you mean --" in refused([*needed, near], capsys)
        if action.nargs == 0:
            assert flag in refused([*needed, f"{flag}=what?"], capsys)
            continue
        if action.nargs != "?":
            assert flag in refused([*needed, flag], capsys)
        if action.choices or getattr(action.type, "__name__", None) not in TAKES_ANY_TEXT:
            said = refused([*needed, flag, "what?"], capsys)
            assert flag in said and "what?" in said
            assert re.search(r"\bwant |invalid (int|float) value|choose from|not JSON", said), said


@pytest.mark.parametrize(
    ("args", "wanted"),
    [
        (["bench", "m", "--tokens", "0"], "of at least 1, got '0'"),
        (["bench", "m", "--prefill-chunk", "-1"], "of at least 1, got '-1'"),
        (["bench", "m", "--draft-vocab-size", "0"], "of at least 1, got '0'"),
        (["bench", "m", "--k", "0,1", "--synthetic-acceptance-length", "3"], "in 1..2 for k = 1, got 3.0"),
        (["quantize", "in", "out", "--num-threads", "-1"], "of at least 1, got '-1'"),
        (["train-head", "m", "--text", "t", "--out", "o", "--num-threads", "-1"], "of at least 1, got '-1'"),
        (["gate", "m", "--port", "65536"], "in 0..65535, got '65536'"),
        (["sweep", "m", "--port", "65536"], "in 0..65535, got '65536'"),
    ],
    ids=lambda value: "" if isinstance(value, str) else f"{value[0]}{value[-2]}",
)
def test_numbers_out_of_range_are_told_before_anything_runs(args, wanted, capsys):
    said = refused(args, capsys)
    assert f"{args[-2]}: want " in said and wanted in said


@pytest.mark.parametrize("name", ["serve", "generate", "key", *cli.OWN_PARSERS])
def test_help_says_what_each_flag_is_and_what_it_is_by_default(name):
    hidden = argparse.SUPPRESS
    flags = [action for action in parser_of(name)._actions if action.help != hidden]
    assert not [action.dest for action in flags if not action.help]
    # of a switch that is off, and of an empty prefix, there is nothing to say
    chosen = [action for action in flags if action.nargs != 0 and action.default not in (None, "", hidden)]
    assert not [action.dest for action in chosen if "default" not in action.help]


def parser_of(name: str) -> Parser:
    class Built(Exception):
        """The parser that was about to read."""

    def stop(self, args=None, namespace=None):
        raise Built(self)

    if name not in cli.OWN_PARSERS:
        commands = next(a for a in cli.build_parser()._actions if isinstance(a, argparse._SubParsersAction))
        return commands.choices[name]
    with pytest.MonkeyPatch.context() as patched, pytest.raises(Built) as caught:
        patched.setattr(Parser, "parse_known_args", stop)
        cli.main([name])
    return caught.value.args[0]
