"""Flags that `serve` and `generate` share: which model, how it drafts, on which device, and what prompts become."""

from __future__ import annotations

import argparse
from pathlib import Path

from pilotfish.engine.command_line.parser import Parser
from pilotfish.engine.command_line.speculation import speculative_config
from pilotfish.engine.link.process import DEFAULT_CORE
from pilotfish.engine.options import DUMMY_LAYOUTS, KV_CACHE_DTYPES, MAX_DEPTH
from pilotfish.server import flags


def add_engine_flags(parser: Parser) -> None:
    parser.add_argument("model", metavar="MODEL", help="checkpoint folder, or a hub id such as Qwen/Qwen3.6-27B")
    parser.add_argument("--core", default=DEFAULT_CORE, help=argparse.SUPPRESS)  # tests run scripted cores
    group = parser.add_argument_group("hub")
    group.add_argument("--revision", metavar="NAME", help="branch, tag or commit of a hub id (default: main)")
    group.add_argument("--download-dir", type=Path, metavar="PATH", help="where hub files are kept (default: HF_HOME)")
    group = parser.add_argument_group("random weights")
    group.add_argument(
        "--load-format",
        choices=("auto", "dummy"),
        default="auto",
        help="dummy: random weights, made from config.json alone (default: auto, the files')",
    )
    group.add_argument(
        "--dummy-layout",
        choices=DUMMY_LAYOUTS,
        default="nvfp4",
        help="how random weights are stored (default: %(default)s)",
    )
    group.add_argument(
        "--synthetic-acceptance-length",
        type=float,
        metavar="TOKENS",
        help="with random weights alone: accept so many tokens a round by decree, 1 to k + 1 (default: by chance)",
    )
    group = parser.add_argument_group("speculation")
    depth = group.add_mutually_exclusive_group()
    depth.add_argument(
        "--num-speculative-tokens",
        type=flags.depth,
        metavar="K",
        help=f"drafted tokens a round, at most {MAX_DEPTH}; 0: no speculation (default: 3 where there is a head)",
    )
    depth.add_argument(
        "--speculative-config",
        type=speculative_config,
        metavar="JSON",
        help='in place of it, in vLLM\'s form, e.g. {"method": "ngram", "num_speculative_tokens": 3, '
        '"prompt_lookup_max": 4}',
    )
    group.add_argument(
        "--draft-head",
        metavar="PATH",
        help="a folder, .safetensors or .gguf file with an MTP head (default: the checkpoint's own)",
    )
    group.add_argument(
        "--draft-vocab",
        metavar="FILE",
        help="draft from these token ids alone, a file by `pilotfish draft-vocab` (default: all)",
    )
    group.add_argument(
        "--head-check",
        choices=("refuse", "warn", "off"),
        default="refuse",
        help="a head that cannot draft a known text: refuse to start, warn, or do not test (default: %(default)s)",
    )
    group = parser.add_argument_group("device and memory")
    group.add_argument(
        "--max-num-seqs",
        type=flags.count,
        metavar="N",
        help="sequences that run at once, others wait (default: on a GPU what rounds timed at the start say, up to 64; "
        "on a CPU 16 over K + 1)",
    )
    group.add_argument(
        "--max-model-len",
        type=flags.count,
        metavar="N",
        help="prompt and answer together, in tokens (default: the model's context)",
    )
    group.add_argument(
        "--gpu-memory-utilization",
        type=flags.share,
        default=0.9,
        metavar="SHARE",
        help="of a GPU's memory (default: %(default)s)",
    )
    group.add_argument(
        "--dtype",
        choices=("auto", "bfloat16", "float32"),
        default="auto",
        help="of activations (default: auto, the checkpoint's; float32 on a CPU without bf16 products)",
    )
    group.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: auto, a GPU if there is one"
    )
    group.add_argument(
        "--kv-cache-tokens",
        type=flags.count,
        metavar="N",
        help="size of the key-value cache (default: on a GPU by --gpu-memory-utilization; on a CPU --max-num-seqs full "
        "contexts, up to 2 GiB)",
    )
    group.add_argument(
        "--kv-cache-dtype", choices=KV_CACHE_DTYPES, default="auto", help="of keys and values (default: the model's)"
    )
    group.add_argument(
        "--kernels",
        choices=("auto", "torch", "fused"),
        default="auto",
        help="default: auto, fused where they run, else torch",
    )
    group.add_argument("--enforce-eager", action="store_true", help="capture no CUDA graphs: rounds take longer")
    group.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="keep what was read of prompts for later ones that begin alike; the text is the same (default: on)",
    )
    group.add_argument(
        "--num-threads",
        type=flags.count,
        metavar="N",
        help="CPU threads of the engine (default: one fewer than there are cores, at least one)",
    )


def add_answer_flags(parser: Parser) -> argparse._ArgumentGroup:
    group = parser.add_argument_group("prompts and answers")
    group.add_argument(
        "--generation-config",
        default="auto",
        metavar="auto|vllm|PATH",
        help="sampling defaults: the checkpoint's (auto, the default), none (vllm), or another folder's",
    )
    group.add_argument(
        "--override-generation-config",
        type=flags.overrides,
        metavar="JSON",
        help='single defaults, e.g. {"max_new_tokens": 4096}, which bounds what a chat without max_tokens reserves',
    )
    group.add_argument("--chat-template", type=Path, metavar="PATH", help="a Jinja file (default: the checkpoint's)")
    return group
