"""vllm's offline engine as a peer of benchmarks/sampling.py; runs in vllm's own environment.

    .venvs/vllm/bin/python benchmarks/peers/vllm_sampling.py --model FOLDER < jobs

Requests go to the engine's own loop, and an episode's next turn is sent as soon as the last one is answered: no turn
waits for the slowest of a batch. Prefixes are cached, and forgotten before each job, as new weights would have it. No
seeds (a request with one is drawn by itself), no detokenising, log-probabilities of the sampled tokens alone, taken
over the tokens that may be sampled.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from json_jobs import Sampler, serve


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--seqs", type=int, default=64, help="max_num_seqs")
    parser.add_argument("--block", type=int, default=0, help="tokens of a KV block; 0: vllm's own choice")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--kv-gib", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--in-process", action="store_true", help="no process of its own for the engine's core")
    return parser.parse_args()


def environment(arguments: argparse.Namespace) -> dict[str, str]:
    """What must be set before vllm is imported, and the library before Python is: OpenMP threads, memory, no calls."""
    cores = sorted(os.sched_getaffinity(0))[: arguments.threads]
    libraries = [Path(sys.prefix) / "lib/libiomp5.so", Path("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4")]
    return {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "OMP_NUM_THREADS": str(arguments.threads),
        "VLLM_CPU_KVCACHE_SPACE": str(arguments.kv_gib),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if arguments.in_process else "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "LD_PRELOAD": ":".join(str(library) for library in libraries if library.exists()),
    }


def start(arguments: argparse.Namespace) -> Sampler:
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    blocks = {"block_size": arguments.block} if arguments.block else {}
    llm = LLM(
        arguments.model,
        dtype=arguments.dtype,
        max_model_len=arguments.context,
        max_num_seqs=arguments.seqs,
        enable_prefix_caching=True,
        skip_tokenizer_init=True,
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
        **blocks,
    )
    engine = llm.llm_engine

    def sample(episodes: list[dict[str, Any]], allowed: list[int] | None) -> dict[str, Any]:
        if not llm.reset_prefix_cache():
            raise RuntimeError("vllm kept its prefix cache: a request is still running")
        sequences = [list(episode["prompt"]) for episode in episodes]
        turn = [0] * len(episodes)
        total, sum_of_logprobs = 0, 0.0

        def send(i: int) -> None:
            params = SamplingParams(
                temperature=1.0,
                max_tokens=episodes[i]["lengths"][turn[i]],
                ignore_eos=True,
                logprobs=0,
                detokenize=False,
                allowed_token_ids=allowed,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            engine.add_request(f"{i}-{turn[i]}", {"prompt_token_ids": list(sequences[i])}, params)

        began = time.perf_counter()
        for i in range(len(episodes)):
            send(i)
        while engine.has_unfinished_requests():
            for output in engine.step():
                if not output.finished:
                    continue
                i = int(output.request_id.split("-")[0])
                made = output.outputs[0]
                ids = list(made.token_ids)
                if len(ids) != episodes[i]["lengths"][turn[i]]:
                    raise RuntimeError(f"vllm ended a request of {episodes[i]['lengths'][turn[i]]} at {len(ids)}")
                total += len(ids)
                sum_of_logprobs += sum(made.logprobs[at][token].logprob for at, token in enumerate(ids))
                if turn[i] < len(episodes[i]["observations"]):
                    sequences[i] += ids + episodes[i]["observations"][turn[i]]
                    turn[i] += 1
                    send(i)
        return {"seconds": time.perf_counter() - began, "tokens": total, "mean_logprob": sum_of_logprobs / total}

    return sample


if __name__ == "__main__":
    given = parsed()
    wanted = environment(given)
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **wanted})
    serve(lambda: start(given))
