"""Measure the shipped model with plain transformers code, apart from the engine.

    python demo/evaluate.py --work /tmp/demo [--weights WORK/run]   # bf16 masters instead of the shipped NVFP4 model

Writes WORK/evaluation.json and prints it:
  bits a byte on held-out Python and documentation (rows of 2048 tokens, each from an empty state);
  the share of 100 greedy completions of held-out function headers that `ast.parse`;
  the mean acceptance length of the MTP head on the held-out prompts of demo/prompts, for k = 1, 2, 3, 5, 7, greedy
  and at temperature 1 (agreement by the same noise on both sides);
  samples, the first ones of each file, not picked.

The acceptance is simulated: the trunk's own continuation is generated first, one token a step; then the head drafts
from every position of it at once, fed with its own drafts and its own hidden states, and rounds are counted off.
"""

import argparse
import ast
import json
import math
import sys
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoConfig, AutoTokenizer, DynamicCache, Qwen3_5MoeForCausalLM
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as hf

# under PYTHONSAFEPATH, which tests/gpu/legs.py sets, a program's own folder is not there
sys.path.append(str(Path(__file__).resolve().parent))

from export import load_shipped, load_trained

HERE = Path(__file__).resolve().parent
MODEL = HERE / "model"
DEPTHS = (1, 2, 3, 5, 7)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def load(weights: dict[str, torch.Tensor]):
    """transformers' model and the head, in fp32."""
    config = AutoConfig.from_pretrained(MODEL)
    del config.quantization_config
    config._attn_implementation = "sdpa"
    model = Qwen3_5MoeForCausalLM(config).eval()
    trunk = {n: w.float() for n, w in weights.items() if not n.startswith("mtp.")}
    result = model.load_state_dict(trunk, strict=False)
    assert result.missing_keys == ["lm_head.weight"] and not result.unexpected_keys, result
    model.tie_weights()
    model.config.eos_token_id_list = tuple(json.loads((MODEL / "generation_config.json").read_text())["eos_token_id"])
    head = Head(config).eval()
    head.load_state_dict({n.removeprefix("mtp."): w.float() for n, w in weights.items() if n.startswith("mtp.")})
    return model.to(DEVICE), head.to(DEVICE)


class Head(nn.Module):
    """The MTP head, written out for whole sequences and chains of drafts."""

    def __init__(self, config):
        super().__init__()
        width = config.hidden_size
        self.config = config
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.pre_fc_norm_embedding = hf.Qwen3_5MoeRMSNorm(width)
        self.pre_fc_norm_hidden = hf.Qwen3_5MoeRMSNorm(width)
        self.layers = nn.ModuleList([hf.Qwen3_5MoeDecoderLayer(config, config.layer_types.index("full_attention"))])
        self.norm = hf.Qwen3_5MoeRMSNorm(width)

    def step(self, embedding, hidden, rotary, chain):
        """One depth for all positions (1, T, H); chain holds the keys and values of the depths before."""
        layer, attention = self.layers[0], self.layers[0].self_attn
        x = self.fc(torch.cat([self.pre_fc_norm_embedding(embedding), self.pre_fc_norm_hidden(hidden)], -1))
        y = layer.input_layernorm(x)
        shape, size = (*x.shape[:2], -1, attention.head_dim), x.shape[1]
        q, gate = attention.q_proj(y).view(*x.shape[:2], -1, 2 * attention.head_dim).chunk(2, -1)
        q, k = attention.q_norm(q).transpose(1, 2), attention.k_norm(attention.k_proj(y).view(shape)).transpose(1, 2)
        q, k = hf.apply_rotary_pos_emb(q, k, *rotary)
        chain.append((k, attention.v_proj(y).view(shape).transpose(1, 2)))
        k, v = (torch.cat(parts, 2) for parts in zip(*chain, strict=True))
        own = torch.eye(size, dtype=torch.bool, device=x.device)
        mask = torch.cat([torch.ones_like(own).tril(), *[own] * (len(chain) - 1)], 1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=attention.scaling, enable_gqa=True)
        x = x + attention.o_proj(out.transpose(1, 2).flatten(2) * torch.sigmoid(gate.flatten(2)))
        return self.norm(x + layer.mlp(layer.post_attention_layernorm(x)))


