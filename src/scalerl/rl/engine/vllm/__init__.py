"""Generation by vLLM: docs/vllm.md."""
