"""Gates on what the server says of itself: loaded, measured and seen to run, not configured."""

from __future__ import annotations

import time

from pilotfish.deploy.gate.gate import CannotRun, Found, Subject
from pilotfish.deploy.gate.requests import ask
from pilotfish.deploy.gate.server import Refused

ROUTES = {
    ("cpu", "bfloat16"): "mkldnn::_linear_pointwise bfloat16",
    ("cpu", "float32"): "aten::linear float32",
}
"""The kernel that the weights' products should take. Elsewhere any will do, and the report says which."""
PRODUCTS = ("linear", "mm", "addmm", "_linear_pointwise")
"""Kernels that multiply with weights; the other matrix products are attention's."""
NUM_LOOKS = 4
IDLE_SECONDS = 3.0
DIRECT = "gates want the server itself, not a relay before it; give the server's own address"
WORKING_MEMORY = 512 << 20
"""What requests need for a while, and libraries keep: the ledger was made before the first of them."""


def answers(subject: Subject) -> Found:
    """Somebody does, and it is one server: its counters and its memory are looked at, which a relay keeps to itself."""
    ready = subject.server.get("/ready")
    try:
        scrapes = [subject.server.metrics() for _ in range(NUM_LOOKS)]
    except Refused as error:
        raise CannotRun(f"{error}: {DIRECT}") from None
    if len({scrape.total("engine_ready_timestamp_seconds") for scrape in scrapes}) > 1:
        raise CannotRun(f"several servers answer in turn: {DIRECT}")
    subject.before = scrapes[-1]
    return Found(ready.get("ready") is True, "/ready says ready", f"ready: {ready.get('ready')}")


def version(subject: Subject) -> Found:
    came = subject.server.get("/version")["version"]
    return Found(came == subject.expected.version, subject.expected.version, came)


def trunk_text(subject: Subject) -> Found:
    """The model tells a plain text: one that does not answers nonsense, however fast."""
    check = subject.server.get("/health").get("trunk_check")
    if check is None:
        raise CannotRun("the trunk was not tested (--head-check off)")
    came = f"{check['verdict']}: {check.get('top1', 0):.0%} of a known text's tokens ranked first"
    reason = f"; {check['reason']}" if check.get("reason") else ""
    return Found(check["verdict"] == "ok", "a trunk that knows a plain text of English and code", came + reason)


def head_weights(subject: Subject) -> Found:
    """Every tensor of the draft head was loaded."""
    if subject.k_was_chosen:
        return Found(True, "no head at k = 0", f"{subject.execution.get('head_weights', [0, 0])[0]} loaded")
    if subject.drafts_by_look_up:
        return Found(True, "no head for look-up", subject.speculation["draft_head"])
    loaded, whole = subject.execution.get("head_weights", [0, 0])
    reason = subject.speculation["disabled_reason"]
    came = f"{loaded} of {whole}" + (f": {reason}" if reason else f", {subject.speculation.get('draft_head')}")
    return Found(0 < loaded == whole, "all weights of the MTP head", came)


def head_rank(subject: Subject) -> Found:
    """The head tells a known text nearly as well as the trunk does."""
    wanted = "the head ranks a known text's tokens as the trunk does"
    if subject.k_was_chosen or subject.drafts_by_look_up:
        return Found(True, "no head to rank", f"drafts by {subject.speculation.get('draft_head') or 'nothing'}")
    check = subject.speculation.get("head_check")
    if check is None:
        raise CannotRun("the head was not tested (--head-check off, or there is none)")
    shares = ", ".join(f"{share:.0%}" for share in check.get("head_top1", ()))
    came = f"{check['verdict']}: trunk {check.get('trunk_top1', 0):.0%} first, head {shares or 'nothing'}"
    reason = f"; {check['reason']}" if check.get("reason") else ""
    return Found(check["verdict"] == "ok", wanted, came + reason)


def kv_dtype(subject: Subject) -> Found:
    wanted = subject.expected.kv_dtype or subject.capacity["dtype"]
    kv, state = subject.execution["kv_dtype"], subject.execution["state_dtype"]
    # a narrower state rounds at each store, so text would depend on how rounds were cut
    passed = kv == wanted and state == "float32"
    return Found(passed, f"KV {wanted}, state float32", f"KV {kv}, state {state}")


