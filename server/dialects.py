"""Other services' names for fields that are known here, as their clients and relays send them."""

from __future__ import annotations

from typing import Any

SAMPLING = {
    "ebnf": "guided_grammar",
    "n_predict": "max_tokens",
    "no_stop_trim": "include_stop_str_in_output",
    "regex": "guided_regex",
    "repeat_penalty": "repetition_penalty",
    "sampling_seed": "seed",
}
"""SGLang's and llama.cpp's, in chats and completions. vllm-router puts SGLang's into every request."""
CHAT = SAMPLING | {
    "thinking_budget": "thinking_token_budget",
    "thinking_budget_tokens": "thinking_token_budget",
}
"""DashScope's and llama.cpp's, in chats."""
SWITCHES = ("preserve_thinking",)
"""Switches of chat templates that DashScope has beside the other fields."""
BEGUN = ("partial", "prefix")
"""Fields of a message that is to be gone on with."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "dry_multiplier": (None, 0),
    "dynatemp_range": (None, 0),
    "lora_path": (None, ""),
    "mirostat": (None, 0),
    "return_hidden_states": (None, False),
    "separate_reasoning": (None, True),
    "session_params": (None,),
    "stream_reasoning": (None, True),
    "top_a": (None, 0),
    "typ_p": (None, 1),
    "typical_p": (None, 1),
    "xtc_probability": (None, 0),
}
"""What other servers' defaults send and only these values mean nothing of."""


def with_usage(body: dict[str, Any]) -> dict[str, Any]:
    """OpenRouter's `usage: {"include": true}`: an answer that is not streamed always has it."""
    usage, options = body.get("usage"), body.get("stream_options")
    if not (isinstance(usage, dict) and usage.get("include") is True and body.get("stream") is True):
        return body
    return {**body, "stream_options": {"include_usage": True, **(options if isinstance(options, dict) else {})}}


def with_switches(body: dict[str, Any]) -> dict[str, Any]:
    given, own = {name: body[name] for name in SWITCHES if body.get(name) is not None}, body.get("chat_template_kwargs")
    if not given or not (own is None or isinstance(own, dict)):
        return body
    return {**body, "chat_template_kwargs": given | (own or {})}


def with_begun_answer(body: dict[str, Any]) -> dict[str, Any]:
    """A last message of the assistant that says of itself that it is only begun: `partial` is DashScope's and
    Moonshot's word, `prefix` Mistral's and DeepSeek's."""
    if not isinstance(messages := body.get("messages"), list) or not messages or not isinstance(messages[-1], dict):
        return body
    last = messages[-1]
    if last.get("role") != "assistant" or True not in map(last.get, BEGUN):
        return body
    rest = {name: value for name, value in last.items() if name not in BEGUN}
    return {**body, "continue_final_message": True, "messages": [*messages[:-1], rest]}
