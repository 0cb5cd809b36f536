"""Trunk and head in fp32 against transformers' own classes, on tiny random models of every kind.

Logits have about unit variance; two fp32 implementations that sum in different orders stay within 1e-4 of each
other, while each known mistake (norm offset, gate split, head repeat, convolution history, concat order) is off by
0.1 and more. The head is checked a second time against a formula written out here, which also covers recursion.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from pilotfish.engine.checkpoint.load import load_weights
from pilotfish.engine.checkpoint.nvfp4 import NvFp4Weight
from pilotfish.engine.checkpoint.recognise import open_checkpoint
from pilotfish.engine.model.build import CacheSizes, Model, build_model
from pilotfish.engine.round.prompt import PromptPass
from tests.support.tiny_models import KINDS, VOCAB_SIZE, build_tiny, write_checkpoint
from tests.support.windows import Windows

TOLERANCE = 1e-4
NUM_TOKENS = 130  # two whole chunks of 64 and a rest
CPU = torch.device("cpu")
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 1e3,
    "partial_rotary_factor": 0.25,
    "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
}
"""As Qwen's cards have it, with fewer positions than the texts here."""
ALL = (*KINDS, "yarn", "yarn_moe")
SLOT, TABLE = 1, [3, 1]  # not the first of anything, and pages out of order


@dataclass(frozen=True)
class Reference:
    """What transformers gives for `ids`: logits [T, V] and hidden states after the final norm [T, H]."""

    folder: Path
    module: Any
    ids: torch.Tensor
    logits: torch.Tensor
    hidden: torch.Tensor


def token_ids(count: int, seed: int = 3) -> torch.Tensor:
    return torch.randint(0, VOCAB_SIZE - 8, (count,), generator=torch.Generator().manual_seed(seed))


