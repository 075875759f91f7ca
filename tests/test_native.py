"""Native exports: the stock model that comes out computes the plan, or nothing is written."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from export_case import (
    FAMILIES,
    REORDERED,
    base_model,
    export_and_measure,
    far_logits,
    load_stock,
    patched,
)
from matrix import SCHEMES, SchemeRow
from processes import run_python
from tiny_models import difference

import hf_posenc
from hf_posenc.checkpoint import native
from hf_posenc.checkpoint.native import TARGETS, Unexportable, choose, export_native
from hf_posenc.checkpoint.native.source import open_source
from hf_posenc.errors import PosencError
from hf_posenc.plan import LayerPlan, PositionPlan

# Layers with tables of more than two kinds, or dropped pairs beside another base.
NO_TARGET = {(f, "dual") for f in ("llama", "mistral", "qwen2")} | {
    (f, row) for f in FAMILIES for row in ("compose", "p_rope-own")
}
REORDERING = ("glm4_moe", "ernie4_5", "glm", "phi3")
PARTIAL_FAMILIES = ("phi3", "glm", "glm4_moe")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("row", SCHEMES, ids=lambda row: row.id)
def test_every_scheme_comes_out_as_stock_code_or_not_at_all(
    family: str, row: SchemeRow, tmp_path: Path
) -> None:
    model = patched(family, row)
    if (family, row.id) in NO_TARGET:
        with pytest.raises(Unexportable, match="no stock architecture computes it") as caught:
            export_native(model, tmp_path / "out")
        assert set(caught.value.reasons) == {n for n, t in TARGETS.items() if t.automatic}
        assert list(tmp_path.iterdir()) == []
        return
    report, measured, stock = export_and_measure(model, tmp_path / "out")
    allowed = REORDERED if report.target in REORDERING else 0.0
    assert measured <= allowed and report.max_logit_difference <= allowed
    assert type(stock).__name__ == report.architecture
    if not row.null:
        assert difference(far_logits(base_model(family)), far_logits(stock)) > 1e-2
    assert not {"posenc", "auto_map"} & vars(stock.config).keys()
    _assert_read_alike(json.loads((tmp_path / "out" / "config.json").read_text()))


def _assert_read_alike(config: dict[str, Any]) -> None:
    """No config that one engine honours and another ignores."""
    rope = config["rope_parameters"]
    nested = [value for value in rope.values() if isinstance(value, dict)]
    for parameters in nested or [rope]:
        if "partial_rotary_factor" in parameters:
            assert config["model_type"] in PARTIAL_FAMILIES
        assert parameters["rope_type"] != "proportional"  # SGLang takes it for full RoPE
        if parameters["rope_type"] == "yarn":
            assert "attention_factor" not in parameters
        if parameters.get("attention_factor", 1.0) != 1.0:
            assert parameters["short_mscale"] == parameters["attention_factor"]
            assert parameters["long_mscale"] == parameters["attention_factor"]


# The table of native targets: row by row, with the weight changes it names.
_TABLE = [
    *[(f, "p_rope", "proportional", 0.0, ()) for f in FAMILIES],
    *[(f, "nope", "proportional", 0.0, ()) for f in FAMILIES],
    *[(f, "nope", "same_class", 0.0, ()) for f in FAMILIES],
    *[(f, "p_rope-uniform", "same_class", 0.0, ()) for f in FAMILIES],
    *[(f, "nope_interleaved", "smollm3", 0.0, ()) for f in ("llama", "mistral")],
    ("qwen2", "nope_interleaved", "smollm3", 0.0, ("zero o_proj biases added",)),
    ("qwen3", "nope_interleaved", "exaone_moe", 0.0, ()),
    *[(f, "nope_interleaved", "mellum", 0.0, ()) for f in ("qwen3", "qwen3_moe")],
    *[(f, "dual", "mellum", 0.0, ()) for f in ("qwen3", "qwen3_moe")],
    *[
        (f, SchemeRow("dual-bases", "dual", {"every": 2}), "granite_swa", 0.0, ("sinks",))
        for f in ("llama", "mistral")
    ],
    (
        "qwen2",
        SchemeRow("dual-bases", "dual", {"every": 2}),
        "granite_swa",
        0.0,
        ("sinks", "o_proj"),
    ),
    ("llama", "p_rope", "phi3", REORDERED, ("re-ordered", "qkv_proj", "gate_up_proj")),
    *[(f, "p_rope", "glm4_moe", REORDERED, ("re-ordered",)) for f in ("llama", "mistral")],
    ("qwen2", "p_rope", "glm", REORDERED, ("q/k biases re-ordered", "gate_up_proj")),
    ("qwen2", "p_rope", "glm4_moe", REORDERED, ("q/k biases re-ordered",)),
    ("qwen3", "p_rope", "glm4_moe", REORDERED, ("q/k norms re-ordered",)),
    ("llama", "rope", "ernie4_5", REORDERED, ("re-ordered",)),
    ("llama", "interleaved-repaired", "ernie4_5", REORDERED, ()),
    ("llama", "partial-raw", "glm4_moe", REORDERED, ()),
]


@pytest.mark.parametrize(
    ("family", "row", "target", "allowed", "changes"),
    _TABLE,
    ids=lambda value: getattr(value, "id", value) if isinstance(value, str | SchemeRow) else "",
)
def test_table_of_native_targets(
    family: str, row: Any, target: str, allowed: float, changes: tuple[str, ...], tmp_path: Path
) -> None:
    model = patched(family, row)
    report, measured, stock = export_and_measure(model, tmp_path / "out", target)
    assert report.target == target
    assert measured <= allowed
    assert len(report.weight_changes) == len(changes)
    for change, found in zip(changes, report.weight_changes, strict=True):
        assert change in found
    if not changes:
        weights, written = model.state_dict(), stock.state_dict()
        assert weights.keys() == written.keys()
        if row not in ("interleaved-repaired", "partial-raw"):
            assert all(torch.equal(weights[name], written[name]) for name in weights)


_SCALED = {
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"factor": 4.0},
    "linear": {"factor": 4.0},
}


@pytest.mark.parametrize("rope_type", _SCALED)
@pytest.mark.parametrize("row", ["p_rope", "p_rope-low", "nope", "nope_interleaved", "partial"])
def test_bases_with_scaled_rope(rope_type: str, row: str, tmp_path: Path) -> None:
    rope = {"rope_type": rope_type, "original_max_position_embeddings": 64, **_SCALED[rope_type]}
    if rope_type == "linear":
        del rope["original_max_position_embeddings"]
    model = patched("llama", row, rope_parameters=rope)
    if rope_type == "yarn" and row == "nope_interleaved":
        with pytest.raises(Unexportable, match="keep an attention factor"):
            export_native(model, tmp_path / "out")
        return
    report, measured, stock = export_and_measure(model, tmp_path / "out")
    rounded = any("one float32 unit" in note for note in report.notes)
    assert measured <= (1e-4 if rounded else 0.0)
    if rope_type != "linear" and row != "nope_interleaved":
        assert not rounded
    _assert_read_alike(stock.config.to_dict())


def test_a_frequency_without_a_spelling_is_said_and_stays_within_a_unit(tmp_path: Path) -> None:
    model = base_model("llama")
    spec = hf_posenc.ModelSpec.from_model(model)
    # 1.9999998807907104 is no float32 reciprocal of a float32.
    odd = (1.9999998807907104, *spec.layers[0].inv_freq[1:])
    plan = PositionPlan((LayerPlan(odd),) * spec.num_layers, spec.fingerprint)
    hf_posenc.patch_model(model, plan)
    report, measured, _ = export_and_measure(model, tmp_path / "out")
    assert any("1 frequencies are one float32 unit" in note for note in report.notes)
    assert 0.0 < measured < 1e-2


@pytest.mark.parametrize("row", ["nope_interleaved", "p_rope"])
def test_the_plan_decides_not_the_name_of_the_scheme(row: str, tmp_path: Path) -> None:
    named = patched("llama", row)
    plan = hf_posenc.get_plan(named)
    assert plan is not None
    renamed = dataclasses.replace(plan, scheme='{"name": "mine"}')
    other = hf_posenc.patch_model(base_model("llama"), renamed)
    first, second = (
        choose(open_source(model, merge=True).case, "auto")[0] for model in (named, other)
    )
    assert first == second == {"nope_interleaved": "smollm3", "p_rope": "same_class"}[row]


def test_a_field_no_export_knows_makes_a_plan_unexportable() -> None:
    later = dataclasses.make_dataclass(
        "Later", [("gate", "int | None", None)], bases=(LayerPlan,), frozen=True
    )
    plain, gated = later((1.0,)), later((1.0,), gate=16)
    native.check_known(PositionPlan((plain,), "base"))
    with pytest.raises(Unexportable, match="layer 1: no export knows about its 'gate'"):
        native.check_known(PositionPlan((plain, gated), "base"))


@pytest.mark.parametrize(
    ("scheme", "options", "part"),
    [
        ("alibi", {}, "bias"),
        ("rope", {"logit_scale": 1.5}, "logit_scale"),
        ("sinusoidal", {}, "embedding"),
        ("irope", {"chunk": 16}, "logit_scale|chunks of the row"),
    ],
)
def test_biases_scales_and_added_vectors_have_no_target(
    scheme: str, options: dict[str, Any], part: str, tmp_path: Path
) -> None:
    model = hf_posenc.patch_model(base_model("llama"), scheme, **options)
    with pytest.raises(Unexportable, match=part):
        export_native(model, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("family", "target"),
    [
        ("llama", "granite_swa"),
        ("mistral", "granite_swa"),
        ("qwen2", "granite_swa"),
        ("qwen3", "mellum"),
        ("qwen3_moe", "mellum"),
    ],
)
def test_dual_bases_with_windows(family: str, target: str, tmp_path: Path) -> None:
    row = SchemeRow("dual-window", "dual", {"every": 2, "window": 8})
    model = patched(family, row)
    report, measured, stock = export_and_measure(model, tmp_path / "out")
    assert report.target == target and measured <= REORDERED
    plan = PositionPlan.from_config(stock.config)
    assert [layer.window and layer.window.size for layer in plan.layers] == [8, None] * 2
    unwindowed = patched(family, SchemeRow("dual-bases", "dual", {"every": 2}))
    assert difference(far_logits(unwindowed), far_logits(stock)) > 1e-2


def test_wrong_weights_and_wrong_configs_are_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(name: str, **changes: Any) -> None:
        draft = TARGETS[name].draft
        wrong = dataclasses.replace(
            TARGETS[name], draft=lambda case: dataclasses.replace(draft(case), **changes)
        )
        monkeypatch.setitem(native.TARGETS, name, wrong)

    model = patched("llama", "p_rope")
    broken("glm4_moe", orders=(None,) * 4)
    with pytest.raises(Unexportable, match="logits of the exported model differ"):
        export_native(model, tmp_path / "out", "glm4_moe")
    broken("same_class", config=base_model("llama").config)
    with pytest.raises(Unexportable, match="does not stand for the plan's frequencies"):
        export_native(model, tmp_path / "out", "same_class")
    assert list(tmp_path.iterdir()) == []


def test_a_live_model_is_left_as_it_is(tmp_path: Path) -> None:
    model = patched("qwen3", "partial-raw").train()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    config, before = model.config.to_dict(), far_logits(model)
    export_native(model, tmp_path / "out", "glm4_moe")
    assert model.training and model.config.to_dict() == config
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    assert torch.equal(far_logits(model), before)


@pytest.mark.parametrize("row", ["nope_interleaved", "p_rope", "partial-raw"])
def test_bfloat16_weights_are_written_unrounded(row: str, tmp_path: Path) -> None:
    model = patched("llama", row).to(torch.bfloat16)
    report = export_native(model, tmp_path / "out")
    stock = load_stock(tmp_path / "out", like=model)
    assert stock.dtype == torch.bfloat16
    if report.target != "glm4_moe":
        assert torch.equal(far_logits(model), far_logits(stock))
    assert torch.equal(model.lm_head.weight, stock.lm_head.weight)


@pytest.mark.parametrize(
    ("family", "overrides", "row", "target"),
    [
        ("llama", {"tie_word_embeddings": True}, "nope_interleaved", "smollm3"),
        ("llama", {"attention_bias": True, "mlp_bias": True}, "nope_interleaved", "smollm3"),
        ("mistral", {"sliding_window": 8}, "nope_interleaved", "smollm3"),
        ("mistral", {"sliding_window": 8}, "p_rope", "same_class"),
        (
            "qwen3",
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
            "p_rope",
            "mellum",
        ),
    ],
)
def test_what_else_the_base_does_comes_along(
    family: str, overrides: dict[str, Any], row: str, target: str, tmp_path: Path
) -> None:
    model = patched(family, row, **overrides)
    report, measured, _ = export_and_measure(model, tmp_path / "out", target)
    assert report.target == target and measured == 0.0


def test_exaone_moe_without_rotated_layers_is_refused_since_vllm_rotates_them_all(
    tmp_path: Path,
) -> None:
    with pytest.raises(Unexportable, match="vLLM's ExaoneMoe rotates all layers"):
        export_native(patched("qwen3", "nope"), tmp_path / "out", "exaone_moe")


def test_proportional_is_written_on_request_only_and_says_who_misreads_it(tmp_path: Path) -> None:
    model = patched("llama", "p_rope")
    assert choose(open_source(model, merge=True).case, "auto")[0] == "same_class"
    report = export_native(model, tmp_path / "out", "proportional")
    assert any("SGLang" in note for note in report.notes)
    with pytest.raises(Unexportable, match="no proportional formula"):
        export_native(patched("llama", "p_rope-low"), tmp_path / "low", "proportional")


def test_windows_a_target_cannot_keep_are_refused(tmp_path: Path) -> None:
    model = patched("mistral", "p_rope", sliding_window=8)
    for target in ("glm4_moe", "glm", "ernie4_5"):
        with pytest.raises(Unexportable, match="no sliding window"):
            export_native(model, tmp_path / "out", target)


def test_errors_are_one_line_and_leave_nothing(tmp_path: Path) -> None:
    with pytest.raises(PosencError, match="not converted by hf_posenc"):
        export_native(base_model("llama"), tmp_path / "out")
    model = patched("llama", "p_rope")
    with pytest.raises(PosencError, match="did you mean 'smollm3'"):
        export_native(model, tmp_path / "out", "smollm")
    with pytest.raises(Unexportable, match="llama has other modules than Mellum"):
        export_native(model, tmp_path / "out", "mellum")
    with pytest.raises(PosencError, match="no such file or folder"):
        export_native(tmp_path / "missing", tmp_path / "out")
    model.model.layers[0].mlp.up_proj.weight.data = torch.zeros(96, 64, dtype=torch.float8_e5m2)
    with pytest.raises(PosencError, match=r"up_proj\.weight: weights are quantised"):
        export_native(model, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("kept")
    with pytest.raises(PosencError, match="is not empty"):
        export_native(patched("llama", "p_rope"), tmp_path / "full")
    assert (tmp_path / "full" / "mine.txt").read_text() == "kept"


def test_exports_load_where_hf_posenc_is_not_installed(tmp_path: Path) -> None:
    wanted = {}
    for family, row in (
        ("llama", "nope_interleaved"),
        ("qwen3", "nope_interleaved"),
        ("qwen3_moe", "dual"),
        ("mistral", "partial-raw"),
    ):
        model = patched(family, row)
        export_native(model, tmp_path / family)
        wanted[family] = far_logits(model)
    code = """
import sys
sys.modules["hf_posenc"] = None
import torch
from pathlib import Path
from export_free import stock_logits
for folder in sorted(Path(sys.argv[1]).iterdir()):
    torch.save(stock_logits(folder), folder / "logits.pt")
"""
    run_python(code, str(tmp_path))
    for family, logits in wanted.items():
        found = torch.load(tmp_path / family / "logits.pt")
        assert difference(logits, found) <= (REORDERED if family == "mistral" else 0.0)
