"""The gate on answers: the shipped questions score the same with and without speculation, and as they once did."""

from __future__ import annotations

from pilotfish.deploy.evaluate import harness, quality
from pilotfish.deploy.gate.gate import Found, Subject


def look(subject: Subject) -> Found:
    """Asked by lm-eval's client where it is installed, else by our own; both score by the same rules."""
    ask, client = (
        (_by_lm_eval, "lm-eval") if harness.is_installed() else (_by_us, "our client, lm-eval is not installed")
    )
    served, plain = ask(subject, None), ask(subject, 0)
    asked = quality.items()
    share = quality.score(asked, served)
    differing = sum(one != other for one, other in zip(served, plain, strict=True))
    recorded, margin = subject.expected.score, subject.expected.score_margin
    wanted = f"{len(asked)} answers the same at k = 0 and k = {subject.k}, one of them right"
    came = f"score {share:.2f}, {differing} answers differ at k = 0 ({client})"
    # a model that knows none of them writes nonsense, the same at every k
    sound = differing == 0 and share > 0
    if recorded is None:
        return Found(sound, wanted + " (no recorded score was given)", came)
    # a hair for decimal fractions
    passed = sound and abs(share - recorded) <= margin + 1e-9
    return Found(passed, f"{wanted}, score {recorded:.2f} within {margin:.2f}", came)


def _by_us(subject: Subject, k: int | None) -> list[str]:
    return quality.answers(subject.server, quality.items(), k)


def _by_lm_eval(subject: Subject, k: int | None) -> list[str]:
    server = subject.server
    model = server.model or server.first_model()
    return harness.own_texts(harness.run(server.url, model, [harness.OWN_GROUP], key=server.key, k=k))