def quietly(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """transformers and its dependencies warn about themselves."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call(*args, **kwargs)


@torch.no_grad()
def run_reference(folder: Path, ids: torch.Tensor) -> Reference:
    from transformers import AutoModelForCausalLM

    module = quietly(AutoModelForCausalLM.from_pretrained, folder, dtype=torch.float32).eval()
    out = quietly(module, ids[None], output_hidden_states=True, use_cache=False)
    return Reference(folder, module, ids, out.logits[0], out.hidden_states[-1][0])


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Products this small take longer to hand out than to compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> Callable[[str], Reference]:
    """The reference run of a kind, made on first use."""
    made: dict[str, Reference] = {}

    def get(kind: str) -> Reference:
        if kind not in made:
            plain = kind.replace("yarn_", "").replace("yarn", "dense")
            rope = {"rope_parameters": YARN} if "yarn" in kind else {}
            made[kind] = run_reference(build_tiny(tmp_path_factory.mktemp(kind), plain, **rope), token_ids(NUM_TOKENS))
        return made[kind]

    return get


def load(folder: Path, max_window: int = 9) -> Model:
    checkpoint = open_checkpoint(folder)
    model = build_model(
        load_weights(checkpoint, progress=False),
        checkpoint.config,
        CacheSizes(num_pages=6, num_slots=4, max_window=max_window),
        torch.float32,
        CPU,
    )
    model.trunk.state.reset(SLOT)
    return model


def logits_of(model: Model, hidden: torch.Tensor) -> torch.Tensor:
    return PromptPass(model).logits(hidden)


def prefill(model: Model, ids: torch.Tensor, chunk: int, start: int = 0) -> torch.Tensor:
    """Hidden states of a prompt cut into chunks, the last one shorter."""
    prompt, hidden = PromptPass(model), []
    for begin in range(start, len(ids), chunk):
        part = ids[begin : begin + chunk]
        hidden.append(prompt.trunk(part, prompt.span(SLOT, begin, len(part), TABLE)))
    return torch.cat(hidden)


def decode(model: Model, ids: torch.Tensor, start: int, pending: int = 0) -> torch.Tensor:
    """Hidden states of ids[start:], one token a window."""
    windows, hidden = Windows(model), []
    for position in range(start, len(ids)):
        hidden.append(windows.trunk(ids[None, position : position + 1], [SLOT], [position], [TABLE], [pending]))
        pending = 1
    return torch.cat(hidden)


def assert_close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert got.shape == wanted.shape
    worst = (got - wanted).abs().max().item()
    assert worst < TOLERANCE, f"want at most {TOLERANCE}, got {worst}"  # NaN fails too


# The trunk.


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("chunk", [1, 3, 4, 63, 64, 65, NUM_TOKENS])
@torch.no_grad()
def test_prefill_in_chunks(reference, kind, chunk):
    wanted = reference(kind)
    model, end = load(wanted.folder), min(NUM_TOKENS, 24 * chunk)
    hidden = prefill(model, wanted.ids[:end], chunk)
    assert_close(hidden, wanted.hidden[:end])
    assert_close(logits_of(model, hidden), wanted.logits[:end])


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("prompt", [1, 2, 65])
@torch.no_grad()
def test_decode_token_by_token(reference, kind, prompt):
    wanted = reference(kind)
    model, end = load(wanted.folder), prompt + 24
    prefill(model, wanted.ids[:prompt], 64)
    hidden = decode(model, wanted.ids[:end], prompt)
    assert_close(logits_of(model, hidden), wanted.logits[prompt:end])


@pytest.mark.parametrize("kind", ALL)
@torch.no_grad()
def test_windows_with_rejected_rows(reference, kind):
    """Windows of changing width, of which a part is accepted: the rest held noise, and leaves no trace."""
    wanted = reference(kind)
    model, position, pending = load(wanted.folder), 61, 0
    prefill(model, wanted.ids[:position], 64)
    windows = Windows(model)
    for width, accepted in ((9, 4), (2, 1), (1, 1), (6, 6), (9, 1), (1, 1), (9, 9), (3, 2), (4, 3)):
        tokens = token_ids(width, seed=width)
        tokens[:accepted] = wanted.ids[position : position + accepted]
        rows = windows.trunk(tokens[None], [SLOT], [position], [TABLE], [pending])[:accepted]
        assert_close(logits_of(model, rows), wanted.logits[position : position + accepted])
        position, pending = position + accepted, accepted


@torch.no_grad()
def test_sequences_at_different_lengths_in_one_window(reference):
    """Each sequence of a batch gets what transformers gives for it alone."""
    first = reference("moe")
    others = [run_reference(first.folder, token_ids(40, seed=seed)) for seed in (11, 12)]
    model = load(first.folder)
    slots, tables, lengths = [2, 1, 3], [[5], [2], [4]], [7, 70, 33]
    runs, prompt = [others[0], first, others[1]], PromptPass(model)
    for slot, table, length, run in zip(slots, tables, lengths, runs, strict=True):
        model.trunk.state.reset(slot)
        prompt.trunk(run.ids[:length], prompt.span(slot, 0, length, table))
    pending, windows = [0, 0, 0], Windows(model)
    for width in (3, 1, 3):
        tokens = torch.stack([run.ids[at : at + width] for run, at in zip(runs, lengths, strict=True)])
        got = logits_of(model, windows.trunk(tokens, slots, lengths, tables, pending))
        assert_close(got, torch.cat([run.logits[at : at + width] for run, at in zip(runs, lengths, strict=True)]))
        lengths, pending = [at + width for at in lengths], [width] * 3


@torch.no_grad()
def test_context_over_several_pages(reference):
    """Prefill and decode on both sides of a page's end (256 tokens)."""
    wanted = run_reference(reference("dense").folder, token_ids(300, seed=5))
    model = load(wanted.folder)
    hidden = prefill(model, wanted.ids[:250], 64)
    hidden = torch.cat((hidden, decode(model, wanted.ids[:262], 250)))
    assert_close(logits_of(model, hidden), wanted.logits[:262])
    again = load(wanted.folder)
    assert_close(logits_of(again, prefill(again, wanted.ids, 100)), wanted.logits)


@pytest.mark.parametrize("kind", ["dense", "moe"])
@torch.no_grad()
def test_packed_weights_act_as_their_values(tmp_path, kind):
    """An NVFP4 checkpoint gives the logits that transformers gives for a plain one of the dequantised values."""
    packed = build_tiny(tmp_path / "packed", kind, nvfp4=True)
    checkpoint = open_checkpoint(packed)
    weights = load_weights(checkpoint, progress=False)
    plain = {
        name: weight.dequantize(torch.float32) if isinstance(weight, NvFp4Weight) else weight
        for name, weight in weights.items()
    }
    plain_config = {"model_type": checkpoint.config.model_type, **_without_quantization(packed)}
    wanted = run_reference(
        write_checkpoint(tmp_path / "plain", plain_config, {"model.safetensors": plain}), token_ids(70)
    )
    model = load(packed)
    assert_close(logits_of(model, prefill(model, wanted.ids, 64)), wanted.logits)


def _without_quantization(folder: Path) -> dict[str, Any]:
    import json

    raw = json.loads((folder / "config.json").read_text())
    del raw["quantization_config"]
    return raw


# The head.


@torch.no_grad()
def transformers_head(wanted: Reference) -> torch.Tensor:
    """Draft logits [T - 1, V] of the pairs (hidden i, token i + 1), by transformers' generic MTP module."""
    from transformers.cache_utils import MtpCache
    from transformers.modeling_layers import MtpModel

    config = wanted.module.config
    config.dtype, config.num_mtp_layers, config.mtp_layer_types = torch.float32, 1, ["full_attention"]
    head = quietly(MtpModel.from_pretrained, wanted.module, device_map={"": "cpu"}).eval()
    hidden = head.forward_layer(
        0,
        wanted.hidden[None, :-1],
        torch.arange(1, len(wanted.ids))[None],
        MtpCache(config=config.get_mtp_config()),
        input_ids=wanted.ids[None, 1:],
    )
    return head.shared_head(hidden)[0]


class Formula:
    """The head written out: one causal pass over pairs of a hidden state and the token after it, all in fp32."""

    def __init__(self, folder: Path):
        self.config = open_checkpoint(folder).config
        self.weights = load_file(folder / "model.safetensors")

    def weight(self, name: str) -> torch.Tensor:
        for spelled in (name, name.replace("model.", "model.language_model.", 1)):
            if spelled in self.weights:
                return self.weights[spelled]
        raise KeyError(name)

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1 + self.weight(f"{name}.weight"))

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight(f"{name}.weight").T

    def __call__(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Hidden states [T, H] after mtp.norm, from [T, H] and int64 [T]."""
        embedded = self.norm("mtp.pre_fc_norm_embedding", self.weight("model.embed_tokens.weight")[tokens])
        x = self.linear("mtp.fc", torch.cat((embedded, self.norm("mtp.pre_fc_norm_hidden", hidden)), -1))
        layer = "mtp.layers.0"
        x = x + self.attention(f"{layer}.self_attn", self.norm(f"{layer}.input_layernorm", x))
        x = x + self.mlp(f"{layer}.mlp", self.norm(f"{layer}.post_attention_layernorm", x))
        return self.norm("mtp.norm", x)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.linear("model.embed_tokens" if self.config.tie_word_embeddings else "lm_head", hidden)

    def attention(self, name: str, x: torch.Tensor) -> torch.Tensor:
        config, rows = self.config, len(x)
        heads, kv, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        q, gate = self.linear(f"{name}.q_proj", x).view(rows, heads, 2, dim).unbind(2)
        q = self.rotate(self.norm(f"{name}.q_norm", q))
        k = self.rotate(self.norm(f"{name}.k_norm", self.linear(f"{name}.k_proj", x).view(rows, kv, dim)))
        v = self.linear(f"{name}.v_proj", x).view(rows, kv, dim)
        k, v = (part.repeat_interleave(heads // kv, 1) for part in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * dim**-0.5
        scores = scores.masked_fill(torch.ones(rows, rows).triu(1).bool(), float("-inf"))
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
        return self.linear(f"{name}.o_proj", (mixed * gate.sigmoid()).flatten(1))

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        width = self.config.rotary_dim
        half = width // 2
        frequencies, factor = self.config.rope_theta ** (-torch.arange(half) / half), 1.0
        if self.config.yarn:
            frequencies, factor = self.yarn(frequencies)
        angles = torch.arange(len(x))[:, None, None] * frequencies
        first, second, rest = x[..., :half], x[..., half:width], x[..., width:]
        cos, sin = angles.cos() * factor, angles.sin() * factor
        return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)

    def yarn(self, frequencies: torch.Tensor) -> tuple[torch.Tensor, float]:
        """Pairs that turn more than 32 times over the original context stay, those below one turn are slowed."""
        turns = YARN["original_max_position_embeddings"] * frequencies / (2 * math.pi)
        places = torch.arange(len(turns))
        # where the curve of turns, continuous over pairs, passes 32 and 1, to whole pairs outwards
        step = math.log(self.config.rope_theta) / len(turns)
        low = max(0, math.floor(math.log(turns[0] / 32) / step))
        high = min(self.config.rotary_dim - 1, math.ceil(math.log(turns[0]) / step))
        slowed = ((places - low) / (high - low)).clamp(0, 1)
        return frequencies * (1 - slowed) + frequencies / YARN["factor"] * slowed, 0.1 * math.log(YARN["factor"]) + 1

    def mlp(self, name: str, x: torch.Tensor) -> torch.Tensor:
        if not self.config.is_moe:
            return self.glu(name, x)
        probabilities, chosen = self.linear(f"{name}.gate", x).softmax(-1).topk(self.config.num_experts_per_tok)
        shares = probabilities / probabilities.sum(-1, keepdim=True)
        gate_up, down = (self.weight(f"{name}.experts.{part}_proj") for part in ("gate_up", "down"))
        rows = []
        for row, weights, experts in zip(x, shares, chosen.tolist(), strict=True):
            parts = [(gate_up[e] @ row).chunk(2) for e in experts]
            outputs = [down[e] @ (F.silu(g) * u) for e, (g, u) in zip(experts, parts, strict=True)]
            rows.append(sum(w * out for w, out in zip(weights, outputs, strict=True)))
        shared = self.linear(f"{name}.shared_expert_gate", x).sigmoid() * self.glu(f"{name}.shared_expert", x)
        return torch.stack(rows) + shared

    def glu(self, name: str, x: torch.Tensor) -> torch.Tensor:
        up = F.silu(self.linear(f"{name}.gate_proj", x)) * self.linear(f"{name}.up_proj", x)
        return self.linear(f"{name}.down_proj", up)


def fill(model: Model, next_tokens: torch.Tensor, hidden: torch.Tensor, chunk: int) -> torch.Tensor:
    """The head's hidden states for pairs at positions 0.., a chunk at a time."""
    prompt, parts = PromptPass(model), []
    for begin in range(0, len(next_tokens), chunk):
        part = slice(begin, begin + chunk)
        span = prompt.span(SLOT, begin, len(next_tokens[part]), TABLE)
        parts.append(prompt.fill(next_tokens[part], hidden[part], span))
    return torch.cat(parts)


@pytest.mark.parametrize("kind", ALL)
@torch.no_grad()
def test_head_equals_transformers(reference, kind):
    wanted = reference(kind)
    model = load(wanted.folder)
    hidden = prefill(model, wanted.ids, 64)
    drafts = logits_of(model, fill(model, wanted.ids[1:], hidden[:-1], NUM_TOKENS))
    assert_close(drafts, transformers_head(wanted))


@pytest.mark.parametrize("kind", ALL)
@torch.no_grad()
def test_formula_equals_transformers(reference, kind):
    """Both oracles say the same, so that the formula can be trusted where transformers offers none."""
    wanted = reference(kind)
    formula = Formula(wanted.folder)
    assert_close(formula.logits(formula(wanted.hidden[:-1], wanted.ids[1:])), transformers_head(wanted))


@pytest.mark.parametrize("kind", ["dense", "moe"])
@pytest.mark.parametrize("chunk", [1, 3, 4, 63, 64, 65])
@torch.no_grad()
def test_head_fill_in_chunks(reference, kind, chunk):
    wanted = reference(kind)
    model, formula = load(wanted.folder), Formula(wanted.folder)
    got = fill(model, wanted.ids[1:], wanted.hidden[:-1], chunk)
    assert_close(got, formula(wanted.hidden[:-1], wanted.ids[1:]))


@pytest.mark.parametrize("kind", ALL)
@torch.no_grad()
def test_head_repair_over_windows(reference, kind):
    """Windows of which a part counts; the next one overwrites what the rest left in the head's cache."""
    wanted = reference(kind)
    model = load(wanted.folder)
    assert model.head is not None
    want = Formula(wanted.folder)(wanted.hidden[:-1], wanted.ids[1:])
    position, windows = 61, Windows(model)
    fill(model, wanted.ids[1 : position + 1], wanted.hidden[:position], 64)
    for width, accepted in ((9, 4), (1, 1), (9, 9), (2, 1), (6, 3)):
        tokens, hidden = token_ids(width, seed=width), torch.randn(width, wanted.hidden.shape[1])
        tokens[:accepted] = wanted.ids[position + 1 : position + 1 + accepted]
        hidden[:accepted] = wanted.hidden[position : position + accepted]
        (rows,) = windows.head(tokens[None], hidden[None], [SLOT], [position], [TABLE])
        assert_close(rows[:accepted], want[position : position + accepted])
        position += accepted


@pytest.mark.parametrize("kind", ALL)
@torch.no_grad()
def test_recursion(reference, kind):
    """Drafts 1 to 4: from the second on, the head's own normed output and the token just drafted go back in."""
    wanted = reference(kind)
    model, formula, prompt = load(wanted.folder), Formula(wanted.folder), 65
    assert model.head is not None
    last = fill(model, wanted.ids[1 : prompt + 1], wanted.hidden[:prompt], 64)[-1:]
    drafts, asked = Windows(model).propose(last, [SLOT], [prompt], [TABLE], 4)
    seen = [logits_of(model, rows) for rows in asked]

    hidden, tokens = wanted.hidden[:prompt], wanted.ids[1 : prompt + 1]
    for step in range(4):
        out = formula(hidden, tokens)[-1:]
        logits = formula.logits(out)
        assert_close(seen[step], logits)
        assert drafts[0, step] == logits.argmax()
        hidden, tokens = torch.cat((hidden, out)), torch.cat((tokens, logits.argmax(-1)))
