"""Converted checkpoints: saved, loaded, saved again, sharded, edited, read without the plugin."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from matrix import FAMILIES, REPRESENTATIVE, SCHEMES, SchemeRow
from patching import patch
from processes import run_python
from safetensors.torch import load_file
from tiny_models import THETA, layer_tables, logits, tiny_model, tokens
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

import hf_posenc
from hf_posenc import ModelSpec, PosencError

STUB = "posenc_stub.py"


def load(folder: Path, **options: Any) -> Any:
    """The model of a folder, with the attention kernel that the tiny models were saved under."""
    options = {"attn_implementation": "eager", **options}
    return AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def edit(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    config = config_of(folder)
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_a_loaded_model_is_converted_again_and_again(tmp_path: Path):
    tiny_model("llama").save_pretrained(tmp_path / "stock")
    model = load(tmp_path / "stock")
    plain, config = logits(model), model.config.to_dict()
    for layers in ([0], [1, 2]):
        patch(model, SchemeRow("", "nope", {"layers": layers}))
        assert model.config.model_type == "posenc_llama"
        model.save_pretrained(tmp_path / "new")
        assert torch.equal(logits(load(tmp_path / "new")), logits(model))
        hf_posenc.unpatch_model(model)
        assert torch.equal(logits(model), plain)
        assert {**model.config.to_dict(), "_name_or_path": config["_name_or_path"]} == config
        assert type(model.config).__name__ == "LlamaConfig"


ROUND_TRIPS = [
    pytest.param(
        family,
        row,
        id=f"{family}-{row.id}",
        # Every scheme on the family with norms, every kind of scheme on the others.
        marks=() if family == "qwen3" or row.id in REPRESENTATIVE else pytest.mark.slow,
    )
    for family in FAMILIES
    for row in SCHEMES
]


@pytest.mark.parametrize(("family", "row"), ROUND_TRIPS)
def test_round_trip(family: str, row: SchemeRow, tmp_path: Path):
    base = tiny_model(family)
    plain, config = logits(base), base.config.to_dict()
    weights = {name: value.clone() for name, value in base.state_dict().items()}
    patched = patch(base, row)
    patched.save_pretrained(tmp_path)
    loaded = load(tmp_path)
    assert type(loaded) is type(patched)
    assert hf_posenc.get_plan(loaded) == hf_posenc.get_plan(patched)
    assert torch.equal(logits(loaded), logits(patched))
    for name in ("inv_freq", "original_inv_freq"):
        fresh = getattr(patched.model.rotary_emb, name)
        assert torch.equal(getattr(loaded.model.rotary_emb, name), fresh)
    with hf_posenc.unpatched(loaded):
        assert torch.equal(logits(loaded), plain)
    assert torch.equal(logits(loaded), logits(patched))

    for model in (patched, loaded):
        hf_posenc.unpatch_model(model)
        assert torch.equal(logits(model), plain)
        assert model.state_dict().keys() == weights.keys()
        assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
        assert not any(module._forward_pre_hooks for module in model.modules())
        written_on_saving = {"architectures", "dtype", "_name_or_path"}
        after = model.config.to_dict()
        assert {k for k, v in after.items() if v != config.get(k, v)} <= written_on_saving
        assert after.keys() - config.keys() <= written_on_saving
        assert after["architectures"] == [type(model).__name__]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Saved models by name, each beside its expected logits."""
    root = tmp_path_factory.mktemp("checkpoints")
    result = {}
    for family in (*FAMILIES, "gemma2"):  # gemma2 is registered when it is first needed
        for row_id in REPRESENTATIVE:
            folder = root / f"{family}-{row_id}"
            model = patch(tiny_model(family), row_id)
            model.save_pretrained(folder)
            torch.save(logits(model), folder / "expected.pt")
            result[folder.name] = folder
    return result


def test_a_fresh_process_with_the_plugin_loads_the_same_models(checkpoints: dict[str, Path]):
    code = """
import sys, torch
from pathlib import Path
torch.set_num_threads(1)
import hf_posenc
from hf_posenc.checkpoint.io import load_model
from transformers import AutoModelForCausalLM
from tiny_models import logits
for name in sys.argv[1:]:
    load = load_model if "gemma2" in name else AutoModelForCausalLM.from_pretrained
    model = load(name, attn_implementation="eager").eval()
    assert hf_posenc.get_plan(model) is not None
    assert torch.equal(logits(model), torch.load(Path(name) / "expected.pt")), name
print(len(sys.argv) - 1)
"""
    folders = [str(folder) for folder in checkpoints.values()]
    assert int(run_python(code, *folders)) == len(checkpoints)


