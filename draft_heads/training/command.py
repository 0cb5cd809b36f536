"""`pilotfish train-head MODEL --text ... --out OUT`: an MTP head for a frozen trunk, as a file for --draft-head.

OUT holds the head (`mtp.safetensors`), `training.json` with what was measured, and while the run lasts a state to go on
from, in `.train-head`.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from pilotfish.draft_heads.training.fit import Figures, Fit, FitOptions
from pilotfish.draft_heads.training.hidden import HiddenCache, HiddenStates
from pilotfish.draft_heads.training.module import TrainableHead
from pilotfish.draft_heads.training.texts import RenderChat, TextRows, cut_rows, make_rows, read_documents, stream_of
from pilotfish.engine.check.acceptance import PROMPT_TOKENS, Acceptance, cut_prompts, measure_acceptance
from pilotfish.engine.checkpoint.hub import resolve_model
from pilotfish.engine.checkpoint.layouts import Module
from pilotfish.engine.checkpoint.load import Weight, load_weights
from pilotfish.engine.checkpoint.names import is_mtp
from pilotfish.engine.checkpoint.recognise import Checkpoint, open_checkpoint
from pilotfish.engine.checkpoint.sidecar import attach_head
from pilotfish.engine.checkpoint.tokenizer import read_tokenizer
from pilotfish.engine.command_line.output import check_folder
from pilotfish.engine.command_line.parser import Parser, whole_number
from pilotfish.engine.convert.write import write_tensors, write_text
from pilotfish.engine.errors import OptionError, PilotfishError
from pilotfish.engine.model.build import Model, build_model, with_head
from pilotfish.engine.options import MAX_DEPTH, EngineOptions
from pilotfish.engine.plan import Plan, make_plan, reserved_pages
from pilotfish.kernels.attention import PAGE

HEAD_FILE, REPORT_FILE, STATE = "mtp.safetensors", "training.json", ".train-head"
NUM_PROMPTS, NUM_TOKENS, BATCH = 16, 64, 4
"""What decodes for the measurement: prompts from the held-out text, tokens after each, sequences at once."""
LEARNING_RATES = {"muon": 0.02, "adamw": 0.002}
ENCODED_AT_ONCE = 256
SHALLOW_SHARE = 0.4
"""The share of the steps from random weights that are for the first draft alone: as long as the rate is level."""
REFINING = 0.1
"""The share of these rates that a head takes which is there already."""


@dataclass(frozen=True)
class FrozenTrunk:
    """The frozen model, its own head's weights ({} without one), and its vocabulary matrices in the products' dtype."""

    checkpoint: Checkpoint
    plan: Plan
    model: Model
    own_head: dict[str, torch.Tensor]
    embedding: torch.Tensor
    lm_head: torch.Tensor

    def acceptance(self, head: dict[str, torch.Tensor], prompts: list[list[int]]) -> Acceptance:
        """How a head with these weights, `mtp.*`, would do where it is served."""
        weights: dict[str, Weight] = dict(head)
        return measure_acceptance(
            with_head(self.model, weights, self.plan.num_pages + 1), self.plan, prompts, NUM_TOKENS
        )


def main(argv: Sequence[str], render_chat: RenderChat) -> int:
    args = _parser().parse_args(argv)
    if args.num_threads:
        torch.set_num_threads(args.num_threads)
    try:
        _check(args)
        pays = train_head(args, render_chat)
    except PilotfishError as error:
        print(f"pilotfish: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        where = error.filename or args.out
        print(f"pilotfish: {where}: {error.strerror or error}; --resume goes on from what was saved", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\npilotfish: stopped; --resume goes on from the last step that was saved", file=sys.stderr)
        return 130
    return 0 if pays else 1


def train_head(args: argparse.Namespace, render_chat: RenderChat) -> bool:
    """Whether the head is better than none, and than the one before it. Raises PilotfishError naming the option or file
    at fault, and OSError where something cannot be written any more."""
    source = resolve_model(args.model, args.revision)
    rows = _read_rows(source, args, render_chat)
    trunk = _load_trunk(source, args)
    options = _options(args, trunk.plan.dtype)
    head = _initial_head(trunk, args)
    train, heldout = (_hidden_states(trunk, rows, args, part) for part in ("train", "heldout"))
    prompts = cut_prompts(rows.heldout.flatten().tolist(), NUM_PROMPTS)
    state = args.out / STATE
    _claim(args, _stamp(trunk.checkpoint, rows, options, args))
    fit = Fit(head.to(trunk.plan.device), trunk.embedding, trunk.lm_head, train, heldout, options)
    fit.load(state)
    report, before = _Report(state / REPORT_FILE), None
    own = f" and {args.own_tokens} of the trunk's own" if args.own_tokens else ""
    print(
        f"{rows.train.size} tokens to train on, {rows.heldout.size} held out, rows of {args.row_tokens}{own}",
        flush=True,
    )
    if trunk.own_head:
        before = report.once("before, with the head that was there", lambda: trunk.acceptance(trunk.own_head, prompts))
    _run(fit, args, state)
    write_tensors(args.out / HEAD_FILE, _weights(head))
    after = report.once("after", lambda: trunk.acceptance(_weights(head), prompts))
    write_text(args.out / REPORT_FILE, json.dumps(report.values, indent=1) + "\n")
    shutil.rmtree(state)
    if (worse := _worse(before, after)) is not None:
        print(f"NOT TO BE SERVED: {worse}; the head is in {args.out}")
        return False
    print(f"served by: pilotfish serve {args.model} --draft-head {args.out}")
    return True


def _worse(before: Acceptance | None, after: Acceptance) -> str | None:
    """Why one would not serve it; None: one would."""
    if not after.num_rounds:
        return "its acceptance could not be measured: no round of the held-out text drafted in full"
    if after.length == 1:
        return "none of its drafts was accepted"
    if before is not None and after.length < before.length:
        return f"acceptance fell from {before.length:.3f} to {after.length:.3f} tokens a round: the old head is better"
    return None


def _run(fit: Fit, args: argparse.Namespace, state: Path) -> None:
    every = args.eval_every or max(1, args.steps // 10)
    figures = fit.evaluate(args.eval_rows)
    with tqdm(total=args.steps, initial=fit.step_number, desc="training", unit="step", disable=None) as bar:
        tqdm.write(_line(fit.step_number, figures), file=sys.stdout)
        while fit.step_number < args.steps:
            step = fit.step()
            bar.update()
            bar.set_postfix_str(f"loss {sum(step.losses) / len(step.losses):.3f}, held out {figures.line()}")
            if fit.step_number % every == 0 or fit.step_number == args.steps:
                figures = fit.evaluate(args.eval_rows)
                tqdm.write(_line(fit.step_number, figures), file=sys.stdout)
                sys.stdout.flush()
            if fit.step_number % args.save_every == 0 or fit.step_number == args.steps:
                fit.save(state)


def _line(step: int, figures: Figures) -> str:
    loss = sum(figures.losses) / len(figures.losses)
    return f"step {step}: on held-out text, loss {loss:.3f}, first choice of the trunk drafted: {figures.line()}"


class _Report:
    """What was measured, kept over an interruption."""

    def __init__(self, file: Path):
        self.file = file
        self.values: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}

    def once(self, name: str, measure: Callable[[], Acceptance]) -> Acceptance:
        """Measures unless a run before this one did, and prints."""
        if name not in self.values:
            self.values[name] = dataclasses.asdict(measure())
            write_text(self.file, json.dumps(self.values))
        found = Acceptance(**self.values[name])
        print(f"acceptance, {name}: {found.line()}", flush=True)
        return found


# What is trained, on what


def _read_rows(source: Path, args: argparse.Namespace, render_chat: RenderChat) -> TextRows:
    config = open_checkpoint(source).config
    separator = config.eos_token_ids[0] if config.eos_token_ids else None
    if (length := args.row_tokens + args.own_tokens) > config.max_position_embeddings:
        own = f" with --own-tokens {args.own_tokens}" if args.own_tokens else ""
        raise OptionError(f"--row-tokens: the model takes {config.max_position_embeddings}, got {length}{own}")
    if args.heldout_text is None:
        return make_rows(document_ids(source, args.text, render_chat), separator, args.row_tokens, args.seed)
    heldout = cut_rows(stream_of(document_ids(source, args.heldout_text, render_chat), separator), args.row_tokens)
    train = cut_rows(stream_of(document_ids(source, args.text, render_chat), separator), args.row_tokens)
    for rows, flag in ((train, "--text"), (heldout, "--heldout-text")):
        if not len(rows):
            raise OptionError(f"{flag}: want at least {args.row_tokens} tokens")
    return TextRows(train, heldout)


def document_ids(source: Path, paths: list[Path], render_chat: RenderChat) -> list[list[int]]:
    """Token ids of each text. Raises PilotfishError naming the file."""
    tokenizer, ids = read_tokenizer(source), []
    documents = read_documents(paths, partial(render_chat, source))
    # some at a time: what the library gives takes far more room than the ids
    for begin in range(0, len(documents), ENCODED_AT_ONCE):
        part = tokenizer.encode_batch(documents[begin : begin + ENCODED_AT_ONCE], add_special_tokens=False)
        ids += [encoding.ids for encoding in part]
    largest, vocab_size = max(map(max, filter(None, ids)), default=0), open_checkpoint(source).config.vocab_size
    if largest >= vocab_size:
        raise OptionError(f"{source}: tokenizer.json gives token {largest}, the model has {vocab_size}")
    return ids


def _load_trunk(source: Path, args: argparse.Namespace) -> FrozenTrunk:
    checkpoint = open_checkpoint(source)
    if args.draft_head is not None:
        checkpoint = attach_head(checkpoint, args.draft_head)
    length = max(args.row_tokens, PROMPT_TOKENS + NUM_TOKENS) + 1
    options = EngineOptions(
        model=str(source),
        num_speculative_tokens=0,
        max_num_seqs=BATCH,
        max_model_len=min(length, checkpoint.config.max_position_embeddings),
        kv_cache_tokens=BATCH * reserved_pages(length, args.depths) * PAGE,
        dtype=args.dtype,
        device=args.device,
        enable_prefix_caching=False,
    )
    # the depth is set here: there may be no head yet
    changes: dict[str, Any] = {"depth": args.depths, "disabled_reason": None, "fused": False, "captured": False}
    plan = dataclasses.replace(make_plan(options, checkpoint), **changes)
    weights = load_weights(checkpoint, plan.device)
    own = {name: _plain(weights.pop(name)) for name in [name for name in weights if is_mtp(name)]}
    embedding = _plain(weights["model.embed_tokens.weight"]).to(plan.device, plan.dtype)
    lm_head = _plain(weights["lm_head.weight"]).to(plan.dtype) if "lm_head.weight" in weights else embedding
    model = build_model(weights, checkpoint.config, plan.cache_sizes, plan.dtype, plan.device)
    return FrozenTrunk(checkpoint, plan, model, own, embedding, lm_head)


def _plain(weight: Weight) -> torch.Tensor:
    return weight if isinstance(weight, torch.Tensor) else weight.dequantize()


def _initial_head(trunk: FrozenTrunk, args: argparse.Namespace) -> TrainableHead:
    config = trunk.checkpoint.config
    if args.init == "head" and not trunk.own_head:
        raise OptionError(f"--init: {trunk.checkpoint.mtp_problem or 'the checkpoint has no MTP head'}; want scratch")
    torch.manual_seed(args.seed)
    if args.init == "scratch":
        return TrainableHead(config)
    named = {name.removeprefix("mtp."): tensor.float().cpu() for name, tensor in trunk.own_head.items()}
    # a head may have fewer experts than the trunk's config says
    head = TrainableHead(dataclasses.replace(config, num_experts=len(named.get("layers.0.mlp.gate.weight", ()))))
    head.load_state_dict(named)
    return head


def _weights(head: TrainableHead) -> dict[str, torch.Tensor]:
    """The head's weights as they are written and served: BF16, under a checkpoint's names."""
    return {f"mtp.{name}": tensor.detach().to(torch.bfloat16) for name, tensor in head.state_dict().items()}


def _hidden_states(trunk: FrozenTrunk, rows: TextRows, args: argparse.Namespace, part: str) -> HiddenStates:
    texts = getattr(rows, part)
    if args.cache is None:
        return HiddenStates(trunk.model, texts, args.own_tokens)
    width, dtype = trunk.checkpoint.config.hidden_size, trunk.plan.dtype
    # a head from elsewhere changes no hidden state
    files = _files(module for name, module in trunk.checkpoint.modules.items() if not is_mtp(name))
    cache = HiddenCache(args.cache / part, texts, args.own_tokens, width, dtype, files)
    return HiddenStates(trunk.model, texts, args.own_tokens, cache)


def _options(args: argparse.Namespace, dtype: torch.dtype) -> FitOptions:
    usual = LEARNING_RATES[args.optimizer] * (REFINING if args.init == "head" else 1.0)
    rate = args.learning_rate if args.learning_rate is not None else usual
    shallow = int(args.steps * SHALLOW_SHARE) if args.init == "scratch" else 0
    fixed = (args.depths, args.seed, args.target, args.optimizer, dtype)
    return FitOptions(args.steps, args.batch_size, rate, *fixed, shallow)


# The folder


def _files(modules: Iterable[Module]) -> str:
    """What tells whether these are still the same."""
    files = {part.file for module in modules for part in module.parts.values()}
    return json.dumps([[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in sorted(files)])


def _stamp(checkpoint: Checkpoint, rows: TextRows, options: FitOptions, args: argparse.Namespace) -> str:
    """What must not change between a run and its continuation."""
    text = hashlib.blake2b(rows.train.tobytes() + rows.heldout.tobytes(), digest_size=16).hexdigest()
    fit = {name: str(value) for name, value in dataclasses.asdict(options).items()}
    return json.dumps(
        {
            "files": _files(checkpoint.modules.values()),
            "text": text,
            "own": args.own_tokens,
            "init": args.init,
            "fit": fit,
        }
    )


def _claim(args: argparse.Namespace, stamp: str) -> None:
    """Raises OptionError unless OUT is new, or was left by an interrupted run of the same kind."""
    state, known = args.out / STATE, args.out / STATE / "stamp.json"
    if not args.resume:
        if args.out.exists() and any(args.out.iterdir()):
            hint = "; --resume goes on with the run that was interrupted there" if known.exists() else ""
            raise OptionError(f"{args.out}: is there already; want a folder to be made{hint}")
        state.mkdir(parents=True, exist_ok=True)
        write_text(known, stamp)
    elif not known.exists():
        raise OptionError(f"--resume: {args.out} has no interrupted run")
    elif known.read_text() != stamp:
        raise OptionError(f"--resume: {args.out} was begun with another trunk, text or other options")


def _check(args: argparse.Namespace) -> None:
    check_folder(args.out, "--out")
    check_folder(args.cache, "--cache")
    for name in ("steps", "batch_size", "eval_rows", "save_every"):
        if getattr(args, name) < 1:
            raise OptionError(f"--{name.replace('_', '-')}: want at least 1, got {getattr(args, name)}")
    if args.own_tokens < 0:
        raise OptionError(f"--own-tokens: want at least 0, got {args.own_tokens}")
    if not 1 <= args.depths <= MAX_DEPTH:
        raise OptionError(f"--depths: want 1..{MAX_DEPTH}, got {args.depths}")
    if args.row_tokens < args.depths + 2:
        raise OptionError(
            f"--row-tokens: want at least {args.depths + 2} at depth {args.depths}, got {args.row_tokens}"
        )
    if args.learning_rate is not None and not args.learning_rate > 0:
        raise OptionError(f"--learning-rate: want above 0, got {args.learning_rate}")


def _parser() -> Parser:
    parser = Parser(
        prog="pilotfish train-head",
        description="Fits an MTP head to a frozen trunk.",
        formatter_class=argparse.HelpFormatter,
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="checkpoint folder or hub id")
    add("--revision", metavar="NAME", help="branch, tag or commit of a hub id")
    add("--draft-head", metavar="PATH", help="a head to start from in place of the checkpoint's own")
    add("--text", type=Path, nargs="+", required=True, metavar="PATH", help="files or folders; .jsonl is read by lines")
    add("--heldout-text", type=Path, nargs="+", metavar="PATH", help="to measure on (default: a twentieth of --text)")
    add("--out", type=Path, required=True, metavar="OUT", help="folder for the head")
    add(
        "--init",
        choices=("head", "scratch"),
        default="head",
        help="start from the head, or from random weights (default: %(default)s)",
    )
    add(
        "--target",
        choices=("trunk", "text"),
        default="trunk",
        help="learn the trunk's own distribution, or the text's tokens (default: %(default)s)",
    )
    add("--steps", type=int, default=2000, metavar="N", help="of training (default: %(default)s)")
    add("--batch-size", type=int, default=8, metavar="N", help="rows a step (default: %(default)s)")
    add("--row-tokens", type=int, default=512, metavar="N", help="tokens of a row (default: %(default)s)")
    add(
        "--own-tokens",
        type=int,
        default=0,
        metavar="N",
        help="that the trunk writes behind each row, to train on too (default: none)",
    )
    add("--depths", type=int, default=3, metavar="K", help="drafts to train for (default: %(default)s)")
    add("--optimizer", choices=tuple(LEARNING_RATES), default="muon", help="for the matrices (default: %(default)s)")
    add("--learning-rate", type=float, metavar="RATE", help="default: muon 0.02, adamw 0.002; a tenth with --init head")
    add("--cache", type=Path, metavar="DIR", help="keep the trunk's hidden states here for later epochs and runs")
    add("--resume", action="store_true", help="go on with an interrupted run")
    add("--seed", type=int, default=0, metavar="N", help="of order and random weights (default: %(default)s)")
    add(
        "--eval-rows",
        type=int,
        default=32,
        metavar="N",
        help="held-out rows measured on the way (default: %(default)s)",
    )
    add("--eval-every", type=int, metavar="STEPS", help="between two such measurements (default: a tenth of the run)")
    add("--save-every", type=int, default=100, metavar="STEPS", help="between two saved states (default: %(default)s)")
    add(
        "--dtype",
        choices=("auto", "bfloat16", "float32"),
        default="auto",
        help="of products (default: auto); weights are float32",
    )
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: auto, a GPU if there is one")
    add("--num-threads", type=whole_number(1), metavar="N", help="CPU threads (default: torch's)")
    return parser
