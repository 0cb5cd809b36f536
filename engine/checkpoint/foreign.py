"""Files and folders that are mistaken for a checkpoint's: what each is, and what to do about it, in one line.

Read from the first bytes of a file and from the names in a folder; what is not known for certain is not named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

SNIFFED_BYTES = 256
ADAPTER_CONFIG, ADAPTER_PREFIX = "adapter_config.json", "base_model.model."
MERGE = "merge it first (pilotfish quantize BASE OUT --merge-lora ADAPTER)"
_POINTER = "a Git LFS pointer, not the file itself; fetch it with `git lfs pull`"
_GGUF = "want safetensors (--draft-head takes the head of a .gguf file)"
_STARTS = (
    (b"version https://git-lfs.github.com/spec/", _POINTER),
    (b"version https://hawser.github.com/spec/", _POINTER),
    (b"GGUF", f"a GGUF file; {_GGUF}"),
    (b"PK\x03\x04", "a zip archive, as torch.save writes it, not safetensors; no pickle is read: convert it"),
    (b"\x1f\x8b", "compressed by gzip; unpack it first"),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd; unpack it first"),
    (b"\x80\x02", "a Python pickle, not safetensors; no pickle is read: convert it"),
    (b"\x80\x04", "a Python pickle, not safetensors; no pickle is read: convert it"),
    (b"\x93NUMPY", "a NumPy array, not safetensors"),
    (b"\x89HDF", "an HDF5 file, not safetensors"),
)
_PAGES = (b"<!doctype", b"<html", b"<head", b"<?xml", b"<error")
_PAGE = "a web page, not the file itself: the download went wrong (a log-in or an error page); fetch it again"


def what_file(start: bytes) -> str | None:
    """What a file is that begins so and is neither safetensors nor JSON; None for what is not known."""
    if not start:
        return "empty: the download or copy was cut off; fetch it again"
    text = start.removeprefix(b"\xef\xbb\xbf").lstrip()
    if text.lower().startswith(_PAGES):
        return _PAGE
    if len(start) == SNIFFED_BYTES and not start.strip(b"\0"):
        return "zeros alone: a download that was set up and never filled; fetch it again"
    return next((what for beginning, what in _STARTS if start.startswith(beginning)), None)


def look_at(file: Path) -> str | None:
    """what_file of a file there is; None where it cannot be read."""
    try:
        with file.open("rb") as opened:
            return what_file(opened.read(SNIFFED_BYTES))
    except OSError:
        return None


def broken_link(path: Path) -> str | None:
    """What a link is whose file is not there, as in a hub cache that was copied in part; None for anything else."""
    if not path.is_symlink() or path.exists():
        return None
    return f"a link to {path.readlink()}, which is not there; fetch it again, or copy what links point to (cp -L)"


def what_folder(folder: Path) -> str | None:
    """What a folder is that is no checkpoint of weights in safetensors; None for what is not known."""
    if not folder.is_dir():
        return None
    try:
        return next((what for look in _LOOKS if (what := look(folder))), None)
    except OSError:
        return None


def _adapter(folder: Path) -> str | None:
    if not (folder / ADAPTER_CONFIG).is_file() or (folder / "config.json").is_file():
        return None
    return f"a PEFT adapter without its base model; {MERGE}"


def _hub_cache(folder: Path) -> str | None:
    """The cache's root, HF_HOME above it, or one model's folder in it."""
    if snapshots := _newest(folder.glob("snapshots/*/config.json")):
        return f"one model's folder of the hub cache; want its snapshot {snapshots.parent}, or the hub id"
    for root in (folder, folder / "hub"):
        if models := sorted(root.glob("models--*")):
            name = models[0].name.removeprefix("models--").replace("--", "/")
            return f"the hub cache, of {len(models)} model(s); want a hub id such as {name}"
    return None


def _trainer(folder: Path) -> str | None:
    """A run's folder: the checkpoints lie one level below."""
    if (newest := _newest(folder.glob("checkpoint-*/config.json"))) is not None:
        return f"a trainer's output folder; want one of its checkpoints, the newest is {newest.parent}"
    if (newest := _newest(folder.glob(f"checkpoint-*/{ADAPTER_CONFIG}"))) is not None:
        return f"a trainer's output folder of adapters, the newest {newest.parent}; {MERGE}"
    return None


def _sharded_training(folder: Path) -> str | None:
    if any(folder.glob("*.distcp")) or any(folder.glob("*/*.distcp")):
        return "an FSDP or DCP training state; merge it first (accelerate merge-weights, dcp_to_torch)"
    if (folder / "zero_to_fp32.py").is_file() or any(folder.glob("global_step*/*_states.pt")):
        return "a DeepSpeed training state; merge it first (zero_to_fp32.py OUT --safe_serialization)"
    if any((folder / name).is_file() for name in ("latest_checkpointed_iteration.txt", "latest_train_state.pt")):
        return "a Megatron training state; convert it to the Hugging Face form first"
    return None


def _other_weights(folder: Path) -> str | None:
    if ggufs := sorted(folder.glob("*.gguf")):
        return (
            f"a folder of GGUF files ({ggufs[0].name}); want safetensors (--draft-head takes the head of a .gguf file)"
        )
    if pickles := sorted([*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth"), *folder.glob("*.ckpt")]):
        return f"weights in pickle files alone ({pickles[0].name}); no pickle is read: convert them to safetensors"
    if (folder / "model_index.json").is_file():
        return "a diffusers pipeline; want a language model's folder"
    if any(folder.glob("*.onnx")):
        return "an ONNX export; want safetensors"
    return None


def _one_below(folder: Path) -> str | None:
    """The folder that was meant, where it is the only one that it can be."""
    below = sorted(folder.glob("*/config.json"))
    if len(below) == 1 and not (folder / "config.json").exists():
        return f"no checkpoint itself; did you mean {below[0].parent}?"
    return None


def _unfinished(folder: Path) -> str | None:
    if found := sorted([*folder.glob("*.incomplete"), *folder.glob("*.aria2"), *folder.glob("*.part")]):
        return f"an unfinished download ({found[0].name}); let it end, or fetch it again"
    return "an empty folder" if not any(folder.iterdir()) else None


_LOOKS: tuple[Callable[[Path], str | None], ...] = (
    _adapter,
    _hub_cache,
    _trainer,
    _sharded_training,
    _other_weights,
    _unfinished,
    _one_below,
)


def _newest(files: Iterator[Path]) -> Path | None:
    """The newest file by the number in its folder's name, or else by its time."""

    def order(file: Path) -> tuple[int, float]:
        number = file.parent.name.rpartition("-")[2]
        return (int(number) if number.isdecimal() else 0), file.stat().st_mtime

    return max(files, key=order, default=None)
