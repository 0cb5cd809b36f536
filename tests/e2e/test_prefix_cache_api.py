"""What clients and operators see of the prefix cache, by the official clients: the core is scripted, and cuts prompts
every 64 tokens. What it ought to find is computed here from the prompts' own ids."""

import json
import urllib.error
import urllib.request

import anthropic
import openai
import pytest
from byte_model import write_model
from caching_core import CHUNK
from serving import PATIENCE, script, serving_in_thread

from pilotfish.server import handlers

SYSTEM = "You answer briefly, and you never say why. " * 6
BILLING = "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch={};"
COUNTER = "<total_tokens>{} tokens left</total_tokens>"
CORE = "caching_core:make_core"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving_in_thread(write_model(tmp_path_factory.mktemp("model")), core=CORE) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.v1, api_key="none", max_retries=0, timeout=PATIENCE) as opened:
        yield opened


@pytest.fixture(scope="module")
def claude(server):
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=PATIENCE) as opened:
        yield opened


@pytest.fixture
def salt(request):
    """Another cache for each test."""
    return request.node.name[:200]


def call(server, path, body=None, key="none"):
    """(status, answer)"""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(server.url + path, data, headers), timeout=PATIENCE) as got:
            return got.status, json.loads(got.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def ids_of(server, **body):
    return call(server, "/tokenize", body)[1]["tokens"]


def floor(count):
    return count // CHUNK * CHUNK


def shared(one, other):
    """What a cut lets the later prompt take from the earlier one."""
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    return floor(count)


def turns():
    """The messages of three requests of one conversation."""
    messages = [{"role": "system", "content": SYSTEM}]
    for number in range(3):
        messages.append({"role": "user", "content": script(f"Question {number}? ", reply=f"Answer {number}.")})
        yield list(messages)
        messages.append({"role": "assistant", "content": f"Answer {number}."})


def expected(server):
    """Cached tokens of each of the three, and how long they are."""
    prompts = [ids_of(server, messages=messages) for messages in turns()]
    cached = [max((shared(prompt, other) for other in prompts[:i]), default=0) for i, prompt in enumerate(prompts)]
    assert cached[0] == 0 and all(cached[1:])
    return cached, [len(prompt) for prompt in prompts]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_chat(server, client, salt, stream):
    found = []
    for messages in turns():
        asked = {"model": "scripted", "messages": messages, "extra_body": {"cache_salt": salt}}
        if stream:
            asked |= {"stream": True, "stream_options": {"include_usage": True}}
            *chunks, last = client.chat.completions.create(**asked)
            assert all(chunk.usage is None for chunk in chunks)
        else:
            last = client.chat.completions.create(**asked)
        found.append((last.usage.prompt_tokens_details.cached_tokens, last.usage.prompt_tokens))
    assert found == list(zip(*expected(server), strict=True))


def test_usage_of_every_chunk_knows_it_with_the_first_token(client, salt):
    options = {"include_usage": True, "continuous_usage_stats": True}
    for messages in turns():
        asked = {"messages": messages, "stream": True, "stream_options": options, "extra_body": {"cache_salt": salt}}
        _, *chunks = client.chat.completions.create(model="scripted", **asked)
        assert len({chunk.usage.prompt_tokens_details.cached_tokens for chunk in chunks}) == 1


def test_a_prompt_of_several_choices_counts_what_none_of_them_read(server, client, salt):
    text = script("A prompt of some length. " * 8, reply="yes")
    length = len(ids_of(server, prompt=text))
    found = []
    for _ in range(2):
        answer = client.completions.create(model="scripted", prompt=text, n=3, extra_body={"cache_salt": salt})
        found.append((answer.usage.prompt_tokens, answer.usage.prompt_tokens_details.cached_tokens))
    # the first choice was read, though the others were not
    assert found == [(length, 0), (length, floor(length))]


def test_prompts_of_a_batch_add_up(server, client, salt):
    texts = [script(word * 40, reply="yes") for word in ("one ", "two ", "three ")]
    lengths = [len(ids_of(server, prompt=text)) for text in texts]
    fields = {"model": "scripted", "n": 2, "extra_body": {"cache_salt": salt}}
    client.completions.create(prompt=texts[1], **fields)
    usage = client.completions.create(prompt=texts, **fields).usage
    assert usage.prompt_tokens == sum(lengths)
    assert usage.prompt_tokens_details.cached_tokens == floor(lengths[1])


def test_log_probabilities_of_a_prompt_read_all_of_it(client, salt):
    text = script("Once more, a prompt of some length. " * 4, reply="yes")
    fields = {"model": "scripted", "prompt": text, "extra_body": {"cache_salt": salt}}
    client.completions.create(**fields)
    echoed = client.completions.create(**fields, echo=True, logprobs=1)
    details = echoed.usage.prompt_tokens_details
    assert (details.cached_tokens, details.cache_write_tokens) == (0, 0)
    assert client.completions.create(**fields, echo=True).usage.prompt_tokens_details.cached_tokens > 0


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_responses(server, client, salt, stream):
    found = []
    for messages in turns():
        asked = {"model": "scripted", "input": messages, "extra_body": {"cache_salt": salt}}
        if stream:
            with client.responses.stream(**asked) as events:
                answer = events.get_final_response()
        else:
            answer = client.responses.create(**asked)
        details = answer.usage.input_tokens_details
        assert details.cached_tokens + details.cache_write_tokens == floor(answer.usage.input_tokens)
        found.append((details.cached_tokens, answer.usage.input_tokens))
    assert found == list(zip(*expected(server), strict=True))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_messages(server, claude, salt, stream):
    """Three parts of the prompt, of which input_tokens is what is left."""
    found = []
    for system, *messages in turns():
        asked = {"model": "scripted", "system": system["content"], "messages": messages}
        counted = claude.messages.count_tokens(**asked).input_tokens
        asked |= {"max_tokens": 99, "extra_body": {"cache_salt": salt}}
        if stream:
            with claude.messages.stream(**asked) as events:
                first = next(iter(events)).message.usage
                usage = events.get_final_message().usage
            assert first.model_copy(update={"output_tokens": usage.output_tokens}) == usage
        else:
            usage = claude.messages.create(**asked).usage
        assert usage.cache_read_input_tokens + usage.cache_creation_input_tokens == floor(counted)
        assert usage.input_tokens == counted - floor(counted)
        found.append((usage.cache_read_input_tokens, counted))
    assert found == list(zip(*expected(server), strict=True))


def test_a_stream_that_begins_before_its_turn_tells_at_its_end(claude, salt, monkeypatch):
    monkeypatch.setattr(handlers, "HEADERS_SECONDS", 0.0)
    prompt = script("Wait for me. " * 10, reply="yes", delay=0.1)
    asked = {"model": "scripted", "messages": [{"role": "user", "content": prompt}], "max_tokens": 9}
    asked["extra_body"] = {"cache_salt": salt}
    claude.messages.create(**asked)
    with claude.messages.stream(**asked) as events:
        first, last = next(iter(events)).message.usage, events.get_final_message().usage
    assert (first.cache_read_input_tokens, first.cache_creation_input_tokens) == (0, 0)
    assert last.cache_read_input_tokens == floor(first.input_tokens) > 0
    assert last.input_tokens == first.input_tokens - last.cache_read_input_tokens


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x" * 200}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 200}]}),
        ("/v1/responses", {"input": "x" * 200}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x" * 200}], "max_tokens": 9}),
    ],
)
def test_a_salt_is_a_text_of_its_own_cache(server, path, body):
    def cached(salt):
        status, answer = call(server, path, {**body, "cache_salt": salt + path} if salt else body)
        assert status == 200, answer
        usage = answer["usage"]
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
        return details.get("cached_tokens", usage.get("cache_read_input_tokens"))

    assert [cached(salt) for salt in ("a", "b", "a", "b")] == [0, 0, 192, 192]
    for wrong in ("", 7, ["a"], "x" * 257):
        status, answer = call(server, path, {**body, "cache_salt": wrong})
        assert status == 400
        assert "cache_salt" in json.dumps(answer)


