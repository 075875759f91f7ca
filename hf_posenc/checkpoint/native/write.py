"""Writing an export: weights, config, tokenizer, licence, and how it was made."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from hf_posenc.checkpoint.native.case import Case, Draft, Weights
from hf_posenc.checkpoint.native.report import ExportReport, Unexportable
from hf_posenc.checkpoint.native.source import Source
from hf_posenc.checkpoint.permute import permute_heads
from hf_posenc.files import write_json
from hf_posenc.runtime import families

RECORD = "posenc_export.json"
_LICENCES = ("LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*")
_ORDERED = (
    "q_proj.weight",
    "k_proj.weight",
    "q_proj.bias",
    "k_proj.bias",
    "q_norm.weight",
    "k_norm.weight",
)
_SAMPLE = "Hello, world!  1234 naïve 漢字\n\tdef f(x): return x**2 # 3.14 <|im_start|>"


def written_weights(case: Case, draft: Draft) -> Weights:
    """The case's weights as the target stores them in memory."""
    weights: Weights = {}
    for name, value in case.weights.items():
        order = draft.orders[_layer(name)] if name.endswith(_ORDERED) else None
        weights[name] = value if order is None else permute_heads(value, order)
    return draft.reshape(weights) if draft.reshape else weights


def write_model(case: Case, draft: Draft, source: Source, stage: Path) -> str:
    """Save the stock model into `stage`; returns its class name."""
    with torch.device("meta"):
        model: Any = families.causal_lm_class(draft.config.model_type)(copy.deepcopy(draft.config))
    weights = {name: value.detach() for name, value in written_weights(case, draft).items()}
    if draft.config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    missing, unexpected = model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    missing = [name for name in missing if not name.startswith("lm_head")]
    if missing or unexpected or any(p.is_meta for p in model.parameters()):
        raise Unexportable(
            f"{type(model).__name__} takes other weights than the base has: "
            f"{(missing + unexpected + ['lm_head.weight'])[0]}"
        )
    if source.model.generation_config is not None:
        model.generation_config = copy.deepcopy(source.model.generation_config)
    model.save_pretrained(stage)
    return type(model).__name__


def write_tokenizer(tokenizer: Any, folder: Path | None, stage: Path) -> str | None:
    """The tokenizer and licence files beside the weights; returns a note when there is none.

    Errors: `Unexportable` when the written tokenizer, read through the stock config, splits text
    otherwise than the given one.
    """
    if folder is not None:
        for pattern in _LICENCES:
            for path in folder.glob(pattern):
                if path.is_file():
                    shutil.copyfile(path, stage / path.name)
    tokenizer = tokenizer or tokenizer_of(folder)
    if tokenizer is None:
        return "no tokenizer was at hand; add the base's own"
    tokenizer.save_pretrained(stage)
    again = AutoTokenizer.from_pretrained(stage)
    if again(_SAMPLE)["input_ids"] != tokenizer(_SAMPLE)["input_ids"]:
        raise Unexportable(
            "the tokenizer splits text differently once it is read with the stock config "
            f"({type(again).__name__} instead of {type(tokenizer).__name__}); choose another target"
        )
    return None


def tokenizer_of(folder: Path | None) -> Any:
    """The tokenizer in a model's folder, or None."""
    if folder is None or not any(folder.glob("tokenizer*")):
        return None
    return AutoTokenizer.from_pretrained(folder)


def write_record(report: ExportReport, case: Case, stage: Path) -> None:
    """posenc_export.json: the plan, and how this checkpoint was made from it and checked."""
    from hf_posenc.provenance import collect

    write_json(
        stage / RECORD,
        {
            "schema": 1,
            "kind": "native_export",
            **report.to_json(),
            "plan_digest": case.plan.digest,
            "plan": case.plan.to_json(),
            "provenance": collect(),
        },
    )


def _layer(name: str) -> int:
    return int(name.partition(".layers.")[2].partition(".")[0])
