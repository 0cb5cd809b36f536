"""Makes of a decoded request what the engine is asked: prompts as ids, sampling parameters, limits.

Everything a client can get wrong is found here or in protocol.py; the engine sees only requests it can serve.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Generator

import msgspec

from pilotfish.engine.link.messages import Grammar, Ready, SamplingParams
from pilotfish.server import unused
from pilotfish.server.calls.grammar import call_grammar
from pilotfish.server.calls.parser import END_THINK, AnswerRules
from pilotfish.server.chat.request import ChatPrompt, ChatRequest, budget_of, chat_prompt, shows_reasoning
from pilotfish.server.completions.request import CompletionRequest, prompt_entries, read_prompts
from pilotfish.server.errors import BadRequest, ContextExceeded
from pilotfish.server.fields import FieldNotes
from pilotfish.server.lane import run_steps
from pilotfish.server.model_files import ModelFiles
from pilotfish.server.protocol import SamplingFields
from pilotfish.server.text.prompts import (
    MAX_SEQUENCES,
    Prompt,
    check_id,
    check_num_messages,
    count_tokens,
    kept_tokens,
    most_counted,
    most_tokens,
    tokenize,
)
from pilotfish.server.text.schemas import Held
from pilotfish.server.text.structured import GUIDED_FIELDS, check_format, grammar_of
from pilotfish.server.text.token_rules import bad_words_ids, closable_thinking, loop_rule, thinking_budget

DEFAULT_COMPLETION_TOKENS = 16
DRAWN_SEED_BITS = 53
"""Clients send a drawn seed back for the same text, and JavaScript reads JSON's numbers exactly to 2**53."""
SHARED_FIELDS = frozenset(SamplingFields.__struct_fields__) & frozenset(SamplingParams.__struct_fields__)
"""Fields that the engine knows by the API's name; those whose value is read in another way are set anew."""


class StopRules(msgspec.Struct, frozen=True):
    """What the HTTP side itself watches for in a sequence's text. Without `answer` rules all of it is content."""

    strings: tuple[str, ...] = ()
    in_reasoning: bool = False
    include: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True
    keep_tokens: bool = False
    answer: AnswerRules | None = None


class GenerationPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One HTTP request: every prompt is run `n` times, choices numbered prompt by prompt. `id` is what the client is
    told, and may have asked for; `engine_id` is no other request's."""

    id: str
    engine_id: str
    model: str
    created: int
    arrived: float
    prompts: list[Prompt]
    sampling: list[SamplingParams]
    n: int
    stops: StopRules
    stream: bool
    include_usage: bool
    continuous_usage: bool = False
    return_token_ids: bool = False
    include_reasoning: bool = True
    include_metrics: bool = False
    traces: bool = False
    speculative_k: int
    priority: int = 0
    cache_salt: str = ""
    prompt_logprobs: int | None = None
    echoes_logprobs: bool = False
    custom_tools: frozenset[str] = frozenset()

    @property
    def seed(self) -> int:
        return self.sampling[0].seed


class Context(msgspec.Struct, frozen=True, kw_only=True):
    """What a request is planned against. `model` is the name it asked for, `arrived` the clock when it came.

    `check_room` is asked before anything is tokenised: it raises ApiError where so many sequences cannot be taken.
    `recall` gives an item of an earlier answer by its id, as JSON. What was read of prompts is shared by those of one
    `cache_owner` alone.
    """

    model: str
    files: ModelFiles
    ready: Ready
    arrived: float
    notes: FieldNotes = msgspec.field(default_factory=FieldNotes)
    check_room: Callable[[int], None] = lambda num_sequences: None
    recall: Callable[[str], bytes | None] = lambda item_id: None
    tool_pieces: bool = False
    cache_owner: str = ""


def plan_completion(request: CompletionRequest, context: Context) -> GenerationPlan:
    """Raises BadRequest naming the field."""
    return run_steps(completion_steps(request, context))


