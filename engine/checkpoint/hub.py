"""Models by name: a hub id becomes a folder, by huggingface_hub (its cache, its tokens, its offline mode)."""

from __future__ import annotations

import re
from pathlib import Path

from pilotfish.engine.checkpoint.foreign import look_at, what_folder
from pilotfish.engine.errors import BusyError, CheckpointError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*\Z", re.ASCII)
FILES = ("*.json", "*.jinja", "*.safetensors", "LICENSE*")
"""What is read of a repository: no other weights, no code."""


def resolve_model(name: str, revision: str | None = None, cache_dir: str | Path | None = None) -> Path:
    """The folder itself, or that of a hub id such as `Qwen/Qwen3.6-27B`, fetched if the cache lacks it.

    `revision` is a branch, tag or commit. The environment decides the rest as it does for every user of the library:
    HF_HUB_OFFLINE, HF_HOME, HF_TOKEN, HF_ENDPOINT. Raises CheckpointError with one line that says what is missing, or
    BusyError where the hub is not reached.
    """
    folder = Path(name)
    if name and folder.is_dir():
        if revision is not None:
            raise CheckpointError(f"revision: want it with a hub id alone, {name} is a folder")
        # before anything of it is missed: a tokenizer, say
        is_whole = (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))
        if not is_whole and (what := what_folder(folder)) is not None:
            raise CheckpointError(f"{name}: {what}")
        return folder
    if folder.is_file():
        part = folder.suffix in (".safetensors", ".json")
        what = look_at(folder) or f"a file; want {f'its folder, {folder.parent}' if part else 'a checkpoint folder'}"
        raise CheckpointError(f"{name}: {what}")
    if folder.exists() or not HUB_ID.match(name):
        raise CheckpointError(f"{name}: want a checkpoint folder, or a hub id such as Qwen/Qwen3.6-27B")
    from huggingface_hub import snapshot_download
    from huggingface_hub.constants import HF_HUB_OFFLINE
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        path = snapshot_download(name, revision=revision, cache_dir=cache_dir, allow_patterns=list(FILES))
    except LocalEntryNotFoundError as error:
        # where the environment forbids to ask, a later start is not let either
        kind = CheckpointError if HF_HUB_OFFLINE else BusyError
        raise kind(
            f"{name}: no such folder; as a hub id it is not in the cache, and the hub is not reached: {_line(error)}"
        ) from error
    except (HfHubHTTPError, HFValidationError, OSError, ValueError) as error:
        kind = BusyError if _may_pass(error) else CheckpointError
        raise kind(f"{name}: {_line(error)}") from error
    return Path(path)


def _may_pass(error: Exception) -> bool:
    """A connection that broke, a disk that is full, too many requests, a fault of the hub's."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    return isinstance(error, OSError) and (status is None or status == 429 or status >= 500)


def _line(error: Exception) -> str:
    """The library's messages have several lines; the first that says something is enough."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
