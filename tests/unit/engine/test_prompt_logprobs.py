"""Log-probabilities of a prompt's own tokens: those that decoding gives, whatever chunks and neighbours there are."""

from __future__ import annotations

import pytest

from tests.support.loops import LoopDriver


def values(request):
    entries = [entry for output in request.outputs for entry in output.prompt_logprobs or ()]
    return [(entry.token_id, entry.logprob, entry.rank, entry.top) for entry in entries]


def test_they_are_what_decoding_said_of_the_same_tokens():
    """But for the rounding of prefill."""
    driver = LoopDriver(depth=2, max_num_seqs=1)
    written = driver.ask("written", 21, logprobs=3, max_tokens=20)
    driver.run()
    prompt = written.submit.prompt_token_ids
    read = driver.submit(
        "read",
        [*prompt, *written.tokens],
        written.submit.sampling.__class__(temperature=0, max_tokens=0, prompt_logprobs=3),
    )
    driver.run()
    assert read.tokens == [] and read.finish == "length"
    found = values(read)
    assert [token for token, *_ in found] == [*prompt[1:], *written.tokens]
    decoded = [entry for output in written.outputs for entry in output.logprobs]
    for entry, (token, logprob, rank, top) in zip(decoded, found[len(prompt) - 1 :], strict=True):
        assert token == entry.token_id and rank == 1
        assert logprob == pytest.approx(entry.logprob, abs=1e-4)
        assert [id for id, _ in top] == [id for id, _ in entry.top]


@pytest.mark.parametrize("kind", ("hv_gt_hk", "moe"))
def test_bits_depend_on_the_prompt_alone(kind):
    """A prompt of several chunks, alone and among others, without and with text after it."""
    alone = LoopDriver(kind, depth=2, max_num_seqs=1)
    wanted = alone.ask("alone", 200, seed=5, max_tokens=0, prompt_logprobs=2)
    alone.run()
    crowd = LoopDriver(kind, depth=3, max_num_seqs=3)
    others = [crowd.ask(f"other {n}", 40, seed=n, mode="sampled") for n in range(2)]
    got = crowd.ask("among others", 200, seed=5, max_tokens=9, prompt_logprobs=2)
    crowd.run()
    assert values(got) == values(wanted)
    assert len(values(wanted)) == 199
    assert len(got.tokens) == 9 and got.tokens == got.reference.tokens[:9]
    assert all(other.finish == "length" for other in others)
    assert sum(output.prompt_logprobs is not None for output in wanted.outputs) > 1


def test_a_prompt_that_is_only_read_leaves_nothing_behind():
    driver = LoopDriver(depth=2, max_num_seqs=2)
    driver.ask("one token", 1, max_tokens=0, prompt_logprobs=0)
    driver.ask("read", 30, max_tokens=0)
    after = driver.ask("after", 21)
    driver.run()
    scheduler = driver.loop.scheduler
    scheduler.check()
    assert not driver.loop.has_work() and scheduler.pages.num_used == scheduler.slots.num_used == 0
    assert after.tokens == after.reference.tokens[: len(after.tokens)]
    read = driver.requests["read"]
    assert read.finish == "length" and read.tokens == [] and values(read) == []
