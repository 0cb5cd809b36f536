"""From a decoded request to what the engine is asked: prompts as ids, sampling parameters, limits.

Everything a client can get wrong is found here or in protocol.py; the engine sees only requests it can serve.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import Any, Literal

import msgspec

from pilotfish.engine.messages import Grammar, Ready, SamplingParams
from pilotfish.server.answer import CALL, END_THINK, FUNCTION, THINK, AnswerRules
from pilotfish.server.call_grammar import call_grammar
from pilotfish.server.chat_template import ChatTemplate
from pilotfish.server.errors import BadRequest
from pilotfish.server.messages import check_messages
from pilotfish.server.model_files import ModelFiles
from pilotfish.server.protocol import ChatRequest, CompletionRequest, SamplingFields, TokenizeRequest
from pilotfish.server.structured import GUIDED_FIELDS, grammar_of
from pilotfish.server.token_rules import bad_words_ids, thinking_budget
from pilotfish.server.tokenizer import Tokenizer
from pilotfish.server.tool_calls import Tools, read_tools

DEFAULT_COMPLETION_TOKENS = 16
LOWEST_TEMPERATURE = 1e-5
"""Below it sampling is greedy, as in vLLM: logits divided by less overflow."""
MAX_SEQUENCES = 128
SLOW_TEXT = 8192
"""Longer texts are tokenised in a thread, so that other streams go on."""
MAX_COMPOSED = 4
"""Characters that a normaliser may join into one."""


class Prompt(msgspec.Struct, frozen=True):
    """`text` is kept only where it is echoed."""

    token_ids: list[int]
    text: str = ""


class StopRules(msgspec.Struct, frozen=True):
    """What the HTTP side itself watches for in a sequence's text. Without `answer` rules all of it is content."""

    strings: tuple[str, ...] = ()
    include: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True
    keep_tokens: bool = False
    answer: AnswerRules | None = None


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """One HTTP request: every prompt is run `n` times, choices numbered prompt by prompt."""

    id: str
    model: str
    created: int
    arrived: float
    prompts: list[Prompt]
    sampling: list[SamplingParams]
    n: int
    stops: StopRules
    stream: bool
    include_usage: bool
    return_token_ids: bool = False
    include_reasoning: bool = True
    include_metrics: bool = False
    speculative_k: int

    @property
    def seed(self) -> int:
        return self.sampling[0].seed


class Context(msgspec.Struct, frozen=True, kw_only=True):
    """What a request is planned against. `model` is the name it asked for, `arrived` the clock when it came."""

    model: str
    files: ModelFiles
    ready: Ready
    arrived: float
    ignore_unknown: bool = False


async def plan_completion(request: CompletionRequest, context: Context) -> Plan:
    """Raises BadRequest naming the field."""
    if request.echo and request.logprobs is not None:
        raise BadRequest("Log-probabilities of an echoed prompt are not supported yet.", param="echo")
    prompts = await _read_prompts(request, context.files.tokenizer, context.ready)
    sampling = _sampling(request, context, request.logprobs, _grammar(request))
    limit = request.max_tokens or context.files.defaults.max_new_tokens or DEFAULT_COMPLETION_TOKENS
    limits = [_limit(len(prompt.token_ids), limit, request.max_tokens, context.ready) for prompt in prompts]
    return _plan("cmpl-", request, context, prompts, sampling, limits)


async def plan_chat(request: ChatRequest, context: Context, prefix: str = "chatcmpl-") -> Plan:
    """`prefix` begins the answer's id. Raises BadRequest naming the field."""
    ready = context.ready
    if request.top_logprobs is not None and not request.logprobs:
        raise BadRequest("'top_logprobs' wants 'logprobs' to be true.", param="top_logprobs")
    text, answer = _chat_prompt(request, context)
    prompt = Prompt(await _tokenize(text, context.files.tokenizer, ready, "messages", add_special_tokens=False))
    grammar = _chat_grammar(request, context.files, answer)
    sampling = _sampling(request, context, (request.top_logprobs or 0) if request.logprobs else None, grammar)
    thinking, budget = answer.thinking if answer is not None else None, request.thinking_token_budget
    sampling = msgspec.structs.replace(
        sampling, thinking=thinking_budget(budget, thinking, context.files, ready.vocab_size)
    )
    asked = request.max_completion_tokens or request.max_tokens
    limit = asked or context.files.defaults.max_new_tokens or ready.max_model_len
    limits = [_limit(len(prompt.token_ids), limit, asked, ready)]
    plan = _plan(prefix, request, context, [prompt], sampling, limits)
    return msgspec.structs.replace(
        plan,
        stops=msgspec.structs.replace(plan.stops, answer=answer),
        include_reasoning=request.include_reasoning is not False,
    )


