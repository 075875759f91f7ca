"""`PosencLM` gives HFLM's numbers, computes less, and refuses what HFLM would cut."""

from __future__ import annotations

import pickle

import pytest
import torch
from evaluation_case import tiny_config, tiny_model
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM
from tiny_tokenizer import tiny_text, tiny_tokenizer
from transformers import LlamaConfig, MistralConfig

from hf_posenc import patch_model
from hf_posenc.errors import PosencError
from hf_posenc.evaluation import PosencLM, scoring
from hf_posenc.evaluation.answer import Answer
from hf_posenc.evaluation.scoring import common_prefix

TEXT = tiny_text(300)


def instances(kind: str, arguments: list[tuple]) -> list[Instance]:
    return [
        Instance(request_type=kind, doc={}, arguments=item, idx=i)
        for i, item in enumerate(arguments)
    ]


def shared_prefix_requests() -> list[Instance]:
    """Three contexts, several questions on each, several choices on each question."""
    pairs = []
    for start in (0, 2000, 4000):
        context = TEXT[start : start + 900]
        for question in ("Which king", "What did the small lemon see in the"):
            pairs += [
                (f"{context}\n{question}", f" {choice}")
                for choice in ("tiger", "window and a door", "x", "y")
            ]
    pairs += [("", "The wise lemon"), ("A", "b")]
    return instances("loglikelihood", pairs[::-1])


def numbers(answers) -> torch.Tensor:
    return torch.tensor([float(answer[0]) for answer in answers], dtype=torch.float64)


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def expected(model):
    lm = HFLM(pretrained=model, tokenizer=tiny_tokenizer(), batch_size=1, backend="causal")
    return lm.loglikelihood(shared_prefix_requests(), disable_tqdm=True)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"prefix_cache": False},
        {"prefill_chunk": 37},
        {"prefill_chunk": 37, "prefix_cache": False},
        {"batch_size": 5},
    ],
    ids=str,
)
def test_equals_hflm(model, expected, options):
    lm = PosencLM(model, tiny_tokenizer(), **options)
    answers = lm.loglikelihood(shared_prefix_requests(), disable_tqdm=True)
    torch.testing.assert_close(numbers(answers), numbers(expected), rtol=0, atol=1e-5)
    assert [a[1] for a in answers] == [e[1] for e in expected]
    assert all(sum(a.logprobs) == pytest.approx(a[0]) for a in answers)


def test_prefixes_are_computed_once(model):
    lm = PosencLM(model, tiny_tokenizer())
    requests = shared_prefix_requests()
    lm.loglikelihood(requests, disable_tqdm=True)
    alone = sum(len(lm.tok_encode("".join(r.args))) for r in requests)
    assert lm.scorer.tokens_computed < alone / 5
    off = PosencLM(model, tiny_tokenizer(), prefix_cache=False)
    off.loglikelihood(requests, disable_tqdm=True)
    assert off.scorer.tokens_reused == 0
    # Choices of one token share their forward even without a cache.
    assert off.scorer.tokens_computed < alone


def test_long_answers_in_pieces_give_the_same_numbers(model, monkeypatch):
    request = instances("loglikelihood", [("The", TEXT[3:1500])])
    whole = PosencLM(model, tiny_tokenizer()).loglikelihood(request, disable_tqdm=True)[0]
    monkeypatch.setattr(scoring, "ROWS_PER_FORWARD", 29)
    for reuse in (True, False):
        lm = PosencLM(model, tiny_tokenizer(), prefix_cache=reuse)
        pieces = lm.loglikelihood(request, disable_tqdm=True)[0]
        torch.testing.assert_close(
            torch.tensor(pieces.logprobs), torch.tensor(whole.logprobs), rtol=0, atol=1e-5
        )
        assert pieces.greedy == whole.greedy


def test_rolling_equals_hflm(model):
    requests = instances("loglikelihood_rolling", [(TEXT[:6000],), (TEXT[:50],)])
    options = {"tokenizer": tiny_tokenizer(), "max_length": 256}
    ours = PosencLM(model, **options).loglikelihood_rolling(requests, disable_tqdm=True)
    theirs = HFLM(pretrained=model, **options).loglikelihood_rolling(requests, disable_tqdm=True)
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-6, atol=1e-4)


def test_generation_equals_hflm(model):
    prompts = [(TEXT[:300], {"max_gen_toks": 6}), (TEXT[400:500], {"max_gen_toks": 6})]
    requests = instances("generate_until", prompts)
    ours = PosencLM(model, tiny_tokenizer(), batch_size=2).generate_until(requests, True)
    theirs = HFLM(pretrained=model, tokenizer=tiny_tokenizer(), batch_size=2)
    assert ours == theirs.generate_until(requests, True)
    assert any(ours)


def test_softmax_is_float32(expected):
    """A bfloat16 softmax is off by far more than bfloat16 weights are."""
    half = tiny_model().to(torch.bfloat16)
    answers = PosencLM(half, tiny_tokenizer()).loglikelihood(shared_prefix_requests(), True)
    logprobs = torch.tensor([value for answer in answers for value in answer.logprobs])
    assert (logprobs != logprobs.bfloat16().float()).float().mean() > 0.9