def routes(subject: Subject) -> Found:
    """Every layer multiplied with its weights by the kernel that this device and dtype have for it."""
    execution = subject.execution
    parts = [f"layers.{i}" for i in range(execution["num_layers"])] + ["lm_head"]
    parts += ["head"] if subject.k and not subject.drafts_by_look_up else []
    taken: dict[str, set[str]] = {part: set() for part in parts}
    seen = execution.get("routes") or {}
    device, dtype = subject.capacity["device"].split(":")[0], subject.capacity["dtype"]
    wanted = ROUTES.get((device, dtype))
    for kernel, layers in seen.items():
        if wanted is None or kernel.split()[0].split("::")[1] in PRODUCTS:
            for layer in taken.keys() & set(layers):
                taken[layer].add(kernel)
    wrong = [part for part in parts if not taken[part] or (wanted and taken[part] != {wanted})]
    came = "; ".join(f"{kernel}: {_layers(layers)}" for kernel, layers in seen.items()) or "nothing was seen"
    if wrong:
        came += f"; otherwise in {', '.join(wrong[:4])}{', ..' if len(wrong) > 4 else ''}"
    return Found(not wrong, f"{wanted or 'a kernel'} for the weights of {_layers(parts)}", came)


def slow(subject: Subject) -> Found:
    """Nothing that a missing package or another build of torch would make many times faster."""
    found = subject.execution.get("slow") or []
    return Found(not found, "nothing that this machine could do much faster", "; ".join(found) or "nothing")


def _layers(names: list[str]) -> str:
    layers = [name for name in names if name.startswith("layers.")]
    return " + ".join(([f"{len(layers)} layers"] if layers else []) + [n for n in names if n not in layers])


def graphs(subject: Subject) -> Found:
    """No round missed the captured graphs. On a GPU there must be some: without, it serves by its slow path."""
    ask(subject)
    captured = subject.execution.get("num_graphs", 0)
    metrics = subject.server.metrics()
    eager, replayed = (int(metrics.total("rounds_total", path=path)) for path in ("eager", "graph"))
    if not captured:
        device = subject.capacity["device"]
        came = f"none captured on {device}: {eager} rounds launched operator by operator, {replayed} from graphs"
        if device.startswith("cuda"):
            return Found(False, "rounds from captured graphs (no --enforce-eager, nor --kernels torch)", came)
        return Found(replayed == 0 < eager, "rounds, and no graph where none is captured", came)
    came = f"{eager} misses, {replayed} rounds from {captured} graphs"
    return Found(eager == 0 < replayed, "no round without its graph since the start", came)


def compiled(subject: Subject) -> Found:
    """Nothing was left to compile once the server was ready: somebody's round would have waited for it."""
    ask(subject)
    metrics = subject.server.metrics()
    if not metrics.has("kernels_compiled_total"):
        raise CannotRun("the server does not count pilotfish_kernels_compiled_total")
    count = int(metrics.total("kernels_compiled_total"))
    return Found(count == 0, "no kernel compiled since the start", f"{count} compiled")


def memory(subject: Subject) -> Found:
    """What is in use after all these requests is what the ledger accounted for at the start."""
    ledger = subject.capacity["memory"]
    accounted = ledger["total_bytes"] - ledger["free_bytes"]
    most = accounted * (1 + subject.expected.memory_margin) + WORKING_MEMORY
    ask(subject)
    used = _memory_used(subject)
    if not used:
        raise CannotRun("pilotfish_memory_used_bytes is 0: the engine was never idle, or cannot measure")
    least = ledger["weights_bytes"]
    wanted = f"{_mib(least)} (weights) to {_mib(most)} (the ledger's {_mib(accounted)} and what requests need)"
    return Found(least <= used <= most, wanted, f"{_mib(used)} in use")


def _memory_used(subject: Subject) -> float:
    """Measured whenever the engine is idle, so some time after the last request."""
    deadline = time.monotonic() + IDLE_SECONDS
    while not (used := subject.server.metrics().total("memory_used_bytes")) and time.monotonic() < deadline:
        time.sleep(0.2)
    return used


def _mib(count: float) -> str:
    return f"{count / (1 << 20):.0f} MiB"
