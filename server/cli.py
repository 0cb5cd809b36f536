"""The `pilotfish` command. Imports are lazy: --help and --version cost nothing, and only what runs loads torch."""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pilotfish
from pilotfish.engine.command_line.parser import Parser
from pilotfish.engine.errors import BusyError, PilotfishError
from pilotfish.server import flags
from pilotfish.server.engine_flags import add_answer_flags, add_engine_flags

KEY_VARIABLE = "PILOTFISH_API_KEY"
KEY_VARIABLES = (KEY_VARIABLE, "VLLM_API_KEY")
"""The first one that is set; vLLM's, so that a unit or a manifest goes on."""
OWN_PARSERS = {
    "chat": ("pilotfish.deploy.chat.command", "talk with a model in the terminal, acceptance shown"),
    "audit": ("pilotfish.engine.check.audit.command", "prove that speculation changes no token"),
    "bench": ("pilotfish.engine.bench.command", "speed of rounds by k, batch and context"),
    "sweep": ("pilotfish.deploy.sweep.command", "measure which k and how many sequences to serve"),
    "gate": ("pilotfish.deploy.gate.command", "look at what a server really does before it gets traffic"),
    "release": ("pilotfish.deploy.release.command", "replace the running version, and go back if a gate fails"),
    "eval": ("pilotfish.deploy.evaluate.command", "score a served model on questions, by lm-eval"),
    "acceptance": ("pilotfish.deploy.acceptance", "how often a head is right on a text, and what it must be"),
    "collect-env": (
        "pilotfish.deploy.collect_env",
        "what a report of a problem should say: versions, device, checkpoint",
    ),
    "quantize": ("pilotfish.engine.convert.quantize", "make an NVFP4 checkpoint from a BF16 or FP8 one"),
    "train-head": ("pilotfish.draft_heads.training.command", "fit an MTP head to a checkpoint's trunk"),
    "draft-vocab": (
        "pilotfish.draft_heads.training.draft_vocab",
        "choose the ids that drafts are drawn from, by a text",
    ),
}
"""Sub-commands that read their own flags: the module, and what it does."""
UNWRITABLE = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT)
"""Who reads our output has gone, as `head` does, or its disk is full."""
READ_CHATS = ("train-head", "draft-vocab")
"""Sub-commands whose texts may be chats: they are given the checkpoint's template."""


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 2, and a line, for what the operator can set right; 1 for what may be right by itself later."""
    try:
        status = _main(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return status
    except OSError as error:
        if error.errno not in UNWRITABLE or error.filename is not None:
            raise
        # what is left to write would raise once more at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno != errno.EPIPE:
            print(f"pilotfish: cannot write: {error.strerror}", file=sys.stderr)
        return 1
    except PilotfishError as error:
        print(f"pilotfish: {error}", file=sys.stderr)
        return 1 if isinstance(error, BusyError) else 2
    except KeyboardInterrupt:
        return 130


def _main(given: list[str]) -> int:
    if given and given[0] in OWN_PARSERS:
        module, _ = OWN_PARSERS[given[0]]
        command = importlib.import_module(module).main
        if given[0] in READ_CHATS:
            from pilotfish.server.model_files import render_chat

            command = partial(command, render_chat=render_chat)
        return command(given[1:]) or 0
    args = build_parser().parse_args(given)
    if hasattr(args, "revision"):
        _fetch(args)
    run: Callable[[argparse.Namespace], int] = args.run
    return run(args)


def build_parser() -> Parser:
    parser = Parser(prog="pilotfish", usage="pilotfish COMMAND [FLAG ...]", description=pilotfish.__doc__)
    parser.add_argument("--version", action="version", version=f"pilotfish {pilotfish.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND [FLAG ...]", prog="pilotfish", required=True)
    usage = "pilotfish %s MODEL [FLAG ...]"
    apis = "OpenAI's chat, completions and Responses, Anthropic's Messages"
    what = f"Serves a checkpoint over HTTP: {apis}. The engine is a process of its own."
    help = f"serve a checkpoint: {apis}"
    _add_serve(commands.add_parser("serve", usage=usage % "serve", help=help, description=what))
    _add_generate(commands.add_parser("generate", usage=usage % "generate", help="complete one prompt in the terminal"))
    for name, (_, what) in OWN_PARSERS.items():
        commands.add_parser(name, help=what, add_help=False)
    key = commands.add_parser("key", help="make an API key: itself to stderr, its line for --api-key-file to stdout")
    key.add_argument("label", metavar="LABEL", help="what metrics call it")
    key.set_defaults(run=make_key)
    return parser


def _add_serve(parser: Parser) -> None:
    add_engine_flags(parser)
    group = parser.add_argument_group("endpoint")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    group.add_argument("--port", type=flags.port, default=8000, help="0 for any free one (default: %(default)s)")
    group.add_argument(
        "--served-model-name", nargs="+", metavar="NAME", help="names clients may ask for; the first is the default"
    )
    group.add_argument(
        "--any-model-name", action="store_true", help="answer to every model name, under the name that was asked for"
    )
    group.add_argument(
        "--api-key",
        nargs="+",
        metavar="KEY|@FILE",
        help=f"keys clients must send, or a file of them (a KEY shows in `ps`; ${KEY_VARIABLE} and a file do not)",
    )
    group.add_argument(
        "--api-key-file", type=Path, metavar="PATH", help="keys by digest, a line each (see `pilotfish key`); reread"
    )
    group.add_argument(
        "--metrics-port", type=flags.port, metavar="N", help="serve /metrics there and not to clients; plain HTTP"
    )
    group.add_argument("--metrics-host", metavar="HOST", help="address of the metrics' port (default: --host's)")
    group.add_argument("--uds", type=Path, metavar="PATH", help="Unix socket to listen on in place of host and port")
    group.add_argument(
        "--root-path", type=flags.root_path, default="", metavar="PATH", help="prefix under which a relay forwards"
    )
    group.add_argument("--no-page", action="store_true", help="no page to look at: GET / answers as /version does")
    group.add_argument(
        "--strict-fields", action="store_true", help="refuse every field that nobody here knows (default: say so only)"
    )
    group.add_argument("--ignore-unknown-fields", action="store_true", help=argparse.SUPPRESS)  # is the default now
    _add_tls_flags(parser.add_argument_group("TLS"))
    _add_cors_flags(parser.add_argument_group("pages of other origins (CORS)"))
    group = add_answer_flags(parser)
    group.add_argument(
        "--reasoning-parser",
        choices=("auto", "none", "qwen3"),
        default="auto",
        help="tell reasoning from content (default: auto, where the chat template writes </think>)",
    )
    group.add_argument(
        "--reasoning-config",
        type=flags.reasoning_end,
        dest="reasoning_end",
        default='{"reasoning_end_str": "</think>"}',
        metavar="JSON",
        help="what ends a spent thinking budget (default: </think>), vLLM's JSON: "
        '{"reasoning_end_str": "\\nNow the answer.\\n</think>"}',
    )
    group.add_argument(
        "--loop-guard",
        type=flags.loop_rule,
        nargs="?",
        const="4:256",
        metavar="N:M",
        help="end a text whose last tokens have come N times in a row, over at least M tokens; a thinking block is"
        " closed (default: off; without a value: %(const)s; a request's `loop_guard` goes first)",
    )
    group.add_argument(
        "--late-system",
        choices=("keep", "front"),
        default="keep",
        help="system messages that do not lead keep their place, as marked user turns where the template wants one"
        " system message, or all lead (default: %(default)s)",
    )
    group.add_argument(
        "--default-chat-template-kwargs",
        type=flags.json_object,
        default="{}",
        metavar="JSON",
        help="the template's switches where a request says nothing of them (default: {}), "
        'e.g. {"preserve_thinking": true}',
    )
    group.add_argument(
        "--volatile-lines",
        choices=("drop", "keep"),
        default="drop",
        help="lines that clients put into system prompts and change with every request (docs/api.md has the list):"
        " leave them out, or keep them, and read every prompt anew (default: %(default)s)",
    )
    group.add_argument(
        "--tool-call-parser",
        choices=("auto", "none", "qwen3_coder", "qwen3_xml"),
        default="auto",
        help="read tool calls (default: auto, where the chat template writes <function=)",
    )
    group.add_argument(
        "--stream-tool-arguments",
        action="store_true",
        help="chat streams tell calls as they are written: clients may run one that is cut off",
    )
    group.add_argument(
        "--enable-auto-tool-choice", action="store_true", help="as vLLM's; on wherever tool calls are read"
    )
    group = parser.add_argument_group("operation")
    group.add_argument(
        "--prefix-cache-isolation",
        choices=("none", "key"),
        default="none",
        help="key: prompts share what was read of them with those of the same API key alone, so that no other key can"
        " time what they hold (default: %(default)s; `cache_salt` does it by request)",
    )
    group.add_argument(
        "--log-requests",
        "--enable-log-requests",
        action="store_true",
        help="a line of JSON to stdout for each request that has ended, without its text",
    )
    group.add_argument("--log-prompts", action="store_true", help="the same, with prompts")
    group.add_argument(
        "--max-waiting",
        type=flags.count,
        default=256,
        metavar="N",
        help="requests queued before 503 (default: %(default)s)",
    )
    group.add_argument(
        "--max-connections",
        type=flags.count,
        default=4096,
        metavar="N",
        help="then the longest idle one goes, without a key first; as open files allow (default: %(default)s)",
    )
    group.add_argument(
        "--audit-rate",
        type=flags.share_or_zero,
        default=0.0,
        metavar="SHARE",
        help="share of finished requests decoded again at k = 0 while idle, and compared (default: none)",
    )
    group.add_argument(
        "--cost-table",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="time rounds at k = 0 and k before serving: some seconds of start for a break-even that is measured"
        " (default: on)",
    )
    group.add_argument(
        "--restart-engine",
        type=flags.count_or_zero,
        default=3,
        metavar="N",
        help="restarts of a failed engine in 10 minutes, then the server ends with status 1 (default: %(default)s)",
    )
    group.add_argument(
        "--engine-timeout",
        type=flags.seconds,
        default=300,
        metavar="SECONDS",
        help="an engine that does not answer for so long, longer than any step takes, has failed; 0: never "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--shutdown-timeout",
        type=flags.seconds,
        default=30,
        metavar="SECONDS",
        help="time for running requests to end (default: %(default)s)",
    )
    parser.set_defaults(run=serve)


def _add_tls_flags(group: argparse._ArgumentGroup) -> None:
    """vLLM's names."""
    group.add_argument("--ssl-certfile", type=Path, metavar="PATH", help="certificate chain (PEM): serve HTTPS")
    group.add_argument("--ssl-keyfile", type=Path, metavar="PATH", help="its key, if that is not in the same file")
    group.add_argument("--ssl-ca-certs", type=Path, metavar="PATH", help="authorities that clients' certificates want")
    group.add_argument(
        "--ssl-cert-reqs",
        type=int,
        choices=(0, 1, 2),
        default=0,
        help="certificates of clients: 0 not asked for, 1 checked if sent, 2 required (default: %(default)s)",
    )
    group.add_argument("--enable-ssl-refresh", action="store_true", help="reread certificate and key when they change")


