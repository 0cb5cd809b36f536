"""How far a quantised checkpoint is from its source on a given text: perplexities, and the divergence of the logits.

Both models see the same tokens (teacher-forced), by the engine's own prefill on the CPU, one after the other: of the
first only the final hidden rows and its output head stay while the second is loaded. T = tokens of the text.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from pilotfish.engine.checkpoint.load import load_weights
from pilotfish.engine.checkpoint.names import is_mtp
from pilotfish.engine.checkpoint.recognise import Checkpoint, open_checkpoint
from pilotfish.engine.errors import OptionError
from pilotfish.engine.model.build import CacheSizes, Model, build_model
from pilotfish.engine.model.window import Span
from pilotfish.kernels.attention import PAGE
from pilotfish.kernels.linear import TILE_ROWS, AnyLinear, cpu_multiplies_bf16

SLOT = 1
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Fidelity:
    """Over `num_tokens` tokens: perplexities of the text, the mean of KL(source || output) in nats for the token after
    each, and the share of them where both rank the same token first."""

    num_tokens: int
    source_perplexity: float
    output_perplexity: float
    divergence: float
    agreement: float

    def line(self) -> str:
        return (
            f"on {self.num_tokens} tokens: perplexity {self.source_perplexity:.4f} -> {self.output_perplexity:.4f}, "
            f"mean KL(source || output) {self.divergence:.6f} nats, same first choice {self.agreement:.2%}"
        )


@torch.inference_mode()
def compare(source: Path, output: Path, ids: list[int]) -> Fidelity:
    """`ids`: at least 2 tokens that both models have."""
    wanted, wanted_head = _hidden(open_checkpoint(source), ids)
    got, got_head = _hidden(open_checkpoint(output), ids)
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
    first, second = (math.exp(float(total) / (count - 1)) for total in sums[:2])
    return Fidelity(count, first, second, float(sums[2]) / count, float(sums[3]) / count)


def read_tokens(folder: Path, text_file: Path, max_tokens: int) -> list[int]:
    """The text's first tokens in the checkpoint's own tokenizer. Raises OptionError if it or the text is not there."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise OptionError(f"{folder}: has no tokenizer.json, so a text cannot be read")
    try:
        text = text_file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"{text_file}: cannot be read as text: {error}") from error
    ids: list[int] = Tokenizer.from_file(str(file)).encode(text, add_special_tokens=False).ids[:max_tokens]
    if len(ids) < 2:
        raise OptionError(f"{text_file}: want at least 2 tokens of it, got {len(ids)}")
    return ids


def _hidden(checkpoint: Checkpoint, ids: list[int]) -> tuple[torch.Tensor, AnyLinear]:
    """The final-norm hidden rows [T, H] of a prompt, and the output head."""
    trunk = {name: module for name, module in checkpoint.modules.items() if not is_mtp(name)}
    num_pages = -(-len(ids) // PAGE)
    model = _build(dataclasses.replace(checkpoint, modules=trunk), num_pages)
    model.trunk.state.reset(SLOT)
    rows, table = [], list(range(1, num_pages + 1))
    for start in range(0, len(ids), PAGE):
        part = torch.tensor(ids[start : start + PAGE])
        rows.append(model.trunk.bulk(part, Span.build(SLOT, start, len(part), table, model.inv_freq)))
    return torch.cat(rows), model.trunk.lm_head


def _build(checkpoint: Checkpoint, num_pages: int) -> Model:
    wide = checkpoint.config.dtype == "float32" or not cpu_multiplies_bf16()
    dtype = torch.float32 if wide else torch.bfloat16
    weights = load_weights(checkpoint, CPU)
    return build_model(weights, checkpoint.config, CacheSizes(num_pages + 1, 2, 1), dtype, CPU)


def _log_probabilities(hidden: torch.Tensor, head: AnyLinear) -> torch.Tensor:
    """fp64 [n, V] of at most one tile of rows."""
    logits = head.rows(F.pad(hidden, (0, 0, 0, TILE_ROWS - len(hidden))))[: len(hidden)]
    return logits.double().log_softmax(1)
