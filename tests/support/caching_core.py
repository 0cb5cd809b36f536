"""The scripted core with what a prefix cache tells: prompts are cut every 64 tokens, and nothing is ever evicted."""

from __future__ import annotations

import msgspec
from scripted_core import ScriptedCore, Sequence

from pilotfish.engine.link.messages import CacheMiss, PrefixCacheStats, RequestOutput, StepStats

CHUNK = 64
SNAPSHOT_BYTES = 1000


def common(one: list[int], other: list[int]) -> int:
    return next(
        (i for i, pair in enumerate(zip(one, other, strict=False)) if len(set(pair)) > 1), len(one[: len(other)])
    )


class CachingCore(ScriptedCore):
    def __init__(self, options) -> None:
        super().__init__(options)
        self.ready = msgspec.structs.replace(
            self.ready,
            prefix_caching=options.enable_prefix_caching,
            prefill_chunk=CHUNK,
            page_size=CHUNK,
            snapshot_bytes=SNAPSHOT_BYTES,
        )
        self._kept: dict[str, list[list[int]]] = {}
        self._news: PrefixCacheStats | None = None

    def _advance(self, sequence: Sequence) -> RequestOutput:
        is_first = not sequence.prefilled
        output = super()._advance(sequence)
        if not is_first or not self.ready.prefix_caching:
            return output
        return msgspec.structs.replace(output, num_cached_tokens=self._look_up(sequence))

    def _look_up(self, sequence: Sequence) -> int:
        request = sequence.request
        prompt, kept = request.prompt_token_ids, self._kept.setdefault(request.cache_salt, [])
        shared = max((common(prompt, other) for other in kept), default=0)
        nearest = next((other for other in kept if common(prompt, other) == shared), [])
        whole = request.sampling.prompt_logprobs is not None
        cached = 0 if whole else shared // CHUNK * CHUNK
        allowed = len(prompt) // CHUNK * CHUNK
        reason = "logprobs" if whole else "short" if not allowed else "differs" if shared else "new"
        miss = CacheMiss(
            request_id=request.request_id,
            key=request.key,
            reason=reason,
            num_prompt_tokens=len(prompt),
            num_cached_tokens=cached,
            num_allowed_tokens=allowed,
            first_difference=shared if reason == "differs" else None,
            here=tuple(prompt[shared : shared + 8]) if reason == "differs" else (),
            there=tuple(nearest[shared : shared + 8]) if reason == "differs" else (),
        )
        kept.append(prompt)
        count = sum(len(other) // CHUNK for prompts in self._kept.values() for other in prompts)
        before = self._news or PrefixCacheStats()
        self._news = PrefixCacheStats(
            num_queried_tokens=before.num_queried_tokens + len(prompt),
            num_hit_tokens=before.num_hit_tokens + cached,
            misses=before.misses if cached == allowed > 0 else (*before.misses, miss),
            num_snapshots=count,
            num_bytes=count * SNAPSHOT_BYTES,
            capacity_bytes=1 << 20,
        )
        return cached

    def _stats(self) -> StepStats:
        news, self._news = self._news, None
        return msgspec.structs.replace(super()._stats(), prefix_cache=news)


def make_core(options) -> CachingCore:
    return CachingCore(options)
