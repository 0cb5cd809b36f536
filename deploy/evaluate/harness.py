"""lm-eval against a served model, through its own OpenAI client: the shipped questions, or any task it knows.

lm-eval is imported where it is used: it comes with `pip install 'pilotfish[eval]'`.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pilotfish.deploy.evaluate import quality

OWN_TASKS = {f"pilotfish_{kind}": kind for kind in quality.RULES}
OWN_GROUP = "pilotfish_quality"


def is_installed() -> bool:
    return importlib.util.find_spec("lm_eval") is not None


def own_task(name: str) -> dict[str, Any]:
    """A half of the shipped set as lm-eval's task, scored by quality.py's rules."""
    kind = OWN_TASKS[name]
    pick = {"function": "regex", "regex_pattern": quality.RULES[kind].pattern, "group_select": 0}
    return {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(quality.FILE)}},
        "process_docs": lambda docs: docs.filter(lambda doc: doc["kind"] == kind, load_from_cache_file=False),
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{prompt}}",
        "doc_to_target": "{{answer}}",
        "target_delimiter": "",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": quality.MAX_TOKENS, "temperature": 0},
        "filter_list": [{"name": "first", "filter": [pick, {"function": "take_first"}]}],
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
        "metadata": {"version": 1.0},
    }


def run(
    url: str,
    model: str,
    tasks: Sequence[str],
    *,
    key: str | None = None,
    k: int | None = None,
    chat: bool = False,
    limit: int | None = None,
    include_path: Path | None = None,
    tokenizer: Path | None = None,
) -> dict[str, Any]:
    """lm-eval's own results. Tasks that rank given endings take the checkpoint's `tokenizer`, to count what stands
    before them. Raises ImportError without lm-eval; ValueError for a task that it does not find."""
    # its data sets read a local file; the hub is asked for nothing
    own_only = all(name in (OWN_GROUP, *OWN_TASKS) for name in tasks)
    if own_only:
        os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
    import lm_eval
    from lm_eval.tasks import TaskManager

    wanted: list[Any] = []
    for name in tasks:
        names = list(OWN_TASKS) if name == OWN_GROUP else [name]
        wanted += [own_task(one) if one in OWN_TASKS else one for one in names]
    path = "chat/completions" if chat else "completions"
    arguments: dict[str, Any] = {
        "model": model,
        "base_url": f"{url}/v1/{path}",
        "num_concurrent": quality.AT_ONCE,
        "tokenizer_backend": None,
        "tokenized_requests": False,
    }
    if tokenizer is not None and not chat:
        arguments |= {"tokenizer_backend": "huggingface", "tokenizer": str(tokenizer)}
    if key is not None:
        arguments["auth_token"] = key
        os.environ["OPENAI_API_KEY"] = key
    manager = TaskManager(include_path=include_path, include_defaults=not own_only)
    if not own_only:
        _check(manager, wanted, ranks=tokenizer is not None and not chat)
    return lm_eval.simple_evaluate(
        model="local-chat-completions" if chat else "local-completions",
        model_args=arguments,
        tasks=wanted,
        task_manager=manager,
        gen_kwargs=None if k is None else {"speculation": {"k": k}},
        apply_chat_template=chat,
        limit=limit,
        bootstrap_iters=0,
        log_samples=True,
    )


def _check(manager: Any, tasks: Sequence[Any], ranks: bool) -> None:
    """Raises ValueError for a name that lm-eval does not know, and for tasks that cannot run so."""
    try:
        loaded = manager.load(tasks)["tasks"]
    except KeyError as error:
        raise ValueError(str(error.args[0])) from None
    ranked = [name for name, task in loaded.items() if task.OUTPUT_TYPE != "generate_until"]
    if ranked and not ranks:
        more = ", .." if len(ranked) > 3 else ""
        raise ValueError(
            f"{', '.join(ranked[:3])}{more}: these rank given endings by log-probability: want --tokenizer, the "
            "checkpoint's folder, and no --chat"
        )


def own_texts(results: dict[str, Any]) -> list[str]:
    """The answers to the shipped questions, in their order."""
    halves = [sorted(results["samples"][name], key=lambda sample: sample["doc_id"]) for name in OWN_TASKS]
    return [sample["resps"][0][0] for half in halves for sample in half]


def scores(results: dict[str, Any]) -> list[tuple[str, str, float, int]]:
    """Task, metric, value and number of questions; the shipped set's halves are followed by their mean."""
    rows = []
    for task, values in results["results"].items():
        for name, value in values.items():
            metric, _, rule = name.partition(",")
            if rule and not metric.endswith("_stderr") and isinstance(value, int | float):
                rows.append((task, metric, float(value), int(values.get("sample_len", 0))))
    halves = [row for row in rows if row[0] in OWN_TASKS]
    if len(halves) == len(OWN_TASKS):
        count = sum(row[3] for row in halves)
        rows.append((OWN_GROUP, halves[0][1], sum(row[2] * row[3] for row in halves) / count, count))
    return rows
