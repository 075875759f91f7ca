"""Any causal-LM family either runs exactly or is refused by name; nothing in between."""

from __future__ import annotations

import all_families
import pytest
import torch
from patching import assert_same, snapshot
from tiny_models import logits, tiny_model
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    BertConfig,
    T5Config,
    T5ForConditionalGeneration,
)

import hf_posenc
from hf_posenc import PosencError

# What stands for what: nested tables, other layouts, gates, MoE, caps and multipliers, other names.
RUN = (
    *("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "smollm3"),
    *("gemma", "gemma2", "gemma3_text", "granite", "phi", "phi3", "olmo2", "olmo3", "stablelm"),
    *("cohere", "cohere2", "glm", "glm4_moe", "gpt_oss", "ernie4_5", "starcoder2", "nemotron"),
    *("mixtral", "ministral3", "exaone4", "mellum", "seed_oss", "minimax_m2"),
)
REFUSED = {
    "gpt2": "GPT2LMHeadModel: no decoder with a rotary embedding",
    "bert": "BertLMHeadModel: no decoder with a rotary embedding",
    "mamba": "MambaForCausalLM: no decoder with a rotary embedding",
    "gpt_neox": "GPTNeoXModel: layer 0 has no self_attn",
    "llama4_text": "llama4_text cannot be converted",
    "qwen3_next": "linear-attention",
}


SHORT_FACTORS = {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}


@pytest.mark.parametrize("model_type", RUN)
def test_runs(model_type: str):
    kind, detail = all_families.verdict(model_type)
    assert kind == "runs", detail


@pytest.mark.parametrize("model_type", REFUSED)
def test_refused_by_name_with_the_reason(model_type: str):
    kind, detail = all_families.verdict(model_type)
    assert kind == "refused"
    assert REFUSED[model_type] in detail
    assert "\n" not in detail


@pytest.mark.slow
def test_every_family_runs_or_is_refused_as_the_page_says():
    found = {model_type: all_families.verdict(model_type) for model_type in all_families.ALL}
    assert sum(kind == "runs" for kind, _ in found.values()) >= 70
    assert all_families.PAGE.read_text() == all_families.page(found)


def test_a_layer_that_does_not_rotate_is_named():
    model = all_families.tiny("exaone4")
    before = all_families.outputs(model)
    with pytest.raises(PosencError, match="exaone4: layer 3 does not apply a rotary table"):
        hf_posenc.patch_model(model, "nope_interleaved", every=4)
    assert torch.equal(all_families.outputs(model), before)
    hf_posenc.patch_model(model, "nope", layers=[0, 1])
    assert not torch.equal(all_families.outputs(model), before)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (lambda: nn.Linear(2, 2), "Linear is not a transformers model"),
        (lambda: T5ForConditionalGeneration(small(T5Config)), "encoder-decoder"),
        (lambda: AutoModel.from_config(small(BertConfig)), "load it as BertLMHeadModel"),
        (lambda: tiny_model("llama").model, "load it as LlamaForCausalLM"),
        (
            lambda: AutoModelForSequenceClassification.from_config(tiny_model("qwen3").config),
            "load it as Qwen3ForCausalLM",
        ),
    ],
    ids=["module", "encoder-decoder", "encoder", "headless", "classifier"],
)
def test_models_that_are_no_causal_lm_are_refused(model, words: str):
    made = model()
    weights = {name: value.clone() for name, value in made.state_dict().items()}
    kind = type(made)
    with pytest.raises(PosencError, match=words):
        hf_posenc.patch_model(made, "nope")
    assert type(made) is kind
    assert all(torch.equal(value, weights[name]) for name, value in made.state_dict().items())


def small(config_class):
    if config_class is T5Config:
        return T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=32)
    return BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=32)


@pytest.mark.parametrize(
    ("scheme", "options", "words"),
    [
        ("nopee", {}, "unknown scheme 'nopee'; did you mean 'nope'"),
        ("p_rope", {"fraction": 0.5}, "no option 'fraction'"),
        ("p_rope", {"P": 0.5}, "no option 'P'"),
        ("partial", {"fraction": 0.0}, "fraction"),
        ("partial", {"fraction": 1.5}, "fraction"),
        ("partial", {"fraction": float("nan")}, "fraction"),
        ("partial", {"fraction": 1 / 8}, "even"),  # head_dim 24: 3 features
        ("p_rope", {"p": 0.01}, "keeps none"),
        ("nope", {"layers": [4]}, "layer 4 .*out of range.*0 to 3"),
        ("nope_interleaved", {"every": 5}, "selects no layer"),
        ("nope", {"layers": "auto:2"}, "calibration"),
        (
            "rope",
            {"scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
            "12",
        ),
        ({"name": "nope"}, {"layers": [0]}, "put it into|use its name"),
        (7, {}, "is no scheme"),
    ],
)
def test_bad_schemes_leave_the_model_as_it_is(scheme, options, words):
    model = tiny_model("qwen3")
    before = snapshot(model)
    with pytest.raises(PosencError, match=words) as caught:
        hf_posenc.patch_model(model, scheme, **options)
    assert "\n" not in str(caught.value)
    assert_same(snapshot(model), before)


def test_a_plan_of_another_model_is_refused():
    plan = hf_posenc.make_scheme("nope").build(
        hf_posenc.ModelSpec.from_model(tiny_model("qwen3", num_hidden_layers=3))
    )
    model = tiny_model("qwen3")
    before = snapshot(model)
    with pytest.raises(PosencError, match=r"plan nope was built for .*build the scheme anew"):
        hf_posenc.patch_model(model, plan)
    with pytest.raises(PosencError, match="no effect on a finished plan"):
        hf_posenc.patch_model(model, plan, layers=[0])
    assert_same(snapshot(model), before)
    own = hf_posenc.make_scheme("nope").build(hf_posenc.ModelSpec.from_model(model))
    hf_posenc.patch_model(model, own)
    assert not torch.equal(logits(model), before["logits"])


def test_a_family_that_stores_q_and_k_fused_keeps_its_own_layout():
    model = all_families.tiny("sarvam_moe")
    before = all_families.outputs(model)
    for preserve in (True, False):
        with pytest.raises(PosencError, match="sarvam_moe stores q and k under other names"):
            hf_posenc.patch_model(model, "interleaved", preserve=preserve)
    assert torch.equal(all_families.outputs(model), before)
