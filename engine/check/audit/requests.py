"""What the audit asks of a checkpoint: prompts, and the sampling parameters they are decoded with."""

from __future__ import annotations

from pathlib import Path

import torch

from pilotfish.engine.checkpoint.tokenizer import read_tokenizer
from pilotfish.engine.link.messages import SamplingParams, Submit, ThinkingBudget
from pilotfish.kernels.attention import PAGE

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


def long_prompt(prompts: list[list[int]]) -> list[int]:
    """The prompts one after the other, again and again, up to just before a page ends."""
    joined = [token for prompt in prompts for token in prompt]
    return (joined * (PAGE // len(joined) + 1))[: PAGE - 4]


def load_prompts(folder: Path, count: int, vocab: int) -> list[list[int]]:
    """Built-in texts through the checkpoint's tokenizer, or random ids where it has none; all of different lengths."""
    if (folder / "tokenizer.json").exists():
        tokenizer = read_tokenizer(folder)
        prompts = [tokenizer.encode(text).ids for text in TEXTS]
    else:
        generator = torch.Generator().manual_seed(0)
        lengths = (5, 64, 17, 258, 130, 40)
        prompts = [torch.randint(0, vocab, (n,), generator=generator).tolist() for n in lengths]
    return [prompts[i % len(prompts)] for i in range(count)]
