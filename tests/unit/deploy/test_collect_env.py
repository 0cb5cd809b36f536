"""A report of a problem says what runs, and no secret."""

import json
import os
import socket
from pathlib import Path

import pytest

from pilotfish.deploy import collect_env

DEMO = Path(__file__).parents[3] / "demo" / "model"
SECRETS = {
    "PILOTFISH_API_KEY": "sk-1",
    "VLLM_API_KEY": "sk-2",
    "HF_TOKEN": "hf_3",
    "HF_HUB_TOKEN": "hf_4",
    "HF_ENDPOINT": "https://me:pw5@hub",
    "AWS_SECRET_ACCESS_KEY": "aws6",
}


@pytest.fixture
def collected(capsys, monkeypatch):
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")

    def collect(*args):
        assert collect_env.main(args) == 0
        return capsys.readouterr().out

    return collect


def test_versions_device_and_layout_and_no_secret(collected):
    text = collected(str(DEMO))
    for wanted in ("[packages]", "torch ", "compressed-tensors NVFP4", "with MTP head", "fla-core", "[machine]"):
        assert wanted in text, wanted
    assert not [value for value in SECRETS.values() if value in text]
    found = json.loads(collected("--json"))
    assert found["environment"]["CUDA_VISIBLE_DEVICES"] == "3" and found["environment"]["HF_TOKEN"] == "(set)"
    assert found["machine"]["cores"].endswith(f"of {os.cpu_count()}")


def test_what_is_no_checkpoint_or_no_server_is_part_of_the_report(collected, tmp_path):
    assert "hub ids are not fetched" in collected("Qwen/Qwen3.6-27B")
    (tmp_path / "config.json").write_text("no json")
    assert "[checkpoint]\nrefused" in collected(str(tmp_path))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        text = collected(f"http://127.0.0.1:{free.getsockname()[1]}")
    assert "/v1/capacity  error:" in text


def test_escape_sequences_of_a_server_stay_text(collected, monkeypatch):
    monkeypatch.setattr(collect_env.Server, "get", lambda self, path: "\x1b]0;title\x07")
    text = collected("http://127.0.0.1:9")
    assert "\x1b" not in text and "\\u001b]0;title" in text


def test_flags_of_servers_here_are_told_without_their_keys(tmp_path):
    commands = {
        "7": ["/v/bin/python", "/v/bin/pilotfish", "serve", "m o", "--api-key", "sk-1", "sk-2", "--port", "8001"],
        "8": ["python", "-m", "pilotfish.server.cli", "serve", "m", "--api-key=sk-3", "--api-key", "@keys"],
        "9": ["vi", "serve", "pilotfish"],
        "10": ["python", "-m", "pilotfish.engine.link.process"],
    }
    for number, words in commands.items():
        (tmp_path / number).mkdir()
        (tmp_path / number / "cmdline").write_text("".join(f"{word}\0" for word in words))
    assert collect_env.servers(tmp_path) == {
        "7": "serve 'm o' --api-key '(set)' '(set)' --port 8001",
        "8": "serve m '--api-key=(set)' --api-key @keys",
    }
