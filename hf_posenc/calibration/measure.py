"""`calibrate`: one pass over a few thousand tokens that says where rotation is missed least."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hf_posenc import provenance
from hf_posenc.calibration.ablation import Damage
from hf_posenc.calibration.gradients import Gates, fisher, no_gradients
from hf_posenc.calibration.probe import Seen, probing
from hf_posenc.calibration.record import STATISTICS, Calibration
from hf_posenc.calibration.scores import norms, score_changes
from hf_posenc.errors import PosencError, did_you_mean
from hf_posenc.head import checked_head, last_hidden_state
from hf_posenc.model_spec import ModelSpec
from hf_posenc.runtime.patch import base_of, get_plan

Progress = Callable[[float, str], None]

QUERIES = 32  # per row, whose scores are looked at
BATCH_TOKENS = 1024
ABLATION_TOKENS = 2048  # one forward per layer on these; the first rows


def calibrate(
    model: Any,
    rows: Iterable[Tensor],
    *,
    statistics: Sequence[str] = STATISTICS,
    seed: int = 0,
    progress: Progress | None = None,
) -> Calibration:
    """Measure what dropping rotation damages, by layer and pair, on a loaded unconverted model.

    rows        token ids, int64 [T] or [B, T] each, all of one length; a few thousand tokens
    statistics  "norm": E|q_k| E|k_k| (MHA2MLA, arXiv 2502.14837); "score": the KL of each attention
                distribution to second order; "sensitivity": the KL of the output to second order,
                from gradients; "ablation": the measured KL, one forward per layer on at most
                2,048 of the tokens
    progress    called with the share that is done, 0 to 1, and what is being measured
    The model is left as it was. The same rows and seed give the same result on the same machine.
    Errors: `PosencError` for a converted model, no rows, ragged rows, an unknown statistic.
    """
    wanted = _checked(statistics)
    check_unconverted(model)
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise PosencError(f"seed={seed!r} must be a whole number from 0 to 2**63 - 1")
    spec = ModelSpec.from_model(model)
    batch = checked_rows(rows, model)
    report = progress or (lambda share, text: None)
    started = time.perf_counter()
    with at_rest(model):
        ahead = len(batch) / (len(batch) + spec.num_layers) if "ablation" in wanted else 1.0
        passed = _Pass(model, spec, wanted, seed)
        for done, part in _batches(batch):
            report(ahead * done, ", ".join(name for name in wanted if name != "ablation"))
            passed.add(part)
        found = passed.result(batch.numel())
        if "ablation" in wanted:
            found["layers"]["ablation"] = _ablated(model, batch, spec, ahead, report)
    report(1.0, "done")
    return Calibration(
        base=spec.fingerprint,
        tokens=batch.numel(),
        **found,
        provenance=provenance.collect(
            seed=seed,
            tokens=batch.numel(),
            row_tokens=batch.shape[1],
            statistics=list(wanted),
            dtype=str(model.dtype).removeprefix("torch."),
            seconds=round(time.perf_counter() - started, 3),
        ),
    )


class _Pass:
    """Sums of the statistics that come out of one forward (and backward) per batch."""

    def __init__(self, model: Any, spec: ModelSpec, wanted: Sequence[str], seed: int) -> None:
        self.model, self.spec, self.wanted = model, spec, wanted
        self.random = torch.Generator().manual_seed(seed)
        device = model.get_input_embeddings().weight.device
        self.draws = torch.Generator(device).manual_seed(seed)
        layers, pairs = spec.num_layers, spec.num_frequencies
        self.norm = torch.zeros(layers, spec.num_heads, pairs, dtype=torch.float64)
        self.score = torch.zeros(layers, pairs, pairs, dtype=torch.float64)
        self.fisher = torch.zeros(layers, pairs, dtype=torch.float64)
        self.fisher_layer = torch.zeros(layers, dtype=torch.float64)
        self.queries = 0
        self.head = checked_head(model) if "sensitivity" in wanted else None
        if "sensitivity" in wanted and self.head is None:
            raise PosencError(
                f"{spec.family}: sensitivity needs a vocabulary head that can be taken apart; "
                "leave it out of statistics"
            )

    def add(self, rows: Tensor) -> None:
        """Take the statistics of some rows [B, T] into the sums."""
        if not set(self.wanted) - {"ablation"}:
            return
        count, length = rows.shape
        chosen = torch.randperm(length, generator=self.random)[:QUERIES].sort().values
        self.queries += count * len(chosen)
        device = self.model.get_input_embeddings().weight.device
        gates = None  # without a gradient to take, plain attention and no head are enough
        if self.head is not None:
            gates = Gates(self.spec.num_layers, count, self.spec.num_frequencies, device)

        def attend(seen: Seen) -> Tensor:
            with torch.no_grad():
                self._look(seen, chosen.to(device), count * length)
            return seen.attended(seen.query, seen.key) if gates is None else gates.attend(seen)

        with (
            torch.set_grad_enabled(gates is not None),
            probing(self.model, attend),
            last_hidden_state(self.model.get_decoder()) as last,
        ):
            if gates is None:
                self.model.get_decoder()(input_ids=rows.to(device), use_cache=False)
            else:
                self.model(input_ids=rows.to(device), use_cache=False, logits_to_keep=1)
        if self.head is not None and gates is not None:
            vocabulary = self.model.config.get_text_config().vocab_size
            pairs, layers = fisher(gates, last[0], self.head, vocabulary, self.draws)
            self.fisher += pairs.cpu()
            self.fisher_layer += layers.cpu()

    def result(self, tokens: int) -> dict[str, dict[str, Any]]:
        """The fields of `Calibration`, each statistic -> nested tuples."""
        layers: dict[str, Any] = {}
        pairs: dict[str, Any] = {}
        joint: dict[str, Any] = {}
        heads: dict[str, Any] = {}
        if "norm" in self.wanted:
            norm = self.norm / tokens
            heads["norm"] = _nested(norm)
            pairs["norm"] = _nested(norm.mean(1))
            layers["norm"] = _nested(norm.mean(1).sum(-1))
        if "score" in self.wanted:
            score = self.score / self.queries
            joint["score"] = _nested(score)
            pairs["score"] = _nested(score.diagonal(dim1=1, dim2=2))
            layers["score"] = _nested(score.sum((1, 2)))
        if "sensitivity" in self.wanted:
            pairs["sensitivity"] = _nested(self.fisher / (2 * tokens))
            layers["sensitivity"] = _nested(self.fisher_layer / (2 * tokens))
        return {"layers": layers, "pairs": pairs, "joint": joint, "heads": heads}

    def _look(self, seen: Seen, queries: Tensor, tokens: int) -> None:
        if "norm" in self.wanted:
            self.norm[seen.layer] += norms(seen).double().cpu() * tokens
        if "score" in self.wanted:
            self.score[seen.layer] += score_changes(seen, queries).cpu()


def _ablated(
    model: Any, rows: Tensor, spec: ModelSpec, begun: float, report: Progress
) -> tuple[float, ...]:
    damage = Damage(model, rows[: max(1, ABLATION_TOKENS // rows.shape[1])])
    found = []
    for layer in range(spec.num_layers):
        report(begun + (1 - begun) * layer / spec.num_layers, f"ablation of layer {layer}")
        found.append(damage.of_dropping(layer))
    return tuple(found)


def _checked(statistics: Sequence[str]) -> list[str]:
    names = [statistics] if isinstance(statistics, str) else list(statistics)
    for name in names:
        if name not in STATISTICS:
            raise PosencError(f"statistic {name!r} is unknown; {did_you_mean(name, STATISTICS)}")
    if not names:
        raise PosencError(f"no statistics given; use some of {', '.join(STATISTICS)}")
    return [name for name in STATISTICS if name in names]


def check_unconverted(model: Any) -> None:
    """Refuse a model that carries a plan or an adapter. Errors: `PosencError`."""
    if base_of(model) is not model:
        raise PosencError("the model carries an adapter; measure the model without it")
    if get_plan(model) is not None:
        raise PosencError(
            "the model is converted already; measure the unconverted model (unpatch_model)"
        )


def checked_rows(rows: Any, model: Any) -> Tensor:
    """All rows as one tensor [N, T].

    Errors: `PosencError` for none, rows of several lengths, or what are no token ids of the model.
    """
    try:
        given = [torch.as_tensor(row) for row in (rows[None] if _flat(rows) else rows)]
    except (TypeError, ValueError, RuntimeError):
        given = []
    found = [row if row.ndim == 2 else row[None] for row in given]
    if any(row.ndim != 2 or row.is_floating_point() for row in found):
        raise PosencError("calibration rows are token ids, int64 [T] or [B, T]")
    if not found or not sum(row.numel() for row in found):
        raise PosencError("no rows to calibrate on; give a few thousand tokens of text")
    lengths = sorted({row.shape[1] for row in found})
    if len(lengths) > 1:
        raise PosencError(f"calibration rows are of lengths {lengths}; give rows of one length")
    if lengths[0] < 2:
        raise PosencError("calibration rows are 1 token long; give rows of some hundred tokens")
    result = torch.cat(found)
    words = model.get_input_embeddings().num_embeddings
    if result.min() < 0 or result.max() >= words:
        raise PosencError(
            f"calibration rows hold token {int(result.max())}; the model knows 0 to {words - 1}"
        )
    return result


def _flat(rows: Any) -> bool:
    return isinstance(rows, Tensor) and rows.ndim == 1 and rows.numel() > 0


def _batches(rows: Tensor) -> Iterator[tuple[float, Tensor]]:
    size = max(1, BATCH_TOKENS // rows.shape[1])
    for start in range(0, len(rows), size):
        yield start / len(rows), rows[start : start + size]


@contextmanager
def at_rest(model: Any) -> Iterator[None]:
    """Evaluation mode and frozen weights inside the block; both as before afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    trainable = no_gradients(model)
    model.eval()
    try:
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
        for parameter in trainable:
            parameter.requires_grad_(True)


def _nested(values: Tensor) -> Any:
    def frozen(value: Any) -> Any:
        return tuple(frozen(item) for item in value) if isinstance(value, list) else value

    return frozen(values.tolist())
