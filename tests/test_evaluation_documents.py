"""Evaluation documents: sized, independent of one another, and asking what they should."""

from __future__ import annotations

import pytest
from tiny_tokenizer import tiny_text, tiny_tokenizer

from hf_posenc.errors import PosencError
from hf_posenc.evaluation import documents as docs
from hf_posenc.evaluation.texts import fit, split_words, windows

TEXT = tiny_text()
SIZER = docs.Sizer(tiny_tokenizer())
BUILDERS = {
    "ppl_bins": lambda sizer, length, seed: docs.perplexity_documents(sizer, TEXT, length),
    "copytext": lambda sizer, length, seed: docs.copy_documents(sizer, TEXT, length),
    "niah_single": docs.single_needle_documents,
    "niah_essay": lambda sizer, length, seed: docs.essay_needle_documents(
        sizer, TEXT, length, seed
    ),
}
NEEDLES = ("niah_single", "niah_essay")


def build(kind: str, length: int = 400, count: int = 10, seed: int = 0, sizer=SIZER) -> list[dict]:
    return docs.take(BUILDERS[kind](sizer, length, seed), count, kind)


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("length", [400, 777])
@pytest.mark.parametrize("kind", BUILDERS)
def test_prompt_and_answer_fill_the_length_and_never_pass_it(kind, length, bos):
    sizer = docs.Sizer(tiny_tokenizer(bos=bos))
    for document in build(kind, length, count=3, sizer=sizer):
        answers = document.get("choices")
        answers = [" " + a for a in answers] if kind == "niah_essay" else [document["answer"]]
        sizes = [sizer.count(document["prompt"] + answer) for answer in answers]
        assert max(sizes) <= length
        assert sizes[0] == document["n_tokens"]
        # An inserted sentence or a doubled word is the step; keys differ by a few tokens.
        assert document["n_tokens"] >= length - 16


@pytest.mark.parametrize("kind", NEEDLES)
def test_a_document_does_not_depend_on_the_others(kind):
    ten = build(kind, count=10)
    assert build(kind, count=3) == ten[:3]
    # Interleaved with another length, as when several tasks are built at once.
    here, there = BUILDERS[kind](SIZER, 400, 0), BUILDERS[kind](SIZER, 500, 0)
    mixed = []
    for _ in range(10):
        next(there)
        mixed.append(next(here))
    assert mixed == ten


@pytest.mark.parametrize("kind", NEEDLES)
def test_seed_length_and_index_each_change_a_needle_document(kind):
    first = build(kind, count=9)
    answers = {d["answer"] for d in first}
    assert len(answers) == 9
    assert build(kind, count=1, seed=1)[0]["answer"] not in answers
    assert build(kind, 500, count=1)[0]["answer"] not in answers


def test_essay_probes_share_the_prompt_up_to_the_question():
    probes = build("niah_essay", count=16)
    assert [p["haystack"] for p in probes] == [0] * 8 + [1] * 8
    heads = {p["prompt"].rpartition("\n")[0] for p in probes[:8]}
    assert len(heads) == 1
    head = heads.pop()
    for stratum, probe in enumerate(probes[:8]):
        value, *others = probe["choices"]
        assert probe["answer"] == f" {value}"
        assert all(f"is: {choice}." in head for choice in probe["choices"])
        assert len({value, *others}) == 4
        key = probe["prompt"].rpartition("number for ")[2].split()[0]
        assert f"for {key} is: {value}." in head
        # Stratified; a needle stands between sentences, so it may slip by about one of them.
        assert abs(probe["depth"] - (stratum + 0.5) / 8) < 0.5 / 8 + 0.08


def test_single_needle_depths_cover_the_haystack():
    depths = sorted(d["depth"] for d in build("niah_single", 777, count=8))
    assert all(abs(depth - (i + 0.5) / 8) < 0.5 / 8 + 0.05 for i, depth in enumerate(depths))


def test_copytext_repeats_its_passage():
    for document in build("copytext"):
        assert document["answer"] == "\n\n" + document["prompt"]
        assert document["prompt"] in TEXT
        lead = SIZER.encode(document["prompt"] + document["answer"])
        lead = lead[SIZER.count(document["prompt"]) :][: document["lead"]]
        assert SIZER.tokenizer.decode(lead).strip() == ""


def test_perplexity_windows_follow_each_other():
    made = [d["prompt"] + d["answer"] for d in build("ppl_bins", 400, count=5)]
    words = " ".join(made).split()
    assert words == TEXT.split()[: len(words)]


def test_lead_counts_white_space_tokens_only():
    # The tiny tokenizer keeps digits apart, so " 1" is two tokens; " The" is one.
    assert SIZER.lead("It is", " 1234567") == 1
    assert SIZER.lead("It is", " The") == 0


def test_windows_never_overlap_and_drop_the_rest():
    words = split_words("one two three four five six seven")
    assert list(windows(words, lambda text: len(text.split()), 3)) == [
        "one two three",
        "four five six",
    ]


def test_fit_lowers_where_the_count_is_not_monotone():
    counts = {0: 0, 1: 1, 2: 5, 3: 3, 4: 9}
    best = fit(counts.__getitem__, 3, 4)
    assert counts[best] <= 3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: build("niah_essay", 100), "too short for 8 needle"),
        (lambda: docs.take(docs.perplexity_documents(SIZER, "a b c", 64), 1, "x"), "shorter than"),
        (lambda: list(windows(["a" * 99], len, 5)), "longer than 5 tokens"),
    ],
)
def test_what_cannot_be_built_is_said(make, message):
    with pytest.raises(PosencError, match=message):
        make()
