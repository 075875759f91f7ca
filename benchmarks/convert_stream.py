"""Memory, speed and resumption of convert_checkpoint on a synthetic checkpoint of 8.9 GB.

    python benchmarks/convert_stream.py    # writes about 100 GB, needs 30 GB free
    python benchmarks/convert_stream.py --layers 4 --hidden 512 --vocab 4000 --shards 8    # small

Makes a Llama-shaped bf16 checkpoint of random bytes in a temporary folder and measures
  memory   peak resident memory of a fresh process that converts it (goal: below 1.2 GB)
  speed    conversion against shutil.copyfile of the same files, alternating, both with fsync after
           every file, the source evicted from the page cache before each (goal: at least 0.6)
  resume   three SIGKILLs on the way, then a run to the end (goal: every file bitwise the same)
for a scheme that moves the rows of all q and k (interleaved) and one that moves none (nope).
"""

from __future__ import annotations

import argparse
import filecmp
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from hf_posenc import provenance
from hf_posenc.checkpoint.source_folder import INDEX
from hf_posenc.files import write_json

RESULT = Path(__file__).parent / "results" / "convert_stream.json"
GOALS = {"peak_memory_bytes": 1.2e9, "speed_ratio": 0.6}
SCHEMES = ("interleaved", "nope")
_BLOCK = 64 * 2**20
_CHILD = """
import json, resource, sys, time
import hf_posenc
begin = time.perf_counter()
hf_posenc.convert_checkpoint(sys.argv[1], sys.argv[2], sys.argv[3], progress=False)
seconds = time.perf_counter() - begin
scale = 1 if sys.platform == "darwin" else 1024
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale
print(json.dumps({"seconds": seconds, "peak_memory_bytes": peak}))
"""


def main() -> int:
    arguments = _arguments()
    with tempfile.TemporaryDirectory(dir=arguments.dir, prefix="convert_stream_") as name:
        record = measure(Path(name), arguments)
    print(json.dumps(record["summary"], indent=2))
    write_json(arguments.out, record)
    return 0 if all(record["summary"]["passed"].values()) else 1


