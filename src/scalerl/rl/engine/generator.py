"""The built-in generator: continuous batching on a Hugging Face model, one decode step at a time.

    submit -> waiting (in order of admission) -> decode slots -> complete -> take (in order of admission)

A slot holds one completion. When it finishes, the next waiting completion takes the slot at once, whatever
the other slots are doing: no slot waits for the rest of a batch. `update` exchanges the weights between two
decode steps: completions in flight go on with the KV cache that older weights wrote, and every token records
the version that sampled it. Completions of one group that start together share the pass over their prompt.

Where an environment answers a turn, the completion keeps its slot and its KV cache, and decodes nothing until
the answer is there; others go on. The tokens of the answer are then decoded one by one, as those of an
interruption are, and the model goes on behind them.

Shapes in names: S decode slots, A slots that make a step, B prompts that are read, D hidden size,
V vocabulary, T tokens of an answer; PLK as in `scalerl.rl.engine.slots`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from scalerl.rl.algo.length import LengthState
from scalerl.rl.config.memory import RoleMemory
from scalerl.rl.engine.engine import Engine, make_engine
from scalerl.rl.engine.ordered import Generator, pack_samples, unpack_samples
from scalerl.rl.engine.sampling import GroupRequest, Request, RequestFactory, Sampling, uniform
from scalerl.rl.engine.slots import DecodeSlots
from scalerl.rl.model.causal_lm import FlopCount, cut_TV, head_of, log_probs_TV
from scalerl.rl.model.out_of_memory import within_memory
from scalerl.rl.model.weights import load_weights
from scalerl.rl.types import Counters, Weights
from scalerl.rl.verify.environment import TaskEnvironment, TurnAnswer

ANSWER_DELAY_STEPS = 8
"""Decode steps after a turn in which its answer is installed, where completions must not depend on how fast
environments are."""
_POLL_SECONDS = 0.05
"""Seconds to wait for an answer, where no completion can go on without one."""


class TorchGenerator(Generator):
    """Samples with a Transformers model in this process, `n_slots` completions at a time."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        sampling: Sampling,
        n_slots: int,
        engine: Engine | None = None,
        memory: Callable[[], RoleMemory] | None = None,
        environment: TaskEnvironment | None = None,
    ) -> None:
        """`engine` is one of this model with so many slots, in place of a new one; see `lent`. `memory` is
        what the memory check says of it, for the message where there is too little. `environment` answers
        the turns of completions; without one they have one turn."""
        super().__init__(version=0)
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.sampling = sampling
        self._counters, self._memory = Counters(), memory
        self.environment = environment
        self.answers_at_once = False
        """Whether answers are installed as soon as they are there; else at decode steps that do not depend on
        how fast environments are."""
        self._head: tuple[torch.Tensor, torch.Tensor | None] | None = None
        """The LM head of the present weights: on a CPU a copy in float32, not to be made in every step."""
        self._factory = RequestFactory(tokenizer, sampling)
        self._flop_count = FlopCount.of(model)
        self._device = next(model.parameters()).device
        self._waiting: deque[Request] = deque()
        prompt_tokens, new_tokens = sampling.max_prompt_tokens, sampling.length.max_tokens
        how = n_slots, prompt_tokens, new_tokens, sampling.engine, sampling.experts
        self._engine = engine or make_engine(model, *how)
        routers = getattr(self._engine, "routers", None) if sampling.experts else None
        self._slots = DecodeSlots(n_slots, prompt_tokens + new_tokens + 1, routers)
        self._answers: dict[int, TurnAnswer] = {}
        """The answers that slots wait for."""
        self._length = LengthState(sampling.length, n_slots)

    # -- the interface ---------------------------------------------------------------------------------

    def _assign(self, seq_no: int, group: GroupRequest) -> None:
        self._waiting += self._factory.requests(seq_no, group)

    @property
    def counters(self) -> Counters:
        """Counters so far."""
        return self._counters

    @property
    def unfinished(self) -> int:
        """Completions that wait or are under way."""
        return len(self._waiting) + int(self._slots.active_S.sum())

    def work(self) -> None:
        """Make one decode step.

        Raises:
            OutOfMemoryError: the device does not hold it; nothing has changed.
        """
        started = time.perf_counter()
        if self._memory is None:
            self.tick()
        else:
            within_memory(self.tick, "generator", self._memory)
        self._counters.seconds += time.perf_counter() - started

    def update(self, weights: Weights, version: int) -> None:
        """Install new weights between two decode steps; the KV cache stays as it is."""
        started = time.perf_counter()
        load_weights(self.model, weights)
        self._head = None
        self.version = version
        self._counters.seconds += time.perf_counter() - started

    def start(self, weights: Weights, version: int) -> None:
        """Install the first weights, which is start-up and counted as no work."""
        self.update(weights, version)
        self._counters.seconds = 0.0

    def wait_until_started(self) -> None:
        """Return at once: see `start`."""

    def close(self) -> None:
        """Stop the processes of the environment, if there is one."""
        if self.environment is not None:
            self.environment.close()

    @property
    def installed(self) -> int:
        """The version of the weights: they are exchanged at once."""
        return self.version

    # -- resume ----------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return everything but the weights: the resumed run is the same run, bit for bit."""
        slots = np.flatnonzero(self._slots.active_S)
        running = [self._slots.requests[slot] for slot in slots.tolist()]
        return super().state() | {
            "partial": pack_samples({n: list(found.values()) for n, found in self._partial.items()}),
            "waiting": [[request.seq_no, request.sample] for request in self._waiting],
            "running": [[request.seq_no, request.sample] for request in running],
            "slots": slots,
            "arrays": self._slots.state(slots),
            "length": self._length.save(slots),
            "cache": self._engine.state(slots, self._slots.next_S[slots]),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from `state`, with slots, tokens and KV cache as they were."""
        self._restore_groups(state)
        self.version = state["version"]
        self._counters = Counters(**state["counters"])
        for seq_no, rollouts in unpack_samples(state["partial"]).items():
            self._partial[seq_no] = {rollout.sample: rollout for rollout in rollouts}
        requests = {n: self._factory.requests(n, group) for n, group in self._incomplete.items()}
        slots, waiting = state["slots"], state["waiting"]
        if len(slots) and slots[-1] >= len(self._slots):  # fewer now: what was running begins again
            self._counters.restarted += len({seq_no for seq_no, _ in state["running"]})
            waiting, slots = sorted([*state["running"], *waiting]), slots[:0]
        self._waiting = deque(requests[seq_no][sample] for seq_no, sample in waiting)
        if not len(slots):
            return
        running = [requests[seq_no][sample] for seq_no, sample in state["running"]]
        self._slots.restore(slots, running, state["arrays"])
        self._length.load(slots, state["length"])
        self._engine.restore(slots, state["cache"])
        for slot in slots[self._slots.asked_S[slots] >= 0].tolist():
            self._ask_environment(slot)

    @contextmanager
    def lent(self, seed: int) -> Iterator[TorchGenerator]:
        """Yield a generator with another seed on the same model and engine, for as long as this one rests.

        What is in flight here, and the weights, are in the memory of the CPU meanwhile, and then put back.
        """
        slots = np.flatnonzero(self._slots.active_S)
        cache = self._engine.state(slots, self._slots.next_S[slots])
        before = {name: p.detach().to("cpu", copy=True) for name, p in self.model.named_parameters()}
        sampling = replace(self.sampling, seed=seed, experts=False)
        self._engine.free(slots)
        try:
            yield TorchGenerator(self.model, self.tokenizer, sampling, len(self._slots), self._engine)
        finally:
            with torch.no_grad():
                for name, parameter in self.model.named_parameters():
                    parameter.copy_(before[name])
            self._engine.free(np.arange(len(self._slots)))  # those of an evaluation that was given up
            with torch.inference_mode():  # in which the cache was made
                self._engine.restore(slots, cache)

    # -- one decode step -------------------------------------------------------------------------------

    @torch.inference_mode()
    def tick(self) -> None:
        """Refill free slots, run the model one position on, sample, and keep what is finished."""
        if self._answers:
            self._install_answers()
        held = self._slots
        decoding = np.flatnonzero(held.decoding_S)
        starting = self._refill()
        slots = np.concatenate([decoding, *starting])
        if not len(slots):
            return
        at, flops = held.next_S[slots], self._counters.flops
        how = self.sampling.temperature, self.sampling.fp32_logits
        try:
            hidden_AD = self._forward(decoding, starting)
            self._head = self._head or head_of(self.model, self.sampling.fp32_logits)
            logp_AV = log_probs_TV(self.model, hidden_AD, *how, self._head)
            logp_AV = cut_TV(logp_AV, self.sampling.top_p, self.sampling.top_k)
            token_A, logp_A = self._sample(logp_AV, slots, at)
        except (RuntimeError, MemoryError):  # out of memory, say: a checkpoint may be made of what was before
            self._counters.flops = flops
            self._put_back([slot for group in starting for slot in group.tolist()])
            raise
        given_A = at < held.given_S[slots]
        forced_A = np.where(given_A, held.token_SL[slots, at], self._length.forced_token()[slots])
        sampled_A = forced_A < 0
        token_A = np.where(sampled_A, token_A, forced_A)

        held.token_SL[slots, at] = token_A
        held.logp_SL[slots, at] = np.where(sampled_A, logp_A, 0.0)
        held.sampled_SL[slots, at] = sampled_A
        held.version_SL[slots, at] = self.version
        held.next_S[slots] += 1

        self._counters.ticks += 1
        self._counters.tokens += int(sampled_A.sum())
        token_S, given_S = np.full(len(held), -1), np.zeros(len(held), dtype=bool)
        token_S[slots], given_S[slots] = token_A, given_A
        done_S, truncated_S = self._length.advance(token_S, self.sampling.end_tokens, given_S)
        done = {slot: bool(truncated_S[slot]) for slot in np.flatnonzero(done_S & (token_S >= 0)).tolist()}
        self._finish({slot: cut for slot, cut in done.items() if cut or not self._ask_environment(slot)})

    def _forward(self, decoding: np.ndarray, starting: list[np.ndarray]) -> torch.Tensor:
        """Return last hidden states: of the slots that go on, then of each group of slots that start."""
        hidden, held = list[torch.Tensor](), self._slots
        if len(decoding):
            position_A = held.next_S[decoding] - 1
            hidden.append(self._engine.decode(decoding, held.token_SL[decoding, position_A], position_A))
            if held.expert_SPLK is not None:
                held.expert_SPLK[decoding, position_A] = self._chosen_experts()
            self._counters.flops += self._flop_count.forward(len(decoding), float((position_A + 1).sum()))
        if starting:
            prompts = [held.token_SL[slots[0], : held.start_S[slots[0]]] for slots in starting]
            hidden_BD = self._engine.prefill(starting, prompts)
            if held.expert_SPLK is not None:
                for slots, expert_PLK in zip(starting, self._chosen_experts(), strict=True):
                    held.expert_SPLK[slots, : len(expert_PLK)] = expert_PLK
            prompt_A = np.repeat(np.arange(len(starting)), [len(slots) for slots in starting])
            hidden.append(hidden_BD[torch.from_numpy(prompt_A).to(self._device)])
            for n in map(len, prompts):
                self._counters.flops += self._flop_count.forward(n, n * (n + 1) / 2)
        return torch.cat(hidden)

    def _chosen_experts(self) -> np.ndarray:
        engine: Any = self._engine  # that of transformers: the kernels compute no mixtures
        return engine.chosen()

    def _sample(
        self, logp_AV: torch.Tensor, slots: np.ndarray, at: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Invert the cumulative distribution at a number that only (key, position) decide."""
        draw_A = uniform(self._slots.key_S[slots], at - self._slots.start_S[slots])
        # In float64: a sum of 1 in float32 takes up no token rarer than 6e-8.
        cdf_AV = logp_AV.double().exp_().cumsum(-1)  # its end is 1 but for rounding
        threshold_A1 = torch.from_numpy(draw_A).to(self._device)[:, None] * cdf_AV[:, -1:]
        token_A1 = torch.searchsorted(cdf_AV, threshold_A1, right=True).clamp_(max=cdf_AV.shape[-1] - 1)
        logp_A = logp_AV.gather(-1, token_A1)[:, 0]
        return token_A1[:, 0].cpu().numpy(), logp_A.cpu().numpy()

    def _refill(self) -> list[np.ndarray]:
        """Give free slots to the next waiting completions; return the slots that start, by group."""
        free = np.flatnonzero(~self._slots.active_S)[: len(self._waiting)]
        groups: dict[int, list[int]] = {}
        for slot in free.tolist():
            request = self._waiting.popleft()
            self._slots.start(slot, request, self.version)
            self._length.start(slot, request.interrupt_at)
            groups.setdefault(request.seq_no, []).append(slot)
        return [np.array(slots) for slots in groups.values()]

    def _put_back(self, slots: Sequence[int]) -> None:
        """Undo the start of completions: they wait again, in the same order."""
        for slot in sorted(slots, reverse=True):
            self._waiting.appendleft(self._slots.free(slot))

    def _finish(self, truncated_of: Mapping[int, bool]) -> None:
        """Hand over the completions of slots, which are free then."""
        for slot, truncated in truncated_of.items():
            rollout = self._slots.rollout(slot, truncated)
            self._add(self._slots.free(slot).seq_no, rollout)
        if truncated_of:
            self._engine.free(np.array(list(truncated_of)))

    # -- the answers of an environment -----------------------------------------------------------------

    def _ask_environment(self, slot: int) -> bool:
        """Have the environment answer the turn that has ended in a slot; False where it was the last."""
        if self.environment is None:
            return False
        turns = self._slots.turns(slot)
        if len(turns) >= self.environment.turns:
            return False
        self._answers[slot] = self.environment.ask(self._slots.requests[slot].prompt, turns)
        if self._slots.asked_S[slot] < 0:
            self._slots.asked_S[slot] = self._counters.ticks
        return True

    def _install_answers(self) -> None:
        """Have completions go on whose answer is due, and end those that it ends.

        With `answers_at_once` those are due that are there. Else it does not depend on time: due are those of
        `ANSWER_DELAY_STEPS` ago, and where no completion decodes the first ones; they are waited for.
        """
        assert self.environment is not None
        held = self._slots
        idle = not held.decoding_S.any() and (held.active_S.all() or not self._waiting)
        slots = sorted(self._answers, key=lambda slot: (held.asked_S[slot], slot))
        if self.answers_at_once:
            self.environment.poll(_POLL_SECONDS if idle else 0.0)
            due = [slot for slot in slots if self._answers[slot].done]
        else:
            until = held.asked_S[slots[0]] if idle else self._counters.ticks - ANSWER_DELAY_STEPS
            due = [slot for slot in slots if held.asked_S[slot] <= until]
            self.environment.wait([self._answers[slot] for slot in due])
        for slot in due:
            self._install_answer(slot, self._answers.pop(slot).result())

    def _install_answer(self, slot: int, token_T: np.ndarray | None) -> None:
        """Give a slot the tokens of an answer; None is a failure, and no token the end of the completion."""
        held = self._slots
        held.asked_S[slot] = -1
        at = int(held.next_S[slot])
        if token_T is None or not len(token_T):
            self._finish({slot: token_T is None})
        elif at - held.start_S[slot] + len(token_T) >= self.sampling.length.max_tokens:
            self._finish({slot: True})  # it does not fit with a token to sample behind it
        else:
            held.token_SL[slot, at : at + len(token_T)] = token_T
            held.given_S[slot] = at + len(token_T)