def completion_steps(request: CompletionRequest, context: Context) -> Generator[None, None, GenerationPlan]:
    """The plan, of which others may have their turn between two prompts."""
    entries = prompt_entries(request)
    _check_num_sequences(len(entries), request.n or 1, context)
    asked, limit = _asked(request.max_tokens, context, DEFAULT_COMPLETION_TOKENS)
    last = _kept(request, asked, context.ready)
    prompts = yield from read_prompts(request, entries, context.files.tokenizer, context.ready, last)
    sampling = _sampling(request, context, request.logprobs, _grammar(request, context))
    if request.echo and request.logprobs is not None:
        most = max(request.logprobs, sampling.prompt_logprobs or 0)
        sampling = msgspec.structs.replace(sampling, prompt_logprobs=most)
    limits = [_limit(len(prompt.token_ids), limit, asked, context.ready) for prompt in prompts]
    plan = _plan("cmpl-", request, context, prompts, sampling, limits)
    return msgspec.structs.replace(plan, echoes_logprobs=bool(request.echo) and request.logprobs is not None)


def plan_chat(request: ChatRequest, context: Context, prefix: str = "chatcmpl-") -> GenerationPlan:
    """`prefix` begins the answer's id. Raises BadRequest naming the field."""
    ready = context.ready
    if request.top_logprobs and not request.logprobs:
        raise BadRequest("'top_logprobs' wants 'logprobs' to be true.", param="top_logprobs")
    _check_num_sequences(1, request.n or 1, context)
    given = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    asked, limit = _asked(given, context, ready.max_model_len)
    last = _kept(request, asked, ready)
    check_num_messages(request.messages, ready.max_model_len if last is None else most_counted(ready))
    chat = chat_prompt(request, context.files, context.notes, pieces=context.tool_pieces)
    answer, tokenizer = chat.answer, context.files.tokenizer
    ids = tokenize(chat.text, tokenizer, ready, "messages", add_special_tokens=False, last=last)
    prompt = Prompt(ids, system_tokens=_system_tokens(ids, chat, context))
    grammar = _chat_grammar(request, context, chat)
    sampling = _sampling(request, context, (request.top_logprobs or 0) if request.logprobs else None, grammar)
    thinking, budget = answer.thinking if answer is not None else None, _budget(request, context)
    rule = thinking_budget(budget, thinking, context.files, ready.vocab_size)
    if rule is None and sampling.loop_rule is not None:
        rule = closable_thinking(thinking, context.files, ready.vocab_size)
    sampling = msgspec.structs.replace(sampling, thinking=rule)
    limits = [_limit(len(prompt.token_ids), limit, asked, ready)]
    plan = _plan(prefix, request, context, [prompt], sampling, limits)
    return msgspec.structs.replace(
        plan,
        stops=msgspec.structs.replace(plan.stops, answer=answer, in_reasoning=bool(request.stop_in_reasoning)),
        include_reasoning=shows_reasoning(request),
        custom_tools=chat.tools.custom_names if chat.tools is not None else frozenset(),
    )


def _system_tokens(ids: list[int], chat: ChatPrompt, context: Context) -> int | None:
    """None where nothing is kept of prompts, and where they have neither system prompt nor tools."""
    beginnings = context.files.beginnings
    if beginnings is None or not context.ready.prefix_caching:
        return None
    return beginnings.measure(ids, chat.messages, chat.tools.shown if chat.tools is not None else None, chat.values)


def _budget(request: ChatRequest, context: Context) -> int | None:
    """Only the field that is about nothing else is refused where a model does not think."""
    budget = budget_of(request)
    if budget is None or request.thinking_token_budget is not None or context.files.parses_reasoning:
        return budget
    context.notes.unused(unused.BUDGET)
    return None


def count_prompt(request: ChatRequest, context: Context) -> int:
    """How many tokens the prompt would have, up to twice what the model takes. Raises BadRequest."""
    check_num_messages(request.messages, most_counted(context.ready))
    chat = chat_prompt(request, context.files, context.notes)
    return len(count_tokens(chat.text, context.files.tokenizer, context.ready, "messages", add_special_tokens=False))


def _check_num_sequences(num_prompts: int, n: int, context: Context) -> None:
    if num_prompts * n > MAX_SEQUENCES:
        raise BadRequest(
            f"Want at most {MAX_SEQUENCES} sequences a request, got {num_prompts} prompts x n = {n}.", param="n"
        )
    context.check_room(num_prompts * n)