def _add_cors_flags(group: argparse._ArgumentGroup) -> None:
    """vLLM's names, and with API keys its defaults."""
    anything = '["*"]'
    group.add_argument(
        "--allowed-origins",
        type=flags.origins,
        metavar="JSON",
        help='whose pages may call this server (default: ["*"] with API keys, else those of this machine)',
    )
    group.add_argument(
        "--allowed-hosts",
        type=flags.hosts,
        default="[]",
        metavar="JSON",
        help="without API keys: names by which pages may call it, beside those of this machine (default: none), "
        'e.g. ["llm.example"]',
    )
    group.add_argument(
        "--allowed-methods", type=flags.methods, default=anything, metavar="JSON", help="default: %(default)s"
    )
    group.add_argument(
        "--allowed-headers", type=flags.headers, default=anything, metavar="JSON", help="default: %(default)s"
    )
    group.add_argument(
        "--allow-credentials", action="store_true", help="cookies and client certificates; not for any origin at all"
    )


def _add_generate(parser: Parser) -> None:
    add_engine_flags(parser)
    add_answer_flags(parser)
    parser.add_argument("--prompt", metavar="TEXT", required=True, help="the text to go on with")
    parser.add_argument("--chat", action="store_true", help="put the prompt through the chat template")
    parser.add_argument(
        "--max-tokens", type=flags.count, metavar="N", default=128, help="of the answer (default: %(default)s)"
    )
    parser.add_argument("--temperature", type=float, metavar="T", help="0 is greedy (default: the checkpoint's)")
    parser.add_argument("--seed", type=int, metavar="N", default=0, help="of the sampling noise (default: %(default)s)")
    parser.add_argument("--ignore-eos", action="store_true", help="go on after the end of the text")
    parser.set_defaults(run=generate)