async def count_prompt(request: ChatRequest, context: Context) -> int:
    """How many tokens the prompt would have, longer than the model takes or not. Raises BadRequest."""
    text, _ = _chat_prompt(request, context)
    return len(await _encode(text, context.files.tokenizer, add_special_tokens=False))


def _chat_prompt(request: ChatRequest, context: Context) -> tuple[str, AnswerRules | None]:
    """The text that the model reads, and how its answer is read."""
    template = context.files.chat_template
    if template is None:
        raise BadRequest("This model has no chat template: use /v1/completions, or serve it with --chat-template.")
    tools = _tools(request, context.files)
    text = template.render(
        check_messages(request.messages, ignore_unknown=context.ignore_unknown),
        add_generation_prompt=request.add_generation_prompt is not False,
        tools=tools.shown if tools else None,
        values=_template_values(request, template),
    )
    answer = _answer_rules(request, context.files, text, tools)
    if answer is not None and answer.forced:
        text = _close_thinking(text) + answer.forced
    return text, answer


async def tokens_of(request: TokenizeRequest, files: ModelFiles, *, ignore_unknown: bool) -> list[int]:
    """What /tokenize answers: the ids that the same text or messages would be as a prompt. Raises BadRequest."""
    if (request.prompt is None) == (request.messages is None):
        raise BadRequest("Want either 'prompt' or 'messages'.", param="prompt", code="missing_parameter")
    if request.messages is None:
        for name in ("tools", "add_generation_prompt", "chat_template_kwargs"):
            if getattr(request, name) is not None:
                raise BadRequest(f"'{name}' wants 'messages'.", param=name)
        special = request.add_special_tokens is not False
        return await _encode(request.prompt or "", files.tokenizer, add_special_tokens=special)
    if files.chat_template is None:
        raise BadRequest("This model has no chat template.", param="messages")
    tools = read_tools(request.tools, None)
    text = files.chat_template.render(
        check_messages(request.messages, ignore_unknown=ignore_unknown),
        add_generation_prompt=request.add_generation_prompt is not False,
        tools=tools.shown if tools else None,
        values=request.chat_template_kwargs,
    )
    return await _encode(text, files.tokenizer, add_special_tokens=bool(request.add_special_tokens))


def check_ids(token_ids: list[int], vocab_size: int) -> None:
    """Raises BadRequest naming `tokens` for an id that is none."""
    if token_ids:
        _check_id(max(token_ids), vocab_size, "tokens")


def _plan(
    prefix: str,
    request: SamplingFields,
    context: Context,
    prompts: list[Prompt],
    sampling: SamplingParams,
    limits: list[int],
) -> Plan:
    """What both endpoints share once prompts and limits are known."""
    n = request.n or 1
    if len(prompts) * n > MAX_SEQUENCES:
        raise BadRequest(
            f"Want at most {MAX_SEQUENCES} sequences a request, got {len(prompts)} prompts x n = {n}.", param="n"
        )
    if sampling.min_tokens > min(limits):
        raise BadRequest(f"Want min_tokens <= max_tokens, got {sampling.min_tokens}.", param="min_tokens")
    stream = bool(request.stream)
    if request.stream_options is not None and not stream:
        raise BadRequest("'stream_options' wants 'stream' to be true.", param="stream_options")
    return Plan(
        id=prefix + secrets.token_hex(12),
        model=context.model,
        created=int(time.time()),
        arrived=context.arrived,
        prompts=prompts,
        sampling=[msgspec.structs.replace(sampling, max_tokens=limit) for limit in limits],
        n=n,
        stops=_stop_rules(request, sampling),
        stream=stream,
        include_usage=bool(request.stream_options and request.stream_options.include_usage),
        return_token_ids=bool(request.return_token_ids),
        include_metrics=bool(request.include_metrics),
        speculative_k=_speculative_k(request, context.ready),
    )


