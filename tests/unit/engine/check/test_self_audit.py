"""`--audit-rate`: finished requests are decoded again when the engine is idle, unseen by clients."""

import pytest
import torch

from pilotfish.engine.link.messages import SamplingParams, Submit
from pilotfish.engine.options import EngineOptions
from pilotfish.engine.start import make_core
from tests.support.tiny_models import build_tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build_tiny(tmp_path_factory.mktemp("self_audit") / "moe", "moe")


def make(folder, rate):
    return make_core(
        EngineOptions(model=str(folder), num_speculative_tokens=3, audit_rate=rate, max_num_seqs=2, head_check="off")
    )


def ask(core, name, length=20, **sampling):
    prompt = torch.randint(0, 320, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    params = SamplingParams(**({"temperature": 0.8, "max_tokens": 12, "seed": 3} | sampling))
    core.submit(Submit(request_id=name, prompt_token_ids=prompt, sampling=params))


def drain(core, steps=10_000):
    """Outputs by request, tokens checked and mismatches, of at most so many steps."""
    outputs, checked, mismatched = {}, 0, 0
    while core.has_work() and steps:
        report = core.step()
        steps -= 1
        for output in report.outputs:
            outputs.setdefault(output.request_id, []).append(output)
        checked += report.stats.num_audited_tokens
        mismatched += report.stats.num_audit_mismatches
    return outputs, checked, mismatched


def test_every_token_of_a_finished_request_is_checked_and_no_client_sees_it(folder):
    core = make(folder, 1.0)
    for number in range(3):
        ask(core, f"r{number}", length=10 + number)
    outputs, checked, mismatched = drain(core)
    assert set(outputs) == {"r0", "r1", "r2"}
    assert (checked, mismatched) == (36, 0)
    core.scheduler.check()
    assert core.scheduler.pages.num_used == 0


def test_a_share_of_the_requests_is_checked(folder):
    core = make(folder, 0.25)
    for number in range(8):
        ask(core, f"r{number}", length=5 + number, max_tokens=4)
    _, checked, mismatched = drain(core)
    assert (checked, mismatched) == (2 * 4, 0)


def test_a_check_is_no_miss_of_the_prefix_cache(folder):
    core, told = make(folder, 1.0), []
    ask(core, "r")
    while core.has_work():
        report = core.step()
        if report is not None and report.stats.prefix_cache is not None:
            told += [(miss.request_id, miss.reason) for miss in report.stats.prefix_cache.misses]
    assert told == [("r", "short")]


def test_nothing_is_checked_by_default(folder):
    core = make(folder, 0.0)
    ask(core, "a")
    assert drain(core)[1:] == (0, 0)


def test_tokens_that_k_0_would_not_have_written_are_counted_and_logged(folder, caplog):
    core = make(folder, 1.0)
    ask(core, "wrong")
    while core._sequences:
        core.step()
    check = core.self_audit.start()
    core.self_audit.running.tokens[5] ^= 1
    core.self_audit.interrupt()
    assert check.request_id == "audit:wrong"
    _, _, mismatched = drain(core)
    assert mismatched == 1
    assert "request wrong differs" in caplog.text


def test_real_work_interrupts_a_check_which_is_done_later(folder):
    core = make(folder, 1.0)
    ask(core, "first")
    while core._sequences:
        core.step()
    for _ in range(3):
        core.step()
    assert core.self_audit.running is not None
    ask(core, "second", length=30)
    assert core.self_audit.running is None
    outputs, checked, mismatched = drain(core)
    assert outputs["second"][-1].finish_reason == "length"
    assert (checked, mismatched) == (24, 0)
    core.scheduler.check()


def test_an_aborted_request_is_checked_as_far_as_it_came(folder):
    core = make(folder, 1.0)
    ask(core, "a", max_tokens=400)
    for _ in range(6):
        core.step()
    core.abort("a")
    _, checked, mismatched = drain(core)
    assert checked >= 5 and mismatched == 0
