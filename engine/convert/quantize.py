"""`pilotfish quantize IN OUT`: a BF16, F32 or FP8 checkpoint as NVFP4 (W4A16), with FP8 where asked.

File by file: beyond the mapped pages of what is read, memory holds one matrix in its packed form. The output grows in
OUT.partial beside OUT and is renamed when it is complete and opens; an interrupted run goes on with the first file
that is not finished, if source and recipe are still the same.
"""

from __future__ import annotations

import argparse
import dataclasses
import fcntl
import hashlib
import json
import os
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from pilotfish.engine.checkpoint.copies import check_copies
from pilotfish.engine.checkpoint.findings import NOT_FINITE, ZEROS, findings
from pilotfish.engine.checkpoint.hub import resolve_model
from pilotfish.engine.checkpoint.quantization import MODELOPT_FILE
from pilotfish.engine.checkpoint.recognise import INDEX_FILE, Checkpoint, census, open_checkpoint
from pilotfish.engine.checkpoint.sidecar import attach_head
from pilotfish.engine.command_line.output import check_folder
from pilotfish.engine.command_line.parser import Parser, whole_number
from pilotfish.engine.config import read_json_object
from pilotfish.engine.convert.calibrate import collect
from pilotfish.engine.convert.declare import modelopt_file, quantised_config
from pilotfish.engine.convert.lora import Adapter, read_adapter
from pilotfish.engine.convert.pack import SourceWeights, pack
from pilotfish.engine.convert.recipe import Action, ConversionPlan, Job, Recipe, changeable, plan_conversion
from pilotfish.engine.convert.write import TensorFile, tensor_file, write_text
from pilotfish.engine.errors import CheckpointError, OptionError, PilotfishError

REPORT_FILE = "quantization_report.json"
STATE = ".quantize"
COPIED = {".json", ".jinja", ".txt", ".model", ".tiktoken", ".md"}
NOT_COPIED = {"config.json", MODELOPT_FILE, INDEX_FILE, REPORT_FILE}
TEMPLATES = "additional_chat_templates"
SPARE_BYTES = 64 << 20
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}

Errors = dict[str, dict[str, float]]
"""Raw name of a packed matrix -> {"relative": |W - Q| / |W|, "largest": the largest |w - q|}."""


@dataclass(frozen=True)
class Quantized:
    """What a run made: the censuses before and after, and the error of each packed matrix.

    `merged` counts the matrices that an adapter changed, of the `adapted` ones that it names; errors are against what
    they were changed to. `zeros`: the source's plain matrices that are 0 throughout, and where.
    """

    source: Checkpoint
    output: Checkpoint
    errors: Errors
    merged: int = 0
    adapted: int = 0
    zeros: str | None = None


def quantize_folder(
    source: Path,
    out: Path,
    recipe: Recipe,
    graft_head: Path | None = None,
    merge_lora: Path | None = None,
    progress: bool = True,
    calibration: Sequence[int] = (),
) -> Quantized:
    """Writes `out`, or goes on with an interrupted run of the same source and recipe.

    `calibration`: tokens of a text that the source reads first, so that scales are those under which what comes out of
    each matrix is off the least.

    Raises OptionError (`out` is there, another run holds or left its partial folder, no space) or CheckpointError
    and its kinds (a source that cannot be read, or that is packed already).
    """
    if out.exists():
        raise OptionError(f"{out}: is there already; want a folder to be made")
    if recipe.needs_inputs and not calibration:
        raise OptionError("--calibrate: want a text: ModelOpt's FP8 has a scale of the inputs")
    opened = open_checkpoint(source)
    check_copies(opened.copies)
    checkpoint = opened if graft_head is None else attach_head(opened, graft_head)
    adapter = None if merge_lora is None else read_adapter(merge_lora, changeable(opened))
    plan = plan_conversion(checkpoint, recipe, adapter.pairs if adapter else ())
    partial = out.with_name(out.name + ".partial")
    with _hold(partial, _stamp(checkpoint, plan, recipe, adapter, calibration)):
        moments = collect(checkpoint, list(calibration)) if calibration else {}
        zeros = _check_plain(checkpoint, plan)
        weights = SourceWeights(plan, recipe, adapter, moments)
        merged = weights.changed()
        try:
            _require_space(partial, plan)
            errors = _write_all(partial, plan, weights, progress)
            _write_rest(partial, plan, checkpoint, recipe, errors)
        except OSError as error:
            raise CheckpointError(f"{partial}: {error.strerror or error}; what is finished stays there") from error
        output = open_checkpoint(partial)
        _sync_folder(partial)
        partial.rename(out)
        _sync_folder(out.parent)
    shutil.rmtree(out / STATE)
    adapted = len(adapter.pairs) if adapter else 0
    return Quantized(opened, dataclasses.replace(output, path=out), errors, merged, adapted, zeros)