def test_changing_lines_of_system_prompts_are_left_out(server, claude, client, salt):
    before = call(server, "/v1/cache")[1]["hit_tokens"]
    cached = []
    for number in range(3):
        system = [
            {"type": "text", "text": BILLING.format(f"{number:05x}")},
            {"type": "text", "text": SYSTEM},
            {"type": "text", "text": COUNTER.format(15_000_000 - number)},
        ]
        answer = claude.messages.create(
            model="scripted",
            system=system,
            messages=[{"role": "user", "content": f"{number} {BILLING.format('aaaaa')}"}],
            max_tokens=9,
            extra_body={"cache_salt": salt},
        )
        cached.append(answer.usage.cache_read_input_tokens)
    assert cached[0] == 0 and cached[1] == cached[2] >= floor(len(SYSTEM.encode()))
    assert call(server, "/v1/cache")[1]["hit_tokens"] == before + sum(cached)
    with urllib.request.urlopen(server.url + "/metrics", timeout=PATIENCE) as response:
        text = response.read().decode()
    for line in ("billing_header", "token_counter"):
        assert f'pilotfish_volatile_lines_left_out_total{{line="{line}"}} 3.0' in text


def test_totals_and_metrics_agree(server, client, salt):
    def sums():
        with urllib.request.urlopen(server.url + "/metrics", timeout=PATIENCE) as response:
            text = response.read().decode()
        values = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("pilotfish_prefix_cache"))
        return [float(values[f"pilotfish_prefix_cache_{name}"]) for name in ("queries_total", "hits_total")]

    queried, hits = sums()
    details = client.chat.completions.create(
        model="scripted", messages=next(turns()), extra_body={"cache_salt": salt}
    ).usage
    status = call(server, "/v1/cache")[1]
    assert sums() == [queried + details.prompt_tokens, hits]
    assert [status["queried_tokens"], status["hit_tokens"]] == sums()
    assert status["enabled"] and status["isolation"] == "none" and status["chunk_tokens"] == CHUNK
    assert status["bytes"] == status["snapshots"] * status["snapshot_bytes"] <= status["capacity_bytes"]
    assert sum(status["misses"].values()) >= len(status["last_misses"])
    last = status["last_misses"][0]
    assert (last["reason"], last["prompt_tokens"]) == ("new", details.prompt_tokens)
    assert "here" not in last


