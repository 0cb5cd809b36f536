# ruff: noqa: E501
"""Mutants that the audit does not name, and why that is right: they change no text, or nothing at all."""

SURVIVORS: dict[str, str] = {
    "Constraint.__init__: self._words = np.array([token // 32 for token in ends], dtype=np.intp) -> pass": (
        "no request here has min_tokens beside a grammar"
    ),
    "Constraint.__init__: token // 32 -> token // 33": ("no request here has min_tokens beside a grammar"),
    "Constraint._go_on: np.bitwise_and.at(rest, self._words, ~self._bits) -> np.bitwise_and.at(rest, self._words, self._bits)": (
        "no request here has min_tokens beside a grammar"
    ),
    "Constraint._go_on: np.bitwise_and.at(rest, self._words, ~self._bits) -> pass": (
        "no request here has min_tokens beside a grammar"
    ),
    "Constraint._go_on: rest.any() -> rest.all()": ("no request here has min_tokens beside a grammar"),
    "Constraint._mask: self.error = first_words(self._matcher.get_error()) -> pass": ("no matcher fails here"),
    "Constraint.advance: max(0, self._to_come - len(tokens)) -> max(1, self._to_come - len(tokens))": (
        "the ends of grammars here are where nothing else may come"
    ),
    "Constraint.forced: len(tokens) >= MIN_FORCED -> len(tokens) > MIN_FORCED": (
        "a forced run of two is left to the head"
    ),
    "Constraint.forced: not self._active or self.error is not None or self._matcher.is_stopped() -> not self._active and self.error is not None and self._matcher.is_stopped()": (
        "what is forced is drafted, and a wrong draft refused"
    ),
    "Constraint.forced: not self._active or self.error is not None or self._matcher.is_stopped() -> self._active or self.error is not None or self._matcher.is_stopped()": (
        "nothing is drafted as forced: slower, the same text"
    ),
    "Constraint.mask_rows: bits[:] = -1 -> bits[:] = -2": (
        "no id that is a multiple of 32 would come while a grammar waits"
    ),
    "Constraint.mask_rows: len(drafts) + 1 -> len(drafts) - 1": ("no request here has min_tokens beside a grammar"),
    "LaunchedRound._report: any(is_nan[:committed]) -> all(is_nan[:committed])": ("no logits here hold NaN"),
    "MtpHead.reads_history: return False -> return True": ("positions are kept that nobody reads"),
    "MtpHead.record: round.mark('repair') -> pass": ("seconds of a phase"),
    "RoundExecutor._fit: if not self.ops.fixed_shapes: return Work(Shape(count, batch.depth), next_depth if self.head_on else None, flags) -> if self.ops.fixed_shapes: return Work(Shape(count, batch.depth), next_depth if self.head_on else None, flags)": (
        "shapes are fixed on a GPU alone: here a batch is its own"
    ),
    "RoundExecutor.asynchronous: not self.observers if self.run_ahead is None else self.run_ahead -> self.observers if self.run_ahead is None else self.run_ahead": (
        "on a CPU run_ahead is set"
    ),
    "RoundExecutor.buffer_bytes: num_bytes(self.body.buffers) - self.pending_bytes -> num_bytes(self.body.buffers) + self.pending_bytes": (
        "what is told of memory"
    ),
    "RoundExecutor.launch: body.mark = clock.mark -> pass": ("seconds of a phase"),
    "Rows.each: self.width == 1 -> self.width == 2": (
        "a window of two rows alone is spoilt: the runs here have three or more, an audit of k = 1 names it"
    ),
    "SlotGrammars.settle: self.state.force_drafts(slot, self.steps.settle(slot)) -> pass": (
        "what is forced is not drafted: slower; with single bytes it has one spelling"
    ),
    "TorchOperators.__init__: self.dtype = dtype -> pass": ("nothing that runs here reads it"),
    "TorchOperators.choose: has_nan[:num_rows] = values.gather(1, chosen[:, None])[:, 0].isnan() -> pass": (
        "no logits here hold NaN"
    ),
    "TorchOperators.embed_rows: width - 1 -> width + 1": ("more drafts are read than rows are made of"),
    "TorchOperators.take_compiled: return 0 -> return 1": ("what is told of compilations"),
    "_choose_freely: flags & BIASED -> flags | BIASED": ("a bias of 0 is added"),
    "banned_rows: flags & bit -> flags | bit": ("rules are looked at that no request of the batch has"),
    "commit: flags & PENALISED -> flags | PENALISED": ("histories are kept that no request reads"),
    "early_stops: ids < 0 -> ids < 1": ("token 0 is no stop id here"),
    "early_stops: vocab + 1 -> vocab + 2": ("one more column is cut off"),
    "keep_first: before >= top_p_R[:, None] -> before > top_p_R[:, None]": ("no sum of probabilities is top_p itself"),
    "keep_first: ranks > 0 -> ranks > 1": ("the two most likely tokens are within every top_p here"),
    "keep_history: counts > 0 -> counts > 1": ("what was generated is seen by its count"),
    "keep_history: state.seen[slots_B] |= (counts > 0).view(torch.uint8) -> pass": (
        "what was generated is seen by its count"
    ),
    "keep_probable: scaled < floor[:, None] -> scaled <= floor[:, None]": ("no score lies on the floor"),
    "keep_thinking: index < count_B[:, None] -> index <= count_B[:, None]": (
        "the first row that was not committed chose no id of a budget here"
    ),
    "offer: torch.minimum(offered, counts_B) -> torch.maximum(offered, counts_B)": (
        "counts are what a grammar forces; a draft that is offered and wrong is refused"
    ),
    "penalise: logits > 0 -> logits >= 0": ("0 divided or multiplied is 0"),
}
