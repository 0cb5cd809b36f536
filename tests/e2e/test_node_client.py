"""The official Node client, unmodified, where node and the package `openai` are (npm install openai; NODE_PATH)."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from serving import PATIENCE

CLIENT = Path(__file__).resolve().parents[1] / "support" / "client.cjs"
NODE = shutil.which("node")


@pytest.mark.skipif(
    NODE is None or subprocess.run([NODE, "-e", "require('openai')"], capture_output=True).returncode != 0,
    reason="node does not find the package openai: npm install openai, and name its node_modules in NODE_PATH",
)
def test_the_node_client(server):
    ran = subprocess.run([NODE, CLIENT, server.v1], capture_output=True, text=True, timeout=PATIENCE)
    assert ran.returncode == 0, ran.stderr
    seen = json.loads(ran.stdout)
    assert seen["models"] == ["scripted", "alias"]
    assert seen["chat"] == {
        "whole": "I look.",
        "text": "I look.",
        "args": ['{"city": "Zürich"}'] * 2,
        "same": True,
        "after": "Rain €.",
    }
    assert seen["responses"] == {
        "whole": "I look.",
        "streamed": "I look.",
        "args": '{"city": "Zürich"}',
        "after": "Rain €.",
        "completed": True,
    }
    assert seen["refusal"] == {"kind": "BadRequestError", "status": 400, "param": "temperature"}
