"""Weight sync from the learner to the generators.

loop/pipeline.py publishes weights after a step (`update` of its generator); placement/ and engine/vllm/ send
them.

    buckets.py         some tensors at a time, for every transport
    shared_weights.py  transport to rollout workers: on one machine, shared memory
    ray_weights.py     on a cluster: Ray's object store, PyTorch's broadcast
    vllm_weights.py    files, CUDA IPC or NCCL to vLLM's engines; vllm_client.py has the engines' calls, and
                       ipc_buffers.py the GPU memory that both sides read

It may import `scalerl.rl.workers` and what is below. Imported by `rl.engine.vllm`, `rl.loop`,
`rl.placement`, `rl.placement.ray`.
"""
