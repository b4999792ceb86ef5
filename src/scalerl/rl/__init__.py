"""Training: prompts -> rollouts -> verified groups -> advantages -> loss -> weights -> generators."""
