"""The built-in generator: continuous batching on a Hugging Face model, one decode step at a time.

    submit -> waiting (in order of admission) -> decode slots -> complete -> take (in order of admission)

A slot holds one completion. When it finishes, the next waiting completion takes the slot at once: no slot
waits for the rest of a batch. `update` changes the weights between two decode steps: completions in flight
continue on the KV cache of older weights, and every token records the version that sampled it. Completions of
one group that start together share the prefill of their prompt.

When an environment answers a turn, the completion keeps its slot and its KV cache but does not decode until
the answer is there; other slots continue. The tokens of the answer are then decoded one at a time, like those
of an interruption, and the model continues after them.

Shapes in names: S decode slots, A slots in a step, B prompts that are read, D hidden size, V vocabulary,
T tokens of an answer; PLK as in `scalerl.rl.engine.slots`.
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
"""Decode steps from the end of a turn to the use of its answer, if completions must not depend on the speed
of environments."""
_POLL_SECONDS = 0.05
"""Longest wait for an answer, in seconds, if no completion can decode without one."""


class TorchGenerator(Generator):
    """The built-in generator: a transformers model in this process, `n_slots` completions at a time."""

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
        """Use `engine`, if given, in place of a new one; it must have this model and `n_slots` (see `lent`).

        `memory` gives the estimate for out-of-memory errors. Without an `environment` there is one turn."""
        super().__init__(version=0)
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.sampling = sampling
        self._counters, self._memory = Counters(), memory
        self.environment = environment
        self.answers_at_once = False
        """Whether answers are used as soon as they arrive, rather than at decode steps that do not depend on
        the speed of environments."""
        self._head: tuple[torch.Tensor, torch.Tensor | None] | None = None
        """The LM head of the current weights, kept because on a CPU it is a copy in float32."""
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
        """The pending answers by slot."""
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
        """Number of completions that wait or are in a slot."""
        return len(self._waiting) + int(self._slots.active_S.sum())

    def work(self) -> None:
        """Make one decode step.

        Raises:
            OutOfMemoryError: the device has too little memory; the step has changed nothing.
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
        """Load the first weights; this counts as start-up, not as work."""
        self.update(weights, version)
        self._counters.seconds = 0.0

    def wait_until_started(self) -> None:
        """Return at once: `start` has loaded the weights."""

    def close(self) -> None:
        """Stop the processes of the environment, if there is one."""
        if self.environment is not None:
            self.environment.close()

    @property
    def installed(self) -> int:
        """The version of the weights, which `update` loads before it returns."""
        return self.version

    # -- resume ----------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return all state but the weights; a resumed run continues bit for bit."""
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
        """Continue from `state`, with slots, tokens and KV cache as they were."""
        self._restore_groups(state)
        self.version = state["version"]
        self._counters = Counters(**state["counters"])
        for seq_no, rollouts in unpack_samples(state["partial"]).items():
            self._partial[seq_no] = {rollout.sample: rollout for rollout in rollouts}
        requests = {n: self._factory.requests(n, group) for n, group in self._incomplete.items()}
        slots, waiting = state["slots"], state["waiting"]
        if len(slots) and slots[-1] >= len(self._slots):  # fewer slots now: restart running completions
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
        """Yield a generator with another seed on the same model and engine; this one pauses meanwhile.

        The KV cache in use and the weights are copied to CPU memory, and restored at the end.
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
            self._engine.free(np.arange(len(self._slots)))  # slots of an evaluation that was abandoned
            with torch.inference_mode():  # the cache was allocated in this mode
                self._engine.restore(slots, cache)

    # -- one decode step -------------------------------------------------------------------------------

    @torch.inference_mode()
    def tick(self) -> None:
        """Refill free slots, run the model for one position, sample, and keep finished completions."""
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
        except (RuntimeError, MemoryError):  # such as out of memory: undo, as a checkpoint may be saved now
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
        """Return the last hidden states of the decoding slots, then of each group of slots that start."""
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
        engine: Any = self._engine  # a TransformersEngine: the kernels do not support mixtures of experts
        return engine.chosen()

    def _sample(
        self, logp_AV: torch.Tensor, slots: np.ndarray, at: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Sample by inverse transform, with a uniform number that depends only on (key, position)."""
        draw_A = uniform(self._slots.key_S[slots], at - self._slots.start_S[slots])
        # In float64: near 1, a float32 sum does not change with tokens rarer than 6e-8.
        cdf_AV = logp_AV.double().exp_().cumsum(-1)  # ends at 1, up to rounding
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
        """Undo the start of completions; they wait again in the same order."""
        for slot in sorted(slots, reverse=True):
            self._waiting.appendleft(self._slots.free(slot))

    def _finish(self, truncated_of: Mapping[int, bool]) -> None:
        """Keep the completions of some slots and free these slots."""
        for slot, truncated in truncated_of.items():
            rollout = self._slots.rollout(slot, truncated)
            self._add(self._slots.free(slot).seq_no, rollout)
        if truncated_of:
            self._engine.free(np.array(list(truncated_of)))

    # -- the answers of an environment -----------------------------------------------------------------

    def _ask_environment(self, slot: int) -> bool:
        """Ask the environment to answer the turn that ended in a slot; return False if it was the last."""
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
        """Use the answers that are due: each continues or ends its completion.

        With `answers_at_once` an answer is due when it arrives. Otherwise this must not depend on time: it is
        due `ANSWER_DELAY_STEPS` after it was asked for, or at once if no slot can decode and it was asked for
        first; due answers are waited for.
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
        """Give a slot the tokens of an answer; None means failure, and no tokens end the completion."""
        held = self._slots
        held.asked_S[slot] = -1
        at = int(held.next_S[slot])
        if token_T is None or not len(token_T):
            self._finish({slot: token_T is None})
        elif at - held.start_S[slot] + len(token_T) >= self.sampling.length.max_tokens:
            self._finish({slot: True})  # the budget has no room for it and a token sampled after it
        else:
            held.token_SL[slot, at : at + len(token_T)] = token_T
            held.given_S[slot] = at + len(token_T)
