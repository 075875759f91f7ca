"""The result of one evaluation, as it is kept on disk and read by the report."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_posenc.errors import PosencError
from hf_posenc.files import read_json, write_json

SCHEMA = 1


@dataclass(frozen=True)
class Score:
    """One number: `value` with its standard error over `n` documents in `clusters` groups.

    `bin` is the half-open range of positions the value covers, None for all of them; `length` is
    the prompt length in tokens, None for lm-eval's own tasks. `stderr` is None where it cannot be
    estimated, e.g. from a single haystack.
    """

    task: str
    metric: str
    value: float
    stderr: float | None
    n: int
    length: int | None = None
    bin: tuple[int, int] | None = None
    unit: str = ""
    higher_is_better: bool | None = None
    clusters: int | None = None


@dataclass(frozen=True)
class Needle:
    """One probe: where its needle stood and how the model answered.

    `depth` is the fraction of the haystack before the needle, `nll` nats per answer token, `acc`
    the forced choice among the values in the haystack, None when only one is there.
    """

    task: str
    length: int
    depth: float
    haystack: int
    em: float
    acc: float | None
    nll: float


@dataclass(frozen=True)
class EvalRecord:
    """Scores of one model, with what is needed to make them again."""

    variant: str
    model: str
    scheme: dict[str, Any] | None = None
    plan_digest: str | None = None
    adapter: str | None = None
    scores: list[Score] = field(default_factory=list)
    needles: list[Needle] = field(default_factory=list)
    cost: dict[str, float] = field(default_factory=dict)
    data: dict[str, str] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)

    def score(
        self,
        task: str,
        metric: str,
        *,
        length: int | None = None,
        bin: tuple[int, int] | None = None,
    ) -> Score:
        """The one score with these four keys; `KeyError` when it was not measured."""
        for score in self.scores:
            if (score.task, score.metric, score.length, score.bin) == (task, metric, length, bin):
                return score
        raise KeyError((task, metric, length, bin))

    def to_json(self) -> dict[str, Any]:
        """A dictionary that `json` can write, `schema` and `kind` first."""
        body = dataclasses.asdict(self)
        for score in body["scores"]:
            score["bin"] = None if score["bin"] is None else list(score["bin"])
        return {"schema": SCHEMA, "kind": "eval", **body}

    @classmethod
    def from_json(cls, value: Any, *, where: str = "evaluation record") -> EvalRecord:
        """Read what `to_json` wrote; `PosencError` names what is wrong with anything else."""
        if not isinstance(value, dict) or value.get("kind") != "eval":
            raise PosencError(f"{where}: not an evaluation record; write one with `hf-posenc eval`")
        if value.get("schema") != SCHEMA:
            raise PosencError(
                f"{where}: schema {value.get('schema')!r}, this version reads {SCHEMA}; "
                "evaluate again or use the version that wrote it"
            )
        body = {key: item for key, item in value.items() if key not in ("schema", "kind")}
        try:
            body["scores"] = [_score(item) for item in body.get("scores", [])]
            body["needles"] = [Needle(**item) for item in body.get("needles", [])]
            return cls(**body)
        except (TypeError, ValueError) as error:
            raise PosencError(f"{where}: damaged evaluation record ({error})") from None

    def write(self, path: Path | str) -> Path:
        """Write the record as JSON, whole or not at all."""
        for score in self.scores:
            if not math.isfinite(score.value):
                raise PosencError(
                    f"{score.task} {score.metric}: {score.value} is not a number; "
                    "the model's logits overflow, score it in bfloat16 or float32"
                )
        return write_json(path, self.to_json())

    @classmethod
    def read(cls, path: Path | str) -> EvalRecord:
        """Read a record; a missing, corrupt or foreign file is a `PosencError` that names it."""
        return cls.from_json(read_json(path), where=str(path))


def _score(value: dict[str, Any]) -> Score:
    bounds = value.get("bin")
    return Score(**{**value, "bin": None if bounds is None else (int(bounds[0]), int(bounds[1]))})
