"""Models in Hugging Face format: loading, log-probabilities, LoRA, and the demonstration's base model.

It may import `scalerl.rl.config` and what is below. Engines and learners import it.
"""
