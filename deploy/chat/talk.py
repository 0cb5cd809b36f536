"""One conversation: what was said, how the next answer is asked for, and what its last event tells of speculation."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from pilotfish.deploy.chat.screen import Screen
from pilotfish.deploy.gate.server import Refused, Server


@dataclass
class Talk:
    """`fields` go with every request; `k` None leaves the depth to the server."""

    server: Server
    screen: Screen
    system: str | None = None
    k: int | None = None
    fields: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, str]] = field(default_factory=list)

    def body(self) -> dict[str, Any]:
        leading = [{"role": "system", "content": self.system}] if self.system else []
        depth = {} if self.k is None else {"speculation": {"k": self.k}}
        return {"messages": leading + self.messages, "include_metrics": True, **depth, **self.fields}

    def ask(self, text: str) -> None:
        """Streams the answer to the screen, and keeps both turns; a turn that is refused is forgotten.

        An interrupt ends the answer: what has come of it is kept. Raises Refused, Unreachable.
        """
        self.messages.append({"role": "user", "content": text})
        answer = Answer(self.screen)
        try:
            for event in self.server.stream("/v1/chat/completions", self.body()):
                if event is not None:
                    answer.take(event)
        except KeyboardInterrupt:
            answer.interrupted = True
        except BaseException:
            self.messages.pop()
            raise
        answer.end()
        self.messages.append({"role": "assistant", "content": answer.text})

    def forget(self) -> None:
        self.messages.clear()

    def again(self) -> bool:
        """Asks the last question once more; whether there was one."""
        if len(self.messages) < 2:
            return False
        question = self.messages[-2]["content"]
        del self.messages[-2:]
        self.ask(question)
        return True


class Answer:
    """An answer as it comes, and what it took."""

    def __init__(self, screen: Screen) -> None:
        self.text, self.interrupted = "", False
        self._screen, self._began = screen, time.monotonic()
        self._first: float | None = None
        self._usage: dict[str, Any] = {}
        self._rounds: dict[str, Any] = {}
        self._thinking, self._finish = False, None

    def take(self, event: dict[str, Any]) -> None:
        """Raises Refused where the stream ends in an error."""
        if error := event.get("error"):
            raise Refused(str(error.get("message", error) if isinstance(error, dict) else error))
        self._usage = event.get("usage") or self._usage
        self._rounds = (event.get("metrics") or {}).get("speculative_decoding") or self._rounds
        for choice in event.get("choices") or ():
            self._finish = choice.get("finish_reason") or self._finish
            delta = choice.get("delta") or {}
            self._show(delta.get("reasoning_content") or delta.get("reasoning"), delta.get("content"))

    def _show(self, thought: str | None, text: str | None) -> None:
        if thought or text:
            self._first = self._first or time.monotonic()
        if thought:
            self._thinking = True
            self._screen.thought(thought)
        if text:
            if self._thinking:
                self._thinking = False
                self._screen.thought("\n")
            self.text += text
            self._screen.answer(text)

    def end(self) -> None:
        self._screen.answer("\n")
        self._screen.say(self.summary())

    def summary(self) -> str:
        """Tokens, speed and acceptance, as far as the server tells."""
        parts = []
        tokens = self._usage.get("completion_tokens", 0)
        span = time.monotonic() - (self._first or self._began)
        if tokens:
            parts.append(f"{tokens} tokens")
        if tokens > 1 and span > 0:
            parts.append(f"{(tokens - 1) / span:.0f} tokens/s")
        if self._first is not None:
            parts.append(f"the first after {self._first - self._began:.2f} s")
        if length := self._rounds.get("mean_acceptance_length"):
            drafts = f"{self._rounds.get('accepted')} of {self._rounds.get('drafted')} drafts accepted"
            parts.append(f"acceptance length {length:.2f} at k = {self._rounds.get('k')} ({drafts})")
        if self._finish == "length":
            parts.append("cut off by max_tokens or the context")
        if self.interrupted:
            parts.append("interrupted")
        return f"[{', '.join(parts) or 'no answer'}]"