def test_the_engine_is_told_where_the_system_prompt_ends(server, client, monkeypatch):
    submitted = []
    submit = server.service.client.submit
    monkeypatch.setattr(
        server.service.client, "submit", lambda request, feed: submitted.append(request) or submit(request, feed)
    )
    for messages in turns():
        client.chat.completions.create(model="scripted", messages=messages)
    client.completions.create(model="scripted", prompt="x")
    client.chat.completions.create(model="scripted", messages=[{"role": "user", "content": "x"}])
    ids = ids_of(server, messages=[{"role": "system", "content": SYSTEM}], add_generation_prompt=False)
    *chats, plain, bare = (request.system_tokens for request in submitted)
    assert len(set(chats)) == 1 and chats[0] >= len(ids)
    assert plain is bare is None
    assert submitted[0].prompt_token_ids[: chats[0]] == submitted[2].prompt_token_ids[: chats[0]]


@pytest.mark.parametrize("isolates", [False, True], ids=["none", "key"])
def test_keys(tmp_path, isolates):
    """Each key sees the misses of its own requests; what stands in another's prompt is shown to nobody."""
    options = {"api_keys": ("first", "second"), "isolates_keys": isolates, "log_prompts": True}
    with serving_in_thread(write_model(tmp_path), core=CORE, **options) as server:

        def cached(key, text, **fields):
            status, answer = call(server, "/v1/completions", {"prompt": text, "max_tokens": 1, **fields}, key)
            assert status == 200, answer
            return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

        text = "a secret of the first key: " * 8
        length = floor(len(text))
        assert [cached(key, text) for key in ("first", "first", "second")] == [0, length, 0 if isolates else length]
        assert cached("second", text[:100] + "guess" + text) == 64
        # a client's salt is no way into another key's cache
        assert cached("second", text, cache_salt="1:") == 0
        assert call(server, "/v1/cache")[0] == 401
        (mine, theirs) = (call(server, "/v1/cache", key=key)[1] for key in ("first", "second"))
    assert [miss["reason"] for miss in mine["last_misses"]] == ["new"]
    assert [miss["reason"] for miss in theirs["last_misses"]] == ["new", "differs", *(["new"] if isolates else [])]
    differs = theirs["last_misses"][1]
    assert (differs["first_difference"], differs["here"]) == (100, ("guess" + text)[:8])
    assert differs.get("there") == (text[100:108] if isolates else None)
    assert theirs["isolation"] == ("key" if isolates else "none")
