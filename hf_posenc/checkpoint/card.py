"""The model card of an output: what was changed, in which model, and how to load the result."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from hf_posenc.checkpoint.source_folder import hub_snapshot
from hf_posenc.errors import PosencError
from hf_posenc.files import read_json, write_text
from hf_posenc.parts import part_text
from hf_posenc.plan import PositionPlan, canonical_json
from hf_posenc.show import choice_text, plan_rows

_LICENCE_KEYS = ("license", "license_name", "license_link")
_LICENCE_FILES = ("LICEN[CS]E*", "COPYING*", "NOTICE*", "USE_POLICY*")
_FRONT_MATTER = re.compile(r"\A---\s*\n(.*?)\n---\s*(?:\n|\Z)", re.DOTALL)
_MAX_README = 2**20
_LONG_LABEL = 80  # characters of a scheme's label that a sentence can carry
_LOADING = (
    "With the Python package `hf_posenc` installed:\n\n"
    "```python\n"
    "import hf_posenc\n"
    "from transformers import AutoModelForCausalLM\n\n"
    'model = AutoModelForCausalLM.from_pretrained("<this folder>")\n'
    "```\n\n"
    "`trust_remote_code=True` in place of the import works too, but the package must be "
    "installed. Without it transformers refuses to load the checkpoint, on purpose: stock "
    "code would compute plain RoPE.\n\n"
    "For use without the package, `hf-posenc export <this folder> <output>` writes a stock "
    "architecture if one computes the same, and says why if none does."
)


@dataclass(frozen=True)
class Origin:
    """Where a converted checkpoint comes from.

    source    what the user named it by, never a path of this machine
    hub_id    owner/name on the hub, when known
    revision  commit of the hub repository, when known
    sha256    checksum of the file it was unpacked from, when there is one
    licence   `license`, `license_name`, `license_link` of its own card
    """

    source: str
    hub_id: str | None = None
    revision: str | None = None
    sha256: str | None = None
    licence: Mapping[str, str] = field(default_factory=dict)


def describe_base(source: str, folder: Path, *, hub_id: str | None = None) -> Origin:
    """What can be known about the model in `folder`, which the user named `source`.

    hub_id  the base's place on the hub, where the folder itself does not tell
    """
    from hf_posenc.sources import is_hub_id

    snapshot = hub_snapshot(folder.resolve())
    sha256, licence = None, _licence_of_card(folder)
    origin = folder / "gguf_source.json"
    if origin.is_file():
        record = read_json(origin)
        sha256 = record.get("sha256")
        source = str(record.get("source", source))
        if not licence and record.get("licence", "not stated") != "not stated":
            licence = {"license": str(record["licence"])}
    elif Path(source).expanduser().exists():
        source = Path(source).expanduser().resolve().name
    if snapshot is not None:
        return Origin(snapshot[0], snapshot[0], snapshot[1], sha256, licence)
    if hub_id is not None and not is_hub_id(hub_id):
        raise PosencError(f"base_model {hub_id!r} is not a hub id; use owner/name")
    return Origin(source, hub_id, None, sha256, licence)


def write_card(
    folder: Path,
    plan: PositionPlan,
    *,
    base: Origin | str,
    name: str | None = None,
    healing: Mapping[str, Any] | None = None,
    scores: Sequence[Mapping[str, Any]] | None = None,
) -> Path:
    """Write `README.md` into a converted checkpoint.

    name     title; the folder's name by default
    healing  the record of a healing run (heal.json), None when it was not healed
    scores   records of evaluations (eval/<variant>.json), one column each
    """
    base = Origin(base) if isinstance(base, str) else base
    title = name or Path(folder).name
    sections = [
        _front_matter(plan, base),
        f"# {title}\n\n{_summary(plan, base, healing)}",
        f"## Positional encoding\n\n{_plan_table(plan)}",
        f"## Base\n\n{_base_lines(base)}",
        f"## Healing\n\n{_healing_text(healing)}",
        f"## Scores\n\n{_score_table(scores)}",
        f"## Loading\n\n{_LOADING}",
        f"## Licence\n\n{_licence_text(folder, base)}",
    ]
    return write_text(Path(folder) / "README.md", "\n\n".join(sections) + "\n")


def _front_matter(plan: PositionPlan, base: Origin) -> str:
    values: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    if base.hub_id is not None:
        values |= {"base_model": base.hub_id, "base_model_relation": "finetune"}
    values |= dict(base.licence)
    values["tags"] = ["hf-posenc", "positional-encoding", str(plan.scheme_dict["name"])]
    return f"---\n{yaml.safe_dump(values, sort_keys=False, allow_unicode=True)}---"


def _summary(plan: PositionPlan, base: Origin, healing: Mapping[str, Any] | None) -> str:
    state = "Not healed: unless the scheme computes what the base does, expect worse output."
    if healing:
        state = f"Healed for {healing['tokens']:,} tokens."
    return (
        f"{_code(base.source)} with another positional encoding, "
        f"{_code(plan.label if len(plan.label) <= _LONG_LABEL else plan.scheme_dict['name'])}, "
        f"converted by hf-posenc. {state}"
    )


def _plan_table(plan: PositionPlan) -> str:
    columns = {
        "layers": "layers",
        "rotated": "pairs",
        "base": "base",
        "wavelengths": "wavelengths (tokens)",
        "scale": "scale",
        "stretch": "by length",
        "order": "features",
        "queries": "queries",
        "window": "sees",
        "logits": "scores",
        "bias": "bias",
    }
    rows = [tuple(getattr(row, name) for name in columns) for row in plan_rows(plan)]
    header = tuple(columns.values())
    lines = [
        f"- scheme: {_code(canonical_json(plan.scheme_dict))}",
        f"- plan digest: `{plan.digest}`, built for base fingerprint `{plan.base}`",
        f"- q/k rows are stored {plan.pairing.replace('_', '-')}",
    ]
    if (choice := choice_text(plan)) is not None:
        lines.append(f"- {_code(choice)}")
    if plan.gained:
        lines.append(
            "- the weights are not the base's alone: `q_proj` (or `q_norm`) of the layers marked "
            "below carries gains for the pairs that lost their rotation; the base's own lies "
            "beside it (`stock_query`)"
        )
    if plan.embedding is not None:
        lines.append(f"- added to the token embeddings: {part_text(plan.embedding)}")
    return "\n".join(lines) + "\n\n" + _table(header, rows)


def _base_lines(base: Origin) -> str:
    facts = {"source": base.source, "revision": base.revision, "sha256": base.sha256}
    return "\n".join(f"- {key}: {_code(value)}" for key, value in facts.items() if value)


def _healing_text(healing: Mapping[str, Any] | None) -> str:
    if not healing:
        return "None. The weights are the base's, but for what the plan above asks of q and k."
    objective = healing.get("objective")
    first, gentle = healing.get("first"), healing.get("gentle")
    facts = {
        "tokens": f"{healing['tokens']:,}",
        "first objective": first
        and f"{_terms(first['objective'])}, {first['share']:.0%} of the steps",
        "objective": _terms(objective),
        "plan": gentle and f"in by {gentle['by']}, over {gentle['share']:.0%} of the steps",
        "trained": "whole modules" if healing.get("full") else None,
        "steps": healing.get("steps"),
        "trainable parameters": healing.get("trainable_parameters"),
        "seed": healing.get("seed"),
    }
    return "\n".join(f"- {key}: {value}" for key, value in facts.items() if value is not None)


def _terms(objective: Any) -> str:
    terms = objective.items() if isinstance(objective, Mapping) else [(str(objective), 1.0)]
    return ", ".join(f"{kind} x {weight:g}" for kind, weight in terms)


def _score_table(scores: Sequence[Mapping[str, Any]] | None) -> str:
    if not scores:
        return "None known."
    variants = [str(record["variant"]) for record in scores]
    cells: dict[tuple[str, str, str], dict[str, str]] = {}
    for record in scores:
        for score in record["scores"]:
            length, bin_ = score.get("length"), score.get("bin")
            where = "" if length is None else str(length)
            where += f" [{bin_[0]}, {bin_[1]})" if bin_ else ""
            better = "higher" if score.get("higher_is_better") else "lower"
            row = (str(score["task"]), f"{score['metric']} ({better} is better)", where)
            cells.setdefault(row, {})[str(record["variant"])] = _score(score)
    rows = [
        (*row, *(values.get(variant, "") for variant in variants)) for row, values in cells.items()
    ]
    return _table(("task", "metric", "length", *variants), rows)


def _score(score: Mapping[str, Any]) -> str:
    text = f"{score['value']:.4g}"
    if score.get("stderr") is not None:
        text += f" ± {score['stderr']:.2g}"
    return text if score.get("n") is None else f"{text} (n={score['n']})"


def _licence_text(folder: Path, base: Origin) -> str:
    files = sorted({path.name for glob in _LICENCE_FILES for path in Path(folder).glob(glob)})
    stated = ", ".join(_code(base.licence[key]) for key in _LICENCE_KEYS[:2] if key in base.licence)
    terms = (
        f"That of the base: {stated}." if stated else "That of the base, which states none here."
    )
    return terms + (f" See {', '.join(map(_code, files))}." if files else "")


def _licence_of_card(folder: Path) -> dict[str, str]:
    path = folder / "README.md"
    if not path.is_file() or path.stat().st_size > _MAX_README:
        return {}
    found = _FRONT_MATTER.match(path.read_text(encoding="utf-8", errors="replace"))
    try:
        values = yaml.safe_load(found[1]) if found else None
    except yaml.YAMLError:
        return {}
    if not isinstance(values, dict):
        return {}
    return {key: values[key] for key in _LICENCE_KEYS if isinstance(values.get(key), str)}


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(_cell(cell) for cell in line)} |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(str(text).replace("|", "\\|").split())


def _code(text: str) -> str:
    # A source may contain anything: no backtick or line break may end the code span.
    return f"`{' '.join(str(text).replace('`', chr(39)).split())}`"
