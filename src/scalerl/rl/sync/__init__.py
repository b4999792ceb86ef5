"""Weights from the learner to what generates.

loop/pipeline.py publishes them after a step (`update` of its generator), placement/local.py, placement/ray/
and engine/vllm/ send them.

    buckets.py         some tensors at a time, for every transport
    shared_weights.py  shared memory on one machine
    object_store.py, broadcast.py     Ray's object store, PyTorch's broadcast; transport.py chooses
    vllm_weights.py    files or NCCL to vLLM's engines; vllm_client.py has the calls of these

It may import `scalerl.rl.workers` and what is below. Imported by `rl.engine.vllm`, `rl.loop`,
`rl.placement`, `rl.placement.ray`.
"""
