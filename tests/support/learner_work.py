"""What ranks of a learner do in tests; functions of a module, as processes import them."""

import logging
import os
import signal
import time

import torch
import torch.distributed as dist
from weight_arrays import arrays

from scalerl.errors import ScalerlError
from scalerl.rl.learner.checkpoint import DISK
from scalerl.rl.learner.launch import lead_or_follow
from scalerl.rl.learner.load import load_learner
from scalerl.rl.train import train as train_run
from scalerl.rl.workers.ranks import losses


def log_probs(learner, batch):
    """Of every token that was sampled, by the learner as it is."""
    with torch.no_grad():
        return learner.score(batch.token_NT, batch.sampled_NT[:, 1:])[0]


def train(rank, recipe, batches):
    """Stats and log-probabilities of every step, and the weights at the beginning."""
    learner = load_learner(recipe, recipe.model)
    weights = arrays(learner.weights())
    return [(learner.step(batch), log_probs(learner, batch)) for batch in batches], weights


def train_and_save(rank, recipe, batches, folder):
    """Train, save, and train once more while the save is under way."""
    learner = load_learner(recipe, recipe.model)
    for batch in batches[:-1]:
        learner.step(batch)
    wait = learner.save(folder / DISK)
    last = learner.step(batches[-1])
    wait()
    return last, log_probs(learner, batches[-1])


def load_and_train(rank, recipe, batch, folder):
    """Go on from what was saved."""
    learner = load_learner(recipe, recipe.model)
    learner.restore(folder)
    return learner.step(batch), log_probs(learner, batch), learner.version


def save_hf(rank, recipe, batches, folder):
    """Train, and save in Hugging Face format."""
    learner = load_learner(recipe, recipe.model)
    for batch in batches:
        learner.step(batch)
    learner.save_pretrained(folder)
    return arrays(learner.weights())


def steps(rank, recipe, batches):
    """Stats of every step."""
    learner = load_learner(recipe, recipe.model)
    return [learner.step(batch) for batch in batches]


def restore_and_train(rank, recipe, batch, folder):
    """Go on from the state of the learner of one process."""
    learner = load_learner(recipe, recipe.model)
    learner.restore(folder)
    return learner.step(batch), log_probs(learner, batch)


def held_scores(learner, batches):
    """Of the last batch by the weights before the first, with a step after each."""
    held = learner.hold()
    token_NT, wanted_NT = torch.from_numpy(batches[-1].token_NT), torch.from_numpy(batches[-1].sampled_NT)
    learner.step(batches[0])
    scores = learner.held_scores(held, token_NT, wanted_NT[:, 1:], (True,))
    learner.step(batches[-1])
    return [*scores, log_probs(learner, batches[-1])]


def hold_and_train(rank, recipe, batches):
    """`held_scores` of a sharded learner."""
    return held_scores(load_learner(recipe, recipe.model), batches)


def run_out_on_rank_1(rank, recipe, batches):
    """Rank 1 asks for more memory than there is in its second step, in the middle of a pass."""
    learner = load_learner(recipe, recipe.model)
    learner.step(batches[0])
    if rank == 1:
        type(recipe.loss).fails_at = type(recipe.loss).calls + 1
    with losses(20.0):
        learner.step(batches[1])


def lose_one(rank, recipe, batch, how):
    """Rank 1 is killed after a step, or says nothing any more; rank 0 goes on."""
    learner = load_learner(recipe, recipe.model)
    learner.step(batch)
    if rank == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(12)
    with losses(4.0):
        learner.step(batch)


def run(rank, recipe, folder, port, options):
    """A whole run whose learner is on all ranks, as torchrun makes one; rank 0 returns its warnings, with the
    line of what ended it last."""
    n_ranks, said = dist.get_world_size(), []
    dist.destroy_process_group()
    where = {"RANK": rank, "WORLD_SIZE": n_ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in where.items()}
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("scalerl").addHandler(handler)

    def lead(load):
        train_run(recipe, folder, recipe.model, evaluate_aside=False, load=load, **options)

    try:
        lead_or_follow(60.0, lead)
    except ScalerlError as error:
        said.append(str(error))
    return said
