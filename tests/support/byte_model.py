"""A model folder without weights: a byte-level tokenizer (ids 0..255 are the bytes), a chat template, end ids."""

from __future__ import annotations

import json
from pathlib import Path

from scripted_core import byte_letters
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

# Merges that cut through characters: the first two bytes of the euro sign, of an emoji, and two ASCII pairs.
MERGES = [(b"\xe2", b"\x82"), (b"\xf0", b"\x9f"), (b"\xf0\x9f", b"\x98"), (b"l", b"l"), (b"o", b",")]
END, START, IM_END, THINK = 300, 301, 302, 303
TEMPLATE = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}</tools>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n<function={{ call.function.name }}>\n"
    "{% for name, value in call.function.arguments | items %}<parameter={{ name }}>\n"
    "{{ value if value is string else value | tojson }}\n</parameter>\n{% endfor %}"
    "</function>\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking %}<think>\n{% endif %}{% endif %}"
)


def build_tokenizer() -> Tokenizer:
    letters = {byte: letter for letter, byte in byte_letters().items()}

    def spell(raw: bytes) -> str:
        return "".join(letters[byte] for byte in raw)

    vocabulary = {spell(bytes([byte])): byte for byte in range(256)}
    for left, right in MERGES:
        vocabulary[spell(left + right)] = len(vocabulary)
    for filler in range(len(vocabulary), END):
        vocabulary[f"Ā{filler}"] = filler
    tokenizer = Tokenizer(models.BPE(vocabulary, [(spell(left), spell(right)) for left, right in MERGES]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True) for text in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")]
    )
    tokenizer.add_tokens([AddedToken(text, special=False) for text in ("<think>", "</think>")])
    return tokenizer


def write_model(folder: Path) -> Path:
    build_tokenizer().save(str(folder / "tokenizer.json"))
    files = {
        "tokenizer_config.json": {"eos_token": "<|im_end|>", "chat_template": TEMPLATE},
        "config.json": {"model_type": "qwen3_5", "text_config": {"eos_token_id": END}},
        "generation_config.json": {"eos_token_id": [IM_END, END]},
    }
    for name, content in files.items():
        folder.joinpath(name).write_text(json.dumps(content))
    return folder
