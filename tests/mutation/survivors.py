# ruff: noqa: E501
"""Mutants that the audit does not name, and why that is right: they change no text, or nothing at all."""

SURVIVORS: dict[str, str] = {
    "Reading.end: first is not None and (not launches) and first.report.done -> first is not None and launches and first.report.done": (
        "the head reads for a sequence that its first token has ended"
    ),
    "LaunchedRound._report: first + committed -> first - committed": ("no logits here hold NaN"),
    "SlotGrammars.forced: if not self.constraints: return [[] for _ in slots] -> if self.constraints: return [[] for _ in slots]": (
        "what is told of forced tokens"
    ),
    "keep_first: before >= top_p_R[:, None] -> before > top_p_R[:, None]": ("no sum of probabilities is top_p itself"),
    "_in_order: scores.sort(dim=-1, descending=True, stable=True) -> scores.sort(dim=-1, descending=True, stable=False)": (
        "torch sorts these rows alike, told to be stable or not"
    ),
    "_first_in_order: (last < last_kept) | (last_kept == float('-inf')) -> (last < last_kept) & (last_kept == float('-inf'))": (
        "all is sorted, which gives the same"
    ),
    "_first_in_order: most - 1 -> most - 2": ("no two scores at a filter's end are equal"),
    "RoundExecutor._verified: lambda: True -> lambda: False": (
        "a round waits for masks as long as it may, and all come in time"
    ),
    "RoundExecutor.graph_bytes: self.graphs.counts.num_bytes + self.prompt_graphs.counts.num_bytes -> self.graphs.counts.num_bytes - self.prompt_graphs.counts.num_bytes": (
        "what is told of memory"
    ),
    "Constraint._mask: self.error = first_words(fill.get_error()) -> pass": (
        "no matcher fails here, and no request can make a sound one fail"
    ),
    "Constraint.forced: not self._active or self.error is not None -> not self._active and self.error is not None": (
        "what is forced is drafted, and a wrong draft refused"
    ),
    "Constraint.forced: (1, num_words) -> (2, num_words)": ("a second row that nobody reads"),
    "MtpHead.reads_history: return False -> return True": ("positions are kept that nobody reads"),
    "MtpHead.record: round.mark('repair') -> pass": ("seconds of a phase"),
    "RoundExecutor._fit: if not self.ops.fixed_shapes: return Work(Shape(count, batch.depth), next_depth if self.head_on else None, flags) -> if self.ops.fixed_shapes: return Work(Shape(count, batch.depth), next_depth if self.head_on else None, flags)": (
        "runs as on a GPU: filled up with the null slot, drafts for a round as deep as this one"
    ),
    "RoundExecutor.asynchronous: not self.observers if self.run_ahead is None else self.run_ahead -> self.observers if self.run_ahead is None else self.run_ahead": (
        "run_ahead is False on a CPU, and then the other branch is not taken"
    ),
    "RoundExecutor.buffer_bytes: tensor_bytes(self.body.buffers) - self.pending_bytes + self.prompt.num_bytes -> tensor_bytes(self.body.buffers) - self.pending_bytes - self.prompt.num_bytes": (
        "what is told of memory"
    ),
    "RoundExecutor.launch: body.mark = unmarked -> pass": ("seconds of a phase"),
    "SlotGrammars.release: self.steps.release(slot) -> pass": (
        "the step of an ended request stays until the next one takes the slot"
    ),
    "SlotGrammars.settle: self.state.force_drafts(slot, self.steps.settle(slot)) -> pass": (
        "what is forced is not drafted: slower; the library's mask allows one spelling of it alone"
    ),
    "TorchOperators.choose: has_nan[:num_rows] = values.gather(1, chosen[:, None])[:, 0].isnan() -> pass": (
        "no logits here hold NaN"
    ),
    "TorchOperators.most_pending: return 0 -> return 1": ("a window beside a pending row makes two"),
    "TorchOperators.take_compiled: return 0 -> return 1": ("what is told of compilations"),
    "_choose_freely: flags & BIASED -> flags | BIASED": ("a bias of 0 is added"),
    "banned_rows: flags & bit -> flags | bit": ("rules are looked at that no request of the batch has"),
    "early_stops: vocab + 1 -> vocab + 2": ("one more column is cut off"),
    "keep_history: counts > 0 -> counts > 1": ("what was generated is seen by its count"),
    "keep_history: state.seen[slots_B] |= (counts > 0).view(torch.uint8) -> pass": (
        "what was generated is seen by its count"
    ),
    "offer: torch.minimum(offered, counts_B) -> torch.maximum(offered, counts_B)": (
        "counts are what a grammar forces; a draft that is offered and wrong is refused"
    ),
    "penalise: logits > 0 -> logits >= 0": ("0 divided or multiplied is 0"),
    "rows_left: count + width <= most_pending -> count + width < most_pending": ("rows stay pending on a GPU alone"),
}
