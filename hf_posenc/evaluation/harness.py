"""`evaluate`: score a model through lm-eval and keep the result as an `EvalRecord`."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lm_eval
import numpy as np
import torch
from lm_eval.models.utils import resolve_max_length
from transformers import AutoConfig

from hf_posenc import provenance
from hf_posenc.checkpoint.adapter import base_of_adapter, is_adapter
from hf_posenc.errors import PosencError
from hf_posenc.evaluation.collect import foreign_scores, needles_of, own_scores
from hf_posenc.evaluation.lm import PosencLM, tokenizer_of
from hf_posenc.evaluation.load import check_foreign, foreign_tasks, own_tasks, quiet
from hf_posenc.evaluation.record import EvalRecord
from hf_posenc.evaluation.suites import PlannedTask, plan_tasks
from hf_posenc.evaluation.tasks import SPLITS
from hf_posenc.evaluation.texts import load_text, resolve_source
from hf_posenc.runtime.patch import get_plan
from hf_posenc.sources import resolve_model

__all__ = ["PosencLM", "evaluate"]

# Standard errors are ours, and so is the documents' randomness.
_OUR_OPTIONS: dict[str, Any] = {
    "bootstrap_iters": 0,
    "random_seed": None,
    "numpy_random_seed": None,
    "torch_random_seed": None,
}


def evaluate(
    model_or_path: Any,
    tokenizer: Any = None,
    tasks: str | Sequence[str] = "quick",
    *,
    lengths: Sequence[int] | None = None,
    limit: int | None = None,
    seed: int = 0,
    out: Path | str | None = None,
    variant: str = "",
    batch_size: int = 1,
    texts: str | None = None,
    max_length: int | None = None,
    dtype: Any = None,
    device: str | None = None,
    attn_implementation: str | None = None,
    prefix_cache: bool = True,
    prefill_chunk: int | None = None,
    model_name: str | None = None,
) -> EvalRecord:
    """Score a model on long-context tasks and on any task of lm-eval.

    model_or_path: a live model (PEFT included; its tokenizer must be given) or a model source.
    tasks: a suite (`quick`, `dev`, `full`), kinds (`ppl_bins`, `niah_single`, `niah_essay`,
      `copytext`), a kind at a length (`niah_essay_2048`), lm-eval's names; a list or commas.
    lengths: tokens per prompt, answer included; any length works, files are not needed.
    limit: documents per task. seed: of the needle documents; lm-eval's tasks keep their own.
    out: file to write the record to. texts: text source, the held-out essays by default.
    max_length: longest row, the model's own limit by default; more than that is for models made
      to go further. dtype, device, attn_implementation: for a source only.

    Names, lengths and data are checked before a model is loaded: an unknown task, one whose data
    cannot be had, and a length beyond the model are a `PosencError`. One process: under a
    launcher of several call it on one of them. lm-eval's request and response caches are not
    used, since they do not tell models apart.
    """
    planned, foreign = plan_tasks(tasks, lengths, limit)
    from_source = isinstance(model_or_path, str)
    if tokenizer is None and not from_source:
        raise PosencError("a live model needs its tokenizer: pass tokenizer=...")
    if device is not None and device.startswith("cuda") and not torch.cuda.is_available():
        raise PosencError(f"device {device!r}: this machine has no CUDA device; use 'cpu'")
    check_foreign(foreign)
    _check_lengths(planned, model_or_path, tokenizer, max_length)
    if isinstance(tokenizer or model_or_path, str):
        tokenizer = tokenizer_of(tokenizer or model_or_path)
    if any(task.kind in SPLITS for task in planned):
        texts = resolve_source(texts)
    with _undisturbed(model_or_path):
        metadata = {"tokenizer": tokenizer, "seed": seed, "texts": texts}
        ours = own_tasks(planned, metadata) if planned else None
        theirs = foreign_tasks(foreign, tokenizer, lengths) if foreign else None
        lm = PosencLM(
            model_or_path,
            tokenizer,
            batch_size=batch_size,
            max_length=max_length,
            dtype=dtype,
            device=device,
            attn_implementation=attn_implementation,
            prefix_cache=prefix_cache,
            prefill_chunk=prefill_chunk,
        )
        started, cpu_started = time.perf_counter(), time.process_time()
        scores, needles = [], []
        if ours:
            with quiet("lm_eval"):
                results = _simple_evaluate(lm, *ours, **_OUR_OPTIONS)
            for task in planned:
                samples = results["samples"][task.name]
                scores += own_scores(task, samples)
                needles += needles_of(task, samples)
        if theirs:
            results = _simple_evaluate(lm, *theirs, limit=limit, log_samples=False)
            scores += foreign_scores(results)
        cost = {
            "seconds": round(time.perf_counter() - started, 3),
            "cpu_seconds": round(time.process_time() - cpu_started, 3),
            "tokens_computed": lm.scorer.tokens_computed,
            "tokens_reused": lm.scorer.tokens_reused,
        }
    record = EvalRecord(
        variant=variant,
        model=model_name or _model_name(model_or_path),
        **_plan_fields(lm.model),
        adapter=model_or_path if from_source and is_adapter(model_or_path) else None,
        scores=scores,
        needles=needles,
        cost=cost,
        data=_data_hashes(planned, texts),
        provenance=provenance.collect(
            seed=seed,
            tasks=[*(task.name for task in planned), *foreign],
            limit=limit,
            max_length=lm.max_length,
            dtype=str(lm.model.dtype).removeprefix("torch."),
            device=str(lm.device),
            attention=lm.model.config._attn_implementation,
            batch_size=batch_size,
            prefix_reuse="on" if lm.scorer.reuse else f"off: {lm.scorer.no_reuse or 'asked for'}",
        ),
    )
    if out is not None:
        record.write(out)
    return record


@contextmanager
def _undisturbed(model_or_path: Any) -> Iterator[None]:
    """Give back the random streams and a live model's mode, both of which lm-eval changes."""
    training = not isinstance(model_or_path, str) and model_or_path.training
    state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(state)
        np.random.set_state(numpy_state)
        if training:
            model_or_path.train()