def _speculative_k(request: SamplingFields, ready: Ready) -> int:
    """The request's own depth, or what is served."""
    served = ready.num_speculative_tokens
    asked = request.speculation.k if request.speculation is not None else None
    if asked is not None and asked > served:
        reason = f" ({ready.speculation_disabled_reason})" if ready.speculation_disabled_reason else ""
        raise BadRequest(f"This server speculates with k = {served}{reason}, got {asked}.", param="speculation.k")
    return served if asked is None else asked


def _grammar(request: SamplingFields, after_token_id: int | None = None) -> Grammar | None:
    """What the text must match, from whichever field asks for it. Raises BadRequest."""
    names = ("response_format", "structured_outputs", *GUIDED_FIELDS)
    given = {name: value for name in names if (value := getattr(request, name)) is not None}
    grammar = grammar_of(given, after_token_id)
    if grammar is not None and request.min_tokens:
        raise BadRequest("A grammar decides when the text ends: want no min_tokens with it.", param="min_tokens")
    return grammar


def _chat_grammar(request: ChatRequest, files: ModelFiles, answer: AnswerRules | None) -> Grammar | None:
    """In force after the thinking block where the prompt opens one. A demanded call is a grammar too."""
    thinking = answer is not None and answer.thinking == "open"
    grammar = _grammar(request, files.tokenizer.token_to_id(END_THINK) if thinking else None)
    if grammar is None and answer is not None and answer.tools is not None and answer.forced:
        if request.min_tokens:
            raise BadRequest("A demanded call decides when the text ends: want no min_tokens.", param="min_tokens")
        return call_grammar(answer.tools, answer.named, answer.single, files.tokenizer)
    if grammar is not None and answer is not None and answer.tools is not None:
        raise BadRequest(
            "Structured output and tools are not supported together: want tool_choice none.", param="tools"
        )
    return grammar


def _sampling(
    request: SamplingFields, context: Context, logprobs: int | None, grammar: Grammar | None
) -> SamplingParams:
    """The request's values, then the checkpoint's, then neutral ones. max_tokens is filled in for each prompt."""
    defaults, vocab_size = context.files.defaults, context.ready.vocab_size

    def choose(value: Any, default: Any, neutral: Any) -> Any:
        return value if value is not None else default if default is not None else neutral

    stop_ids = tuple(dict.fromkeys(request.stop_token_ids or ()))
    for token_id in stop_ids:
        _check_id(token_id, vocab_size, "stop_token_ids")
    for token_id in request.allowed_token_ids or ():
        _check_id(token_id, vocab_size, "allowed_token_ids")
    temperature = choose(request.temperature, defaults.temperature, 1.0)
    return SamplingParams(
        temperature=temperature if temperature >= LOWEST_TEMPERATURE else 0.0,
        top_p=choose(request.top_p, defaults.top_p, 1.0),
        # more than all ids is all ids; -1 is vLLM's other way to say "off"
        top_k=min(max(choose(request.top_k, defaults.top_k, 0), 0), vocab_size),
        min_p=choose(request.min_p, defaults.min_p, 0.0),
        repetition_penalty=choose(request.repetition_penalty, defaults.repetition_penalty, 1.0),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        logit_bias=_logit_bias(request.logit_bias or {}, vocab_size),
        min_tokens=request.min_tokens or 0,
        stop_token_ids=stop_ids,
        eos_token_ids=tuple(token_id for token_id in context.files.eos_token_ids if 0 <= token_id < vocab_size),
        ignore_eos=bool(request.ignore_eos),
        seed=request.seed if request.seed is not None else secrets.randbits(63),
        logprobs=logprobs,
        grammar=grammar,
        bad_words_token_ids=bad_words_ids(request.bad_words or [], context.files.tokenizer, vocab_size),
        allowed_token_ids=tuple(dict.fromkeys(request.allowed_token_ids)) if request.allowed_token_ids else None,
    )


