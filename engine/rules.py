"""Rules that depend on the tokens so far: word bans, and a thinking block closed when its budget is spent.

Each table holds its part of every slot on the device. Row j of a window obeys what the sequence's own tokens and drafts
1 .. j say, and commit adds what was accepted, so the text is the same for every k. S = slots, B = sequences of a round,
W = window rows, V = vocabulary, n = drafts.
"""

from __future__ import annotations

import torch

from pilotfish.engine.errors import RequestError
from pilotfish.engine.messages import SamplingParams, ThinkingBudget

MAX_BAD_SEQUENCES = 256
MAX_BAD_LENGTH = 32
MAX_CLOSING = 64
ANY, NO_TOKEN = -1, -2
NEVER = 1 << 40
"""A position that no sequence reaches."""


class BadSequences:
    """Token sequences that must not be written: the last token of each is banned where the others stand before it.

    Only generated tokens count, as in vLLM. `prefixes` int64 [S, N, M], padded with ANY on the left, and `lasts`
    [S, N], NO_TOKEN where there is none; `recent` [S, M] are each slot's newest tokens.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device):
        self.vocab_size = vocab_size
        before = MAX_BAD_LENGTH - 1
        self.prefixes = torch.full((num_slots, MAX_BAD_SEQUENCES, before), ANY, device=device)
        self.lasts = torch.full((num_slots, MAX_BAD_SEQUENCES), NO_TOKEN, device=device)
        self.recent = torch.full((num_slots, before), NO_TOKEN, device=device)

    def admit(self, slot: int, sequences: list[tuple[int, ...]]) -> None:
        self.prefixes[slot] = ANY
        self.lasts[slot] = self.recent[slot] = NO_TOKEN
        if not sequences:
            return
        device = self.lasts.device
        width = self.prefixes.shape[2]
        padded = [[ANY] * (width + 1 - len(sequence)) + list(sequence) for sequence in sequences]
        rows = torch.tensor(padded, device=device)
        self.prefixes[slot, : len(rows)] = rows[:, :-1]
        self.lasts[slot, : len(rows)] = rows[:, -1]

    def banned(self, slots: torch.Tensor, drafts_Bn: torch.Tensor, width: int) -> torch.Tensor:
        """bool [B * W, V], for the last W of the n + 1 rows."""
        context = torch.cat((self.recent[slots], drafts_Bn), dim=1)
        before = context.unfold(1, self.recent.shape[1], 1)[:, -width:, None]
        prefixes, lasts = self.prefixes[slots][:, None], self.lasts[slots][:, None]
        hits = ((prefixes == ANY) | (prefixes == before)).all(-1) & (lasts != NO_TOKEN)
        # what does not apply bans a token past the vocabulary
        ids = torch.where(hits, lasts, self.vocab_size)
        table = torch.zeros((*ids.shape[:2], self.vocab_size + 1), dtype=torch.bool, device=ids.device)
        return table.scatter_(2, ids, True)[..., : self.vocab_size].flatten(0, 1)

    def commit(self, slots: torch.Tensor, chosen_BW: torch.Tensor, count_B: torch.Tensor) -> None:
        tokens = torch.cat((self.recent[slots], chosen_BW), dim=1)
        places = count_B[:, None] + torch.arange(self.recent.shape[1], device=tokens.device)
        self.recent[slots] = tokens.gather(1, places)


class ThinkingBudgets:
    """From a position on, unless the end id was written before it, tokens are those of the closing sequence.

    That position is `num_tokens` after the block was opened: by the prompt, or by the first start id that is written.
    `opened` and `closed` int64 [S] are the positions of the first start and end id, NEVER while there is none.
    """

    def __init__(self, num_slots: int, device: torch.device):
        self.start, self.end, self.num_closing = (torch.full((num_slots,), NO_TOKEN, device=device) for _ in range(3))
        self.budget, self.opened, self.closed = (torch.full((num_slots,), NEVER, device=device) for _ in range(3))
        self.closing = torch.full((num_slots, MAX_CLOSING), NO_TOKEN, device=device)

    def admit(self, slot: int, num_prompt: int, rule: ThinkingBudget | None) -> None:
        self.opened[slot] = self.closed[slot] = self.budget[slot] = NEVER
        if rule is None:
            return
        self.budget[slot] = rule.num_tokens
        self.end[slot] = rule.end_token_id
        self.start[slot] = NO_TOKEN if rule.start_token_id is None else rule.start_token_id
        if rule.start_token_id is None:
            self.opened[slot] = num_prompt - 1
        self.num_closing[slot] = len(rule.closing)
        self.closing[slot, : len(rule.closing)] = torch.tensor(rule.closing, device=self.closing.device)

    def forced(self, slots: torch.Tensor, positions_BW: torch.Tensor, drafts_Bn: torch.Tensor) -> torch.Tensor:
        """int64 [B * W], for the last W of the n + 1 rows: the token that must be chosen, NO_TOKEN where any may."""
        width, num_drafts = positions_BW.shape[1], drafts_Bn.shape[1]
        places = positions_BW[:, -1:] - num_drafts + torch.arange(num_drafts, device=slots.device)

        def first(known: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            found = torch.where(drafts_Bn == ids[slots][:, None], places, NEVER)
            return torch.cat((known[slots][:, None], found), dim=1).cummin(1).values[:, -width:]

        opened, closed = first(self.opened, self.start), first(self.closed, self.end)
        deadline = opened + 1 + self.budget[slots][:, None]
        step = positions_BW - deadline
        token = self.closing[slots].gather(1, step.clamp(0, MAX_CLOSING - 1))
        in_force = (step >= 0) & (step < self.num_closing[slots][:, None]) & (closed >= deadline)
        return torch.where(in_force, token, NO_TOKEN).flatten()

    def commit(
        self, slots: torch.Tensor, chosen_BW: torch.Tensor, count_B: torch.Tensor, first_B: torch.Tensor
    ) -> None:
        """first: the position that row 0's token takes."""
        index = torch.arange(chosen_BW.shape[1], device=slots.device)
        for known, ids in ((self.opened, self.start), (self.closed, self.end)):
            is_one = (chosen_BW == ids[slots][:, None]) & (index < count_B[:, None])
            found = torch.where(is_one, first_B[:, None] + index, NEVER).amin(1)
            known[slots] = torch.minimum(known[slots], found)