def _simple_evaluate(lm: PosencLM, manager: Any, tasks: list[Any], **options: Any) -> Any:
    return lm_eval.simple_evaluate(lm, tasks=tasks, task_manager=manager, **options)


def _check_lengths(
    planned: Sequence[PlannedTask], model_or_path: Any, tokenizer: Any, max_length: int | None
) -> None:
    """Refuse lengths beyond the model, from its configuration alone."""
    limit = max_length
    if limit is None:
        config = _config(model_or_path)
        if config is None:
            return
        limit = resolve_max_length(config, None if isinstance(tokenizer, str) else tokenizer)
    if too_long := [task for task in planned if task.length > limit]:
        fitting = sorted({task.length for task in planned if task.length <= limit})
        raise PosencError(
            f"{too_long[0].kind} at {too_long[0].length} exceeds the model's {limit} positions; "
            + (f"use lengths={fitting}" if fitting else f"use lengths up to {limit}")
            + ", or max_length=... for a model made to go further"
        )


def _config(model_or_path: Any) -> Any:
    """The configuration of a model or source; None where loading the model has to tell."""
    if not isinstance(model_or_path, str):
        return model_or_path.config
    source = base_of_adapter(model_or_path) if is_adapter(model_or_path) else model_or_path
    path = resolve_model(source).path
    try:
        return AutoConfig.from_pretrained(path)
    except (OSError, ValueError):
        return None


def _model_name(model_or_path: Any) -> str:
    if isinstance(model_or_path, str):
        return resolve_model(model_or_path).name
    config = model_or_path.config
    return Path(getattr(config, "_name_or_path", "") or type(model_or_path).__name__).name


def _plan_fields(model: Any) -> dict[str, Any]:
    plan = get_plan(model)
    if plan is None:
        return {"scheme": None, "plan_digest": None}
    return {"scheme": plan.scheme_dict, "plan_digest": plan.digest}


def _data_hashes(planned: Sequence[PlannedTask], texts: str | None) -> dict[str, str]:
    splits = sorted({SPLITS[task.kind] for task in planned if task.kind in SPLITS})
    used = [load_text(texts, split) for split in splits] if texts else []
    return {text.label: text.sha256 for text in used}