def test_without_the_plugin_loading_is_a_loud_error(checkpoints: dict[str, Path]):
    code = """
import sys, torch
import transformers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
refused = 0
for name in sys.argv[1:]:
    family = name.rpartition("/")[2].partition("-")[0]
    stock = type(AutoModelForCausalLM.from_config(AutoConfig.for_model(
        family, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1,
        intermediate_size=8, vocab_size=8, pad_token_id=0)))
    loaders = [AutoModelForCausalLM, AutoModel, stock, getattr(
        transformers, stock.__name__.replace("ForCausalLM", "Model"))]
    for loader in loaders:
        options = {"trust_remote_code": False} if "Auto" in loader.__name__ else {}
        try:
            loader.from_pretrained(name, **options)
        except (KeyError, ValueError) as error:
            assert "posenc" in str(error) or "custom code" in str(error), error
            refused += 1
        else:
            raise AssertionError(f"{loader.__name__} loaded {name} in silence")
assert not any(module.startswith("hf_posenc") for module in sys.modules)
print(refused)
"""
    folders = [str(checkpoints[f"{family}-nope_interleaved"]) for family in FAMILIES]
    assert int(run_python(code, *folders)) == 4 * len(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_with_the_plugin_a_stock_class_still_refuses(family: str, checkpoints: dict[str, Path]):
    folder = checkpoints[f"{family}-nope_interleaved"]
    stock = type(tiny_model(family))
    with pytest.raises(PosencError, match=r"converted by hf_posenc.*AutoModelForCausalLM"):
        stock.from_pretrained(folder)
    with pytest.raises(ValueError, match="Unrecognized configuration class"):
        AutoModel.from_pretrained(folder)


def test_remote_code_stub_loads_the_same_and_saves_the_same_files(
    checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    code = """
import sys, torch
from pathlib import Path
torch.set_num_threads(1)
from transformers import AutoModelForCausalLM
from tiny_models import logits
out = Path(sys.argv[1])
for name in sys.argv[2:]:
    model = AutoModelForCausalLM.from_pretrained(
        name, trust_remote_code=True, attn_implementation="eager").eval()
    assert torch.equal(logits(model), torch.load(Path(name) / "expected.pt")), name
    model.save_pretrained(out / Path(name).name)
"""
    names = [f"{family}-interleaved-repaired" for family in FAMILIES] + ["qwen3-nope_interleaved"]
    run_python(code, str(tmp_path), *(str(checkpoints[name]) for name in names))
    for name in names:
        before, after = content(checkpoints[name]), content(tmp_path / name)
        del before["expected.pt"]
        assert after == before
        assert config_of(tmp_path / name)["auto_map"]["AutoConfig"].startswith("posenc_stub.")


@pytest.mark.parametrize("row_id", REPRESENTATIVE)
def test_saving_again_gives_the_same_files(
    row_id: str, checkpoints: dict[str, Path], tmp_path: Path
):
    folder = checkpoints[f"qwen3-{row_id}"]
    load(folder).save_pretrained(tmp_path)
    before = content(folder)
    del before["expected.pt"]
    assert content(tmp_path) == before
    assert STUB in before


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_shards(family: str, tmp_path: Path):
    base = tiny_model(family)
    plain = logits(base)
    patch(base, "interleaved").save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert torch.equal(logits(load(tmp_path)), plain)


@pytest.mark.parametrize("row_id", ["interleaved", "interleaved-repaired", "partial-raw"])
def test_a_model_that_was_loaded_is_converted_and_saved_alike(row_id: str, tmp_path: Path):
    """from_pretrained leaves traces on a model (conversions, name) that one from a config lacks."""
    built = tiny_model("qwen2")
    plain = logits(built)
    built.save_pretrained(tmp_path / "stock")
    patch(built, row_id).save_pretrained(tmp_path / "built")
    loaded = patch(load(tmp_path / "stock"), row_id)
    loaded.save_pretrained(tmp_path / "loaded")
    stored = load_file(tmp_path / "loaded" / "model.safetensors")
    wanted = load_file(tmp_path / "built" / "model.safetensors")
    assert all(torch.equal(stored[name], wanted[name]) for name in wanted)

    again = hf_posenc.unpatch_model(load(tmp_path / "loaded"))
    again.save_pretrained(tmp_path / "again")
    assert content(tmp_path / "again") == content(tmp_path / "stock")
    assert torch.equal(logits(load(tmp_path / "again")), plain)


def test_tied_embeddings_stay_tied(tmp_path: Path):
    base = tiny_model("llama", tie_word_embeddings=True)
    patched = patch(base, "interleaved-repaired")
    patched.save_pretrained(tmp_path)
    loaded = load(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert torch.equal(logits(loaded), logits(patched))


@pytest.mark.parametrize("row_id", REPRESENTATIVE)
def test_loading_in_bfloat16_keeps_frequencies_exact(row_id: str, checkpoints: dict[str, Path]):
    folder = checkpoints[f"qwen3-{row_id}"]
    exact, half = load(folder), load(folder, dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16
    assert torch.equal(half.model.rotary_emb.inv_freq, exact.model.rotary_emb.inv_freq)
    for (cos, sin), (cos32, sin32) in zip(layer_tables(half), layer_tables(exact), strict=True):
        assert torch.equal(cos, cos32.bfloat16()) and torch.equal(sin, sin32.bfloat16())


@pytest.mark.parametrize("family", FAMILIES)
def test_theta_is_written_where_every_reader_looks(family: str, checkpoints: dict[str, Path]):
    config = config_of(checkpoints[f"{family}-partial-raw"])
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == THETA
    assert config["rope_parameters"]["rope_type"] == "posenc"
    assert config["model_type"] == f"posenc_{family}"


def test_a_legacy_config_keeps_its_theta_and_scaling(tmp_path: Path):
    base = tiny_model("llama")
    base.save_pretrained(tmp_path)

    def legacy(config: dict[str, Any]) -> None:
        del config["rope_parameters"]
        config |= {"rope_theta": 777, "rope_scaling": {"type": "linear", "factor": 2.0}}

    edit(tmp_path, legacy)
    loaded = load(tmp_path)
    spec = ModelSpec.from_model(loaded)
    assert (spec.theta, spec.rope["rope_type"], spec.rope["factor"]) == (777, "linear", 2.0)
    assert spec.layers[0].inv_freq[0] == 0.5
    plain = logits(loaded)
    patch(loaded, "rope")
    assert torch.equal(logits(loaded), plain)
    loaded.save_pretrained(tmp_path / "again")
    again = load(tmp_path / "again")
    assert torch.equal(logits(again), plain)
    assert config_of(tmp_path / "again")["rope_theta"] == 777


def set_to(*path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(config: dict[str, Any]) -> None:
        for key in path[:-1]:
            config = config[key]
        if value is None:
            del config[path[-1]]
        else:
            config[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (set_to("posenc", value=None), "without its plan"),
        (set_to("posenc", "plan", value=None), "without its plan"),
        (set_to("posenc", "plan", "layers", value=None), "not a position plan.*layers"),
        (set_to("posenc", "plan", "format", value=99), "format 99.*upgrade"),
        (set_to("posenc", "base_rope_parameters", value=None), "without its plan"),
        (set_to("num_hidden_layers", value=3), "edited after the conversion"),
        (set_to("num_attention_heads", value=2), "edited after the conversion"),
        (set_to("posenc", "base_rope_parameters", "rope_theta", value=1e4), "edited after"),
        (set_to("rope_parameters", "rope_theta", value=1e4), "rope_theta.*edited after"),
        (set_to("rope_theta", value=1e4), "rope_theta.*edited after"),
        (set_to("rope_parameters", "rope_type", value="default"), "rope_parameters.*edited after"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_tampered_config_is_refused(
    change: Callable[[dict[str, Any]], None], words: str, tmp_path: Path
):
    patch(tiny_model("llama"), "nope_interleaved").save_pretrained(tmp_path)
    edit(tmp_path, change)
    with pytest.raises(PosencError, match=words):
        load(tmp_path)


def test_generation_settings_and_config_reach_the_saved_folder(tmp_path: Path):
    model = tiny_model("llama")
    model.generation_config.temperature = 0.7
    model.generation_config.do_sample = True
    patch(model, "p_rope").save_pretrained(tmp_path)
    loaded = load(tmp_path)
    assert loaded.generation_config.temperature == 0.7
    assert AutoConfig.from_pretrained(tmp_path).vocab_size == model.config.vocab_size
    ids = tokens(1, 5)
    wanted = model.generate(ids, do_sample=False, max_new_tokens=4, temperature=None)
    assert torch.equal(
        loaded.generate(ids, do_sample=False, max_new_tokens=4, temperature=None), wanted
    )
