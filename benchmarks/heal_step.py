"""What the teacher of the KL objective costs: a KL step against a CE step.

    python benchmarks/heal_step.py [--repeats 5] [--steps 4]

One step = forward, backward, clipping and AdamW of the quickstart recipe (SmolLM2-135M in
bfloat16, LoRA and norms, 2 rows of 1024 tokens). Each objective runs in processes of its own, taken
in turn, since the peak memory of a process cannot be reset. Targets: time at most 1.7x, peak memory
at most 1.2x. The result goes to benchmarks/results/heal_step.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

OBJECTIVES = ("ce", "kl")
TIME_TARGET, MEMORY_TARGET = 1.7, 1.2
RESULT = Path(__file__).parent / "results" / "heal_step.json"


def measure(objective: str, steps: int) -> dict[str, Any]:
    """Seconds and CPU seconds of each of `steps` steps after one more, and peak memory in bytes."""
    import torch

    from hf_posenc import patch_model
    from hf_posenc.heal import load_recipe
    from hf_posenc.heal.adapter import attach_adapter, parameter_groups
    from hf_posenc.heal.data import PackedRows, collate
    from hf_posenc.heal.objective import Objective
    from hf_posenc.heal.trainer import peak_memory_bytes
    from hf_posenc.sources import load_pretrained, load_tokenizer

    recipe = load_recipe("quickstart", [f"heal.objective={objective}", "heal.rows=2"])
    rows = iter(PackedRows(recipe.data, load_tokenizer(recipe.model), seed=0))
    torch.manual_seed(0)
    model = patch_model(load_pretrained(recipe.model, dtype=recipe.dtype), recipe.scheme)
    model = attach_adapter(model, recipe.lora, train_norms=recipe.heal.train_norms).train()
    step_loss = Objective(model, recipe.heal.objective)
    optimizer = torch.optim.AdamW(parameter_groups(model, lr=1e-4, bias_lr_multiplier=1))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]

    before = peak_memory_bytes()
    wall, cpu, losses = [], [], []
    for _ in range(steps + 1):
        batch = collate(list(itertools.islice(rows, recipe.heal.rows)))
        began, cpu_began = time.perf_counter(), time.process_time()
        loss = step_loss(model, batch) / (batch["labels"] != -100).sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        wall.append(time.perf_counter() - began)
        cpu.append(time.process_time() - cpu_began)
    return {
        "seconds": wall[1:],
        "cpu_seconds": cpu[1:],
        "losses": losses,
        "peak_memory_bytes": peak_memory_bytes(),
        "peak_memory_bytes_before_the_first_step": before,
        "torch_threads": torch.get_num_threads(),
    }


def main() -> int:
    """Measure both in turn, print the ratios, write the JSON; exit code 1 for a missed target."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5, help="processes per objective")
    parser.add_argument("--steps", type=int, default=4, help="timed steps per process")
    parser.add_argument("--measure", choices=OBJECTIVES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.measure, arguments.steps)))
        return 0

    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in OBJECTIVES}
    for repeat in range(arguments.repeats):
        for name in OBJECTIVES if repeat % 2 == 0 else reversed(OBJECTIVES):
            command = [sys.executable, __file__, "--measure", name, "--steps", str(arguments.steps)]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            runs[name].append(json.loads(output.splitlines()[-1]))
            seconds = statistics.median(runs[name][-1]["seconds"])
            print(f"{name}: {seconds:.2f} s a step, "
                  f"{runs[name][-1]['peak_memory_bytes'] / 2**20:.0f} MiB", flush=True)  # fmt: skip

    def median(name: str, key: str) -> float:
        values = [run[key] for run in runs[name]]
        return statistics.median(
            itertools.chain.from_iterable(v if isinstance(v, list) else [v] for v in values)
        )

    keys = ("seconds", "cpu_seconds", "peak_memory_bytes")
    medians = {name: {key: median(name, key) for key in keys} for name in OBJECTIVES}
    ratios = {key: medians["kl"][key] / medians["ce"][key] for key in keys}
    met = ratios["seconds"] <= TIME_TARGET and ratios["peak_memory_bytes"] <= MEMORY_TARGET
    print(f"time {ratios['seconds']:.3f}x (target {TIME_TARGET}), "
          f"CPU time {ratios['cpu_seconds']:.3f}x, "
          f"peak memory {ratios['peak_memory_bytes']:.3f}x (target {MEMORY_TARGET})")  # fmt: skip

    from hf_posenc.files import write_json
    from hf_posenc.provenance import collect

    write_json(
        RESULT,
        {
            "schema": 1,
            "kind": "benchmark",
            "name": "heal_step",
            "what": "a KL step against a CE step, quickstart recipe, 2 x 1024 tokens, bfloat16",
            "ratios_kl_to_ce": ratios,
            "targets": {"seconds": TIME_TARGET, "peak_memory_bytes": MEMORY_TARGET},
            "met": met,
            "medians": medians,
            "runs": runs,
            "provenance": collect(seed=0, tokens=2048),
        },
    )
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
