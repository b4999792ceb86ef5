"""Generation by vLLM: docs/howto/vllm.md."""
