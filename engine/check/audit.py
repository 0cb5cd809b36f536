"""`pilotfish audit MODEL`: proof, on this checkpoint and machine, that speculation changes no token and no bit.

Every request is first decoded alone, one row at a time (k = 0). Then all of them again for each k, in batches of each
size, once with the head's own drafts and once with forced drafts that agree for 0, 1, .. k tokens in turn. Compared for
every committed row: the output of each layer half, the logits, the penalties' history, the chosen token, the head's
hidden state and its next draft, all bit for bit. The first difference is named by request, position and tensor. A
faulty head changes speed and never text, so its acceptance is shown beside what a sound one reaches teacher-forced.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tqdm import tqdm

from pilotfish.engine.assemble import assemble
from pilotfish.engine.checkpoint.hub import resolve_model
from pilotfish.engine.checkpoint.load import load_weights
from pilotfish.engine.checkpoint.names import is_mtp
from pilotfish.engine.checkpoint.recognise import open_checkpoint
from pilotfish.engine.checkpoint.sidecar import attach_head
from pilotfish.engine.errors import OptionError, PilotfishError
from pilotfish.engine.link.messages import SamplingParams, Submit, ThinkingBudget
from pilotfish.engine.loop import EngineLoop
from pilotfish.engine.model.build import Model, build_model
from pilotfish.engine.options import KV_CACHE_DTYPES, MAX_DEPTH, EngineOptions
from pilotfish.engine.parser import Parser
from pilotfish.engine.plan import Plan, make_plan
from pilotfish.engine.sequence import Sequence
from pilotfish.engine.speculation import speculative_config

TEXTS = (
    'def fibonacci(n: int) -> int:\n    """The n-th Fibonacci number."""\n    ',
    "The history of the sea is written in its harbours. In the oldest of them",
    "从前有一座山，山里有一座庙，庙里",
    "<|im_start|>user\nWrite a function that reverses a list.<|im_end|>\n<|im_start|>assistant\n",
    "class Config:\n    def __init__(self, path):\n        self.path = path\n\n    def load(self):\n" * 8,
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16,",
)
MODES: dict[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0),
    "sampled": SamplingParams(temperature=0.8, top_k=40, top_p=0.95),
    "penalised": SamplingParams(
        temperature=0.7,
        min_p=0.02,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        repetition_penalty=1.1,
        logit_bias={1: 1.5},
        min_tokens=8,
        bad_words_token_ids=((1,), (2, 3), (4, 5, 6)),
        thinking=ThinkingBudget(num_tokens=12, start_token_id=None, end_token_id=8, closing=(7, 8)),
    ),
}
ALWAYS_KEPT = ("prefill.logits", "draft")


@dataclass(frozen=True)
class Finding:
    """Where a run first left the reference."""

    run: str
    request: str
    position: int
    tensor: str

    def __str__(self) -> str:
        return f"{self.run}: request {self.request}, position {self.position}: {self.tensor} differs"


@dataclass
class Transcript:
    """One request's run: its tokens from the first generated one; for each position, a digest of each tensor's row."""

    tokens: list[int] = field(default_factory=list)
    rows: dict[int, dict[str, bytes]] = field(default_factory=dict)


@dataclass(frozen=True)
class RunResult:
    """Outcome of one (k, batch, drafts) run."""

    name: str
    findings: list[Finding]
    num_tokens: int
    num_rows: int
    num_rounds: int
    num_drafted: int
    num_accepted: int
    num_first_drafted: int
    num_first_accepted: int

    @property
    def first_draft_acceptance(self) -> float:
        """Share of rounds with a draft whose first draft was accepted."""
        return self.num_first_accepted / self.num_first_drafted if self.num_first_drafted else 0.0

    @property
    def acceptance_length(self) -> float:
        """Committed tokens a sequence and round."""
        return 1 + self.num_accepted / self.num_rounds if self.num_rounds else 1.0


class Recorder:
    """An observer that files digests by request and keeps only rows whose input was committed. Without `rows` it looks
    at tokens alone."""

    def __init__(self, loop: EngineLoop, rows: bool = True):
        self.loop = loop
        self.transcripts: dict[str, Transcript] = {}
        self._seen: list[tuple[str, int, str, bytes]] = []
        if rows:
            loop.runner.observers.append(self.observe)

    def observe(self, name: str, rows: torch.Tensor, slots: list[int], positions: list[int]) -> None:
        scheduler = self.loop.scheduler
        owners = {sequence.slot: sequence.request_id for sequence in (*scheduler.running, *scheduler.retired)}
        table = rows.detach().to("cpu").contiguous()
        flat = table.reshape(len(slots), -1).view(torch.uint8).numpy()
        for row, slot, position in zip(flat, slots, positions, strict=True):
            digest = blake2b(row.tobytes(), digest_size=8).digest()
            self._seen.append((owners[slot], position, name, digest))

    def step(self) -> list[int]:
        """One engine step. Of it: rounds of sequences, drafted and accepted tokens, first drafts and accepted ones."""
        prompts = {s.request_id: len(s.prompt) for s in (*self.loop.scheduler.running, *self.loop.scheduler.waiting)}
        report = self.loop.step()
        totals = [0] * 5
        for output in report.outputs if report is not None else ():
            if output.error is not None:
                raise RuntimeError(f"request {output.request_id}: {output.error}")
            transcript = self.transcripts.setdefault(output.request_id, Transcript())
            transcript.tokens += output.token_ids
            totals[0] += output.round
            totals[1] += output.num_drafted
            totals[2] += output.num_accepted
            totals[3] += output.num_drafted > 0
            totals[4] += output.num_accepted > 0
        for request, position, name, digest in self._seen:
            transcript = self.transcripts.setdefault(request, Transcript())
            # the last token is committed but not yet an input: its own row has not been run
            if name in ALWAYS_KEPT or position < prompts[request] + len(transcript.tokens) - 1:
                transcript.rows.setdefault(position, {})[name] = digest
        self._seen.clear()
        return totals


def compare(
    run: str, wanted: dict[str, Transcript], got: dict[str, Transcript], prompt_lengths: dict[str, int]
) -> list[Finding]:
    """The first difference of each request, in order of position, then of computation."""
    findings = []
    for request, reference in wanted.items():
        place = _first_difference(reference, got[request], prompt_lengths[request])
        if place is not None:
            findings.append(Finding(run, request, *place))
    return findings


def _first_difference(reference: Transcript, other: Transcript, prompt_length: int) -> tuple[int, str] | None:
    """A token's position is that of the row that chose it; at one position the tensors come before the token."""
    wrong = [i for i, (a, b) in enumerate(zip(reference.tokens, other.tokens, strict=False)) if a != b]
    if not wrong and len(reference.tokens) != len(other.tokens):
        wrong = [min(len(reference.tokens), len(other.tokens))]
    token_place = (prompt_length - 1 + wrong[0], "tokens") if wrong else None
    for position in sorted(other.rows):
        if token_place is not None and position > token_place[0]:
            break
        wanted = reference.rows.get(position, {})
        for name, digest in other.rows[position].items():
            if wanted.get(name, digest) != digest:
                return position, name
    return token_place