def _check_plain(checkpoint: Checkpoint, plan: ConversionPlan) -> str | None:
    """Looks at what stays plain; what is packed is looked at meanwhile. Returns a word on matrices of zeros, if there
    are any. Raises CheckpointError for values that are not finite."""
    found = findings(
        job.module for jobs in plan.values() for job in jobs if job.module is not None and job.action is not Action.PACK
    )
    if NOT_FINITE in found:
        raise CheckpointError(f"{checkpoint.path}: {found[NOT_FINITE]}")
    return found.get(ZEROS)


# The partial folder


def _stamp(
    checkpoint: Checkpoint, plan: ConversionPlan, recipe: Recipe, adapter: Adapter | None, calibration: Sequence[int]
) -> str:
    """What must not change between a run and its continuation."""
    files = {info.main.file for jobs in plan.values() for info in jobs} | {checkpoint.path / "config.json"}
    files |= set(adapter.files) if adapter else set()
    seen = [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in sorted(files)]
    text = hashlib.blake2b(repr(list(calibration)).encode(), digest_size=16).hexdigest()
    return json.dumps({"recipe": dataclasses.asdict(recipe), "files": seen, "calibration": text})


@contextmanager
def _hold(partial: Path, stamp: str) -> Iterator[None]:
    """The partial folder for this run alone, empty or left by one with the same stamp."""
    state = partial / STATE
    if partial.exists() and any(partial.iterdir()) and not state.is_dir():
        raise OptionError(f"{partial}: is in the way; want no such folder, or one that an interrupted run left")
    try:
        state.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(f"{partial}: cannot be made: {error.strerror}") from error
    with (state / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise OptionError(f"{partial}: another run is writing it") from None
        known = state / "stamp.json"
        if known.exists() and known.read_text() != stamp:
            raise OptionError(f"{partial}: left by a run with another source or other options; remove it to start anew")
        if not known.exists():
            write_text(known, stamp)
        for unfinished in partial.glob("*.safetensors.partial"):
            unfinished.unlink()
        yield


def _require_space(partial: Path, plan: ConversionPlan) -> None:
    waiting = [jobs for file, jobs in plan.items() if not (partial / file).exists()]
    needed = sum(entry.num_bytes for jobs in waiting for job in jobs for entry in job.entries) + SPARE_BYTES
    free = shutil.disk_usage(partial).free
    if needed > free:
        raise OptionError(f"{partial}: want {needed / 1e9:.2f} GB of free space, got {free / 1e9:.2f} GB")


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# Weights


def _write_all(partial: Path, plan: ConversionPlan, source: SourceWeights, progress: bool) -> Errors:
    total = sum(job.num_bytes for jobs in plan.values() for job in jobs)
    with tqdm(total=total, unit="B", unit_scale=True, desc="quantizing", disable=not progress) as bar:
        for file, jobs in plan.items():
            if (partial / file).exists():
                bar.update(sum(job.num_bytes for job in jobs))
                continue
            _write_file(partial, file, jobs, source, bar)
    errors: Errors = {}
    for file in plan:
        errors |= json.loads(_errors_of(partial, file).read_text())
    return dict(sorted(errors.items()))


def _errors_of(partial: Path, file: str) -> Path:
    return partial / STATE / f"{file}.errors.json"


def _write_file(partial: Path, file: str, jobs: list[Job], source: SourceWeights, bar: Any) -> None:
    errors: Errors = {}
    with tensor_file(partial / file, (entry for job in jobs for entry in job.entries)) as opened:
        for job in jobs:
            errors |= _write_job(opened, job, source)
            bar.update(job.num_bytes)
        # before the file takes its name: a file that is finished has its errors beside it
        write_text(_errors_of(partial, file), json.dumps(errors))
    source.release()


def _write_job(opened: TensorFile, job: Job, source: SourceWeights) -> Errors:
    if job.action is Action.COPY:
        opened.copy(job.entries[0].name, job.main)
        return {}
    if job.action is Action.PACK:
        return _write_packed(opened, job, source)
    for matrix, entry in zip(job.matrices, job.entries, strict=True):
        plain = torch.empty(matrix.shape, dtype=DTYPES[entry.dtype])
        for part, values in source.blocks(matrix.name):
            plain[part] = values - 1.0 if job.to_deltas else values
        opened.put(entry.name, plain)
    return {}


def _write_packed(opened: TensorFile, job: Job, source: SourceWeights) -> Errors:
    errors, entries = {}, iter(job.entries)
    for matrix in job.matrices:
        tensors, errors[matrix.raw_name] = pack(matrix, job.form, source)
        for tensor in tensors:
            opened.put(next(entries).name, tensor)
    return errors


# Everything else


def _write_rest(partial: Path, plan: ConversionPlan, checkpoint: Checkpoint, recipe: Recipe, errors: Errors) -> None:
    """config.json, the index, the tokenizer's and templates' files, and the report."""
    raw = quantised_config(read_json_object(checkpoint.path / "config.json"), plan, checkpoint, recipe)
    write_text(partial / "config.json", json.dumps(raw, indent=2) + "\n")
    if recipe.writer == "modelopt":
        write_text(partial / MODELOPT_FILE, json.dumps(modelopt_file(plan, checkpoint), indent=2) + "\n")
    where = {entry.name: file for file, jobs in plan.items() for job in jobs for entry in job.entries}
    size = sum(entry.num_bytes for jobs in plan.values() for job in jobs for entry in job.entries)
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(where.items()))}
    if len(plan) > 1 or "model.safetensors" not in plan:
        write_text(partial / INDEX_FILE, json.dumps(index, indent=1) + "\n")
    for file in _companions(checkpoint.path):
        target = partial / file.relative_to(checkpoint.path)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, target)
    write_text(partial / REPORT_FILE, json.dumps({"errors": errors}, indent=1) + "\n")


