"""The model card: what it states is true of the folder, and its front matter is valid YAML."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from plan_math import spec_of
from tiny_models import tiny_model

from hf_posenc.checkpoint.card import Origin, describe_base, write_card
from hf_posenc.checkpoint.stream import convert_checkpoint
from hf_posenc.errors import PosencError
from hf_posenc.plan import PositionPlan
from hf_posenc.schemes import make_scheme

HEALING = {
    "variant": "healed",
    "objective": {"kl": 1.0, "hidden": 0.5},
    "tokens": 1_234_567,
    "steps": 60,
    "seed": 3,
    "trainable_parameters": 4000,
}
SCORES = [
    {
        "variant": "stock",
        "scores": [
            {
                **{"task": "ppl_bins", "metric": "nll", "length": 2048, "bin": [256, 512]},
                **{"value": 3.33512, "stderr": 0.0123, "n": 6, "higher_is_better": False},
            }
        ],
    },
    {
        "variant": "healed",
        "scores": [
            {
                **{"task": "ppl_bins", "metric": "nll", "length": 2048, "bin": [256, 512]},
                **{"value": 3.4, "stderr": None, "n": None, "higher_is_better": False},
            },
            {
                **{"task": "niah_single", "metric": "em", "length": 1024, "bin": None},
                **{"value": 0.5, "stderr": None, "n": 8, "higher_is_better": True},
            },
        ],
    },
]


def _plan(name: str = "nope_interleaved", **options: Any) -> PositionPlan:
    return make_scheme(name, **options).build(spec_of(16, layers=8))


def _split(card: Path) -> tuple[dict[str, Any], str]:
    _, front, body = card.read_text(encoding="utf-8").split("---\n", 2)
    return yaml.safe_load(front), body


def _rows(body: str, heading: str) -> list[list[str]]:
    section = body.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_plan_base_healing_and_scores(tmp_path: Path) -> None:
    plan = _plan(every=4)
    base = Origin("owner/model", "owner/model", "abc123", "f" * 64, {"license": "apache-2.0"})
    front, body = _split(
        write_card(tmp_path, plan, base=base, name="My model", healing=HEALING, scores=SCORES)
    )
    assert front == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "base_model": "owner/model",
        "base_model_relation": "finetune",
        "license": "apache-2.0",
        "tags": ["hf-posenc", "positional-encoding", "nope_interleaved"],
    }
    assert body.startswith("\n# My model\n") or body.startswith("# My model\n")
    for text in (plan.digest, plan.base, plan.label, "abc123", "f" * 64):
        assert f"`{text}`" in body
    assert "Healed for 1,234,567 tokens" in body
    assert "- objective: kl x 1, hidden x 0.5" in body
    kinds = _rows(body, "Positional encoding")[2:]
    assert [row[:2] for row in kinds] == [["0-2, 4-6", "8 of 8"], ["3, 7", "0 of 8"]]
    header, _, *rows = _rows(body, "Scores")
    assert header == ["task", "metric", "length", "stock", "healed"]
    assert rows == [
        ["ppl_bins", "nll (lower is better)", "2048 [256, 512)"] + ["3.335 ± 0.012 (n=6)", "3.4"],
        ["niah_single", "em (higher is better)", "1024", "", "0.5 (n=8)"],
    ]


def test_what_is_not_known_is_not_claimed(tmp_path: Path) -> None:
    front, body = _split(write_card(tmp_path, _plan(), base="some-model"))
    assert "base_model" not in front
    assert "license" not in front
    assert f"# {tmp_path.name}" in body
    assert "Not healed" in body
    assert "None known." in body
    assert "states none here" in body
    assert "revision" not in body


@pytest.mark.parametrize("base", ["a`b|c\nd", "---\nx: y\n---", "<script>", "é\U0001f600"])
def test_a_strange_name_does_not_break_the_card(base: str, tmp_path: Path) -> None:
    front, body = _split(write_card(tmp_path, _plan(), base=base))
    assert front["library_name"] == "transformers"
    assert "\n## Licence" in body
    assert body.count("\n# ") + body.startswith("# ") == 1


def test_a_conversion_carries_licence_and_origin(tmp_path: Path) -> None:
    source = tmp_path / "private" / "my-base"
    tiny_model("llama", num_hidden_layers=2).save_pretrained(source)
    (source / "LICENSE").write_text("Terms.")
    (source / "README.md").write_text(
        "---\nlicense: other\nlicense_name: my-terms\nlicense_link: LICENSE\n"
        "tags:\n- secret\nbase_model: grand/parent\n---\nHello.\n"
    )
    out = convert_checkpoint(source, tmp_path / "out", "nope", progress=False)
    front, body = _split(out / "README.md")
    assert front["license"] == "other"
    assert front["license_name"] == "my-terms"
    assert front["license_link"] == "LICENSE"
    assert "base_model" not in front  # the base's own base is not ours
    assert "secret" not in body
    assert "- source: `my-base`" in body
    assert str(tmp_path) not in (out / "README.md").read_text()
    assert "# out\n" in body
    assert "`other`, `my-terms`. See `LICENSE`." in body
    digest = json.loads((out / "config.json").read_text())["posenc"]["plan"]
    assert PositionPlan.from_json(digest).digest in body

    named = convert_checkpoint(
        source, tmp_path / "named", "nope", progress=False, base_model="owner/my-base"
    )
    assert _split(named / "README.md")[0]["base_model"] == "owner/my-base"
    with pytest.raises(PosencError, match="not a hub id"):
        convert_checkpoint(
            source, tmp_path / "bad", "nope", progress=False, base_model="../my base"
        )


@pytest.mark.parametrize("text", ["no front matter", "---\n: [\n---\n", "---\n- a\n---\n", ""])
def test_a_base_card_that_says_nothing(text: str, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(text)
    assert describe_base(str(tmp_path), tmp_path).licence == {}


def test_a_base_unpacked_from_a_file(tmp_path: Path) -> None:
    record = {"source": "pypi:some==1.0", "sha256": "e" * 64, "licence": "apache-2.0"}
    (tmp_path / "gguf_source.json").write_text(json.dumps(record))
    base = describe_base("pypi:some==1.0", tmp_path)
    assert base == Origin("pypi:some==1.0", None, None, "e" * 64, {"license": "apache-2.0"})
