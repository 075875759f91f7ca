"""What a healing run leaves behind: heal.json, log.jsonl and loss.png."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_posenc.errors import PosencError
from hf_posenc.files import read_json, write_json, write_text

SCHEMA = 1


@dataclass(frozen=True)
class HealRecord:
    """One finished healing run, as in heal.json.

    log       per step: step, tokens so far, loss (nats per token for ce and kl), lr, grad_norm,
              seconds of training so far
    heldout   per measurement: step, tokens, loss (next-token cross entropy, nats per token,
              whatever the objective), n_tokens
    first, gentle      the recipe's sections of that name, where they took part
    full      whether the targets were trained as whole copies instead of LoRA
    peak_memory_bytes  of the process, or of the accelerator when there is one
    """

    variant: str
    model: str
    scheme: dict[str, Any] | None
    plan_digest: str | None
    recipe_digest: str
    objective: dict[str, float]
    tokens: int
    steps: int
    seed: int
    seconds: float
    tokens_per_second: float
    peak_memory_bytes: int
    trainable_parameters: int
    log: list[dict[str, Any]]
    heldout: list[dict[str, Any]]
    provenance: dict[str, Any]
    first: dict[str, Any] | None = None
    gentle: dict[str, Any] | None = None
    full: bool = False

    def to_json(self) -> dict[str, Any]:
        """The content of heal.json."""
        return {"schema": SCHEMA, "kind": "heal", **dataclasses.asdict(self)}

    @classmethod
    def read(cls, path: Path | str) -> HealRecord:
        """Read heal.json back. Errors: `PosencError` naming the file."""
        content = read_json(path)
        fields = dataclasses.fields(cls)
        names = {field.name for field in fields}
        required = {field.name for field in fields if field.default is dataclasses.MISSING}
        if (
            not isinstance(content, dict)
            or content.get("kind") != "heal"
            or not required <= content.keys()
        ):
            raise PosencError(f"{path}: not a healing record of this version; heal again")
        return cls(**{name: content[name] for name in names & content.keys()})

    def write(self, folder: Path) -> None:
        """Write heal.json, log.jsonl and loss.png into `folder`."""
        write_json(folder / "heal.json", self.to_json())
        write_text(folder / "log.jsonl", "".join(json.dumps(entry) + "\n" for entry in self.log))
        draw_loss(self, folder / "loss.png")


def draw_loss(record: HealRecord, path: Path) -> None:
    """Draw the training loss, and the held-out loss when it was measured, against tokens seen."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = 2 if record.heldout else 1
    figure = Figure(figsize=(4.6 * panels + 0.6, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, panels, squeeze=False)[0]
    objective = _weights_text(record.objective)
    if record.first is not None:
        objective = f"{_weights_text(record.first['objective'])}, then {objective}"
    tokens = [entry["tokens"] for entry in record.log]
    axes[0].plot(tokens, [entry["loss"] for entry in record.log], color="#1f6f8b", linewidth=1.4)
    axes[0].set_title("Training loss", loc="left")
    axes[0].set_ylabel(f"{objective} (per token)")
    if record.heldout:
        seen = [entry["tokens"] for entry in record.heldout]
        losses = [entry["loss"] for entry in record.heldout]
        axes[1].plot(seen, losses, color="#b5452c", linewidth=1.4, marker="o", markersize=4)
        for at, loss in ((seen[0], losses[0]), (seen[-1], losses[-1])):
            axes[1].annotate(f"{loss:.3f}", (at, loss), xytext=(0, 6), textcoords="offset points",
                             ha="center", fontsize=9)  # fmt: skip
        axes[1].margins(x=0.1, y=0.15)
        axes[1].set_title("Held-out text, next-token loss", loc="left")
        axes[1].set_ylabel("nats per token")
    for axis in axes:
        axis.set_xlabel("tokens seen")
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        axis.xaxis.set_major_formatter(lambda value, _: _short(value))
    scheme = record.scheme["name"] if record.scheme else "unconverted"
    figure.suptitle(f"{record.model}, {scheme}, {record.variant}", fontsize=10, x=0.01, ha="left")
    figure.savefig(path, dpi=150)


def _weights_text(weights: dict[str, float]) -> str:
    return " + ".join(
        name if weight == 1 else f"{weight:g} {name}" for name, weight in weights.items()
    )


def _short(tokens: float) -> str:
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if tokens >= size:
            return f"{tokens / size:.3g}{unit}"
    return f"{tokens:.0f}"
