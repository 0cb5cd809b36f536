"""Talks with a model in the terminal, and shows after each answer how many drafts were accepted.

pilotfish chat http://127.0.0.1:8000
pilotfish chat demo/model -- --num-speculative-tokens 5
echo "What is a pilot fish?" | pilotfish chat http://127.0.0.1:8000

Where the input is no terminal, all of it is one message. The answer goes to stdout, all else to stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from pilotfish.deploy.arguments import add_endpoint_flags, is_address, split_flags
from pilotfish.deploy.chat.screen import Screen, printable
from pilotfish.deploy.chat.talk import Talk
from pilotfish.deploy.gate.server import Refused, Server, Unreachable
from pilotfish.deploy.sweep.target import StartError, WrongCommand, started
from pilotfish.engine.command_line.parser import Parser, whole_number

HELP = """\
/new              forget what was said
/again            ask the last question once more
/system TEXT      what the model is told first; without a text nothing
/k N              drafts a round, from 0 up to what is served; without a number as it is served
/exit             or Ctrl-D; Ctrl-C ends an answer
A line that ends in \\ goes on in the next one."""


def main(argv: Sequence[str]) -> int:
    args = parse(argv)
    for stream in (sys.stdout, sys.stderr):
        # a terminal that cannot show a character shows another
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    screen = Screen(sys.stdout, sys.stderr)
    try:
        with target(args, screen) as url:
            server = Server(url, args.api_key, args.served_model)
            server.model = server.model or server.first_model()
            talk = Talk(server, screen, args.system, args.k, fields_of(args))
            if sys.stdin.isatty():
                converse(talk, read_turn)
            else:
                talk.ask(sys.stdin.read())
    except (StartError, Refused, Unreachable, ValueError) as error:
        where = f"{args.target}: " if isinstance(error, Unreachable) else ""
        print(f"pilotfish chat: {where}{printable(str(error))}", file=sys.stderr)
        return 2 if isinstance(error, WrongCommand) else 1
    return 0


@contextlib.contextmanager
def target(args: argparse.Namespace, screen: Screen) -> Iterator[str]:
    """The server's URL; one that is started ends with the block."""
    if args.is_url:
        yield args.target
        return
    with tempfile.TemporaryDirectory() as folder:
        screen.say(f"[loading {args.target}]")
        # Ctrl-C is for the answer, not for the server
        with started(args.target, args.server_flags, Path(folder) / "server.log", own_group=True) as url:
            yield url


def converse(talk: Talk, read: Callable[[], str | None]) -> None:
    """Turns until there is no more: None."""
    talk.screen.say(f"[{talk.server.model}; /help lists commands]")
    while (text := read()) is not None:
        try:
            if text.startswith("/"):
                if not obey(talk, text):
                    return
            elif text.strip():
                talk.ask(text)
        except Refused as error:
            talk.screen.say(f"[{error}]")


def read_turn() -> str | None:
    """What was typed, with readline's editing and history where Python has it; None at the end of the input."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # input() is edited with it
    lines: list[str] = []
    while True:
        try:
            line = input("... " if lines else ">>> ")
        except EOFError:
            print(file=sys.stderr)
            return None
        except KeyboardInterrupt:
            print(file=sys.stderr)
            lines = []
            continue
        lines.append(line.removesuffix("\\"))
        if not line.endswith("\\"):
            return "\n".join(lines)


def obey(talk: Talk, line: str) -> bool:
    """Whether the conversation goes on after a command."""
    name, _, rest = line.partition(" ")
    rest = rest.strip()
    if name in ("/exit", "/quit", "/bye"):
        return False
    if name == "/new":
        talk.forget()
    elif name == "/again":
        if not talk.again():
            talk.screen.say("[nothing was asked yet]")
    elif name == "/system":
        talk.system = rest or None
    elif name == "/k" and (not rest or rest.isdecimal()):
        talk.k = int(rest) if rest else None
    else:
        talk.screen.say(HELP)
    return True


def fields_of(args: argparse.Namespace) -> dict[str, object]:
    """What was asked for; all else is the server's to say."""
    given = {"temperature": args.temperature, "max_tokens": args.max_tokens, "seed": args.seed}
    thinking = {"chat_template_kwargs": {"enable_thinking": False}} if args.no_thinking else {}
    return {name: value for name, value in given.items() if value is not None} | thinking


def parse(argv: Sequence[str]) -> argparse.Namespace:
    own, flags = split_flags(argv)
    parser = Parser(prog="pilotfish chat", description=__doc__)
    add = parser.add_argument
    add("target", metavar="URL-or-MODEL", help="a server that runs, or a checkpoint to serve; flags for it after --")
    add("--system", metavar="TEXT", help="what the model is told first")
    add("--temperature", type=float, metavar="T", help="0 is greedy (default: the checkpoint's)")
    add("--max-tokens", type=whole_number(1), metavar="N", help="of an answer (default: as the context allows)")
    add("--seed", type=whole_number(0), metavar="N", help="default: another one each time")
    add("--k", type=whole_number(0), metavar="K", help="drafted tokens a round (default: what is served)")
    add("--no-thinking", action="store_true", help="ask the model to answer at once")
    add_endpoint_flags(parser)
    args = parser.parse_args(own)
    args.is_url = is_address(parser, args.target)
    args.server_flags = flags
    if args.is_url and flags:
        parser.error("flags after -- are for a server that is started: want a MODEL")
    return args