def _companions(folder: Path) -> list[Path]:
    """Files beside the weights that a reader of the copy wants: no code, no other weights."""
    found = [file for file in folder.iterdir() if file.suffix in COPIED or file.name.startswith(("LICENSE", "NOTICE"))]
    found = [file for file in found if file.name not in NOT_COPIED and not file.name.endswith(".index.json")]
    return sorted(file for file in [*found, *(folder / TEMPLATES).glob("*.jinja")] if file.is_file())


# The command


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    shared = args.global_scales == "shared"
    recipe = Recipe(args.attention, args.lm_head, args.head, shared, args.format, args.search_scales)
    if args.num_threads:
        torch.set_num_threads(args.num_threads)
    try:
        check_folder(args.out.parent, "OUT")
        source = resolve_model(args.source, args.revision)
        ids = _read_tokens(source, args.text, args.text_tokens)
        calibration = _read_tokens(source, args.calibrate, args.calibrate_tokens)
        result = quantize_folder(source, args.out, recipe, args.graft_head, args.merge_lora, calibration=calibration)
        print("\n".join(report_lines(result)), flush=True)
        if ids:
            _report_fidelity(source, args.out, ids)
    except PilotfishError as error:
        print(f"pilotfish: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"pilotfish: {error.filename or args.out}: {error.strerror or error}", file=sys.stderr)
        return 2
    return 0


def _report_fidelity(source: Path, out: Path, ids: list[int]) -> None:
    from pilotfish.engine.convert.fidelity import compare

    print("\n".join(compare(source, out, ids).lines()))


def _read_tokens(source: Path, text: Path | None, num_tokens: int) -> list[int]:
    """Tokens of the text, read before hours of work, so that one that is not there is told at once; [] without one."""
    if text is None:
        return []
    from pilotfish.engine.convert.fidelity import read_tokens

    return read_tokens(source, text, num_tokens)


def _parser() -> Parser:
    parser = Parser(
        prog="pilotfish quantize",
        description="BF16, F32 or FP8 to NVFP4 (W4A16), with FP8 where asked.",
        formatter_class=argparse.HelpFormatter,
    )
    parser.add_argument("source", metavar="IN", help="checkpoint folder or hub id")
    parser.add_argument("out", metavar="OUT", type=Path, help="folder to be made")
    parser.add_argument("--revision", metavar="NAME", help="branch, tag or commit of a hub id")
    for flag, default, what in (
        ("--attention", "nvfp4", "projections of attention and GatedDeltaNet"),
        ("--lm-head", "nvfp4", "the output head, unless it is tied to the embedding"),
        ("--head", "bf16", "the MTP head's matrices; mtp.fc stays plain"),
    ):
        parser.add_argument(
            flag, choices=("nvfp4", "fp8", "bf16"), default=default, help=f"{what} (default: %(default)s)"
        )
    parser.add_argument(
        "--global-scales",
        choices=("shared", "own"),
        default="shared",
        help="one for q, k, v, for qkv, z and for gate, up; or one a matrix, which vLLM loads without an error "
        "and reads wrongly (default: %(default)s)",
    )
    parser.add_argument(
        "--format",
        choices=("compressed-tensors", "modelopt"),
        default="compressed-tensors",
        help="how it is written and declared (default: %(default)s)",
    )
    parser.add_argument(
        "--search-scales", action="store_true", help="search scales by the weights alone where no text tells inputs"
    )
    parser.add_argument("--calibrate", type=Path, metavar="FILE", help="search scales by what inputs this text gives")
    parser.add_argument(
        "--calibrate-tokens", type=int, default=4096, metavar="N", help="of that text (default: %(default)s)"
    )
    parser.add_argument("--graft-head", type=Path, metavar="PATH", help="take the MTP head from this folder or file")
    parser.add_argument("--merge-lora", type=Path, metavar="ADAPTER", help="add a PEFT adapter's LoRA first")
    parser.add_argument("--text", type=Path, metavar="FILE", help="compare perplexity and logits on this text")
    parser.add_argument("--text-tokens", type=int, default=2048, metavar="N", help="of the text (default: %(default)s)")
    parser.add_argument("--num-threads", type=whole_number(1), metavar="N", help="CPU threads (default: torch's)")
    return parser


def report_lines(result: Quantized) -> Iterator[str]:
    """Censuses before and after, then the errors by kind of matrix and the worst ones."""
    for what, checkpoint in (("source", result.source), ("output", result.output)):
        yield f"{what}: {checkpoint.summary()}"
        for layout, row in census(checkpoint).items():
            yield f"  {row['modules']:6} modules {row['bytes'] / 1e6:12.1f} MB  {layout}"
    if result.zeros:
        yield f"in the source: {result.zeros}"
    if result.merged:
        unchanged = result.adapted - result.merged
        left = f"; {unchanged} of those it names stay as they were" if unchanged else ""
        yield f"the adapter changed {result.merged} matrices{left}"
    yield f"relative error |W - Q| / |W| of {len(result.errors)} matrices (each in {REPORT_FILE}):"
    kinds: dict[str, list[float]] = defaultdict(list)
    for name, error in result.errors.items():
        kinds[_kind(name)].append(error["relative"])
    for kind, values in sorted(kinds.items()):
        mean = sum(values) / len(values)
        yield f"  {len(values):6} {kind:14} mean {mean:.4f}, largest {max(values):.4f}"
    yield from _calibration_lines(result.errors)
    for name, error in sorted(result.errors.items(), key=lambda item: -item[1]["relative"])[:3]:
        yield f"  worst: {name} {error['relative']:.4f}"


def _calibration_lines(errors: Errors) -> Iterator[str]:
    """What calibration brought: the error of what comes out, weighted by the inputs that were seen."""
    seen = [error for error in errors.values() if "output" in error]
    if not seen:
        return
    before, after = (sum(error[key] for error in seen) / len(seen) for key in ("output_uncalibrated", "output"))
    yield f"relative error of outputs of {len(seen)} matrices: mean {before:.4f} without calibration, {after:.4f} with"
    if unseen := len(errors) - len(seen):
        yield f"  {unseen} matrices saw too few tokens of the text: scales by their weights alone"


def _kind(name: str) -> str:
    for part, kind in (
        ("mtp.", "MTP head"),
        (".experts.", "experts"),
        (".shared_expert.", "shared experts"),
        (".mlp.", "MLP"),
        (".self_attn.", "attention"),
        (".linear_attn.", "GatedDeltaNet"),
    ):
        if name.startswith(part) or (part[0] == "." and part in name):
            return kind
    return name


if __name__ == "__main__":
    sys.exit(main())
