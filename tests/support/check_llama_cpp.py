"""Reads GGUF files that llama.cpp's own converter wrote, and holds the head in them against the original.

Not part of the test suite: it needs a checkout of llama.cpp (its `conversion` and `gguf-py` folders; the source archive
of llama-cpp-python has them) and what that imports. `python tests/support/check_llama_cpp.py LLAMA_CPP` converts tiny
models, alone (--mtp) and whole, and attaches the results. Last run with the llama.cpp of llama-cpp-python 0.3.36: F32
and BF16 give every weight back, norms included, and Q8_0 gives matrices to 1 part in 127 of a block's largest.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:] = [str(ROOT / "typings"), str(ROOT), *(entry for entry in sys.path if Path(entry).resolve() != ROOT)]

from pilotfish.engine.checkpoint.load import load_weights  # noqa: E402
from pilotfish.engine.checkpoint.recognise import open_checkpoint  # noqa: E402
from pilotfish.engine.checkpoint.sidecar import attach_head  # noqa: E402
from tests.support.tiny_models import build_tiny  # noqa: E402

# tiny models have no tokenizer, and the head needs none
WITHOUT_VOCABULARY = """
import runpy, sys
folder = sys.argv.pop(1)
sys.path[:0] = [folder + "/gguf-py", folder]
from conversion import base, qwen
for cls in (base.TextModel, qwen.Qwen3_5TextModel):
    cls.set_vocab = lambda self: None
sys.argv[0] = folder + "/convert_hf_to_gguf.py"
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def convert(llama_cpp: str, source: Path, out: Path, kind: str, alone: bool) -> None:
    flags = ["--outtype", kind, "--outfile", str(out), *(["--mtp"] if alone else [])]
    command = [sys.executable, "-c", WITHOUT_VOCABULARY, llama_cpp, str(source), *flags]
    subprocess.run(command, check=True, capture_output=True)


def check(llama_cpp: str, model: str, kind: str, alone: bool) -> str:
    with tempfile.TemporaryDirectory() as scratch:
        source = build_tiny(Path(scratch, "source"), model, dtype="bfloat16")
        convert(llama_cpp, source, out := Path(scratch, "out.gguf"), kind, alone)
        checkpoint = open_checkpoint(source)
        wanted = load_weights(checkpoint, progress=False)
        got = load_weights(attach_head(checkpoint, out), progress=False)
    worst = 0.0
    for name in (name for name in wanted if name.startswith("mtp.")):
        weight, plain = got[name], wanted[name]
        assert isinstance(weight, torch.Tensor) and isinstance(plain, torch.Tensor) and weight.shape == plain.shape
        worst = max(worst, float((weight - plain.float()).abs().max() / plain.float().abs().max()))
    assert worst <= (0.005 if kind == "q8_0" else 0), f"{model} {kind}: off by {worst}"
    return f"{model}, {kind}, {'the head alone' if alone else 'the whole model'}: largest difference {worst:.1e}"


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for model in ("dense", "moe", "vl_moe"):
        for kind in ("f32", "bf16", "q8_0"):
            for alone in (True, False):
                print(check(sys.argv[1], model, kind, alone), flush=True)


if __name__ == "__main__":
    main()
