"""Recipes: how they are read and refused, and every shipped one run two steps on a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from heal_case import converted, tiny_recipe, word_tokenizer, write_texts
from tiny_models import tokens

from hf_posenc.checkpoint.io import load_model
from hf_posenc.errors import PosencError
from hf_posenc.heal import heal, list_recipes, load_recipe
from hf_posenc.resources import recipes_dir
from hf_posenc.runtime.patch import get_plan
from hf_posenc.sources import is_hub_id

MODELS = {
    "llama-3.2-1b": ("meta-llama/Llama-3.2-1B", "llama"),
    "llama-3.1-8b": ("meta-llama/Llama-3.1-8B", "llama"),
    "qwen2.5-0.5b": ("Qwen/Qwen2.5-0.5B", "qwen2"),
    "qwen3-0.6b": ("Qwen/Qwen3-0.6B", "qwen3"),
    "qwen3-8b": ("Qwen/Qwen3-8B", "qwen3"),
}
SCHEMES = ("p_rope", "partial", "nope_interleaved", "nope", "interleaved")
HYBRIDS = ("rnope_swa", "drope")
ON_SMOLLM2 = ("quickstart", "smollm2_rnope_swa", "smollm2_nope7", "smollm2_p_rope")


def test_the_shipped_recipes_are_the_promised_ones() -> None:
    promised = {f"{model}_{scheme}" for model in MODELS for scheme in SCHEMES}
    promised |= {f"{m}_{s}" for m in ("llama-3.2-1b", "qwen3-0.6b") for s in HYBRIDS}
    assert set(list_recipes()) == {*ON_SMOLLM2} | promised
    for name in promised:
        model, _, scheme = name.partition("_")
        recipe = load_recipe(name)
        assert recipe.model == MODELS[model][0] and is_hub_id(recipe.model)
        assert recipe.scheme["name"] == scheme
        assert (recipe.heal.tokens == 0) == (scheme == "interleaved")


@pytest.mark.parametrize("name", list_recipes())
def test_a_recipe_opens_with_its_command_and_holds_only_differences(name: str) -> None:
    path = recipes_dir() / f"{name}.yaml"
    assert path.read_text().splitlines()[0] == f"# hf-posenc run {name}"
    defaults = yaml.safe_load((recipes_dir() / "defaults.yaml").read_text())

    def differences(given: dict[str, object], below: dict[str, object], at: str = "") -> None:
        for key, value in given.items():
            usual = below.get(key)
            if isinstance(value, dict) and isinstance(usual, dict):
                differences(value, usual, f"{at}{key}.")
            else:
                assert value != usual, f"{at}{key} is the default"

    differences(yaml.safe_load(path.read_text()), defaults)


@pytest.mark.parametrize("name", list_recipes())
def test_two_steps_of_every_recipe(name: str, tmp_path: Path) -> None:
    texts = write_texts(tmp_path / "texts")
    shrunk = [
        *(f'data.sources=["{texts}"]', "data.row_tokens=32", "heal.tokens=64", "heal.rows=1"),
        *("heal.gradient_accumulation=1", "heal.heldout_rows=1", "dtype=float32"),
    ]
    recipe = load_recipe(name, shrunk)
    assert recipe.steps == 2
    family = "llama" if name in ON_SMOLLM2 else MODELS[name.split("_")[0]][1]
    model = converted(recipe, family, num_hidden_layers=8 if "auto" in str(recipe.scheme) else 4)
    plan = get_plan(model)
    record = heal(recipe, out=tmp_path / "out", model=model, tokenizer=word_tokenizer())
    assert plan is not None
    assert (record.steps, record.tokens, record.plan_digest) == (2, 64, plan.digest)
    assert load_recipe(tmp_path / "out" / "recipe.yaml") == recipe
    loaded = load_model(tmp_path / "out" / "adapter")
    assert get_plan(loaded) == plan
    ids = tokens(1, 20)
    with torch.no_grad():
        model.eval()
        assert torch.equal(loaded(input_ids=ids).logits, model(input_ids=ids).logits)


def test_overrides_are_yaml_and_come_last(tmp_path: Path) -> None:
    recipe = load_recipe(
        "quickstart",
        [
            *(
                "heal.tokens=4096",
                "heal.lr=2e-4",
                "data.sources=[stdlib]",
                "lora.targets=all-linear",
            ),
            *("scheme.every=3", "heal.objective.ce=0.5", "eval.limit=3", "heal.tokens=8192"),
        ],
    )
    assert (recipe.heal.tokens, recipe.heal.lr, recipe.steps) == (8192, 2e-4, 8)
    assert [(s.source, s.weight) for s in recipe.data.sources] == [("stdlib", 1.0)]
    assert recipe.lora.targets == "all-linear"
    assert recipe.scheme == {"name": "nope_interleaved", "every": 3}
    assert recipe.heal.objective == {"kl": 1.0, "ce": 0.5}
    whole = load_recipe("quickstart", ["scheme=nope", "heal.objective=ce", "scheme.layers=0-3"])
    assert whole.scheme == {"name": "nope", "layers": "0-3"}
    assert whole.heal.objective == {"ce": 1.0}


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [({"amx_bf16": True}, "bfloat16"), ({"avx512_bf16": True}, "bfloat16"),
     ({"avx512_f": True, "amx_bf16": False}, "float32")],
)  # fmt: skip
def test_auto_dtype_is_what_the_processor_multiplies(
    capabilities: dict[str, bool], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    assert load_recipe("quickstart").dtype == expected
    assert load_recipe("quickstart", ["dtype=bfloat16"]).dtype == "bfloat16"


def test_a_recipe_replaces_scheme_and_objective_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("model: m\nscheme: {name: nope}\nheal: {objective: {ce: 2}}\n")
    recipe = load_recipe(path)
    assert recipe.name == "r"
    assert recipe.heal.objective == {"ce": 2.0}
    assert recipe.heal.lr == load_recipe("qwen3-0.6b_nope").heal.lr


def test_what_is_healed_decides_the_digest(tmp_path: Path) -> None:
    base = tiny_recipe(tmp_path)
    assert tiny_recipe(tmp_path, "eval.limit=7", "name=other").digest == base.digest
    assert tiny_recipe(tmp_path, "heal.lr=0.5").digest != base.digest
    assert tiny_recipe(tmp_path, "scheme.every=2").digest != base.digest


def test_the_control_is_wanted_when_ce_takes_part(tmp_path: Path) -> None:
    assert not tiny_recipe(tmp_path).wants_control
    assert tiny_recipe(tmp_path, "heal.objective={kl: 1, ce: 1}").wants_control
    assert not tiny_recipe(tmp_path, "heal.objective={kl: 1, ce: 0}").wants_control
    assert not tiny_recipe(tmp_path, "heal.objective=ce", "eval.variants=[healed]").wants_control
    assert not tiny_recipe(tmp_path, "heal.objective=ce", "heal.tokens=0").wants_control


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("haal.tokens=3", r"haal: unknown key; did you mean 'heal'\?"),
        ("heal.tokns=3", r"heal\.tokns: unknown key; did you mean 'tokens'\?"),
        (
            "data.sources=[{source: a, wieght: 2}]",
            r"data\.sources\.0\.wieght: unknown key; did you mean 'weight'\?",
        ),
        ("scheme=p_rop", r"scheme: unknown scheme 'p_rop'; did you mean 'p_rope'\?"),
        ("scheme.evry=3", r"scheme: .*no option 'evry'; did you mean 'every'\?"),
        ("heal.objective={kll: 1}", r"heal\.objective\.kll: .*'ce', 'kl' or 'hidden'"),
        ("heal.objective={kl: 0}", r"heal\.objective: needs at least one weight above 0"),
        ("heal.objective={kl: -1}", r"heal\.objective: needs kl, ce or hidden"),
        ("heal.lr=fast", r"heal\.lr: .*valid number.*\(got 'fast'\)"),
        ("heal.lr=0", r"heal\.lr: .*greater than 0"),
        ("heal.warmup=1.5", r"heal\.warmup: is a share of the steps below 1, or a whole number"),
        ("heal.tokens=1.5", r"heal\.tokens: .*valid integer"),
        ("heal.schedule=cos", r"heal\.schedule: .*'cosine'"),
        ("heal.hidden_layers=[0, x]", r"heal\.hidden_layers\.1: .*valid integer"),
        ("heal.tokens.x=1", r"heal\.tokens has no keys below it"),
        ("lora.targets=[lm_head]", r"lora\.targets: lm_head shares its weights"),
        ("lora.targets=[]", r"lora\.targets: needs at least one"),
        ("data.sources=[]", r"data\.sources: .*at least 1"),
        ("data.split=test", r"data\.split: .*'train' or 'all'"),
        ("eval.variants=[stok]", r"eval\.variants\.0: .*'stock'"),
        ("eval.lengths=[0]", r"eval\.lengths: .*1 or more"),
        ("dtype=float16", r"dtype: is auto, bfloat16 or float32"),
        ("seed=-1", r"seed: "),
        ("heal={", r"not valid YAML"),
        ("tokens", r"write key\.path=value"),
        ("heal..x=1", r"write key\.path=value"),
    ],
)
def test_bad_overrides_are_named(override: str, message: str) -> None:
    with pytest.raises(PosencError, match=message) as caught:
        load_recipe("quickstart", [override])
    assert "\n" not in str(caught.value)
    assert override in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("scheme: {name: nope}\n", r"model: is missing"),
        ("model: m\n", r"scheme: is missing"),
        ("model: m\nscheme: {p: 1}\n", r"scheme: needs a name"),
        ("model: m\nscheme: {name: nope}\nheal: {tokns: 3}\n", r"heal\.tokns: .*'tokens'"),
        ("model: m\nmodel: n\n", r"the key 'model' is given twice"),
        ("model: [\n", r"not valid YAML"),
        ("- a\n- b\n", r"a recipe is a mapping"),
        ("model: !!python/object/apply:os.getcwd []\n", r"not valid YAML"),
        ("model: m\nscheme: {name: nope}\nheal: 3\n", r"heal: "),
    ],
)
def test_bad_files_are_named_with_the_key(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(PosencError, match=message) as caught:
        load_recipe(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_recipes_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(PosencError, match=r"quickstrat: no such recipe.*'quickstart'"):
        load_recipe("quickstrat")
    with pytest.raises(PosencError, match=r"quikstart\.yaml: no such recipe.*'quickstart'"):
        load_recipe(tmp_path / "quikstart.yaml")
    with pytest.raises(PosencError, match="is a folder"):
        load_recipe(tmp_path)
    with pytest.raises(PosencError, match="no such recipe"):
        load_recipe("defaults")
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PosencError, match="not a text file"):
        load_recipe(tmp_path / "b.yaml")


def test_a_resolved_recipe_reads_back_the_same(tmp_path: Path) -> None:
    recipe = load_recipe("quickstart", ["heal.objective={ce: 1, kl: 0.5}", "heal.lr=3.3e-5"])
    (tmp_path / "again.yaml").write_text(recipe.to_yaml())
    assert load_recipe(tmp_path / "again.yaml") == recipe
