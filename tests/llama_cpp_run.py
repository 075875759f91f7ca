"""Log-probabilities from llama.cpp: run as a script where `xllamacpp` is installed.

usage: python llama_cpp_run.py MODEL.gguf < request.json > answer.json
request  {"prefixes": [[token, ...], ...], "top": k, "texts": [text, ...], "context": n}
answer   {"logprobs": [{token: log-probability}, ...], "tokens": [[token, ...], ...]}
None are given where the most likely token ends the text. A prefix shares the cache of the one
before it. Cache and attention are float32, one thread.
"""

import json
import sys
import urllib.request

import xllamacpp


def main() -> None:
    request = json.load(sys.stdin)
    params = xllamacpp.CommonParams()
    params.model.path = sys.argv[1]
    params.n_ctx = request["context"]
    params.n_parallel = 1
    params.n_gpu_layers = 0
    params.warmup = False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    kinds = xllamacpp.llama_flash_attn_type
    params.flash_attn_type = kinds.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    server = xllamacpp.Server(params)
    answer = {"logprobs": [], "tokens": []}
    for prefix in request["prefixes"]:
        done = server.handle_completions(
            {
                "prompt": prefix,
                "n_predict": 1,
                "n_probs": request["top"],
                "temperature": 0.0,
                "cache_prompt": True,
                "post_sampling_probs": False,
            }
        )
        logprobs = done["choices"][0]["logprobs"]
        found = logprobs["content"][0]["top_logprobs"] if logprobs else []
        answer["logprobs"].append({entry["id"]: entry["logprob"] for entry in found})
    for text in request.get("texts", []):
        body = json.dumps({"content": text, "add_special": False}).encode()
        call = urllib.request.Request(f"{server.listening_address}/tokenize", body)
        call.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(call) as reply:
            answer["tokens"].append(json.load(reply)["tokens"])
    print(json.dumps(answer))


main()
