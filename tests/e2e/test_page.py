"""The page in a real browser: what it shows is what the API says, and it does nothing that it should not."""

import json
import re
import urllib.request
from pathlib import Path

import pytest
from browser import CHROMIUM, Watched, chromium
from byte_model import build_tokenizer, write_model
from processes import until
from serving import PATIENCE, script, serving_in_thread
from tokenizers import AddedToken

from pilotfish.server.http import watch

pytest.importorskip("playwright.sync_api", reason="no playwright: pip install -e '.[dev]'")
axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="no axe: pip install -e '.[dev]'")
# no package index has a browser; .ci/run installs Debian's
if CHROMIUM is None:
    pytest.skip("no Chromium: apt install chromium", allow_module_level=True)

DEMO = Path(__file__).resolve().parents[2] / "demo" / "model"
CORE = "pilotfish.engine.start:make_core"
KEY = "the-right-one"
PREFIX = "/llm"
LINE = "x" * 1024
PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True}
# the eight steps of the scale that three drafts take
SHADES = {1: "d1", 2: "d5", 3: "d8"}


@pytest.fixture(scope="module")
def browser():
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def demo():
    """The demo model at k = 3, sampled often enough for plots to move while a test looks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watch, "INTERVAL_SECONDS", 0.25)
        engine = {"num_speculative_tokens": 3, "max_model_len": 1024, "num_threads": 1}
        with serving_in_thread(DEMO, core=CORE, engine=engine) as server:
            yield server


@pytest.fixture(scope="module")
def scripted(tmp_path_factory):
    """A scripted core behind a key and a prefix, with room for a megabyte; token 305 is a kibibyte of one line."""
    folder = write_model(tmp_path_factory.mktemp("model"))
    tokenizer = build_tokenizer()
    tokenizer.add_tokens([AddedToken(LINE, special=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    options = {"api_keys": (KEY,), "root_path": PREFIX, "core": "scripted_core:make_core_with_room"}
    with serving_in_thread(folder, engine={"max_model_len": 8192}, **options) as server:
        yield server


@pytest.fixture
def opened(browser):
    """Pages that must not have a fault at the end but those that a test has looked at."""
    watched = []

    def open_page(url, path="/", **context):
        watched.append(Watched(browser, url, **context))
        watched[-1].page.goto(url + path)
        return watched[-1]

    yield open_page
    faults = [fault for one in watched for fault in one.faults]
    for one in watched:
        one.close()
    assert not faults


def ready(watched):
    watched.page.locator("#state[data-state=ready]").wait_for()
    return watched.page


def write(page, prompt, *, api="chat", beside=True, max_tokens=48, logprobs=False, **fields):
    """Asks and waits for the end."""
    ask(page, prompt, api=api, beside=beside, max_tokens=max_tokens, logprobs=logprobs, **fields)
    page.locator("#go:enabled").wait_for()


def ask(page, prompt, *, api="chat", beside=True, max_tokens=48, logprobs=False, **fields):
    page.locator(f"input[name=api][value={api}]").check(force=True)
    page.locator("input[name=beside]").set_checked(beside)
    page.locator("input[name=logprobs]").set_checked(logprobs)
    page.locator("details").evaluate("element => { element.open = true; }")
    for name, value in {"max_tokens": max_tokens, **fields}.items():
        page.locator(f"#ask [name={name}]").fill(str(value))
    page.fill("#prompt", prompt)
    page.click("#go")


def unlock(page):
    page.fill("#key", KEY)
    page.click("#key-form button")
    page.locator("#key-form").wait_for(state="hidden")


def tokens_of(page, pane):
    """(text, class) of each token that a pane shows."""
    read = "spans => spans.map(span => [span.textContent, span.className])"
    return [tuple(entry) for entry in page.locator(".pane").nth(pane).locator(".t").evaluate_all(read)]


def shade(token):
    return {"draft": SHADES.get(token["draft"]), "grammar": "grammar", "trunk": None}[token["origin"]]


def shown_shade(classes):
    return next((name for name in classes.split() if name == "grammar" or re.fullmatch(r"d\d", name)), None)


def traced(server, body):
    asked = {**body, "speculation": {"k": 3, "trace": True}}
    request = urllib.request.Request(
        server.url + "/v1/chat/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=PATIENCE) as response:
        return json.load(response)["choices"][0]["trace"]


def test_it_streams_in_the_colours_of_the_trace_and_both_panes_are_equal(opened, demo):
    page = ready(opened(demo.url))
    prompt = "Write a function that reads a JSON file."
    write(page, prompt, temperature=0, logprobs=True)
    body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 48, "temperature": 0}
    trace = traced(demo, body)
    shown = tokens_of(page, 1)
    assert [(text, shown_shade(classes)) for text, classes in shown] == [(one["text"], shade(one)) for one in trace]
    assert {one["origin"] for one in trace} == {"trunk", "draft"}
    plain = tokens_of(page, 0)
    assert [text for text, _ in plain] == [text for text, _ in shown]
    assert {shown_shade(classes) for _, classes in plain} == {None}
    verdict = page.locator("#verdict")
    assert verdict.get_attribute("data-verdict") == "equal" and f"equal, {len(trace)} tokens" in verdict.inner_text()
    # those who listen hear it once, at the end
    assert f"equal, {len(trace)} tokens" in page.inner_text("#announce")
    rounds = trace[-1]["round"]
    length = sum(1 for one in trace if one["round"]) / rounds
    assert page.locator(".pane").nth(1).locator("[data-figure=length]").inner_text() == f"{length:.2f}"
    # what is known of a token, by the keyboard
    page.locator(".text").nth(1).focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    told = page.inner_text("#inspector")
    assert "token 2 " in told and f"round {trace[1]['round']}" in told and "(log -" in told
    assert page.locator("#inspector ol li").count() >= 5


def test_sampled_panes_draw_the_same_noise(opened, demo):
    page = ready(opened(demo.url))
    write(page, "Tell a story.", temperature=1.5, max_tokens=24)
    # the end may be drawn, too
    assert re.search(r"equal, [1-9]\d* token", page.inner_text("#verdict"))


def test_what_a_grammar_forces_is_marked(opened, demo):
    page = ready(opened(demo.url))
    page.locator("details").evaluate("element => { element.open = true; }")
    page.select_option("[name=grammar]", "regex")
    write(page, "Answer: ", api="completions", pattern=r"The total of all is \d{2}", temperature=0)
    for pane in (0, 1):
        forced = [text for text, classes in tokens_of(page, pane) if shown_shade(classes) == "grammar"]
        assert forced == ["The", " total", " of", " all", " is"]
    assert page.locator("#verdict").get_attribute("data-verdict") == "equal"


def test_plots_move(opened, demo):
    page = ready(opened(demo.url, "/#watch"))
    plot = page.locator(".plot").first
    plot.locator("canvas").wait_for()
    read = "element => element.querySelector('canvas').toDataURL()"
    before = plot.evaluate(read)
    traced(demo, {"messages": [{"role": "user", "content": "Say something."}], "max_tokens": 32})
    page.locator(".plot[aria-label*='measured: '][aria-label*=' now, from ']").first.wait_for()
    until(lambda: plot.evaluate(read) != before, "the plot moves")
    assert page.locator(".plot canvas").count() == 7
    words = page.inner_text("#words")
    assert "The engine serves" in words and "Speculation is on: 3 drafted tokens a round" in words
    assert page.locator("#limits tr[data-binds]").count() == 1
    with urllib.request.urlopen(demo.url + "/v1/capacity") as response:
        capacity = json.load(response)
    assert capacity["binding_limit"] in page.inner_text("#limits tr[data-binds]")


HEALTH = {"status": "ok", "version": "1", "engine": {}, "speculation": None, "trunk_check": None, "slow": []}
DRAFTS = {"enabled": True, "num_speculative_tokens": 3, "draft_head": "an MTP head", "head_check": None}
POINT = {"time": 90, "acceptance_length": 2.5, "break_even": 2.6, "speedup": 1.2, "num_waiting": 0, "kv_pages_used": 1}
WORDS = [
    ({"status": "loading"}, {}, "note", "The model is loading."),
    ({"status": "failed", "engine": {"part": "round", "message": "no"}}, {}, "bad", "has failed (round): no."),
    ({"status": "stalled", "engine": {"seconds_silent": 21.2}}, {}, "bad", "has not answered for 21 s."),
    ({"status": "draining"}, {}, "warn", "The server is ending"),
    ({"speculation": {"enabled": False, "disabled_reason": "no head"}}, {}, "warn", "Speculation is off: no head."),
    ({"speculation": DRAFTS}, {}, "good", "3 drafted tokens a round, by an MTP head."),
    ({"speculation": {**DRAFTS, "head_check": {"verdict": "dead", "reason": "x"}}}, {}, "bad", "found dead: x."),
    ({"trunk_check": {"verdict": "failed", "reason": "noise"}}, {}, "bad", "The model failed its test: noise."),
    ({"slow": ["no fla-core"]}, {}, "warn", "no fla-core"),
    ({"speculation": DRAFTS}, {}, "good", "2.50 tokens to a sequence that drafts: in all 1.20 × as fast"),
    ({"speculation": DRAFTS}, {"speedup": 0.9}, "warn", "A smaller k, or 0, would be faster."),
    ({"speculation": DRAFTS}, {"speedup": 0.9, "break_even": 2.2}, "note", "Sequences without drafts share"),
    ({"speculation": DRAFTS}, {"speedup": None}, "note", "Whether that pays was not timed"),
    ({"speculation": DRAFTS}, {"time": 20}, "note", "No round in the last minute."),
    ({}, {"num_waiting": 2}, "note", "2 wait: 4 may run at once, by slots."),
    ({}, {"kv_pages_used": 95}, "warn", "95 % full"),
]


def test_what_is_wrong_is_said_in_words(opened, demo):
    page = ready(opened(demo.url))
    run = "([health, watch, capacity]) => import('./page/words.js').then(it => it.sentences(health, watch, capacity))"
    capacity = {"binding_limit": "slots", "max_num_seqs": 4}
    for health, point, level, text in WORDS:
        watched = {"time": 100, "kv_pages": 100, "points": [{**POINT, **point}]}
        said = page.evaluate(run, [{**HEALTH, **health}, watched, capacity])
        assert [one for one in said if one[0] == level and text in one[1]], (text, said)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everybody_can_use_it(opened, demo, scheme):
    page = ready(opened(demo.url, color_scheme=scheme, **(PHONE if scheme == "dark" else {})))
    write(page, "Say something.", max_tokens=12, logprobs=True)
    page.locator(".t").last.click(force=True)
    nobody_is_left_out(page)
    page.click("#tab-watch")
    page.locator(".plot canvas").first.wait_for()
    nobody_is_left_out(page)
    # nothing is wider than the window
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def nobody_is_left_out(page):
    found = axe.Axe().run(page).response["violations"]
    assert not [(one["impact"], one["id"], one["nodes"][0]["html"]) for one in found]


def test_tabs_and_writing_by_the_keyboard_alone(opened, demo):
    page = ready(opened(demo.url))
    page.locator("#tab-write").focus()
    page.keyboard.press("ArrowRight")
    assert page.locator("#watch").is_visible() and page.evaluate("document.activeElement.id") == "tab-watch"
    page.keyboard.press("ArrowLeft")
    page.locator("details").evaluate("element => { element.open = true; }")
    page.fill("[name=max_tokens]", "4")
    page.locator("#prompt").focus()
    page.keyboard.press("Control+Enter")
    page.locator(".t").first.wait_for(state="attached")
    page.locator("#go:enabled").wait_for()


def test_a_wrong_key_is_told_and_the_right_one_is_kept_in_memory(opened, scripted):
    watched = opened(scripted.url, PREFIX + "/")
    page = ready(watched)
    page.locator("#key-form").wait_for()
    assert watched.faults == []
    nobody_is_left_out(page)
    page.fill("#key", "a-wrong-one")
    page.click("#key-form button")
    page.locator("#key-error:not(:empty)").wait_for()
    assert "Incorrect API key" in page.inner_text("#key-error")
    # the browser tells of each answer that is no success
    assert len(watched.faults) == 1 and "401" in watched.faults.pop()
    unlock(page)
    write(page, script(reply="Hello", runs=[2]))
    assert [text for text, _ in tokens_of(page, 1)] == list("Hello")
    kept = "[localStorage.length, sessionStorage.length, document.cookie, document.querySelector('#key').value]"
    assert page.evaluate(kept) == [0, 0, "", ""]
    page.reload()
    ready(watched).locator("#key-form").wait_for()


def test_a_page_without_its_key_says_so_when_it_writes(opened, scripted):
    watched = opened(scripted.url, PREFIX + "/")
    page = ready(watched)
    write(page, "x")
    assert "Missing API key" in page.locator(".pane .error").first.inner_text()
    # what was typed is not lost
    assert page.input_value("#prompt") == "x" and page.locator("#turns").is_hidden()
    watched.faults.clear()


def test_hostile_text_stays_text(opened, scripted):
    page = ready(opened(scripted.url, PREFIX + "/"))
    unlock(page)
    replies = [
        "<img src=x onerror=alert(1)><script>alert(2)</script>",
        "\u202eright to left\u202c \u2066isolated",
        "</div></article></main><a href='javascript:alert(3)'>x</a>",
        "\x1b[31m\x00\x07 \ufeff\u2028 \U0001f600",
    ]
    for reply in replies:
        write(page, script(reply=reply, runs=[3]), max_tokens=200)
        for pane in (0, 1):
            text = page.locator(".pane .text").nth(pane)
            assert text.evaluate("element => element.textContent") == reply
            assert text.locator("img, script, a").count() == 0
        # every element in the text is one of ours, and its overrides end with it
        assert page.locator(".pane .text *:not(span)").count() == 0
        isolated = page.locator(".pane .text").first.evaluate("element => getComputedStyle(element).unicodeBidi")
        assert isolated == "isolate"
    # in the inspector nothing is without a shape
    page.locator(".t").first.evaluate("element => element.click()")
    assert "\\u{1b}" in page.inner_text("#inspector")


def test_a_megabyte_of_one_line_is_compared_and_not_all_shown(opened, scripted):
    page = ready(opened(scripted.url, PREFIX + "/"))
    unlock(page)
    write(page, script(ids=[305], times=1024, runs=[4]), max_tokens=2048, api="completions")
    assert "equal, 1024 tokens" in page.inner_text("#verdict")
    shown = page.locator(".pane .text").first.evaluate("element => element.textContent.length")
    assert 200_000 <= shown <= 203_000
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_texts_that_differ_are_told(opened, scripted):
    """By a server that breaks the promise: the second answer that goes out is another."""
    watched = opened(scripted.url, PREFIX + "/")
    page = ready(watched)
    unlock(page)

    def broken(route):
        answer = script(reply="Hellx" if '"k":0' in route.request.post_data else "Hello", runs=[1])
        body = json.loads(route.request.post_data) | {"messages": [{"role": "user", "content": answer}]}
        route.continue_(post_data=json.dumps(body))

    page.route("**/v1/chat/completions", broken)
    write(page, "x")
    assert "they differ at token 5" in page.inner_text("#verdict")


def test_a_stream_is_stopped_and_none_is_left_when_the_page_is_closed(opened, scripted):
    slow = script(reply="abcdefgh", times=500, delay=0.05)
    watched = opened(scripted.url, PREFIX + "/")
    page = ready(watched)
    unlock(page)
    ask(page, slow, max_tokens=4000)
    both_write(page)
    assert scripted.service.client.num_open == 2
    page.keyboard.press("Escape")
    page.locator("#go:enabled").wait_for()
    assert "stopped; equal for" in page.inner_text("#verdict")
    none_open(scripted)
    for leave in (lambda: page.goto("about:blank"), page.close):
        page.goto(scripted.url + PREFIX + "/")
        unlock(ready(watched))
        ask(page, slow, max_tokens=4000)
        both_write(page)
        assert scripted.service.client.num_open == 2
        leave()
        none_open(scripted)
    # the empty page is no request of ours
    watched.faults = [fault for fault in watched.faults if fault != "about:blank"]


def both_write(page):
    for pane in (0, 1):
        page.locator(".pane").nth(pane).locator(".t").nth(3).wait_for(state="attached")


def none_open(server):
    until(lambda: server.service.client.num_open == 0, "no stream is left")


def test_a_chat_goes_on(opened, scripted):
    page = ready(opened(scripted.url, PREFIX + "/"))
    unlock(page)
    write(page, script(reply="One"))
    # the answer is in the panes
    assert page.locator("#turns li").count() == 1 and page.input_value("#prompt") == ""
    with page.expect_request("**/v1/chat/completions") as asked:
        write(page, script(reply="Two"))
    roles = [(one["role"], one["content"]) for one in asked.value.post_data_json["messages"]]
    assert [role for role, _ in roles] == ["user", "assistant", "user"] and roles[1][1] == "One"
    assert page.locator("#turns li").nth(1).inner_text() == "One"
    page.click("#new-chat")
    assert page.locator("#turns").is_hidden() and page.input_value("#prompt") == script(reply="Two")


def test_a_new_chat_leaves_nothing_of_one_that_still_writes(opened, scripted):
    page = ready(opened(scripted.url, PREFIX + "/"))
    unlock(page)
    slow = script(reply="abcdefgh", times=500, delay=0.05)
    ask(page, slow, max_tokens=4000)
    both_write(page)
    page.click("#new-chat")
    page.locator("#go:enabled").wait_for()
    none_open(scripted)
    assert page.locator("#turns").is_hidden() and page.input_value("#prompt") == slow
    with page.expect_request("**/v1/chat/completions") as asked:
        write(page, script(reply="One"))
    assert [one["role"] for one in asked.value.post_data_json["messages"]] == ["user"]


def test_a_completion_in_between_leaves_the_chat_whole(opened, scripted):
    page = ready(opened(scripted.url, PREFIX + "/"))
    unlock(page)
    write(page, script(reply="One"))
    write(page, script(reply="Two"), api="completions")
    assert page.locator("#turns").is_hidden()
    page.locator("input[value=chat]").check(force=True)
    assert page.locator("#turns li").all_inner_texts() == [script(reply="One"), "One"]
