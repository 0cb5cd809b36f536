"""The demo model's tokenizer: byte-level BPE with 8192 entries, Qwen3.5's split pattern and its special tokens.

python demo/tokenizer.py train  --work /tmp/demo   # writes demo/model/tokenizer.json and tokenizer_config.json
python demo/tokenizer.py encode --work /tmp/demo   # writes WORK/tokens/*.u16, documents ended by <|endoftext|>
"""

import argparse
import json
import random
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

MODEL = Path(__file__).resolve().parent / "model"
VOCABULARY = 8192
# the split pattern of Qwen3.5
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
]
MARKERS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
# characters of each part that the merges are learnt from
SAMPLE = {"python": 50e6, "docs": 12e6, "chat": 10e6}


def documents(path: Path):
    with open(path) as f:
        for line in f:
            yield json.loads(line)["text"]


def sample(text: Path):
    """A random part of every text, in the proportions of SAMPLE."""
    for name, wanted in SAMPLE.items():
        path = text / f"{name}.jsonl"
        share = min(1.0, wanted / path.stat().st_size)
        rng = random.Random(name)
        for document in documents(path):
            if rng.random() < share:
                for mark in ("<|im_start|>", "<|im_end|>", *MARKERS):
                    document = document.replace(mark, "\n")
                yield document


def train(work: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(SPLIT), behavior="isolated", invert=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL) - len(MARKERS), initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(sample(work / "text"), trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in MARKERS])
    assert tokenizer.get_vocab_size() == VOCABULARY
    tokenizer.save(str(MODEL / "tokenizer.json"), pretty=False)
    added = {
        str(tokenizer.token_to_id(t)): {
            "content": t,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": t in SPECIAL,
        }
        for t in SPECIAL + MARKERS
    }
    config = {
        "add_bos_token": False, "add_prefix_space": False, "added_tokens_decoder": added, "bos_token": None,
        "clean_up_tokenization_spaces": False, "eos_token": "<|im_end|>", "errors": "replace",
        "model_max_length": 32768, "pad_token": "<|endoftext|>", "split_special_tokens": False,
        "tokenizer_class": "PreTrainedTokenizerFast", "unk_token": None,
    }  # fmt: skip
    (MODEL / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def encode(work: Path) -> None:
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    end = tokenizer.token_to_id("<|endoftext|>")
    (work / "tokens").mkdir(exist_ok=True)
    sizes = {}
    for path in sorted((work / "text").glob("*.jsonl")):
        parts, batch, size = [], [], 0

        def flush(batch, parts):
            for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
                parts.append(np.array([*encoding.ids, end], dtype=np.uint16))

        for document in documents(path):
            batch.append(document)
            size += len(document.encode())
            if len(batch) == 256:
                flush(batch, parts)
                batch.clear()
        flush(batch, parts)
        tokens = np.concatenate(parts)
        sizes[path.stem] = {"tokens": len(tokens), "bytes": size}
        tokens.tofile(work / "tokens" / f"{path.stem}.u16")
        print(f"{path.stem}: {len(tokens) / 1e6:.1f} M tokens, {size / len(tokens):.2f} bytes a token", flush=True)
    (work / "tokens" / "sizes.json").write_text(json.dumps(sizes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=["train", "encode"])
    parser.add_argument("--work", type=Path, required=True)
    args = parser.parse_args()
    {"train": train, "encode": encode}[args.step](args.work)


if __name__ == "__main__":
    main()
