"""`pilotfish generate`: one prompt through the engine in this process, text to stdout, numbers to stderr."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pilotfish.engine.errors import OptionError
from pilotfish.engine.link.core import EngineCore
from pilotfish.engine.link.messages import Ready, RequestOutput, Submit
from pilotfish.engine.link.process import load_factory
from pilotfish.server.chat.request import ChatRequest
from pilotfish.server.completions.request import CompletionRequest
from pilotfish.server.errors import BadRequest
from pilotfish.server.model_files import ModelFiles, load_model_files
from pilotfish.server.plan import Context, plan_chat, plan_completion
from pilotfish.server.text.detokenize import Detokenizer

if TYPE_CHECKING:
    from pilotfish.engine.options import EngineOptions


def run(args: argparse.Namespace, engine: EngineOptions, core_name: str) -> int:
    """Prints the text as it comes, then tokens/s and the acceptance length. The exit status. Raises PilotfishError."""
    files = load_model_files(
        Path(args.model),
        generation_config=args.generation_config,
        override=args.override_generation_config,
        chat_template=args.chat_template,
    )
    core: EngineCore = load_factory(core_name)(engine)
    outputs: list[RequestOutput] = []
    detokenizer = Detokenizer(files.tokenizer.token_bytes, files.tokenizer.special_ids)
    core.submit(_request(args, files, core.ready))
    first = time.perf_counter()
    for output in _outputs(core):
        if not outputs:
            first = time.perf_counter()
        outputs.append(output)
        shown = output.token_ids[:-1] if output.stop_token_id is not None else output.token_ids
        print("".join(map(detokenizer.push, shown)), end="", flush=True)
    print(detokenizer.flush())
    if outputs[-1].finish_reason == "error":
        print(f"pilotfish: {outputs[-1].error}", file=sys.stderr)
        return 1
    print(_summary(outputs, time.perf_counter() - first), file=sys.stderr)
    return 0


def _request(args: argparse.Namespace, files: ModelFiles, ready: Ready) -> Submit:
    """What the server would ask the engine for this prompt. Raises OptionError."""
    asked: dict[str, Any] = {"max_tokens": args.max_tokens, "temperature": args.temperature}
    asked |= {"seed": args.seed, "ignore_eos": args.ignore_eos}
    context = Context(model=args.model, files=files, ready=ready, arrived=0.0)
    try:
        if args.chat:
            messages = [{"role": "user", "content": args.prompt}]
            plan = plan_chat(ChatRequest(messages=messages, **asked), context)
        else:
            plan = plan_completion(CompletionRequest(prompt=args.prompt, **asked), context)
    except BadRequest as error:
        raise OptionError(error.message) from None
    return Submit(request_id="generate", prompt_token_ids=plan.prompts[0].token_ids, sampling=plan.sampling[0])


def _outputs(core: EngineCore) -> Iterator[RequestOutput]:
    while core.has_work():
        report = core.step()
        yield from report.outputs if report else ()


def _summary(outputs: list[RequestOutput], seconds: float) -> str:
    """Rates after the first token; the acceptance length over the rounds."""
    num_tokens = sum(len(output.token_ids) for output in outputs)
    rounds = [output for output in outputs if output.round and output.token_ids]
    later = num_tokens - len(outputs[0].token_ids)
    text = f"{num_tokens} tokens, {later / seconds:.1f} tokens/s" if seconds > 0 else f"{num_tokens} tokens"
    if rounds:
        length = sum(len(output.token_ids) for output in rounds) / len(rounds)
        drafted = sum(output.num_drafted for output in rounds)
        accepted = sum(output.num_accepted for output in rounds)
        text += f", acceptance length {length:.2f} ({accepted} of {drafted} drafts accepted)"
    return text
