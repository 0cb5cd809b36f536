"""How far a quantised checkpoint is from its source on a given text: perplexities, the divergence of the logits, and
how many drafts each model's head gets accepted.

Both models see the same tokens (teacher-forced), by the engine's own prefill on the CPU, one after the other: of the
first only the final hidden rows and its output head stay while the second is loaded. T = tokens of the text.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from pilotfish.engine.check.acceptance import Acceptance, cut_prompts, measure_acceptance
from pilotfish.engine.checkpoint.load import load_weights
from pilotfish.engine.checkpoint.recognise import Checkpoint, open_checkpoint
from pilotfish.engine.checkpoint.tokenizer import read_tokenizer
from pilotfish.engine.errors import OptionError
from pilotfish.engine.model.build import CacheSizes, Model, build_model
from pilotfish.engine.plan import Plan, reserved_pages
from pilotfish.engine.round.prompt import read_text
from pilotfish.kernels.attention import PAGE, pages_for
from pilotfish.kernels.linear import TILE_ROWS, AnyLinear, cpu_multiplies_bf16

CPU = torch.device("cpu")
DEPTH, NUM_PROMPTS, NUM_TOKENS, BATCH = 3, 8, 48, 4
"""What measures acceptance: k, places of the text to go on from, tokens at each, sequences at once."""
KNOWS_SOMETHING, LARGEST_LOSS = 4, 700.0
"""A model that knows a text is this many times better than guessing; nats whose exponential is still a number."""


@dataclass(frozen=True)
class Fidelity:
    """What `num_tokens` tokens show: perplexities of the text, the mean of KL(source || output) in nats for the token
    after each, and the share of them where both rank the same token first. Acceptance is None where there is no head.
    `vocab_size` is what a model that knows nothing has for a perplexity."""

    num_tokens: int
    source_perplexity: float
    output_perplexity: float
    divergence: float
    agreement: float
    source_acceptance: Acceptance | None = None
    output_acceptance: Acceptance | None = None
    vocab_size: int = 0

    def lines(self) -> Iterator[str]:
        yield (
            f"on {self.num_tokens} tokens: perplexity {self.source_perplexity:.4f} -> {self.output_perplexity:.4f}, "
            f"mean KL(source || output) {self.divergence:.6f} nats, same first choice {self.agreement:.2%}"
        )
        if self.vocab_size and not self.source_perplexity < self.vocab_size / KNOWS_SOMETHING:
            yield (
                f"THE SOURCE DOES NOT KNOW THIS TEXT: its perplexity is that of a guess among {self.vocab_size} tokens,"
                " so that what is made of it writes nonsense too; likely a damaged file, weights of another convention,"
                " or another model's tokenizer.json"
            )
        for what, acceptance in (("source", self.source_acceptance), ("output", self.output_acceptance)):
            found = acceptance.line() if acceptance else "no MTP head"
            yield f"acceptance at k = {DEPTH}, greedy, {what}: {found}"


@torch.inference_mode()
def compare(source: Path, output: Path, ids: list[int]) -> Fidelity:
    """`ids`: at least 2 tokens that both models have."""
    wanted, wanted_head, source_acceptance = _read(open_checkpoint(source), ids)
    got, got_head, output_acceptance = _read(open_checkpoint(output), ids)
    targets = torch.tensor([*ids[1:], 0])
    sums = torch.zeros(4, dtype=torch.float64)
    for begin in range(0, len(ids), TILE_ROWS):
        rows = slice(begin, begin + TILE_ROWS)
        p, q = _log_probabilities(wanted[rows], wanted_head), _log_probabilities(got[rows], got_head)
        known = min(len(p), len(ids) - 1 - begin)  # the last token has no successor
        after = targets[rows][:known, None]
        divergence = (p.exp() * (p - q)).sum()
        agreed = (p.argmax(1) == q.argmax(1)).sum()
        sums += torch.stack([-p[:known].gather(1, after).sum(), -q[:known].gather(1, after).sum(), divergence, agreed])
    count = len(ids)
    first, second = (math.exp(min(float(total) / (count - 1), LARGEST_LOSS)) for total in sums[:2])
    means = float(sums[2]) / count, float(sums[3]) / count
    vocab_size = open_checkpoint(source).config.vocab_size
    return Fidelity(count, first, second, *means, source_acceptance, output_acceptance, vocab_size)


def read_tokens(folder: Path, text_file: Path, max_tokens: int) -> list[int]:
    """The text's first tokens in the checkpoint's own tokenizer. Raises PilotfishError if it or the text cannot be
    read."""
    tokenizer = read_tokenizer(folder)
    try:
        text = text_file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"{text_file}: cannot be read as text: {error}") from error
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids[:max_tokens]
    if len(ids) < 2:
        raise OptionError(f"{text_file}: want at least 2 tokens of it, got {len(ids)}")
    return ids


def _read(checkpoint: Checkpoint, ids: list[int]) -> tuple[torch.Tensor, AnyLinear, Acceptance | None]:
    """The final-norm hidden rows [T, H] of a prompt, the output head, and what the draft head reaches."""
    prompts = cut_prompts(ids, NUM_PROMPTS)
    longest = len(prompts[0]) + NUM_TOKENS
    num_pages = max(pages_for(len(ids)), BATCH * reserved_pages(longest, DEPTH))
    model = load_model(checkpoint, CacheSizes(num_pages + 1, BATCH + 1, DEPTH + 1))
    hidden, acceptance = read_text(model, torch.tensor(ids)), None
    if model.head is not None:
        plan = Plan(CPU, model.dtype, DEPTH, None, longest, BATCH, "configured", num_pages, PAGE)
        acceptance = measure_acceptance(model, plan, prompts, NUM_TOKENS)
    return hidden, model.trunk.lm_head, acceptance


def load_model(checkpoint: Checkpoint, sizes: CacheSizes) -> Model:
    """The model on the CPU, in the dtype that it is served in there."""
    wide = checkpoint.config.dtype == "float32" or not cpu_multiplies_bf16()
    dtype = torch.float32 if wide else torch.bfloat16
    return build_model(load_weights(checkpoint, CPU), checkpoint.config, sizes, dtype, CPU)


def _log_probabilities(hidden: torch.Tensor, head: AnyLinear) -> torch.Tensor:
    """fp64 [n, V] of at most one tile of rows."""
    logits = head.rows(F.pad(hidden, (0, 0, 0, TILE_ROWS - len(hidden))))[: len(hidden)]
    return logits.double().log_softmax(1)