def _logit_bias(given: dict[str, float], vocab_size: int) -> dict[int, float]:
    bias = {}
    for key, value in given.items():
        # at most seven digits: no number worth parsing is longer
        if not (key.isascii() and key.isdigit() and len(key) <= 7):
            raise BadRequest(f"Want token ids as keys, got {key[:40]!r}.", param="logit_bias")
        _check_id(int(key), vocab_size, "logit_bias")
        bias[int(key)] = value
    return bias


def _stop_rules(request: SamplingFields, sampling: SamplingParams) -> StopRules:
    stop = request.stop or ()
    return StopRules(
        strings=(stop,) if isinstance(stop, str) else tuple(stop),
        include=bool(request.include_stop_str_in_output),
        min_tokens=sampling.min_tokens,
        skip_special_tokens=request.skip_special_tokens is not False,
        keep_tokens=sampling.logprobs is not None or bool(request.return_token_ids),
    )


def _limit(num_prompt: int, limit: int, asked: int | None, ready: Ready) -> int:
    """max_tokens for a prompt: what was asked or a 400; a default shrinks to what fits."""
    room = ready.max_model_len - num_prompt
    if room < 1:
        raise BadRequest(
            f"This model's maximum context length is {ready.max_model_len} tokens, "
            f"but the prompt has {num_prompt} and at least 1 is to be generated.",
            param="prompt",
            code="context_length_exceeded",
        )
    # the cache holds the whole sequence and one window of drafts, reserved before it starts
    cache_room = ready.kv_pages_total * ready.page_size - num_prompt - ready.num_speculative_tokens - 1
    if asked is None:
        return max(1, min(limit, room, cache_room))
    if limit > min(room, cache_room):
        bound, name = (
            (ready.max_model_len, "maximum context length")
            if room <= cache_room
            else (ready.kv_pages_total * ready.page_size, "key-value cache")
        )
        raise BadRequest(
            f"This model's {name} is {bound} tokens. However, you requested {num_prompt + limit} tokens "
            f"({num_prompt} in the prompt, {limit} for the completion).",
            param="max_tokens",
            code="context_length_exceeded",
        )
    return limit


# -- prompts -----------------------------------------------------------------------------------------------------


async def _read_prompts(request: CompletionRequest, tokenizer: Tokenizer, ready: Ready) -> list[Prompt]:
    """text, [text, ...], [id, ...] or [[id, ...], ...]."""
    given, echo = request.prompt, bool(request.echo)
    if given is None or given == []:
        raise BadRequest("Want a prompt.", param="prompt", code="missing_parameter")
    entries: list[Any] = [given] if isinstance(given, str) or _is_id(given[0]) else given
    if len(entries) > MAX_SEQUENCES:
        raise BadRequest(f"Want at most {MAX_SEQUENCES} prompts, got {len(entries)}.", param="prompt")
    prompts = []
    for index, entry in enumerate(entries):
        where = "prompt" if entry is given else f"prompt[{index}]"
        if isinstance(entry, str):
            special = request.add_special_tokens is not False
            ids = await _tokenize(entry, tokenizer, ready, where, add_special_tokens=special)
            prompts.append(Prompt(ids, entry if echo else ""))
        elif isinstance(entry, list):
            prompts.append(_id_prompt(entry, tokenizer, ready, where, echo))
        else:
            raise BadRequest(f"Want text or token ids, got {type(entry).__name__}.", param=where)
    return prompts


def _id_prompt(entry: list[Any], tokenizer: Tokenizer, ready: Ready, where: str, echo: bool) -> Prompt:
    _check_length(len(entry), ready, where)
    for token_id in entry:
        if not _is_id(token_id):
            raise BadRequest(f"Want token ids, got {type(token_id).__name__}.", param=where)
        _check_id(token_id, ready.vocab_size, where)
    # a prompt is shown as it was given, special tokens included
    return Prompt(entry, tokenizer.decode(entry, skip_special_tokens=False) if echo else "")


