"""What each attention bias costs: time and peak memory against plain causal sdpa of one shape.

    python benchmarks/bias_cost.py [--lengths 1024 2048 4096 8192] [--repeats 5]

One attention layer of SmolLM2-135M's shape (9 heads, 3 of keys, head_dim 64) in float32, one row,
one thread, without its projections: the hook that prepares the bias, and the attention that applies
it. Calls of one length are taken in turn; the figure is the least CPU time of each, as a ratio to
the causal kernel's. "alibi, masked" is the dense form, which ALiBi takes when a mask is given
(padded rows). Peak memory is how far a process of its own rises above where it stood before the
call. Targets: the forward of ALiBi's fast path at most 1.6x; the memory of the learned biases
linear, at most 2.3x for twice the tokens. The result goes to benchmarks/results/bias_cost.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hf_posenc
from hf_posenc.files import write_json
from hf_posenc.provenance import collect
from hf_posenc.runtime.families import stock_attention
from hf_posenc.runtime.scores import ScoreHook, attend

CONTROL = "causal sdpa"
SCHEMES = {
    CONTROL: None,
    "alibi": "alibi",
    "alibi, masked": "alibi",
    "t5_bias": "t5_bias",
    "query_bias": "query_bias",
}
LEARNED = ("t5_bias", "query_bias")
TIME_TARGET, GROWTH_TARGET = 1.6, 2.3
BACKWARD_LENGTHS = (1024, 2048, 4096)
RESULT = Path(__file__).parent / "results" / "bias_cost.json"

Work = Callable[[], None]


def prepare(case: str, length: int, backward: bool) -> Work:
    """One call of the attention of `case` on `length` tokens, with or without gradients."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=576,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
    )
    config._attn_implementation = "sdpa"
    model = LlamaForCausalLM(config)
    if (scheme := SCHEMES[case]) is not None:
        hf_posenc.patch_model(model, scheme)
    layer: Any = model.model.layers[0].self_attn
    hooks = [h for h in layer._forward_pre_hooks.values() if isinstance(h, ScoreHook)]
    attention: Any = attend("sdpa") if hooks else stock_attention("sdpa", layer)

    places = torch.arange(length)
    mask = (places[:, None] >= places)[None, None] if "masked" in case else None
    given = {"hidden_states": torch.randn(1, length, 576), "position_ids": places[None]}
    states = [torch.randn(1, h, length, 64, requires_grad=backward) for h in (9, 3, 3)]
    trained = [*states, *(p for name, p in layer.named_parameters() if "posenc" in name)]
    trained += [p for name, p in model.model.named_parameters() if name.startswith("posenc")]

    def work() -> None:
        with torch.set_grad_enabled(backward):
            extra = hooks[0](layer, (), given)[1] if hooks else given
            options = {"scaling": layer.scaling, "posenc": extra.get("posenc")}
            if not hooks:
                del options["posenc"]
            output = attention(layer, *states, mask, **options)[0]
        if backward:
            torch.autograd.grad(output.sum(), trained)

    return work


def seconds(cases: list[str], length: int, backward: bool, repeats: int) -> dict[str, float]:
    """Least CPU seconds of each case; the cases are called in turn."""
    works = {case: prepare(case, length, backward) for case in cases}
    least = dict.fromkeys(cases, float("inf"))
    for repeat in range(repeats):
        for case in cases if repeat % 2 == 0 else reversed(cases):
            began = time.process_time()
            works[case]()
            least[case] = min(least[case], time.process_time() - began)
    return least


def peaks(case: str, lengths: list[int], backward: bool) -> dict[int, int]:
    """Bytes that one call adds to this process's resident memory at most, for each length."""
    prepare(case, 512, backward)()
    found = {}
    for length in lengths:
        work = prepare(case, length, backward)
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from what is held
        before = _status("VmRSS")
        work()
        found[length] = _status("VmHWM") - before
    return found


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))


def measure(lengths: list[int], backward: bool, repeats: int) -> list[dict[str, Any]]:
    """One row per length and case."""
    cases = [case for case in SCHEMES if not backward or case in (CONTROL, *LEARNED)]
    memory: dict[str, dict[str, int]] = {}
    for case in cases:
        command = [sys.executable, __file__, "--peaks", case, "--lengths", *map(str, lengths)]
        command += ["--backward"] if backward else []
        # Freed blocks go back to the system at once, so that none of them hides in the baseline.
        environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
        output = subprocess.run(
            command, check=True, capture_output=True, text=True, env=environment
        ).stdout
        memory[case] = json.loads(output.splitlines()[-1])
    rows = []
    for length in lengths:
        least = seconds(cases, length, backward, repeats)
        for case in cases:
            row = {
                "direction": "forward+backward" if backward else "forward",
                "length": length,
                "bias": case,
                "cpu_seconds": least[case],
                "ratio": least[case] / least[CONTROL],
                "peak_bytes": memory[case][str(length)],
            }
            rows.append(row)
            print(
                f"{row['direction']:18}{length:6}  {case:15}{1000 * least[case]:9.1f} ms "
                f"{row['ratio']:6.2f}x  +{row['peak_bytes'] / 2**20:.0f} MiB",
                flush=True,
            )
    return rows


def memory_growth(rows: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Peak memory of each bias and direction, as a ratio to that of half the tokens."""
    series: dict[str, list[int]] = {}
    for row in rows:
        series.setdefault(f"{row['direction']} {row['bias']}", []).append(row["peak_bytes"])
    return {name: [b / a for a, b in pairwise(values)] for name, values in series.items()}


def missed_targets(rows: list[dict[str, Any]], growth: dict[str, list[float]]) -> list[str]:
    """One line per figure that is worse than its target."""
    missed = [
        f"alibi at {row['length']}: {row['ratio']:.2f}x"
        for row in rows
        if row["bias"] == "alibi" and row["ratio"] > TIME_TARGET
    ]
    for name, values in growth.items():
        if name.endswith(LEARNED) and max(values, default=0.0) > GROWTH_TARGET:
            missed.append(f"memory of {name}: {max(values):.2f}x for twice the tokens")
    return missed


def main() -> int:
    """Measure, print the table, write the JSON; exit code 1 when a target is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024, 2048, 4096, 8192])
    parser.add_argument("--repeats", type=int, default=5, help="calls per figure")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--peaks", choices=SCHEMES, help=argparse.SUPPRESS)
    parser.add_argument("--backward", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.peaks:
        print(json.dumps(peaks(arguments.peaks, arguments.lengths, arguments.backward)))
        return 0
    rows = measure(arguments.lengths, False, arguments.repeats)
    trained = [length for length in arguments.lengths if length in BACKWARD_LENGTHS]
    rows += measure(trained, True, arguments.repeats)
    growth = memory_growth(rows)
    for name, values in growth.items():
        print(f"memory for twice the tokens, {name}: {', '.join(f'{v:.2f}x' for v in values)}")
    missed = missed_targets(rows, growth)
    write_json(
        arguments.out,
        {
            "schema": 1,
            "kind": "benchmark",
            "name": "bias_cost",
            "what": "one attention layer, 9 heads (3 kv) of 64, float32, 1 row, 1 thread",
            "targets": {"alibi forward ratio": TIME_TARGET, "memory per doubling": GROWTH_TARGET},
            "rows": rows,
            "memory_growth": growth,
            "missed": missed,
            "provenance": collect(seed=0),
        },
    )
    for line in missed:
        print(f"missed: {line}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
