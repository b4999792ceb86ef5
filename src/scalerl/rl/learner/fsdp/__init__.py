"""The learner on several processes: PyTorch FSDP2."""