def test_prompts_that_do_not_fit_are_refused(model):
    lm = PosencLM(model, tiny_tokenizer(), max_length=64)
    context = TEXT[:1000]
    with pytest.raises(PosencError, match="exceeds the model's 64"):
        lm.loglikelihood(instances("loglikelihood", [(context, " x")]), disable_tqdm=True)
    with pytest.raises(PosencError, match="leaves no room"):
        lm.generate_until(instances("generate_until", [(context, {"max_gen_toks": 4})]), True)
    # The last token is predicted, never read: 64 + 1 tokens fit.
    ids = lm.tok_encode(context)[:65]
    assert lm._loglikelihood_tokens([(None, ids[:60], ids[60:])], disable_tqdm=True)
    with pytest.raises(PosencError, match="65 tokens exceeds"):
        ids = lm.tok_encode(context)[:66]
        lm._loglikelihood_tokens([(None, ids[:60], ids[60:])], disable_tqdm=True)


def stretched(kind: str) -> LlamaConfig:
    extra = {"factor": 4.0, "rope_type": kind, "rope_theta": 1e4}
    if kind == "longrope":
        extra |= {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
        extra["original_max_position_embeddings"] = 64
    return tiny_config(rope_parameters=extra)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (stretched("dynamic"), "depend on the row's length"),
        (stretched("longrope"), "depend on the row's length"),
        (
            MistralConfig(**{**tiny_config().to_dict(), "sliding_window": 48}),
            "sliding-window layers forget",
        ),
    ],
    ids=["dynamic", "longrope", "sliding"],
)
def test_reuse_is_off_and_said_so_where_it_is_not_exact(config, reason, caplog):
    model = tiny_model(config=config)
    lm = PosencLM(model, tiny_tokenizer(), prefill_chunk=31)
    assert reason in caplog.text
    requests = shared_prefix_requests()
    answers = lm.loglikelihood(requests, disable_tqdm=True)
    assert lm.scorer.tokens_reused == 0
    plain = HFLM(pretrained=model, tokenizer=tiny_tokenizer(), batch_size=1)
    expected = plain.loglikelihood(requests, disable_tqdm=True)
    torch.testing.assert_close(numbers(answers), numbers(expected), rtol=0, atol=1e-5)


def test_stretched_models_would_go_wrong_with_reuse(monkeypatch):
    """Why it is off: with the guard removed, the same requests give other numbers."""
    model = tiny_model(config=stretched("longrope"))
    requests = instances("loglikelihood", [(TEXT[:250], " x"), (TEXT[:250] + TEXT[250:700], " x")])
    exact = PosencLM(model, tiny_tokenizer()).loglikelihood(requests, disable_tqdm=True)
    monkeypatch.setattr(scoring, "why_whole_rows", lambda model: None)
    lm = PosencLM(model, tiny_tokenizer(), prefill_chunk=40)
    assert (numbers(lm.loglikelihood(requests, True)) - numbers(exact)).abs().max() > 1e-3


def test_patched_and_peft_models(model):
    from peft import LoraConfig, get_peft_model

    import hf_posenc

    patched = hf_posenc.patch_model(tiny_model(), "nope_interleaved", every=2)
    requests = shared_prefix_requests()
    stock = PosencLM(model, tiny_tokenizer()).loglikelihood(requests, True)
    plain = HFLM(pretrained=patched, tokenizer=tiny_tokenizer(), backend="causal")
    answers = PosencLM(patched, tiny_tokenizer()).loglikelihood(requests, True)
    torch.testing.assert_close(
        numbers(answers), numbers(plain.loglikelihood(requests, True)), rtol=0, atol=1e-5
    )
    assert (numbers(answers) - numbers(stock)).abs().max() > 0.1
    adapted = get_peft_model(patched, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.2)
    healed = PosencLM(adapted, tiny_tokenizer())
    changed = healed.loglikelihood(requests, True)
    assert (numbers(changed) - numbers(answers)).abs().max() > 0.01
    assert healed.scorer.tokens_reused > 0
    assert healed.generate_until(instances("generate_until", [("The", {"max_gen_toks": 3})]), True)


def test_lm_eval_knows_it_by_name():
    assert get_model("hf-posenc") is PosencLM


@pytest.mark.parametrize("size", ["auto", 0, "two"])
def test_batch_sizes_that_are_no_numbers_are_refused(model, size):
    with pytest.raises(PosencError, match="batch size"):
        PosencLM(model, tiny_tokenizer(), batch_size=size)


def test_a_live_model_needs_its_tokenizer(model):
    with pytest.raises(PosencError, match="tokenizer"):
        PosencLM(model)


def test_answers_are_lm_evals_pairs_and_survive_pickling():
    answer = Answer([-0.5, -0.25], [True, False])
    assert tuple(answer) == (-0.75, False)
    again = pickle.loads(pickle.dumps(answer))
    assert (tuple(again), again.logprobs, again.greedy) == (
        (-0.75, False),
        [-0.5, -0.25],
        [True, False],
    )


@pytest.mark.parametrize(
    ("a", "b", "n"), [("", "x", 0), ("abc", "abd", 2), ("ab", "abc", 2), ("x", "y", 0)]
)
def test_common_prefix(a, b, n):
    assert common_prefix(tuple(a), tuple(b)) == n


def test_windows_of_a_plan_leave_prefixes_reusable():
    """The layers keep every key; the window is a mask, so a cut cache gives the same numbers."""
    model = patch_model(tiny_model(), "rnope_swa", every=2, window=48)
    requests = shared_prefix_requests()
    lm = PosencLM(model, tiny_tokenizer(), prefill_chunk=31)
    answers = lm.loglikelihood(requests, disable_tqdm=True)
    assert lm.scorer.tokens_reused > lm.scorer.tokens_computed
    plain = HFLM(pretrained=model, tokenizer=tiny_tokenizer(), batch_size=1, backend="causal")
    expected = plain.loglikelihood(requests, disable_tqdm=True)
    torch.testing.assert_close(numbers(answers), numbers(expected), rtol=0, atol=1e-5)
