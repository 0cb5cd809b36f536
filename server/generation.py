"""One HTTP request's sequences: tokens in from the engine, text out to whoever reads, each ended exactly once.

`Choice.feed` runs as the engine's outputs arrive, not when the client reads: a stop string ends its sequence one
round late however slow the client is, and what piles up for a slow reader is text, already merged.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from functools import partial

import msgspec

from pilotfish.engine.link.client import ENGINE_FAILED, EngineClient
from pilotfish.engine.link.messages import RequestOutput, Submit, TokenLogprob
from pilotfish.metrics.collectors import Collector, RequestEnd
from pilotfish.server.calls.parser import END_THINK, MARKERS, THINK, AnswerParser, begins_call
from pilotfish.server.calls.parts import Part, Said, merge
from pilotfish.server.errors import ApiError, BadRequest, EngineFailed, Overloaded, Unavailable
from pilotfish.server.http.auth import NO_KEY
from pilotfish.server.plan import GenerationPlan, StopRules
from pilotfish.server.text.detokenize import Detokenizer
from pilotfish.server.text.stops import StopMatcher
from pilotfish.server.text.tokenizer import Tokenizer
from pilotfish.server.waker import Waker

LOOP = "loop"
"""The stop reason of a text that repeats itself."""


class ShownToken(msgspec.Struct, frozen=True):
    """A token of the answer, its text from character `start` on, as far as the token makes it certain.

    `round`: the round of its sequence that wrote it, from 1 on; the prompt wrote the token of round 0. `draft`: the
    place, from 1 on, of the accepted draft that it was, 0 for the trunk's own. `forced`: its grammar allowed no other.
    """

    token_id: int
    start: int
    text: str
    round: int
    draft: int
    forced: bool
    logprob: TokenLogprob | None


class Piece(msgspec.Struct, frozen=True):
    """What has become certain since the last piece. `tokens` only where someone asked for them."""

    parts: list[Part]
    tokens: list[ShownToken]
    finish_reason: str | None
    stop_reason: int | str | None

    @property
    def text(self) -> str:
        """The content."""
        return "".join(part.text for part in self.parts if isinstance(part, Said) and part.kind == "content")


class Choice:
    """One sequence: detokenises, finds stop strings, counts. `end` says how it ended, by error or abort too.

    Text, ids, log-probabilities and usage are cut alike at a stop string: a token belongs to the answer if its text
    begins before the cut. A token is settled, and counts, once that is certain. Metrics count what a decoder without
    runs would have generated: up to the token that completes the stop string, and nothing after it.
    """

    def __init__(
        self, index: int, submit: Submit, tokenizer: Tokenizer, rules: StopRules, arrived: float, metrics: Collector
    ) -> None:
        self.index = index
        self.submit = submit
        self.rules = rules
        self.error: ApiError | None = None
        self.finish_reason: str | None = None
        self.end: str | None = None
        self.first_token_seconds: float | None = None
        self.num_cached_tokens: int | None = None
        self.stop_reason: int | str | None = None
        self.looped = False
        self.prompt_logprobs: list[TokenLogprob] = []
        self.num_tokens = self.num_drafted = self.num_accepted = self.num_reasoning_tokens = 0
        self._num_generated = self._num_rounds = 0
        self.committed_per_round: Counter[int] = Counter()
        self.num_round_accepted = 0
        self._detokenizer = Detokenizer(tokenizer.token_bytes, _hidden_ids(tokenizer, rules))
        self._stops = StopMatcher(rules.strings, include=rules.include)
        self._parser = AnswerParser(rules.answer) if rules.answer is not None else None
        looks = rules.answer is not None and rules.answer.thinking == "look" and not rules.in_reasoning
        self._opening: str | None = "" if looks and rules.strings else None
        self._wrapper = ""
        self._is_plain = not rules.strings and self._parser is None and not rules.keep_tokens
        self._parts: list[Part] = []
        self._num_chars = self._num_shown = 0
        self._unsettled: deque[ShownToken] = deque()
        self._settled: list[ShownToken] = []
        self._unread_starts: deque[int] = deque()
        self._arrived = arrived
        self._last_time: float | None = None
        self._metrics = metrics
        self._taken_end = False
        self.wake: Callable[[], None] = lambda: None

    @property
    def answer_start(self) -> int | None:
        """Where, in what was generated, the answer begins after what was thought; None if that is not known yet."""
        if self._parser is None or self._parser.reasoning_begin is None:
            return 0
        end = self._parser.reasoning_end
        return None if end is None else end + len(END_THINK)

    @property
    def ended(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    # -- from the engine -----------------------------------------------------------------------------------------

    def feed(self, output: RequestOutput) -> RequestOutput:
        """Takes one output in and returns it as it counts."""
        matched = None
        if self._is_plain:
            self._read_plain(output)
        else:
            kept, matched = self._read_tokens(output)
            if matched is not None or self._is_complete():
                output = _trim(output, kept)
        self._count(output)
        if output.finish_reason is not None:
            self._finish(output, matched)
        self._settle(ended=self.finish_reason is not None and matched is None)
        self._count_reasoning(ended=self.ended)
        self.wake()
        return output

    def _read_plain(self, output: RequestOutput) -> None:
        """All tokens at once, where nothing can end the text but the engine, and no one asks for single tokens."""
        ids = output.token_ids
        hides_last = output.stop_token_id is not None and not self.rules.include
        text = self._detokenizer.push_all(ids[:-1] if hides_last else ids)
        self._show(text)
        self._num_chars += len(text)
        self.num_tokens += len(ids)
        self.num_accepted += min(output.num_accepted, len(ids))

    def _read_tokens(self, output: RequestOutput) -> tuple[int, str | None]:
        """How many tokens would have been generated one by one, and the stop string that the last of them completed.

        The first call of a request that wants no second ends it as a stop string does, text included.
        """
        last = len(output.token_ids) - 1
        number = self._num_rounds + 1 if output.round else 0
        for position, token_id in enumerate(output.token_ids):
            stops_here = position == last and output.stop_token_id is not None
            text = "" if stops_here and not self.rules.include else self._detokenizer.push(token_id)
            armed = self._num_generated + position >= self.rules.min_tokens
            matched = self._match(text, armed=armed)
            logprob = output.logprobs[position] if output.logprobs else None
            draft = position + 1 if position < output.num_accepted else 0
            forced = position < output.num_forced
            shown = ShownToken(token_id, self._num_chars, text, number, draft, forced, logprob)
            self._unsettled.append(shown)
            self._num_chars += len(text)
            if matched is not None or self._is_complete():
                return position + 1, matched
        return last + 1, None

    def _match(self, text: str, *, armed: bool) -> str | None:
        """Shows what is certain of a token's text, up to the stop string that it completes.

        What is thought passes by the stop strings: they are about the answer. Where the model may open the block
        itself, the beginning waits until it is known to be no marker. Inside of a call none counts: it would cut it.
        """
        parser = self._parser if self.rules.strings else None
        for part in text if parser is not None else (text,):
            if self._opening is not None:
                self._opening += part
                begun = self._opening.lstrip()
                if begun != THINK and THINK.startswith(begun):
                    continue
                part, self._opening = self._opening, None
                if begun == THINK:
                    self._show(part)
                    continue
            if self._is_thinking() and not self.rules.in_reasoning:
                self._show(part)
                continue
            piece, inside = (part, False) if parser is None else self._beside_calls(part, parser)
            shown, matched = (piece, None) if inside else self._stops.push(piece, armed=armed)
            self._show(shown)
            if matched is not None:
                return matched
        return None

    def _is_thinking(self) -> bool:
        parser = self._parser
        return parser is not None and parser.reasoning_begin is not None and parser.reasoning_end is None

    def _beside_calls(self, text: str, parser: AnswerParser) -> tuple[str, bool]:
        """What is to be looked at now, and whether it belongs to a call: an opening tag may also be a word."""
        if not parser.is_opening:
            return text, parser.in_call
        self._wrapper += text
        begins = begins_call(self._wrapper)
        if begins is None:
            return "", True
        piece, self._wrapper = self._wrapper, ""
        if not begins:
            self._parts += parser.deny_call()
        return piece, begins

    def _is_complete(self) -> bool:
        return self._parser is not None and self._parser.finished

    def _show(self, text: str) -> None:
        self._num_shown += len(text)
        if self._parser is not None:
            self._parts += self._parser.push(text)
        elif text:
            self._parts.append(Said("content", text))

    def _settle(self, *, ended: bool) -> None:
        """Moves tokens that are certain to the answer: all of them at its end, else those whose text has begun to show.

        A token without text waits for the next character: it may be the first byte of one that is cut.
        """
        while self._unsettled and (ended or self._unsettled[0].start < self._num_shown):
            token = self._unsettled.popleft()
            self.num_tokens += 1
            self.num_accepted += token.draft > 0
            if self.rules.keep_tokens:
                self._settled.append(token)
            if self._parser is not None:
                self._unread_starts.append(token.start)

    def _count_reasoning(self, *, ended: bool) -> None:
        """Tokens whose text begins inside the thinking block, as soon as it is known where that is."""
        if self._parser is None:
            return
        begin, end, starts = self._parser.reasoning_begin, self._parser.reasoning_end, self._unread_starts
        while starts and (ended or end is not None or starts[0] < self._parser.position):
            start = starts.popleft()
            self.num_reasoning_tokens += begin is not None and begin <= start and (end is None or start < end)

    def _count(self, output: RequestOutput) -> None:
        self.prompt_logprobs += output.prompt_logprobs or ()
        if output.num_cached_tokens is not None:
            self.num_cached_tokens = output.num_cached_tokens
        if output.queue_seconds is not None:
            self._metrics.on_queue(self.submit.key, output.queue_seconds)
        self._num_generated += len(output.token_ids)
        self.num_drafted += output.num_drafted
        if output.round and output.token_ids:
            self._num_rounds += 1
            self.committed_per_round[len(output.token_ids)] += 1
            self.num_round_accepted += output.num_accepted
        if output.token_ids:
            now = time.monotonic()
            if self._last_time is None:
                self.first_token_seconds = now - self._arrived
                self._metrics.on_first_token(self.first_token_seconds)
            else:
                self._metrics.on_tokens(now - self._last_time, len(output.token_ids))
            self._last_time = now

    def _finish(self, output: RequestOutput, matched: str | None) -> None:
        if output.finish_reason in ("error", "abort"):
            self.error = _engine_error(output)
            self._end(output.finish_reason)
            return
        if matched is None:
            self._flush()
        if self._parser is not None:
            self._parts += self._parser.flush(cut=self._is_cut(output, matched))
        calls = self._parser.num_calls if self._parser is not None else 0
        self.finish_reason = "tool_calls" if calls and output.finish_reason == "stop" else output.finish_reason
        if matched is not None:
            self.stop_reason = matched
        elif output.looped:
            self.stop_reason, self.looped = LOOP, True
        elif output.stop_token_id in self.submit.sampling.stop_token_ids:
            self.stop_reason = output.stop_token_id
        self._end(output.finish_reason or "error")

    def _is_cut(self, output: RequestOutput, matched: str | None) -> bool:
        """Whether the model would have gone on."""
        by_id = output.stop_token_id is not None and output.stop_token_id not in self.submit.sampling.eos_token_ids
        return matched is not None or output.finish_reason == "length" or by_id

    def _flush(self) -> None:
        """The rest: an unfinished character becomes U+FFFD, held text was no stop string after all."""
        rest = self._detokenizer.flush()
        self._num_chars += len(rest)
        if rest and self._unsettled:
            # it is certain now that nothing came after it
            last = self._unsettled[-1]
            self._unsettled[-1] = msgspec.structs.replace(last, text=last.text + rest)
        shown, _ = self._stops.push((self._opening or "") + self._wrapper + rest, armed=False)
        self._wrapper = ""
        self._show(shown + self._stops.flush())

    def give_up(self) -> None:
        """The client has gone, or another choice of its request has failed."""
        if not self.ended:
            self.error = EngineFailed("aborted")
            self._end("abort")

    def _end(self, reason: str) -> None:
        self.end = reason
        self._metrics.on_end(
            RequestEnd(
                finish_reason=reason,
                seconds=time.monotonic() - self._arrived,
                num_prompt_tokens=len(self.submit.prompt_token_ids),
                num_tokens=self._num_generated,
                num_rounds=self._num_rounds,
                num_round_tokens=sum(size * count for size, count in self.committed_per_round.items()),
            )
        )

    # -- to the reader -------------------------------------------------------------------------------------------

    def take(self) -> Piece | None:
        """Everything new, or None. The piece with a finish_reason is the last one."""
        parts = merge(self._parts)
        self._parts.clear()
        tokens, self._settled = self._settled, []
        ends = self.finish_reason is not None and not self._taken_end
        if not (parts or tokens or ends):
            return None
        self._taken_end = self._taken_end or ends
        return Piece(parts, tokens, self.finish_reason, self.stop_reason)


def _hidden_ids(tokenizer: Tokenizer, rules: StopRules) -> frozenset[int]:
    """Special tokens without text. An answer that is parsed keeps its markers, which some tokenizers call special."""
    if not rules.skip_special_tokens:
        return frozenset()
    if rules.answer is None:
        return tokenizer.special_ids
    return tokenizer.special_ids - {tokenizer.token_to_id(marker) for marker in MARKERS}


def _trim(output: RequestOutput, kept: int) -> RequestOutput:
    """Only the first `kept` tokens, which end the request."""
    return msgspec.structs.replace(
        output,
        token_ids=output.token_ids[:kept],
        logprobs=output.logprobs[:kept] if output.logprobs is not None else None,
        num_accepted=min(output.num_accepted, kept),
        num_forced=min(output.num_forced, kept),
        finish_reason="stop",
        stop_token_id=None,
        looped=False,
    )


def _engine_error(output: RequestOutput) -> ApiError:
    message = output.error or "the engine ended the request"
    if output.error_code == "queue_full":
        return Overloaded(message)
    if output.error_code == "invalid":
        return BadRequest(message)
    if output.finish_reason == "abort":
        return Unavailable(message, code="aborted")
    if output.error_code == "nan":
        return EngineFailed(message)
    part, _, detail = message.partition(": ")
    if part.startswith(ENGINE_FAILED):
        return EngineFailed(part, detail)
    return EngineFailed("The engine failed at this request.", message)


SUBMITTED_AT_ONCE = 65536
"""Token ids that are sent to the engine before the event loop does something else."""


class Generation:
    """All choices of one request, which came with the API key of this label. Use as a context: leaving it frees
    whatever still runs."""

    def __init__(
        self,
        plan: GenerationPlan,
        client: EngineClient,
        waker: Waker,
        tokenizer: Tokenizer,
        metrics: Collector,
        key: str = NO_KEY,
    ) -> None:
        self._client = client
        self._news = asyncio.Event()
        self.choices = [
            Choice(index, submit, tokenizer, plan.stops, plan.arrived, metrics)
            for index, submit in enumerate(_submissions(plan, key))
        ]
        wake = partial(waker.add, self._news.set)
        for choice in self.choices:
            choice.wake = wake

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        for choice in self.choices:
            self._client.abort(choice.submit.request_id)
            choice.give_up()

    async def begin(self) -> None:
        """Asks the engine for all of them. Others have their turn between many long ones, whose ids are copied each."""
        num_ids = 0
        for choice in self.choices:
            self._client.submit(choice.submit, choice.feed)
            num_ids += len(choice.submit.prompt_token_ids) + len(choice.submit.sampling.allowed_token_ids or ())
            if num_ids > SUBMITTED_AT_ONCE:
                num_ids = 0
                await asyncio.sleep(0)

    def when_gone(self, call: Callable[[], None]) -> None:
        """Calls once for each choice, when the engine has nothing more of it: after an abort that may take a while."""
        for choice in self.choices:
            self._client.when_gone(choice.submit.request_id, call)

    async def first(self, timeout: float) -> None:
        """Waits for the first news, or until it is time to answer something. Raises ApiError for a refusal."""
        try:
            await asyncio.wait_for(self._news.wait(), timeout)
        except TimeoutError:
            return
        self._raise_errors()

    async def pieces(self, patience: float | None = None) -> AsyncIterator[list[tuple[Choice, Piece]]]:
        """Batches of news until every choice has ended, an empty one after each `patience` seconds without any: a
        call that is being written is no news.

        Raises ApiError when a choice fails.
        """
        clock = asyncio.get_running_loop()
        last, alarm = clock.time(), None

        def ring() -> None:
            # one alarm for many pieces: to set one for each costs as much as the rest of waiting for it
            nonlocal alarm
            alarm = None
            if patience is not None and clock.time() < last + patience:
                alarm = clock.call_at(last + patience, ring)
            else:
                self._news.set()

        try:
            while True:
                if patience is not None and alarm is None:
                    alarm = clock.call_at(last + patience, ring)
                await self._news.wait()
                self._news.clear()
                batch = [(choice, piece) for choice in self.choices if (piece := choice.take()) is not None]
                if batch or (patience is not None and clock.time() >= last + patience):
                    yield batch
                    last = clock.time()
                self._raise_errors()
                if all(choice.ended for choice in self.choices) and not self._news.is_set():
                    return
        finally:
            if alarm is not None:
                alarm.cancel()

    def _raise_errors(self) -> None:
        for choice in self.choices:
            if choice.error is not None:
                raise choice.error


def _submissions(plan: GenerationPlan, key: str) -> list[Submit]:
    submissions: list[Submit] = []
    for prompt, sampling in zip(plan.prompts, plan.sampling, strict=True):
        for number in range(plan.n):
            submissions.append(
                Submit(
                    request_id=f"{plan.engine_id}-{len(submissions)}",
                    prompt_token_ids=prompt.token_ids,
                    sampling=msgspec.structs.replace(sampling, choice=number),
                    speculative_k=plan.speculative_k,
                    key=key,
                    priority=plan.priority,
                    cache_salt=plan.cache_salt,
                    system_tokens=prompt.system_tokens,
                )
            )
    return submissions