def _plan(
    prefix: str,
    request: SamplingFields,
    context: Context,
    prompts: list[Prompt],
    sampling: SamplingParams,
    limits: list[int],
) -> GenerationPlan:
    """What both endpoints share once prompts and limits are known."""
    n, ready = request.n or 1, context.ready
    if sampling.min_tokens > min(limits):
        raise BadRequest(f"Want min_tokens <= max_tokens, got {sampling.min_tokens}.", param="min_tokens")
    stream, unique = bool(request.stream), secrets.token_hex(12)
    if stream and request.prompt_logprobs is not None:
        raise BadRequest("'prompt_logprobs' come with whole answers: want no 'stream'.", param="prompt_logprobs")
    return GenerationPlan(
        id=prefix + (request.request_id or unique),
        engine_id=prefix + unique,
        model=context.model,
        created=int(time.time()),
        arrived=context.arrived,
        prompts=prompts if sampling.prompt_logprobs is not None else [_kept_of(prompt, ready) for prompt in prompts],
        sampling=[msgspec.structs.replace(_with_least(sampling), max_tokens=limit) for limit in limits],
        n=n,
        stops=_stop_rules(request, sampling),
        stream=stream,
        include_usage=bool(request.stream_options and request.stream_options.include_usage),
        continuous_usage=bool(request.stream_options and request.stream_options.continuous_usage_stats),
        return_token_ids=bool(request.return_token_ids),
        include_metrics=bool(request.include_metrics),
        traces=_traces(request),
        speculative_k=_speculative_k(request, ready),
        priority=request.priority or 0,
        cache_salt=cache_salt(context.cache_owner, request.cache_salt),
        prompt_logprobs=request.prompt_logprobs,
    )


def _kept_of(prompt: Prompt, ready: Ready) -> Prompt:
    """The prompt, and how much of it stays once it is read; where its own log-probabilities are wanted nothing does."""
    return msgspec.structs.replace(prompt, num_kept=kept_tokens(len(prompt.token_ids), ready))


def cache_salt(owner: str, given: str | None) -> str:
    """One salt for each owner and each salt that a client gives. Owners are labels of keys, which have no colon."""
    return f"{owner}:{given or ''}" if owner else given or ""


def _with_least(sampling: SamplingParams) -> SamplingParams:
    """The parameters beside a grammar, which is the one to hold min_tokens: only it knows whether the text can go
    on."""
    grammar, least = sampling.grammar, sampling.min_tokens
    if grammar is None or not least:
        return sampling
    ends = (*sampling.eos_token_ids, *sampling.stop_token_ids)
    return msgspec.structs.replace(
        sampling, min_tokens=0, grammar=msgspec.structs.replace(grammar, min_tokens=least, ends=ends)
    )


def _speculative_k(request: SamplingFields, ready: Ready) -> int:
    """The request's own depth, or what is served."""
    served = ready.num_speculative_tokens
    asked = request.speculation.k if request.speculation is not None else None
    if asked is not None and asked > served:
        reason = f" ({ready.speculation_disabled_reason})" if ready.speculation_disabled_reason else ""
        raise BadRequest(f"This server speculates with k = {served}{reason}, got {asked}.", param="speculation.k")
    return served if asked is None else asked


def _traces(request: SamplingFields) -> bool:
    return request.speculation is not None and bool(request.speculation.trace)


def _grammar(request: SamplingFields, context: Context, after_token_id: int | None = None) -> Grammar | None:
    """What the text must match, from whichever field asks for it. Raises BadRequest."""
    check_format(request.response_format, context.notes)
    names = ("response_format", "structured_outputs", *GUIDED_FIELDS)
    given = {name: value for name in names if (value := getattr(request, name)) is not None}
    return grammar_of(given, after_token_id, Held(context.notes.leave_out))


def _chat_grammar(request: ChatRequest, context: Context, chat: ChatPrompt) -> Grammar | None:
    """The grammar of a chat, in force after the thinking block where the prompt opens one. A demanded call is a grammar
    too, and so are calls beside structured output, and those of tools that have a grammar of their own."""
    tokenizer, tools = context.files.tokenizer, chat.tools
    thinking = chat.answer is not None and chat.answer.thinking == "open"
    after = tokenizer.token_to_id(END_THINK) if thinking else None
    grammar = _grammar(request, context, after)
    if tools is None or (grammar is None and not tools.is_demanded and not tools.has_grammar):
        return grammar
    single = request.parallel_tool_calls is False
    held = Held(context.notes.leave_out)
    return call_grammar(tools, held, tokenizer, single=single, answer=grammar, after=after)


