"""Weights from the learner to what generates.

loop/pipeline.py publishes them after a step (`update` of its generator), placement/ and engine/vllm/ send
them.

    buckets.py         some tensors at a time, for every transport
    shared_weights.py  what brings them to rollout workers: on one machine, shared memory
    ray_weights.py     on a cluster: Ray's object store, PyTorch's broadcast
    vllm_weights.py    files, CUDA IPC or NCCL to vLLM's engines; vllm_client.py has the calls of these, and
                       ipc_buffers.py the memory of a GPU that both read

It may import `scalerl.rl.workers` and what is below. Imported by `rl.engine.vllm`, `rl.loop`,
`rl.placement`, `rl.placement.ray`.
"""
