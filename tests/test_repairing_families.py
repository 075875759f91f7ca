"""Schemes that re-order q/k features are refused where the family's own layout is another."""

from __future__ import annotations

import pytest
from tiny_models import logits, tiny_config, tiny_model

import hf_posenc
from hf_posenc.errors import PosencError
from hf_posenc.runtime import families


@pytest.mark.parametrize("family", [*families.TESTED_FAMILIES, "gemma", "olmo2", "granite"])
def test_half_split_families(family: str) -> None:
    assert families.pairs_half_split(tiny_config(family))


@pytest.mark.parametrize("family", ["glm", "ernie4_5", "cohere"])
def test_families_that_rotate_neighbours(family: str) -> None:
    model = tiny_model(family)
    before = logits(model)
    for options in ({"preserve": False}, {"preserve": True}, {"preserve": False, "layers": [1]}):
        with pytest.raises(PosencError, match="does not pair features"):
            hf_posenc.patch_model(model, "interleaved", **options)
    hf_posenc.patch_model(model, "nope_interleaved", every=2)  # no feature moves: fine
    hf_posenc.unpatch_model(model)
    assert logits(model).equal(before)


def test_norms_that_would_be_left_behind() -> None:
    model = tiny_model("stablelm", qk_layernorm=True)
    with pytest.raises(PosencError, match="q_layernorm"):
        hf_posenc.patch_model(model, "interleaved", preserve=False)
    hf_posenc.patch_model(model, "nope")