class Auditor:
    """Runs requests over one loaded model at any depth and batch size."""

    def __init__(self, model: Model, plan: Plan, requests: list[Submit]):
        self.model, self.plan, self.requests = model, plan, requests
        self.prompt_lengths = {request.request_id: len(request.prompt_token_ids) for request in requests}
        self.reference: dict[str, Transcript] = {}

    def run_reference(self) -> None:
        """Every request alone at k = 0: with the head off, then with a head that repairs one row a round and drafts."""
        plain: dict[str, Transcript] = {}
        for request in self.requests:
            plain |= self._transcripts(0, 1, [request])[0].transcripts
            if self.model.head is None:
                continue
            alone = Submit(
                request_id=request.request_id,
                prompt_token_ids=request.prompt_token_ids,
                sampling=request.sampling,
                speculative_k=0,
            )
            self.reference |= self._transcripts(1, 1, [alone])[0].transcripts
        self.reference = self.reference or plain
        findings = compare("k = 0, head off", self.reference, plain, self.prompt_lengths)
        if findings:
            raise RuntimeError(f"the head's presence changes plain decoding: {findings[0]}")

    def run(self, depth: int, batch: int, forced: bool) -> RunResult:
        """All requests at depth k, at most `batch` at once, compared with the reference."""
        name = f"k = {depth}, batch {batch}, {'forced' if forced else 'own'} drafts"
        recorder, totals = self._transcripts(depth, batch, self.requests, forced)
        got = recorder.transcripts
        findings = compare(name, self.reference, got, self.prompt_lengths)
        if self.plan.fused:
            # rounds in view were launched one operator after the other
            replayed = self._transcripts(depth, batch, self.requests, forced, captured=True)[0].transcripts
            findings += compare(f"{name}, captured", self.reference, replayed, self.prompt_lengths)
        return RunResult(
            name,
            findings,
            sum(len(t.tokens) for t in got.values()),
            sum(len(names) for t in got.values() for names in t.rows.values()),
            *totals,
        )

    def _transcripts(
        self, depth: int, batch: int, requests: list[Submit], forced: bool = False, captured: bool = False
    ) -> tuple[Recorder, list[int]]:
        plan = dataclasses.replace(self.plan, depth=depth, max_num_seqs=batch, captured=captured)
        loop = EngineLoop(assemble(self.model, plan, len(requests), 0, 0.0))
        recorder = Recorder(loop, rows=not captured)
        for request in requests:
            loop.submit(request)
        totals = [0] * 5
        agreeing = 0
        while loop.has_work():
            totals = [total + more for total, more in zip(totals, recorder.step(), strict=True)]
            for sequence in loop.scheduler.running if forced else ():
                if sequence.is_prefilled:
                    self._force(loop, sequence, depth, agreeing % (depth + 1))
                    agreeing += 1
        return recorder, totals

    def _force(self, loop: EngineLoop, sequence: Sequence, depth: int, agreeing: int) -> None:
        """Drafts that agree with the reference for `agreeing` tokens, then differ."""
        state, slot = loop.runner.state, sequence.slot
        position = int(state.length[slot])
        known = self.reference[sequence.request_id].tokens[position + 1 - len(sequence.prompt) :][:depth]
        drafts = known + [0] * (depth - len(known))
        vocab = self.model.config.vocab_size
        drafts = [token if i < agreeing else (token + 1) % vocab for i, token in enumerate(drafts)]
        state.drafts[slot, :depth] = torch.tensor(drafts, device=state.device)
        left = int(state.limit[slot]) - position - 2
        state.num_offered[slot] = max(0, min(depth, left))

    def first_draft_acceptance(self) -> float:
        """Share of positions where the reference's head drafts the token that came: what depth 1 must accept."""
        hits = total = 0
        for request, transcript in self.reference.items():
            start = self.prompt_lengths[request]
            for position, names in transcript.rows.items():
                index = position + 1 - start
                if "draft" in names and index < len(transcript.tokens):
                    token = torch.tensor([transcript.tokens[index]]).view(torch.uint8).numpy().tobytes()
                    hits += names["draft"] == blake2b(token, digest_size=8).digest()
                    total += 1
        return hits / total if total else 0.0


