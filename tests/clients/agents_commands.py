"""Command lines of other projects: three turns of one session each, in which the model has commands and files read.

`agents_commands.py FOLDER` runs those of claude, codex, qwen, opencode and aider whose program is in FOLDER; CLIENTS
may name fewer. Each has a home and a work folder of its own; what it ran stands in a file that its commands write.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from check_agents import STEPS, call

ROOT = json.loads(os.environ["DATA"])["url"].removesuffix("/v1")
MCP = """
import json, os, sys
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}
for line in sys.stdin:
    asked = json.loads(line)
    method, id_ = asked["method"], asked.get("id")
    if method == "initialize":
        version = asked["params"]["protocolVersion"]
        result = {"protocolVersion": version, "capabilities": {"tools": {}}}
        result["serverInfo"] = {"name": "sums", "version": "1"}
    elif method == "tools/list":
        hints = {"readOnlyHint": True, "destructiveHint": False, "openWorldHint": False}
        result = {"tools": [{"name": "add", "description": "Adds.", "inputSchema": SCHEMA, "annotations": hints}]}
    elif method == "tools/call":
        with open(os.environ["RAN"], "a") as ran:
            print(json.dumps([asked["params"]["name"], asked["params"]["arguments"]]), file=ran)
        result = {"content": [{"type": "text", "text": open(os.environ["SUM"]).read()}]}
    else:
        result = {}
    if id_ is not None:
        print(json.dumps({"jsonrpc": "2.0", "id": id_, "result": result}), flush=True)
"""


def scripted(reply: str) -> str:
    """In marks that no command line takes for a file's name."""
    return f"«{json.dumps({'reply': reply, 'runs': [3, 1, 4]})}»"


