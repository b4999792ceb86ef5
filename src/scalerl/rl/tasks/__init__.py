"""Tasks: prompts and their verifiers."""