def make_requests(prompts: list[list[int]], max_tokens: int, eos: tuple[int, ...], vocab: int) -> list[Submit]:
    """Every prompt in every mode, seeds fixed, ids that say both."""
    requests = []
    for number, prompt in enumerate(prompts):
        for mode, params in MODES.items():
            bias = {token: value for token, value in params.logit_bias.items() if token < vocab}
            fields = {**{name: getattr(params, name) for name in params.__struct_fields__}, "logit_bias": bias}
            fields |= {"max_tokens": max_tokens, "seed": 1000 + number, "eos_token_ids": eos}
            sampling = SamplingParams(**fields)
            requests.append(Submit(request_id=f"{number}-{mode}", prompt_token_ids=prompt, sampling=sampling))
    return requests


def load_prompts(folder: Path, count: int, vocab: int) -> list[list[int]]:
    """Built-in texts through the checkpoint's tokenizer, or random ids where it has none; all of different lengths."""
    file = folder / "tokenizer.json"
    if file.exists():
        tokenizer = Tokenizer.from_file(str(file))
        prompts = [tokenizer.encode(text).ids for text in TEXTS]
    else:
        generator = torch.Generator().manual_seed(0)
        lengths = (5, 64, 17, 258, 130, 40)
        prompts = [torch.randint(0, vocab, (n,), generator=generator).tolist() for n in lengths]
    return [prompts[i % len(prompts)] for i in range(count)]