class Folder:
    """A home and a work folder: what the model has run, and what the files that it reads make it write next."""

    def __init__(self, root: Path) -> None:
        self.root, self.home, self.work, self.ran = root, root / "home", root / "work", root / "ran.jsonl"
        self.home.mkdir()
        self.work.mkdir()
        self.environment = {
            **os.environ,
            "HOME": str(self.home),
            "PWD": str(self.work),
            "OPENAI_BASE_URL": ROOT + "/v1",
            "OPENAI_API_BASE": ROOT + "/v1",
            "OPENAI_API_KEY": "k",
            "ANTHROPIC_BASE_URL": ROOT,
            "ANTHROPIC_API_KEY": "k",
            "ANTHROPIC_MODEL": "scripted",
        }

    def next(self, number: int) -> str:
        """The file whose text makes the model write the call of that number."""
        return str(self.work / f"next{number}.txt")

    def logged(self, step: list, number: int) -> str:
        return f"echo '{json.dumps(step)}' >> {self.ran}; cat {self.next(number)}"

    def prompt(self, calls: list[str], thought: str = "") -> str:
        """What makes the model write the first call; what each but the last reads makes it write the one after it."""
        first, *later = [scripted(f"{thought}I look.\n{text}") for text in calls]
        for number, text in enumerate([*later, scripted(thought + "It is 5.")], 1):
            Path(self.next(number)).write_text(text + "\n")
        return "Go. " + first

    def run(self, name: str, *turns: list[str], given: str = "") -> None:
        """Prints what the turns of one session ran and what the last one said; stops at the first that fails."""
        final = ""
        fixed: dict = {"env": self.environment, "cwd": self.work, "capture_output": True, "text": True, "timeout": 120}
        for arguments in turns:
            done = subprocess.run(arguments, input=given, **fixed)
            if done.returncode:
                sys.exit(f"{name}: {arguments} {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
            final = done.stdout.partition("Tokens: ")[0].strip()
        files = sorted(self.root.rglob("ran*.jsonl"))
        ran = [json.loads(line) for file in files for line in file.read_text().splitlines()]
        print(json.dumps([f"{name} turns", ran, final]), flush=True)


def own_tools(folder: Folder, shell: str, command: str, read: str, path: str, **more: str) -> list[str]:
    """A command, a file that the client's own tool reads, a command."""
    return [
        call(shell, **{command: folder.logged(STEPS[0], 1)}, **more),
        call(read, **{path: folder.next(2)}),
        call(shell, **{command: folder.logged(STEPS[1], 3)}, **more),
    ]


def claude(program: str, folder: Folder) -> None:
    # it asks for thinking, so that every answer begins inside the block
    prompt = folder.prompt(own_tools(folder, "Bash", "command", "Read", "file_path"), thought="Hm.</think>")
    turn = [program, "--allowedTools", "Bash,Read", "-p", prompt]
    folder.run("claude", turn, [*turn, "--continue"], [*turn, "--continue"])


def qwen(program: str, folder: Folder) -> None:
    folder.environment["OPENAI_MODEL"] = "scripted"
    calls = own_tools(folder, "run_shell_command", "command", "read_file", "file_path", is_background="false")
    turn = [program, "--approval-mode", "yolo", "--auth-type", "openai", "-p", folder.prompt(calls)]
    folder.run("qwen", turn, [*turn, "--continue"], [*turn, "--continue"])


def opencode(program: str, folder: Folder) -> None:
    """By each of the packages that it speaks the three APIs with."""
    options = {"baseURL": ROOT + "/v1", "apiKey": "k"}
    calls = own_tools(folder, "bash", "command", "read", "filePath", description="Looks")
    for package in ("openai-compatible", "openai", "anthropic"):
        provider = {"npm": f"@ai-sdk/{package}", "name": "local", "options": options, "models": {"scripted": {}}}
        folder.work.joinpath("opencode.json").write_text(json.dumps({"provider": {"local": provider}}))
        turn = [program, "run", "-m", "local/scripted"]
        # an argument it would put into quotes, and change those that are in it
        folder.run(f"opencode {package}", turn, [*turn, "-c"], [*turn, "-c"], given=folder.prompt(calls))
        folder.ran.unlink()


def codex(program: str, folder: Folder) -> None:
    """Its own command tool, and a tool of a group: an MCP server's, which it sends as a `namespace`."""
    folder.home.joinpath("mcp.py").write_text(MCP)
    folder.home.joinpath(".codex").mkdir()
    folder.home.joinpath(".codex/config.toml").write_text(
        'model = "scripted"\nmodel_provider = "local"\n[model_providers.local]\nname = "local"\n'
        f'wire_api = "responses"\nbase_url = "{ROOT}/v1"\n'
        f'[mcp_servers.sums]\ncommand = "{sys.executable}"\nargs = ["{folder.home}/mcp.py"]\n'
        f'env = {{ "RAN" = "{folder.ran}", "SUM" = "{folder.next(2)}" }}\n'
    )
    calls = [call("exec_command", cmd=folder.logged(STEPS[0], 1)), call("mcp__sums__add", a=2, b=3)]
    turn, prompt = [program, "exec", "--skip-git-repo-check", "-s", "workspace-write"], folder.prompt(calls)
    folder.run("codex", [*turn, prompt], [*turn, "resume", "--last", prompt], [*turn, "resume", "--last", prompt])
    # the session that it keeps has the answers as they came
    kept = "".join(file.read_text() for file in folder.home.rglob("rollout-*.jsonl"))
    if kept.count('"namespace":"mcp__sums"') < 3:
        sys.exit("codex: the tool of the group came without its namespace")


def aider(program: str, folder: Folder) -> None:
    """Its edits are text: whole files, which it writes. What it says about tokens follows the answer."""
    for way in ("--stream", "--no-stream"):
        turns = []
        fixed = [program, "--model", "openai/scripted", "--yes-always", "--restore-chat-history", way]
        for turn in range(3):
            file = f"ran{turn}.jsonl"
            lines = "".join(json.dumps(step) + "\n" for step in STEPS)
            message = "Go. " + scripted(f"I write.\n\n{file}\n```\n{lines}```\n\nIt is 5.")
            turns.append([*fixed, "--message", message, file])
        folder.run(f"aider {way}", *turns)
        for file in folder.work.glob("ran*.jsonl"):
            file.unlink()


CLIENTS: dict[str, Callable[[str, Folder], None]] = {
    "claude": claude,
    "codex": codex,
    "qwen": qwen,
    "opencode": opencode,
    "aider": aider,
}

for name in os.environ.get("CLIENTS", " ".join(CLIENTS)).split():
    program = shutil.which(name, path=sys.argv[1])
    if program:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as root:
            CLIENTS[name](program, Folder(Path(root)))