def bad_singles(params: SamplingParams) -> list[int]:
    """Bad words of one token: banned wherever they would stand."""
    return [sequence[0] for sequence in params.bad_words_token_ids if len(sequence) == 1]


def bad_sequences(params: SamplingParams) -> list[tuple[int, ...]]:
    """Those of more than one token."""
    return [sequence for sequence in params.bad_words_token_ids if len(sequence) > 1]


def allowed_ids(params: SamplingParams) -> frozenset[int] | None:
    """All that may ever be written, where that is limited."""
    if params.allowed_token_ids is None:
        return None
    return frozenset((*params.allowed_token_ids, *(params.thinking.closing if params.thinking is not None else ())))


def check_rules(params: SamplingParams, stop_ids: list[int]) -> None:
    """Raises RequestError for what the tables cannot hold, or for bans that leave nothing to choose."""
    sequences = bad_sequences(params)
    if any(not sequence or len(sequence) > MAX_BAD_LENGTH for sequence in params.bad_words_token_ids):
        raise RequestError(f"bad_words: want 1..{MAX_BAD_LENGTH} tokens in each")
    if len(sequences) > MAX_BAD_SEQUENCES:
        raise RequestError(
            f"bad_words: want at most {MAX_BAD_SEQUENCES} of several tokens, with and without a space before them, "
            f"got {len(sequences)}"
        )
    if params.allowed_token_ids is not None:
        forbidden = {*bad_singles(params), *(stop_ids if params.min_tokens else ())}
        if not set(params.allowed_token_ids) - forbidden:
            raise RequestError("allowed_token_ids: want at least one that bad_words and min_tokens do not forbid")
    if params.thinking is not None:
        _check_thinking(params.thinking)


def _check_thinking(rule: ThinkingBudget) -> None:
    if not 0 <= rule.num_tokens < NEVER:
        raise RequestError(f"thinking: want a budget in 0..{NEVER - 1}, got {rule.num_tokens}")
    if not 1 <= len(rule.closing) <= MAX_CLOSING or rule.end_token_id not in rule.closing:
        raise RequestError(f"thinking: want a closing sequence of 1..{MAX_CLOSING} tokens with the end id in it")
