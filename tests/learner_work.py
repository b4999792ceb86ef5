"""What ranks of a learner do in tests; functions of a module, as processes import them."""

import torch

from scalerl.rl.fsdp.learner import load_sharded_learner


def log_probs(learner, batch):
    """Of every token that was sampled, by the learner as it is."""
    token_NT = torch.from_numpy(batch.token_NT)
    with torch.no_grad():
        return learner.log_probs(token_NT, torch.from_numpy(batch.sampled_NT[:, 1:]))[0]


def train(rank, recipe, batches, settings=None):
    """Stats and log-probabilities of every step, and the weights at the beginning."""
    learner = load_sharded_learner(recipe, recipe.model, settings)
    weights = learner.weights()
    return [(learner.step(batch), log_probs(learner, batch)) for batch in batches], weights


def train_and_save(rank, recipe, batches, folder):
    """Train, save, and train once more while the save is under way."""
    learner = load_sharded_learner(recipe, recipe.model)
    for batch in batches[:-1]:
        learner.step(batch)
    saving = learner.save(folder)
    last = learner.step(batches[-1])
    saving.wait()
    return last, log_probs(learner, batches[-1])


def load_and_train(rank, recipe, batch, folder):
    """Go on from what was saved."""
    learner = load_sharded_learner(recipe, recipe.model)
    learner.load(folder)
    return learner.step(batch), log_probs(learner, batch), learner.version


def save_hf(rank, recipe, batches, folder):
    """Train, and save in Hugging Face format."""
    learner = load_sharded_learner(recipe, recipe.model)
    for batch in batches:
        learner.step(batch)
    learner.save_pretrained(folder)
    return learner.weights()
