"""Rules that depend on the tokens so far: word bans, and a thinking block closed when its budget is spent.

Each table holds its part of every slot on the device. Row j of a window obeys what the sequence's own tokens and drafts
1 .. j say, and commit adds what was accepted, so the text is the same for every k. S = slots, B = sequences of a round,
W = window rows, V = vocabulary, n = drafts.
"""

from __future__ import annotations

import torch

from pilotfish.engine.errors import RequestError
from pilotfish.engine.link.messages import SamplingParams, ThinkingBudget
from pilotfish.engine.parcel import columns

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

    def rows(self, sequences: list[tuple[int, ...]]) -> torch.Tensor:
        """What `admit` wants of a request's sequences, int64 [n, M + 1], on the host."""
        width = self.prefixes.shape[2] + 1
        padded = [[ANY] * (width - len(sequence)) + list(sequence) for sequence in sequences]
        return torch.tensor(padded, dtype=torch.int64).view(len(padded), width)

    def admit(self, slot: int, rows: torch.Tensor) -> None:
        """`rows`: on the device."""
        self.prefixes[slot].fill_(ANY)
        self.lasts[slot].fill_(NO_TOKEN)
        self.recent[slot].fill_(NO_TOKEN)
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
        self._table = columns(6, num_slots, torch.int64, device)
        self.opened, self.closed, self.budget, self.start, self.end, self.num_closing = self._table
        self._table[:3].fill_(NEVER)
        self._table[3:].fill_(NO_TOKEN)
        self.closing = torch.full((num_slots, MAX_CLOSING), NO_TOKEN, device=device)

    @staticmethod
    def row(num_prompt: int, rule: ThinkingBudget | None) -> torch.Tensor:
        """What `admit` wants of a request, int64, on the host."""
        if rule is None:
            return torch.tensor([NEVER] * 3)
        opened, start = (num_prompt - 1, NO_TOKEN) if rule.start_token_id is None else (NEVER, rule.start_token_id)
        return torch.tensor(
            [opened, NEVER, rule.num_tokens, start, rule.end_token_id, len(rule.closing), *rule.closing]
        )

    def admit(self, slot: int, row: torch.Tensor) -> None:
        """`row`: on the device. Without a rule what is left of the one before it is never in force."""
        numbers, closing = row[: len(self._table)], row[len(self._table) :]
        self._table[: len(numbers), slot] = numbers
        self.closing[slot, : len(closing)] = closing

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