async def _tokenize(
    text: str, tokenizer: Tokenizer, ready: Ready, where: str, *, add_special_tokens: bool
) -> list[int]:
    # so many tokens it has at least: a giant text is refused before it is tokenised
    _check_length(len(text) // (MAX_COMPOSED * tokenizer.longest_token) + 1, ready, where)
    ids = await _encode(text, tokenizer, add_special_tokens=add_special_tokens)
    _check_length(len(ids), ready, where)
    return ids


async def _encode(text: str, tokenizer: Tokenizer, *, add_special_tokens: bool) -> list[int]:
    if len(text) > SLOW_TEXT:
        return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=add_special_tokens)
    return tokenizer.encode(text, add_special_tokens=add_special_tokens)


def _check_length(num_tokens: int, ready: Ready, where: str) -> None:
    if num_tokens == 0:
        raise BadRequest("Want at least one token, got an empty prompt.", param=where, code="empty_prompt")
    if num_tokens >= ready.max_model_len:
        raise BadRequest(
            f"This model's maximum context length is {ready.max_model_len} tokens, "
            f"but the prompt has {num_tokens} and at least 1 is to be generated.",
            param=where,
            code="context_length_exceeded",
        )


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_id(token_id: int, vocab_size: int, where: str) -> None:
    if not 0 <= token_id < vocab_size:
        raise BadRequest(f"Want token ids in 0..{vocab_size - 1}, got {token_id}.", param=where, code="invalid_value")


def _template_values(request: ChatRequest, template: ChatTemplate) -> dict[str, Any]:
    """Keyword values for the template; an effort that it does not read is refused, but none is a switch many have."""
    values = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort == "none" and "enable_thinking" in template.variables:
        values.setdefault("enable_thinking", False)
    elif request.reasoning_effort is not None:
        if "reasoning_effort" not in template.variables:
            raise BadRequest("This model's chat template has no reasoning_effort.", param="reasoning_effort")
        values.setdefault("reasoning_effort", request.reasoning_effort)
    return values


# -- tools and thinking ----------------------------------------------------------------------------------------------


def _tools(request: ChatRequest, files: ModelFiles) -> Tools | None:
    """What may be called. Tools that must not be are not shown to the model either."""
    tools = read_tools(request.tools, request.tool_choice)
    if tools is None:
        return None
    template = files.chat_template
    if not files.parses_tool_calls or template is None or "tools" not in template.variables:
        raise BadRequest("This model's chat template has no tools that are known here.", param="tools")
    if tools.choice.mode in ("required", "named") and request.add_generation_prompt is False:
        raise BadRequest("A call can only be demanded in a new turn.", param="add_generation_prompt")
    return tools


def _answer_rules(request: ChatRequest, files: ModelFiles, text: str, tools: Tools | None) -> AnswerRules | None:
    """None where the answer has no parts to tell apart."""
    if tools is None and not files.parses_reasoning:
        return None
    forced, named = "", tools.choice.named if tools is not None else ""
    if tools is not None and tools.choice.mode in ("required", "named"):
        forced = f"{CALL}\n{FUNCTION}" + (f"{named}>\n" if named else "")
    thinking: Literal["none", "look", "open"] = "none"
    if files.parses_reasoning and not forced:
        thinking = "open" if _is_thinking(text) else "look"
    return AnswerRules(
        thinking=thinking,
        tools=tools.schemas if tools else None,
        forced=forced,
        named=named,
        single=request.parallel_tool_calls is False,
    )


def _is_thinking(text: str) -> bool:
    """The prompt ends inside an empty thinking block."""
    return text.rstrip().endswith(THINK)


def _close_thinking(text: str) -> str:
    """A call that is demanded comes without thought: the block that the template opened is closed again."""
    return text.rstrip() + f"\n\n{END_THINK}\n\n" if _is_thinking(text) else text
