"""Exports that stock code loads: same function, no hf_posenc needed.

`export_native` looks for a stock architecture that computes a plan, writes the checkpoint, loads
it back through transformers alone, and compares its logits with the plan's before anything
appears at the destination.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hf_posenc.checkpoint.native import (
    ernie4_5,
    exaone_moe,
    glm,
    glm4_moe,
    granite_swa,
    mellum,
    phi3,
    proportional,
    same_class,
    smollm3,
)
from hf_posenc.checkpoint.native.beside import check_adapter, with_adapter, write_adapter
from hf_posenc.checkpoint.native.case import Case, Draft, check_known
from hf_posenc.checkpoint.native.gguf import export_gguf
from hf_posenc.checkpoint.native.report import ExportReport, Unexportable
from hf_posenc.checkpoint.native.source import open_source
from hf_posenc.checkpoint.native.target import Target
from hf_posenc.checkpoint.native.verify import (
    check_tables,
    compare,
    load_stock,
    probes,
    reference,
    run,
)
from hf_posenc.checkpoint.native.write import write_model, write_record, write_tokenizer
from hf_posenc.errors import PosencError, did_you_mean
from hf_posenc.files import staged_directory

__all__ = ["TARGETS", "ExportReport", "Unexportable", "export_native", "list_targets"]

# In order of preference among targets that change equally much.
TARGETS: dict[str, Target] = {
    module.TARGET.name: module.TARGET
    for module in (
        same_class,
        smollm3,
        exaone_moe,
        mellum,
        granite_swa,
        glm4_moe,
        ernie4_5,
        glm,
        phi3,
        proportional,
    )
}


def export_native(
    model_or_path: Any,
    dst: Path | str,
    target: str = "auto",
    *,
    merge: bool = True,
    tokenizer: Any = None,
) -> ExportReport:
    """Write a checkpoint of a stock architecture that computes the same as a converted model.

    model_or_path  a patched model (left as it is), a converted checkpoint, an adapter folder, or
                   a PEFT model on a patched base
    dst            a new or empty folder, or a new `.gguf` file; it appears when everything is
                   written and checked
    target         "auto" (no or least change of weights; "gguf" when `dst` is a .gguf file) or a
                   name of `list_targets()`
    merge          merge adapters into the weights (in float32, rounded once); False writes the
                   adapter to `dst`/adapter, re-ordered where rows are
    tokenizer      written along; None takes the one beside the model's files
    The reloaded export is compared with the plan on random tokens at positions up to 200k: in the
    model's dtype where the target is exact, else in float32 (which takes a float32 copy). A GGUF
    file is read back and compared with the plan's frequencies and weights; llama.cpp is not run.
    Errors: `Unexportable` (a `PosencError`) with the reason; nothing is written then.
    """
    _check_target(target)
    if target == "gguf" or (target == "auto" and Path(dst).suffix == ".gguf"):
        return export_gguf(model_or_path, Path(dst), merge=merge, tokenizer=tokenizer)
    source = open_source(model_or_path, merge=merge)
    case = source.case
    check_known(case.plan)
    chosen, draft = choose(case, target, source.adapter)
    calls = probes(case)
    with staged_directory(dst) as stage:
        architecture = write_model(case, draft, source, stage)
        note = write_tokenizer(tokenizer, source.folder, stage)
        if source.adapter is not None:
            write_adapter(source.adapter, draft, stage, Path(dst))
        measured = source.adapter if source.adapter is not None else source.model
        wanted = reference(measured, draft, calls, owned=source.owned)
        stock = load_stock(stage, draft, source.model)
        check_tables(case, stock.config)
        if source.adapter is not None:
            stock = with_adapter(stock, stage).to(stock.device)
        found = compare(wanted, run(stock, calls), draft, f"{case.plan.label} as {chosen}")
        report = ExportReport(
            target=chosen,
            architecture=architecture,
            weight_changes=draft.weight_changes,
            max_logit_difference=found.difference,
            max_logit=found.largest,
            notes=(*draft.notes, *((note,) if note else ())),
        )
        write_record(report, case, stage)
    return report


def list_targets() -> tuple[str, ...]:
    """Names that `export_native` takes besides "auto"."""
    return (*TARGETS, "gguf")


def choose(case: Case, target: str, adapter: Any = None) -> tuple[str, Draft]:
    """The target asked for, or for "auto" the one that changes the weights least.

    Errors: `Unexportable` with the reason of every target that was looked at.
    """
    names = [name for name, one in TARGETS.items() if one.automatic or name == target]
    names = names if target == "auto" else [target]
    drafts: dict[str, Draft] = {}
    reasons: dict[str, str] = {}
    for name in names:
        try:
            draft = TARGETS[name].draft(case)
            if adapter is not None:
                check_adapter(adapter, draft)
            drafts[name] = draft
        except Unexportable as error:
            reasons[name] = str(error)
    if not drafts:
        told = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        raise Unexportable(
            f"{case.plan.label} on {case.family}: no stock architecture computes it ({told})"
            if target == "auto"
            else f"{case.plan.label} on {case.family} cannot be exported as {told}",
            reasons,
        )
    best = min(drafts, key=lambda name: len(drafts[name].weight_changes))
    return best, drafts[best]


def _check_target(target: str) -> None:
    known = ("auto", *list_targets())
    if target not in known:
        raise PosencError(f"unknown target {target!r}; {did_you_mean(target, known)}")
