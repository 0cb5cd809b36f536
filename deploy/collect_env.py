"""Prints what a report of a problem should say: versions, device, driver, the checkpoint's layout, what a server runs.

pilotfish collect-env
pilotfish collect-env /path/to/checkpoint
pilotfish collect-env http://127.0.0.1:8000

Keys and tokens are not printed, only whether they are set; prompts and answers are nowhere in it.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import shlex
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pilotfish
from pilotfish.deploy.arguments import is_address
from pilotfish.deploy.gate.server import Refused, Server, Unreachable
from pilotfish.engine.command_line.parser import Parser
from pilotfish.engine.errors import PilotfishError
from pilotfish.engine.slow import DRIVER

PACKAGES = (
    *("torch", "triton", "fla-core", "safetensors", "tokenizers", "huggingface-hub", "llguidance"),
    *("aiohttp", "msgspec", "numpy", "jinja2", "prometheus-client", "transformers"),
)
SHOWN = (
    "CUDA_",
    "NVIDIA_",
    "OMP_",
    "MKL_",
    "TRITON_",
    "PYTORCH_",
    "TORCH_",
    "HF_",
    "PILOTFISH_",
    "VLLM_",
    "LD_LIBRARY_",
)
"""What names of environment variables begin with that change what runs."""
SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIAL", "ENDPOINT", "PROXY")
"""Parts of a name whose value nobody else should read: an address may hold a password."""
Facts = dict[str, Any]


def main(argv: Sequence[str]) -> int:
    args = parse(argv)
    found: dict[str, Facts] = {"pilotfish": own(), "machine": machine(), "packages": packages(), "torch": torch_facts()}
    found["environment"] = environment(os.environ)
    found["servers on this machine"] = servers()
    if args.is_url:
        found["server"] = server(Server(args.target, args.api_key))
    elif args.target:
        found["checkpoint"] = checkpoint(args.target)
    print(json.dumps(found, indent=1) if args.json else shown(found))
    return 0


def shown(found: dict[str, Facts]) -> str:
    lines = []
    for part, facts in found.items():
        lines.append(f"[{part}]")
        width = max(map(len, facts), default=0)
        for name, value in facts.items():
            # a server's words are a stranger's: what is not printable is written as JSON writes it
            text = value if isinstance(value, str) and value.isprintable() else json.dumps(value)
            lines.append(f"{name:<{width}}  {text}")
        lines.append("")
    return "\n".join(lines).rstrip()


def own() -> Facts:
    root = Path(pilotfish.__file__).resolve().parents[1]
    return {"version": pilotfish.__version__, "commit": _said("git", "-C", str(root), "log", "-1", "--format=%h %cs")}


def machine() -> Facts:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    header = Path(sysconfig.get_path("include"), "Python.h")
    return {
        "system": f"{platform.platform()}, {platform.libc_ver()[0]} {platform.libc_ver()[1]}",
        "python": f"{platform.python_version()}, {platform.python_implementation()}",
        "processor": _processor(),
        "cores": f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}",
        "memory": f"{memory / 2**30:.1f} GiB",
        # Triton compiles what launches a kernel
        "c compiler": next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), "none"),
        "Python.h": "there" if header.exists() else f"missing: {header}",
        "driver": _first_line(DRIVER) or "no NVIDIA driver",
        "nvidia-smi": _said("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"),
    }


def packages() -> Facts:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def torch_facts() -> Facts:
    """What torch was built for and which devices it sees."""
    try:
        import torch
    except Exception as error:
        return {"import": f"{type(error).__name__}: {error}"}
    facts: Facts = {"built for": f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"}
    facts["threads"] = torch.get_num_threads()
    facts["CPU"] = torch.backends.cpu.get_cpu_capability()
    facts["devices"] = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index in range(facts["devices"]):
        properties = torch.cuda.get_device_properties(index)
        capability = f"{properties.major}.{properties.minor}"
        size = f"{properties.total_memory / 2**30:.1f} GiB"
        facts[f"device {index}"] = f"{properties.name}, compute capability {capability}, {size}"
    return facts


def environment(variables: Any) -> Facts:
    names = sorted(name for name in variables if name.startswith(SHOWN))
    return {name: "(set)" if any(part in name for part in SECRET) else variables[name] for name in names}


def servers(processes: Path = Path("/proc")) -> Facts:
    """Command lines of `pilotfish serve` by process id; keys are left out."""
    found = {}
    for path in sorted(processes.glob("[0-9]*/cmdline")):
        with contextlib.suppress(OSError):
            words = path.read_bytes().decode(errors="replace").rstrip("\0").split("\0")
            if "serve" in words and any("pilotfish" in word for word in words[: words.index("serve")]):
                found[path.parent.name] = shlex.join(_without_keys(words[words.index("serve") :]))
    return found


def _without_keys(words: list[str]) -> list[str]:
    kept, is_key = [], False
    for word in words:
        if word.startswith("-"):
            is_key = word.partition("=")[0] == "--api-key"
            kept.append("--api-key=(set)" if is_key and "=" in word else word)
        else:
            kept.append("(set)" if is_key and not word.startswith("@") else word)
    return kept


def checkpoint(name: str) -> Facts:
    """What the folder is recognised as; a hub id is not fetched."""
    from pilotfish.engine.checkpoint.recognise import open_checkpoint

    if not Path(name).exists():
        return {"path": name, "error": "no such folder (hub ids are not fetched here)"}
    try:
        return {"recognised": open_checkpoint(name).summary()}
    except PilotfishError as error:
        return {"refused": str(error)}


def server(asked: Server) -> Facts:
    """What a server says of itself, to who may ask it."""
    facts: Facts = {}
    for path in ("/version", "/health", "/v1/models", "/v1/capacity"):
        try:
            facts[path] = asked.get(path)
        except (Refused, Unreachable, ValueError) as error:
            facts[path] = f"error: {error}"
    return facts


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _first_line(path: str) -> str:
    try:
        return Path(path).read_text().splitlines()[0].strip()
    except (OSError, IndexError):
        return ""


def _said(*command: str) -> str:
    """What a program prints, in one line."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"none ({type(error).__name__})"
    lines = done.stdout.strip().splitlines()
    return "; ".join(lines) if done.returncode == 0 and lines else "none"


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog="pilotfish collect-env", description=__doc__)
    parser.add_argument(
        "target", nargs="?", metavar="MODEL-or-URL", help="a checkpoint's folder, or a server that runs"
    )
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    key = os.environ.get("PILOTFISH_API_KEY")
    parser.add_argument("--api-key", default=key, metavar="KEY", help="of the server (default: $PILOTFISH_API_KEY)")
    args = parser.parse_args(list(argv))
    args.is_url = args.target is not None and is_address(parser, args.target)
    return args
