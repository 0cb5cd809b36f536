"""The `pilotfish` command as a process: start, signals, and errors a person can act on."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from processes import status, until
from serving import ENVIRONMENT, PATIENCE, let_go, script

from pilotfish.deploy.ports import free_port
from pilotfish.server import cli

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "pilotfish.server.cli"]
SCRIPTED = ["--core", "scripted_core:make_core"]


def get(url, data=None):
    request = urllib.request.Request(url, data and json.dumps(data).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE) as response:
        return response.read().decode()


@contextlib.contextmanager
def streamed(url, **commands):
    """A stream of very many tokens, its first line read."""
    body = {"prompt": script(reply="y", times=2900, delay=0.05, **commands), "max_tokens": 3000, "stream": True}
    request = urllib.request.Request(
        url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=PATIENCE) as response:
        response.readline()
        yield response


@contextlib.contextmanager
def command(*args, env=ENVIRONMENT):
    with subprocess.Popen(
        [*COMMAND, *args], env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@contextlib.contextmanager
def served(folder, *args, env=ENVIRONMENT):
    port = free_port()
    with command("serve", str(folder), "--port", str(port), *SCRIPTED, *args, env=env) as process:
        url = f"http://127.0.0.1:{port}"
        until(lambda: process.poll() is not None or status(url + "/ready") == 200, "the server is ready")
        yield process, url


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_lets_running_requests_end(folder, number):
    go = folder / "go"
    with served(folder, "--shutdown-timeout", str(PATIENCE)) as (process, url):
        with streamed(url, go=str(go)) as response:
            process.send_signal(number)
            until(lambda: status(url + "/ready") == 503, "it drains")
            let_go(go)
            rest = response.read().decode()
        assert rest.endswith("data: [DONE]\n\n")
        assert process.wait(PATIENCE) == 0


def test_after_the_shutdown_timeout_requests_end_with_an_error(folder):
    with served(folder, "--shutdown-timeout", "0.2") as (process, url):
        with streamed(url) as response:
            process.send_signal(signal.SIGTERM)
            *_, last = response.read().decode().strip().split("\n\n")
        error = json.loads(last.removeprefix("data: "))["error"]
        assert (error["code"], error["message"]) == ("aborted", "the server is shutting down")
        assert process.wait(PATIENCE) == 0


def test_a_second_signal_ends_it_at_once(folder):
    with served(folder) as (process, url), streamed(url):
        process.send_signal(signal.SIGINT)
        until(lambda: status(url + "/ready") == 503, "it drains")
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 130


def test_a_signal_while_the_model_loads_ends_it_clean(folder):
    port = str(free_port())
    core = ["--core", "scripted_core:make_core_that_loads_forever"]
    with command("serve", str(folder), "--port", port, *core) as process:
        while "loading the model" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0


@pytest.mark.parametrize("flags", [["--host", "0.0.0.0"], ["--no-page"]])
def test_the_last_line_of_a_start_is_the_address_of_the_page(folder, flags):
    port = str(free_port())
    with command("serve", str(folder), "--port", port, "--core", "scripted_core:make_core", *flags) as process:
        lines = []
        while not lines or "speculation: 3" not in lines[-1]:
            assert process.poll() is None
            lines.append(process.stderr.readline())
        if "--no-page" not in flags:
            # what listens everywhere has a name that a browser here can open
            assert f"open http://localhost:{port}/ in a browser" in process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        assert "in a browser" not in process.communicate(timeout=PATIENCE)[1]


def test_names_and_keys(folder):
    env = {**ENVIRONMENT, "PILOTFISH_API_KEY": "from-environment"}
    with served(folder, "--served-model-name", "a", "b", env=env) as (_, url):
        with pytest.raises(urllib.error.HTTPError, match="401") as caught:
            get(url + "/v1/models")
        caught.value.close()
        request = urllib.request.Request(url + "/v1/models", headers={"Authorization": "Bearer from-environment"})
        with urllib.request.urlopen(request, timeout=PATIENCE) as response:
            assert [model["id"] for model in json.load(response)["data"]] == ["a", "b"]


def test_keys_come_from_a_file_or_from_vllms_variable(folder):
    (folder / "plain").write_text("first\n\n  second \n")
    for flags, env, keys in (
        (["--api-key", "@" + str(folder / "plain"), "third"], ENVIRONMENT, ("first", "second", "third")),
        ([], {**ENVIRONMENT, "VLLM_API_KEY": "fourth"}, ("fourth",)),
    ):
        with served(folder, *flags, env=env) as (process, url):
            shown = Path(f"/proc/{process.pid}/cmdline").read_text()
            assert "first" not in shown and "second" not in shown
            for key in keys:
                request = urllib.request.Request(url + "/v1/models", headers={"Authorization": f"Bearer {key}"})
                with urllib.request.urlopen(request, timeout=PATIENCE) as response:
                    assert response.status == 200
            for headers in ({}, {"Authorization": "Bearer @"}, {"Authorization": "Bearer "}):
                with pytest.raises(urllib.error.HTTPError, match="401") as caught:
                    urllib.request.urlopen(urllib.request.Request(url + "/v1/models", headers=headers))
                caught.value.close()


@pytest.mark.parametrize(("word", "content"), [("@nowhere", None), ("@plain", "\n \n"), ("", None)])
def test_no_key_at_all_is_refused(folder, word, content):
    if content is not None:
        (folder / "plain").write_text(content)
    word = "@" + str(folder / word[1:]) if word else word
    with command("serve", str(folder), *SCRIPTED, "--api-key", word) as process:
        _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2 and "key" in errors


def test_metrics_on_a_port_of_their_own(folder):
    port = str(free_port())
    with served(folder, "--metrics-port", port, "--metrics-host", "127.0.0.1") as (_, url):
        apart = f"http://127.0.0.1:{port}"
        with urllib.request.urlopen(apart + "/metrics", timeout=PATIENCE) as response:
            assert b"pilotfish_engine_up 1.0" in response.read()
        for missing in (url + "/metrics", apart + "/v1/models", apart + "/health"):
            with pytest.raises(urllib.error.HTTPError, match="404") as caught:
                get(missing)
            assert json.load(caught.value)["error"]["message"]


def test_a_key_file_made_by_the_command(folder):
    made = subprocess.run([*COMMAND, "key", "alice"], capture_output=True, text=True, check=True, env=ENVIRONMENT)
    (folder / "keys").write_text("# ours\n" + made.stdout)
    assert made.stderr.strip() not in made.stdout
    with served(folder, "--api-key-file", str(folder / "keys")) as (_, url):
        request = urllib.request.Request(url + "/v1/models", headers={"Authorization": f"Bearer {made.stderr.strip()}"})
        with urllib.request.urlopen(request, timeout=PATIENCE) as response:
            assert response.status == 200
        with pytest.raises(urllib.error.HTTPError, match="401") as caught:
            get(url + "/v1/models")
        caught.value.close()


@pytest.mark.parametrize(("content", "words"), [(None, "cannot be read"), ("secret", "line 1")])
def test_a_key_file_that_cannot_be_used_is_named(folder, content, words):
    if content is not None:
        (folder / "keys").write_text(content)
    with command("serve", str(folder), *SCRIPTED, "--api-key-file", str(folder / "keys")) as process:
        _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2 and words in errors and "secret" not in errors


def test_a_unix_socket(folder):
    path = folder / "http.sock"
    # what a dead server left
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    with command("serve", str(folder), *SCRIPTED, "--uds", str(path)) as process:
        while "listening" not in (line := process.stderr.readline()):
            assert process.poll() is None
        assert f"unix:{path}" in line
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(PATIENCE)
            client.connect(str(path))
            client.sendall(b"GET /ping HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert client.makefile().read().endswith("pong\n")
        with command("serve", str(folder), *SCRIPTED, "--uds", str(path)) as other:
            _, errors = other.communicate(timeout=PATIENCE)
            assert other.returncode == 1 and "cannot listen" in errors
        assert path.exists()
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
    assert not path.exists()


def test_a_model_that_does_not_load_ends_the_server_with_the_reason(folder):
    with command("serve", str(folder), "--port", "0", "--core", "scripted_core:make_core_that_fails") as process:
        _, errors = process.communicate(timeout=PATIENCE)
        assert process.returncode == 1
        assert "no such checkpoint" in errors and "Traceback" in errors


def test_an_option_that_the_model_cannot_have_is_told_once(folder):
    with command("serve", str(folder), "--port", "0", "--core", "scripted_core:make_core_that_refuses") as process:
        _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2
    assert (
        errors.count("engine failed (load): max_model_len: want 2..8, got 9\n") == errors.count("max_model_len: ") == 1
    )
    assert "Traceback" not in errors


def test_a_folder_that_is_none_is_named(tmp_path):
    with command("serve", str(tmp_path / "nothing")) as process:
        _, errors = process.communicate(timeout=PATIENCE)
        assert process.returncode == 2
        assert "nothing" in errors and "Traceback" not in errors


def test_a_port_in_use_is_named(folder):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with command("serve", str(folder), "--port", str(port), *SCRIPTED) as process:
            _, errors = process.communicate(timeout=PATIENCE)
            assert process.returncode == 1
            assert f"cannot listen on 127.0.0.1:{port}: Address already in use\n" in errors
            assert "Traceback" not in errors


def test_generate_prints_the_text_then_the_numbers(folder):
    prompt = script(reply="some € text", runs=[3])
    with command("generate", str(folder), "--prompt", prompt, *SCRIPTED) as process:
        out, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    assert out == "some € text\n"
    assert "13 tokens" in errors and "acceptance length 3.00" in errors


def test_generate_refuses_what_the_server_would(folder):
    with command("generate", str(folder), "--prompt", "hi", "--max-tokens", "5000", *SCRIPTED) as process:
        out, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out) == (2, "")
    assert errors.startswith("pilotfish: This model's maximum context length is 4096 tokens.")


def test_the_demo_asks_twice_and_ends_clean(folder):
    demo = [sys.executable, str(ROOT / "demo" / "try_it.py"), "--model", str(folder), "--", *SCRIPTED]
    done = subprocess.run(demo, capture_output=True, text=True, timeout=PATIENCE, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    # a word of its own, and no rate such as 313 tokens/s
    assert len(re.findall(r"\b13 tokens\b(?!/)", done.stdout)) == done.stdout.count("acceptance length 1.00") == 2
    assert done.stdout.count("Hello, world!") == 2 and "make audit" in done.stdout


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--version"], "pilotfish 0."),
        (["--help"], "serve"),
        (["serve", "--help"], "--num-speculative-tokens"),
    ],
)
def test_help_needs_no_torch(args, words):
    code = f"import sys, pilotfish.server.cli as c\ntry: c.main({args})\nfinally: assert 'torch' not in sys.modules"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, env=os.environ
    )
    assert done.returncode == 0 and words in done.stdout


def test_output_that_nobody_reads_any_more_ends_the_command_in_silence():
    code = "import pilotfish.server.cli as c; raise SystemExit(c.main(['collect-env', '--json']))"
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=writing, stderr=subprocess.PIPE, timeout=PATIENCE, env=os.environ
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["serve", "m", "--num-speculative-tokens", "-1"], "want a whole number in 0..8, got '-1'"),
        (["serve", "m", "--num-speculative-tokens", "9"], "want a whole number in 0..8, got '9'"),
        (["serve", "m", "--max-num-seqs", "0"], "want a whole number of at least 1, got '0'"),
        (["serve", "m", "--port", "70000"], "want a port in 0..65535, got '70000'"),
        (["serve", "m", "--shutdown-timeout", "soon"], "want seconds, got 'soon'"),
        (["serve", "m", "--prot", "1"], "pilotfish serve: unknown flag --prot: did you mean --port?"),
        (["serve", "m", "--frobnicate=1"], "unknown flag --frobnicate ("),
        (["serve", "m", "n"], "unknown argument n ("),
        (["serve", "m", "--trust-remote-code"], "no code of a checkpoint is run"),
        (["serve", "--model", "m"], "the model comes first, without a flag"),
        (["serve", "m", "-ngl", "99"], "unknown flag -ngl: a model is on one device as a whole (--device)"),
        (["serve", "m", "--ctx-size", "4096"], "unknown flag --ctx-size: it is --max-model-len here"),
        (["serve", "m", "--speculative-config", "{"], "not JSON"),
        (["serve", "m", "--speculative-config", '{"method": "eagle", "num_speculative_tokens": 2}'], "eagle"),
        (["serve", "m", "--speculative-config", '{"num_speculative_tokens": 2, "draft": 1}'], "draft"),
        (["serve", "m", "--gpu-memory-utilization", "1.5"], "share"),
        (["serve", "m", "--override-generation-config", '{"heat": 1}'], "temperature"),
        (["serve", "m", "--override-generation-config", "7"], "want an object"),
        (["serve", "m", "--override-generation-config", '{"top_p": 2}'], "top_p"),
        (["serve", "m", "--override-generation-config", "[" * 100_000], "not JSON"),
        (["serve", "m", "--reasoning-parser", "deepseek_r1"], "qwen3"),
        (["serve", "m", "--root-path", "llm"], "want a path"),
        (["serve", "m", "--root-path", "/a//b"], "want a path"),
        (["serve", "m", "--tool-call-parser", "hermes"], "qwen3_xml"),
        (["serve", "m", "--allowed-origins", "*"], 'want a JSON list of "*" or origins such as'),
        (["serve", "m", "--allowed-origins", '"*"'], "origins such as"),
        (["serve", "m", "--allowed-origins", '["https://app.example/"]'], "got '[\"https://app.example/\"]'"),
        (["serve", "m", "--allowed-origins", '["https://*.example"]'], "origins such as"),
        (["serve", "m", "--allowed-origins", '["null"]'], "origins such as"),
        (["serve", "m", "--allowed-origins", "[\n7]"], "origins such as"),
        (["serve", "m", "--allowed-hosts", '["https://llm.example"]'], "hosts such as"),
        (["serve", "m", "--allowed-methods", '["get"]'], "methods such as"),
        (["serve", "m", "--allowed-headers", '["x-a, x-b"]'], "names of headers"),
        (
            ["serve", "m", "--num-speculative-tokens", "1", "--speculative-config", '{"num_speculative_tokens": 2}'],
            "not allowed",
        ),
        ([], "COMMAND"),
        (["serve"], "MODEL"),
    ],
)
def test_wrong_flags_are_explained(args, words, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.build_parser().parse_args(args)
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1


def test_cors_flags_reach_the_answers(folder):
    page, flags = "https://app.example:8443", ["--allow-credentials", "--allowed-methods", '["POST"]']
    flags += ["--allowed-origins", f'["{page}", "chrome-extension://abc"]', "--allowed-headers", '["X-A"]']
    with served(folder, *flags, "--allowed-hosts", '["llm.example"]') as (_, url):
        asked = {"Origin": page, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x-a"}
        asked["Host"] = "llm.example:443"
        request = urllib.request.Request(url + "/v1/completions", headers=asked, method="OPTIONS")
        with urllib.request.urlopen(request, timeout=PATIENCE) as response:
            told = {name.removeprefix("Access-Control-Allow-"): value for name, value in response.headers.items()}
    assert (told["Origin"], told["Methods"], told["Credentials"]) == (page, "POST", "true")
    assert told["Headers"].endswith(", X-A")


def test_credentials_for_any_origin_end_the_start_in_a_line(folder):
    with command("serve", str(folder), *SCRIPTED, "--allow-credentials") as process:
        _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2
    assert errors == 'pilotfish: --allow-credentials wants --allowed-origins that name each origin, got "*"\n'


def test_a_full_disk_behind_the_output_is_a_line():
    with open("/dev/full", "w") as full:
        done = subprocess.run([*COMMAND, "key", "label"], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.endswith("pilotfish: cannot write: No space left on device\n")


def test_a_unix_socket_s_path_that_is_a_file_ends_it_for_good(folder):
    """With 1 a service manager would start it again and again."""
    path = folder / "taken"
    path.write_text("mine")
    with command("serve", str(folder), "--uds", str(path), *SCRIPTED) as process:
        assert process.wait(PATIENCE) == 2
        assert f"cannot listen on {path}: File exists" in process.stderr.read()
    assert path.read_text() == "mine"


def test_an_interrupt_before_it_serves_leaves_no_trace(monkeypatch, capsys):
    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_fetch", interrupted)
    assert cli.main(["serve", "m"]) == 130
    assert capsys.readouterr() == ("", "")


def test_flags_become_engine_options():
    flags = [
        "serve",
        "m",
        "--speculative-config",
        '{"method": "mtp", "num_speculative_tokens": 5}',
        "--max-num-seqs",
        "7",
    ]
    options = cli.engine_options(cli.build_parser().parse_args([*flags, "--max-waiting", "9", "--dtype", "bfloat16"]))
    assert (options.model, options.num_speculative_tokens, options.max_num_seqs) == ("m", 5, 7)
    assert (options.max_waiting, options.dtype) == (9, "bfloat16")
    off = cli.build_parser().parse_args(["serve", "m", "--num-speculative-tokens", "0"])
    assert cli.engine_options(off).num_speculative_tokens == 0
    assert cli.engine_options(cli.build_parser().parse_args(["serve", "m"])).num_speculative_tokens is None


def test_vllms_names_of_the_parsers_are_taken():
    args = cli.build_parser().parse_args(
        ["serve", "m", "--reasoning-parser", "qwen3", "--tool-call-parser", "qwen3_coder", "--enable-auto-tool-choice"]
    )
    assert (args.reasoning_parser, args.tool_call_parser) == ("qwen3", "qwen3_coder")
    args = cli.build_parser().parse_args(["serve", "m"])
    assert (args.reasoning_parser, args.tool_call_parser) == ("auto", "auto")