def measure(work: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Make the checkpoint in `work` and run everything; the record as plain values."""
    source = work / "source"
    make_checkpoint(source, arguments)
    shards = sorted(source.glob("*.safetensors"))
    size = sum(path.stat().st_size for path in shards)
    _say(f"{size / 1e9:.1f} GB in {len(shards)} shards")
    runs: list[dict[str, Any]] = []
    for number in range(arguments.rounds):
        for kind in ("copy", *SCHEMES):
            target = work / f"round_{number}" / kind / "out"
            target.parent.mkdir(parents=True)
            evict(source)
            run = copy(shards, target) if kind == "copy" else convert(source, target, kind)
            run |= {"round": number, "kind": kind, "load": os.getloadavg()[0]}
            _say(f"round {number} {kind}: {size / run['seconds'] / 1e6:.0f} MB/s")
            runs.append(run)
            keep = number == arguments.rounds - 1 and kind == SCHEMES[0]
            if not keep:
                shutil.rmtree(target.parent)
    whole = work / f"round_{arguments.rounds - 1}" / SCHEMES[0] / "out"
    resumed = work / "killed" / "out"
    killed_at = convert_with_kills(source, resumed, len(shards))
    same = same_files(whole, resumed)
    return {
        "schema": 1,
        "kind": "benchmark",
        "name": "convert_stream",
        "checkpoint": {"bytes": size, "shards": len(shards), "largest_tensor": largest(source)},
        "conditions": "fsync after every file in both; source evicted from the page cache before "
        "each run; seconds of the convert_checkpoint call, imports not counted",
        "runs": runs,
        "summary": summary(runs, size, killed_at, same),
        "provenance": provenance.collect(seed=0),
    }


def summary(
    runs: list[dict[str, Any]], size: int, killed_at: list[int], same: bool
) -> dict[str, Any]:
    """Medians over rounds, ratios within a round, and whether the goals are met."""
    copies = {run["round"]: run["seconds"] for run in runs if run["kind"] == "copy"}
    conversions = [run for run in runs if run["kind"] != "copy"]
    ratios = {
        kind: [copies[run["round"]] / run["seconds"] for run in conversions if run["kind"] == kind]
        for kind in SCHEMES
    }
    speed = {kind: statistics.median(values) for kind, values in ratios.items()}
    peak = max(run["peak_memory_bytes"] for run in conversions)
    return {
        "copy_bytes_per_second": size / statistics.median(copies.values()),
        "speed_ratio": speed,
        "speed_ratio_lowest": {kind: min(values) for kind, values in ratios.items()},
        "peak_memory_bytes": peak,
        "killed_after_shards": killed_at,
        "resumed_is_bitwise_the_same": same,
        "goals": GOALS,
        "passed": {
            "memory": peak < GOALS["peak_memory_bytes"],
            "speed": min(speed.values()) >= GOALS["speed_ratio"],
            "resume": same and len(killed_at) == 3,
        },
    }


def make_checkpoint(folder: Path, arguments: argparse.Namespace) -> None:
    """A Llama checkpoint of random bytes in the wanted number of shards, tensors in order."""
    from transformers import LlamaConfig

    hidden, inner = arguments.hidden, arguments.hidden * 7 // 2
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=arguments.layers,
        num_attention_heads=hidden // 128,
        num_key_value_heads=max(1, hidden // 512),
        head_dim=128,
        vocab_size=arguments.vocab,
        tie_word_embeddings=True,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(folder)
    keys = config.num_key_value_heads * 128
    shapes = {"model.embed_tokens.weight": [arguments.vocab, hidden], "model.norm.weight": [hidden]}
    for layer in range(arguments.layers):
        for name, shape in {
            **{"self_attn.q_proj": [hidden, hidden], "self_attn.k_proj": [keys, hidden]},
            **{"self_attn.v_proj": [keys, hidden], "self_attn.o_proj": [hidden, hidden]},
            **{"mlp.gate_proj": [inner, hidden], "mlp.up_proj": [inner, hidden]},
            **{"mlp.down_proj": [hidden, inner], "input_layernorm": [hidden]},
            "post_attention_layernorm": [hidden],
        }.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
    groups = _split(shapes, arguments.shards)
    random_bytes = random.Random(0).randbytes(_BLOCK)
    weight_map = {}
    for number, names in enumerate(groups, 1):
        shard = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        _write_random(folder / shard, {name: shapes[name] for name in names}, random_bytes, number)
        weight_map |= dict.fromkeys(names, shard)
    total = sum(_bytes(shape) for shape in shapes.values())
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def convert(source: Path, target: Path, scheme: str) -> dict[str, Any]:
    """Convert in a process of its own; its seconds and peak memory, and those of the process."""
    begin = time.perf_counter()
    done = subprocess.run(_command(source, target, scheme), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**result, "process_seconds": time.perf_counter() - begin}


def copy(files: list[Path], target: Path) -> dict[str, Any]:
    """Copy the files plainly, each on disk before the next."""
    target.mkdir()
    begin = time.perf_counter()
    for path in files:
        shutil.copyfile(path, target / path.name)
        with open(target / path.name, "rb") as file:
            os.fsync(file.fileno())
    return {"seconds": time.perf_counter() - begin}


def convert_with_kills(source: Path, target: Path, shards: int) -> list[int]:
    """Kill the conversion at about a quarter, a half and three quarters; then let it end.

    Returns how many shards were finished at each kill.
    """
    target.parent.mkdir()
    partial = target.with_name(f".{target.name}.partial")
    killed_at = []
    for quarter in (1, 2, 3):
        child = subprocess.Popen(
            _command(source, target, SCHEMES[0]), stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        while child.poll() is None and _count(partial) < shards * quarter // 4:
            time.sleep(0.005)
        child.send_signal(signal.SIGKILL)
        child.communicate()
        if child.returncode == -signal.SIGKILL and not target.exists():
            killed_at.append(_count(partial))
    _say(f"killed after {killed_at} shards")
    convert(source, target, SCHEMES[0])
    return killed_at


def same_files(first: Path, second: Path) -> bool:
    """Whether two folders hold the same files with the same bytes."""
    names = sorted(path.name for path in first.iterdir())
    if names != sorted(path.name for path in second.iterdir()):
        return False
    return filecmp.cmpfiles(first, second, names, shallow=False)[0] == names


def evict(folder: Path) -> None:
    """Ask the kernel to forget the cached pages of a folder's files, where it can be asked."""
    if hasattr(os, "posix_fadvise"):
        for path in folder.iterdir():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def largest(folder: Path) -> int:
    """Bytes of the largest tensor."""
    from hf_posenc.checkpoint.source_folder import read_source

    return max(tensor.nbytes for _, tensor in read_source(folder).tensors())


def _command(source: Path, target: Path, scheme: str) -> list[str]:
    return [sys.executable, "-c", _CHILD, str(source), str(target), scheme]


def _count(partial: Path) -> int:
    return len(list(partial.glob("*.safetensors")))


def _bytes(shape: list[int]) -> int:
    size = 2
    for length in shape:
        size *= length
    return size


def _split(shapes: dict[str, list[int]], shards: int) -> list[list[str]]:
    """Cut the tensors, in order, into groups: those that straddle an even cut go to the left."""
    total = sum(_bytes(shape) for shape in shapes.values())
    largest_first = max(_bytes(shape) for shape in shapes.values())
    goal = (total - largest_first) / (shards - 1)  # the embedding fills a shard of its own
    groups: list[list[str]] = [[]]
    filled = 0.0
    for position, (name, shape) in enumerate(shapes.items()):
        left = len(shapes) - position
        full = filled >= goal or (groups[-1] and left <= shards - len(groups))
        if full and len(groups) < shards:
            groups.append([])
            filled = max(0.0, filled - goal) if filled < 2 * goal else 0.0
        groups[-1].append(name)
        filled += _bytes(shape)
    return groups


def _write_random(path: Path, shapes: dict[str, list[int]], random_bytes: bytes, seed: int) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    reached = 0
    for name, shape in shapes.items():
        end = reached + _bytes(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [reached, end]}
        reached = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    start = seed * 7919 * 2 % _BLOCK  # every shard begins elsewhere in the block
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        while reached:
            piece = random_bytes[start : start + reached]
            file.write(piece)
            reached -= len(piece)
            start = 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=18)
    parser.add_argument("--hidden", type=int, default=4096, help="a multiple of 512")
    parser.add_argument("--vocab", type=int, default=128_256)
    parser.add_argument("--shards", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", type=Path, help="where the temporary folder is made")
    parser.add_argument("--out", type=Path, default=RESULT)
    return parser.parse_args()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