def _sampling(
    request: SamplingFields, context: Context, logprobs: int | None, grammar: Grammar | None
) -> SamplingParams:
    """The request's values, then the checkpoint's, then neutral ones. max_tokens is filled in for each prompt."""
    defaults, vocab_size = context.files.defaults, context.ready.vocab_size
    values = {name: getattr(request, name) for name in SHARED_FIELDS}
    values |= {name: getattr(defaults, name, None) for name, value in values.items() if value is None}
    given = SamplingParams(**{name: value for name, value in values.items() if value is not None})
    stop_ids = tuple(dict.fromkeys(request.stop_token_ids or ()))
    for token_id in stop_ids:
        check_id(token_id, vocab_size, "stop_token_ids")
    for token_id in request.allowed_token_ids or ():
        check_id(token_id, vocab_size, "allowed_token_ids")
    return msgspec.structs.replace(
        given,
        # more than all ids is all ids; -1 is vLLM's other way to say "off"
        top_k=min(max(given.top_k, 0), vocab_size),
        logit_bias=_logit_bias(request.logit_bias or {}, vocab_size),
        stop_token_ids=stop_ids,
        eos_token_ids=tuple(token_id for token_id in context.files.eos_token_ids if 0 <= token_id < vocab_size),
        seed=request.seed if request.seed is not None else secrets.randbits(DRAWN_SEED_BITS),
        logprobs=logprobs,
        grammar=grammar,
        bad_words_token_ids=bad_words_ids(request.bad_words or [], context.files.tokenizer, vocab_size),
        allowed_token_ids=tuple(dict.fromkeys(request.allowed_token_ids)) if request.allowed_token_ids else None,
        prompt_logprobs=request.prompt_logprobs,
        loop_rule=loop_rule(request.loop_guard, request.repetition_detection, context.files.loop_rule),
    )


def _logit_bias(given: dict[str, float], vocab_size: int) -> dict[int, float]:
    bias = {}
    for key, value in given.items():
        # at most seven digits: no number worth parsing is longer
        if not (key.isascii() and key.isdigit() and len(key) <= 7):
            raise BadRequest(f"Want token ids as keys, got {key[:40]!r}.", param="logit_bias")
        check_id(int(key), vocab_size, "logit_bias")
        bias[int(key)] = value
    return bias


def _stop_rules(request: SamplingFields, sampling: SamplingParams) -> StopRules:
    stop = request.stop or ()
    return StopRules(
        strings=(stop,) if isinstance(stop, str) else tuple(stop),
        include=bool(request.include_stop_str_in_output),
        min_tokens=sampling.min_tokens,
        skip_special_tokens=request.skip_special_tokens is not False,
        keep_tokens=sampling.logprobs is not None or bool(request.return_token_ids) or _traces(request),
    )


def _kept(request: SamplingFields, asked: int | None, ready: Ready) -> int | None:
    """How many last tokens of a prompt are kept, None for all; -1 stands for as many as leave room for the answer."""
    last = request.truncate_prompt_tokens
    if last == 0:
        raise BadRequest("Want at least one token, got 0.", param="truncate_prompt_tokens")
    return max(1, most_tokens(ready) - (asked or 1)) if last == -1 else last


def _asked(given: int | None, context: Context, default: int) -> tuple[int | None, int]:
    """The tokens that must fit, if so many were asked for, and the most that may be written."""
    if given is None:
        return None, context.files.defaults.max_new_tokens or default
    return (given, given) if given >= 0 else (None, context.ready.max_model_len)


def _limit(num_prompt: int, limit: int, asked: int | None, ready: Ready) -> int:
    """max_tokens for a prompt: what was asked or a 400; a default shrinks to what fits."""
    most = most_tokens(ready)
    more = (
        "" if most == ready.max_model_len else f" The key-value cache holds {ready.kv_pages_total * ready.page_size}."
    )
    if num_prompt >= most:
        raise ContextExceeded(num_prompt, most, param="prompt", more=more)
    if asked is not None and num_prompt + asked > most:
        raise ContextExceeded(num_prompt, most, param="max_tokens", asked=asked, more=more)
    return min(limit, most - num_prompt)