def audit(auditor: Auditor, depths: list[int], batches: list[int]) -> Iterator[RunResult]:
    """Runs every configuration, the reference first."""
    auditor.run_reference()
    own = [False] if auditor.model.head is not None else []
    runs = [(k, b, forced) for k in depths for b in batches for forced in (*own, True)]
    for depth, batch, forced in tqdm(runs, desc="audit", unit="run", disable=not sys.stderr.isatty()):
        yield auditor.run(depth, batch, forced)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="pilotfish audit", description=__doc__.split("\n\n")[0], formatter_class=argparse.HelpFormatter
    )
    parser.add_argument("model", help="checkpoint folder or hub id")
    parser.add_argument("--revision", help="branch, tag or commit of a hub id")
    parser.add_argument("--draft-head", metavar="PATH", help="a folder or file with an MTP head, as for serve")
    parser.add_argument(
        "--speculative-config", type=speculative_config, metavar="JSON", help="as for serve; its k is the --max-depth"
    )
    parser.add_argument("--max-depth", type=int, default=MAX_DEPTH, help="largest k to check (default: %(default)s)")
    parser.add_argument("--max-batch", type=int, default=4, help="largest batch (default: %(default)s)")
    parser.add_argument("--num-prompts", type=int, default=3, help="prompts, each in every mode (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=24, help="tokens a request (default: %(default)s)")
    parser.add_argument("--dtype", choices=("auto", "bfloat16", "float32"), default="auto")
    parser.add_argument("--kv-cache-dtype", choices=KV_CACHE_DTYPES, default="auto", help="as for serve")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--kernels", choices=("auto", "torch", "fused"), default="auto", help="as for serve")
    parser.add_argument("--json", action="store_true", help="one JSON object a run instead of the table")
    args = parser.parse_args(argv)
    args.speculation = {"draft_head": args.draft_head} | (args.speculative_config or {})
    args.max_depth = args.speculation.pop("num_speculative_tokens", args.max_depth)
    for name, most in (("max_depth", MAX_DEPTH), ("max_batch", 64), ("num_prompts", 64), ("max_tokens", 4096)):
        value = getattr(args, name)
        if not 1 <= value <= most:
            parser.error(f"--{name.replace('_', '-')}: want 1..{most}, got {value}")
    return args


def make_auditor(args: argparse.Namespace) -> Auditor:
    """Loads the checkpoint with caches for the largest depth and batch."""
    checkpoint = open_checkpoint(args.model)
    if args.speculation["draft_head"] is not None:
        checkpoint = attach_head(checkpoint, args.speculation["draft_head"])
    config = checkpoint.config
    has_head = checkpoint.has_mtp or args.speculation.get("speculative_method") == "ngram"
    if not has_head:
        print(f"no head to audit ({checkpoint.mtp_problem or 'none in the checkpoint'}): forced drafts only")
    prompts = load_prompts(Path(args.model), args.num_prompts, config.vocab_size)
    longest = max(map(len, prompts)) + args.max_tokens
    if longest > config.max_position_embeddings:
        raise OptionError(f"--max-tokens: {longest} tokens in all, the model takes {config.max_position_embeddings}")
    options = EngineOptions(
        model=args.model,
        num_speculative_tokens=args.max_depth if has_head else 0,
        **args.speculation,
        max_num_seqs=args.max_batch,
        max_model_len=longest,
        dtype=args.dtype,
        kv_cache_dtype=args.kv_cache_dtype,
        device=args.device,
        kernels=args.kernels,
    )
    plan = dataclasses.replace(make_plan(options, checkpoint), depth=args.max_depth)
    weights = load_weights(checkpoint, plan.device)
    if plan.lookup is not None:
        weights = {name: weight for name, weight in weights.items() if not is_mtp(name)}
    model = build_model(weights, config, plan.cache_sizes, plan.dtype, plan.device, plan.fused)
    if plan.lookup is not None:
        model = dataclasses.replace(model, head=plan.lookup)
    return Auditor(model, plan, make_requests(prompts, args.max_tokens, config.eos_token_ids, config.vocab_size))


@torch.inference_mode()
def main(argv: list[str] | None = None) -> int:
    """Exit status 0 if every run agrees, 1 if one does not, 2 if the audit could not run."""
    args = _parse(argv)
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.ERROR)
    try:
        args.model = str(resolve_model(args.model, args.revision))
        auditor = make_auditor(args)
    except PilotfishError as error:
        print(f"pilotfish audit: {error}", file=sys.stderr)
        return 2
    plan = auditor.plan
    if not args.json:
        dtypes = f"{str(plan.dtype)[6:]}, KV cache {str(plan.cache_sizes.kv_dtype)[6:]}"
        print(f"{args.model} on {plan.device}, {dtypes}; {len(auditor.requests)} requests")
    failed = 0
    for result in audit(auditor, list(range(1, args.max_depth + 1)), list(range(1, args.max_batch + 1))):
        failed += bool(result.findings)
        _print_result(result, args.json)
    if not args.json:
        print(f"head, first draft: {auditor.first_draft_acceptance():.3f} of positions, teacher-forced")
        print(
            "FAIL: output depends on speculation" if failed else "PASS: the same tokens and bits for every k and batch"
        )
    return 1 if failed else 0


def _print_result(result: RunResult, as_json: bool) -> None:
    if as_json:
        row = dataclasses.asdict(result) | {"acceptance_length": result.acceptance_length}
        row |= {"first_draft_acceptance": result.first_draft_acceptance}
        print(json.dumps(row), flush=True)
        return
    verdict = "FAIL" if result.findings else "ok"
    line = f"{result.name:<34} {verdict:<4} {result.num_tokens:>5} tokens {result.num_rows:>7} rows"
    acceptance = f"acceptance length {result.acceptance_length:.2f}, first draft {result.first_draft_acceptance:.3f}"
    tqdm.write(f"{line}  {acceptance}", file=sys.stdout)
    for finding in result.findings:
        tqdm.write(f"    {finding}", file=sys.stdout)