def engine_options(args: argparse.Namespace) -> Any:
    """EngineOptions from the flags, which bear the names of its fields."""
    from pilotfish.engine.options import EngineOptions

    given = vars(args) | (args.speculative_config or {})
    return EngineOptions(**{name: given[name] for name in EngineOptions.__struct_fields__ if name in given})


def _fetch(args: argparse.Namespace) -> None:
    """A hub id becomes the folder of its files, and stays the name it is served by. Raises CheckpointError."""
    from pilotfish.engine.checkpoint.hub import resolve_model

    folder = str(resolve_model(args.model, args.revision, args.download_dir))
    if folder != str(Path(args.model)) and getattr(args, "served_model_name", ()) is None:
        args.served_model_name = [args.model]
    args.model = folder


def serve(args: argparse.Namespace) -> int:
    from pilotfish.server.serve import serve_forever

    return serve_forever(args, engine_options(args), _api_keys(args.api_key or ()))


def _api_keys(given: Sequence[str]) -> list[str]:
    """Those of the flag, of the files that it names, or else of the environment. Raises KeyFileError."""
    from pilotfish.server.http.auth import KeyFileError, read_plain_keys

    if not given:
        return [key for key in (os.environ.get(name, "").strip() for name in KEY_VARIABLES) if key][:1]
    keys = [key for word in given for key in (read_plain_keys(Path(word[1:])) if word.startswith("@") else [word])]
    if not all(map(str.strip, keys)):
        raise KeyFileError("--api-key: want keys that are not empty")
    return keys


def make_key(args: argparse.Namespace) -> int:
    from pilotfish.server.http import auth

    key = auth.make_key()
    try:
        line = auth.key_line(args.label, key)
    except ValueError as error:
        print(f"pilotfish: {error}", file=sys.stderr)
        return 2
    print(line)
    print(key, file=sys.stderr)
    return 0


def generate(args: argparse.Namespace) -> int:
    from pilotfish.server.generate import run

    return run(args, engine_options(args), args.core)


if __name__ == "__main__":
    sys.exit(main())