def noise(seed: int, position: int, vocabulary: int, temperature: float) -> torch.Tensor:
    if temperature == 0:
        return torch.zeros(vocabulary)
    generator = torch.Generator().manual_seed(seed * 1_000_003 + position)
    return -torch.log(-torch.log(torch.rand(vocabulary, generator=generator).clamp(1e-20, 1 - 1e-7)))


def choose(logits: torch.Tensor, noises: torch.Tensor, temperature: float) -> torch.Tensor:
    return (logits / (temperature or 1.0) + noises).argmax(-1)


@torch.no_grad()
def continuations(model, prompts: list[list[int]], length: int, temperature=0.0, stop=()) -> list[list[int]]:
    """The trunk's own tokens after each prompt, one a step, prompts side by side with padding on the left."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=DEVICE)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=DEVICE)
    cache, out = DynamicCache(config=model.config), [[] for _ in prompts]
    for step in range(length):
        logits = model(ids, attention_mask=mask, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        if temperature:
            rows = [noise(i, len(p) + step, logits.shape[-1], temperature) for i, p in enumerate(prompts)]
            logits = logits / temperature + torch.stack(rows).to(DEVICE)
        ids = logits.argmax(-1, keepdim=True)
        mask = torch.cat([mask, torch.ones_like(ids)], 1)
        for tokens, token in zip(out, ids[:, 0].tolist(), strict=True):
            if not (tokens and tokens[-1] in stop):
                tokens.append(token)
    return out


@torch.no_grad()
def drafts(model, head, ids: list[int], depth: int, seed: int, temperature: float) -> torch.Tensor:
    """(T - 1, depth): what the head drafts for positions i + 2, i + 3, .. once tokens up to i + 1 are known."""
    tokens = torch.tensor([ids], device=DEVICE)
    embed, w = model.model.embed_tokens, model.lm_head.weight
    hidden = model(tokens, use_cache=False, output_hidden_states=True).hidden_states[-1][:, :-1]
    token, chain, out = tokens[:, 1:], [], []
    noises = torch.stack([noise(seed, p, len(w), temperature) for p in range(len(ids) + depth + 1)]).to(DEVICE)
    for d in range(depth):
        positions = (torch.arange(len(ids) - 1, device=DEVICE) + d).expand(3, 1, -1)
        hidden = head.step(embed(token), hidden, model.model.rotary_emb(hidden, positions), chain)
        token = choose(hidden @ w.T, noises[2 + d : 2 + d + len(ids) - 1], temperature)
        out.append(token[0])
    return torch.stack(out, 1)


def rounds(ids: list[int], begin: int, drafted: torch.Tensor, k: int) -> list[int]:
    """Committed tokens of each round when everything before `begin` is the prompt and the trunk made the rest."""
    known, lengths = begin + 1, []  # the prompt's prefill gives the first token
    while known + k < len(ids):
        n = 0
        while n < k and int(drafted[known - 2, n]) == ids[known + n]:
            n += 1
        lengths.append(n + 1)
        known += n + 1
    return lengths


def before_loop(tokens: list[int], span=24) -> int:
    """How many tokens come before the continuation repeats its last `span` tokens for the first time."""
    seen = set()
    for i in range(len(tokens) - span):
        window = tuple(tokens[i : i + span])
        if window in seen:
            return i
        seen.add(window)
    return len(tokens)


def acceptance(model, head, prompts: list[list[int]], length: int, temperature: float) -> dict:
    """Mean committed tokens a round over all rounds, and over those before a continuation runs into a loop."""
    lengths, fresh = {k: [] for k in DEPTHS}, {k: [] for k in DEPTHS}
    made = continuations(model, prompts, length, temperature)
    for seed, (prompt, tokens) in enumerate(zip(prompts, made, strict=True)):
        drafted = drafts(model, head, prompt + tokens, max(DEPTHS), seed, temperature).cpu()
        for k in DEPTHS:
            lengths[k] += rounds(prompt + tokens, len(prompt), drafted, k)
            fresh[k] += rounds(prompt + tokens[: before_loop(tokens)], len(prompt), drafted, k)
    return {f"k={k}": [round(sum(v) / len(v), 3) for v in (lengths[k], fresh[k])] for k in DEPTHS}


@torch.no_grad()
def bits_per_byte(model, folder: Path, name: str, limit: int) -> float:
    """Over rows of 2048 tokens from the start of the held-out text, documents joined by <|endoftext|>."""
    size = json.loads((folder / "sizes.json").read_text())[name]
    flat, nats = np.fromfile(folder / f"{name}.u16", dtype=np.uint16)[:limit].astype(np.int64), 0.0
    for i in range(0, len(flat) - 1, 2048):
        row = torch.from_numpy(flat[i : i + 2049])[None].to(DEVICE)
        logits = model(row[:, :-1], use_cache=False).logits[0]
        nats += F.cross_entropy(logits, row[0, 1:], reduction="sum").item()
    return nats / (len(flat) - 1) / math.log(2) * size["tokens"] / size["bytes"]


def function_text(header: str, generated: str) -> str:
    """Header and body up to the first line that leaves the function; an unfinished last line is dropped."""
    lines = generated.split("\n")
    for i, line in enumerate(lines[1:], 1):
        if line.strip() and not line.startswith((" ", ")", "]", "}")):
            return header + "\n".join(lines[:i])
    return header + "\n".join(lines[:-1])


def parses(text: str) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    return True


def prompts(name: str) -> list[dict]:
    return [json.loads(line) for line in open(HERE / "prompts" / f"{name}.jsonl")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--weights", type=Path, help="folder of trained bf16 weights instead of the shipped model")
    parser.add_argument("--only", choices=["bits", "acceptance", "functions", "samples"])
    parser.add_argument("--tokens", type=int, default=400_000, help="held-out tokens for bits a byte")
    parser.add_argument("--length", type=int, default=160, help="tokens of each continuation for acceptance")
    args = parser.parse_args()
    model, head = load(load_trained(args.weights) if args.weights else load_shipped())
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    result = {}

    def wanted(step: str) -> bool:
        return args.only in (None, step)

    if wanted("bits"):
        for name in ("heldout", "heldout_docs"):
            result[f"bits_per_byte_{name}"] = round(bits_per_byte(model, args.work / "tokens", name, args.tokens), 4)
    if wanted("acceptance"):
        code = [tokenizer(p["prompt"])["input_ids"] for p in prompts("code")]
        for temperature in (0.0, 1.0):
            result[f"acceptance_code_t{temperature:g}"] = acceptance(model, head, code, args.length, temperature)
    stop = model.config.eos_token_id_list
    if wanted("functions"):
        headers = [p["prompt"] for p in prompts("functions")]
        made = continuations(model, [tokenizer(h)["input_ids"] for h in headers], 200, stop=stop)
        decoded = [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in made]
        texts = [function_text(header, text) for header, text in zip(headers, decoded, strict=True)]
        result["parse"] = f"{sum(map(parses, texts))} of {len(texts)}"
        result["function_samples"] = texts[:10]
    if wanted("samples"):
        render = partial(tokenizer.apply_chat_template, tokenize=False, add_generation_prompt=True)
        chats = [render(p["messages"], tools=p.get("tools")) for p in prompts("chat")]
        made = continuations(model, [tokenizer(c)["input_ids"] for c in chats], 120, stop=stop)
        questions = [p["messages"][-1]["content"] for p in prompts("chat")]
        answers = [tokenizer.decode(tokens) for tokens in made]
        result["chat_samples"] = list(zip(questions, answers, strict=True))
    (args.work / "evaluation.json").write_text(json.dumps(result, indent=1))
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
