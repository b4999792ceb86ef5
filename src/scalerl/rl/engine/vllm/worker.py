"""A worker with a vLLM engine, driven by calls over the worker's channel.

It runs with the Python of an environment that has vLLM, and imports only modules of scalerl that need no
package but numpy.

    (number, method, arguments)  ->  ("answer", (number, value)) or ("refused", (number, why, retry))

When the channel closes, however the trainer ended, the engine and all its processes (a process group) are
killed, and the folder of weights in transit is removed.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import asyncio
import os
import shutil
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from scalerl.errors import brief_error
from scalerl.rl.sync.vllm_client import SampledTokens
from scalerl.rl.workers.backend import Channel

_LOOK = 0.5  # seconds between two checks that the leader of the process group is alive
_CLOSING = 10.0  # seconds that the engine has to remove its shared memory


def serve_by_actor(channel: Channel, folder: str, arguments: Sequence[str]) -> None:
    """Run `serve` with a folder of its own, as the child of an actor.

    Ray kills the children of an actor that ends but not their descendants, so a watcher in the process group
    waits for this process to end and kills the group."""
    leader = os.getpid()
    if os.fork() == 0:
        while os.getppid() == leader:
            time.sleep(_LOOK)
        shutil.rmtree(folder, ignore_errors=True)
        os.killpg(0, signal.SIGKILL)
    serve(channel, folder, arguments)


def serve(channel: Channel, folder: str, arguments: Sequence[str]) -> None:
    """Run a vLLM engine with these arguments of its command until the channel closes."""
    asyncio.run(_serve(channel, folder, arguments))
    os.killpg(0, signal.SIGKILL)  # processes that the engine left behind


async def _serve(channel: Channel, folder: str, arguments: Sequence[str]) -> None:
    loop, closed = asyncio.get_running_loop(), asyncio.Event()
    calls: asyncio.Queue[tuple[int, str, Sequence[Any]]] = asyncio.Queue()

    def receive() -> None:
        with suppress(EOFError):
            while True:
                loop.call_soon_threadsafe(calls.put_nowait, channel.receive())
        shutil.rmtree(folder, ignore_errors=True)
        loop.call_soon_threadsafe(closed.set)
        time.sleep(_CLOSING)
        os.killpg(0, signal.SIGKILL)  # the engine may hang or still be loading a model

    threading.Thread(target=receive, name="receive", daemon=True).start()
    engine = _Engine(arguments)
    channel.send("started", os.environ.get("CUDA_VISIBLE_DEVICES"))
    taking = asyncio.create_task(_take(calls, engine, channel))
    await closed.wait()
    taking.cancel()
    engine.close()


async def _take(calls: asyncio.Queue[Any], engine: _Engine, channel: Channel) -> None:
    running = set[asyncio.Task[None]]()
    while True:
        task = asyncio.create_task(_answer(engine, channel, *await calls.get()))
        running.add(task)  # the event loop holds only a weak reference to a task
        task.add_done_callback(running.discard)


async def _answer(
    engine: _Engine, channel: Channel, number: int, method: str, arguments: Sequence[Any]
) -> None:
    from vllm.exceptions import VLLMClientError
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        value = await getattr(engine, method)(*arguments)
    except EngineDeadError as error:
        channel.send("lost", brief_error(error))
    except Exception as error:
        wrong = isinstance(error, (VLLMClientError, ValueError, TypeError))
        channel.send("refused", (number, f"{method}: {brief_error(error)}", not wrong))
    else:
        channel.send("answer", (number, value))


class _Engine:
    """The engine; the methods of `scalerl.rl.sync.vllm_client` are called by name and concurrently."""

    def __init__(self, arguments: Sequence[str]) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.utils.argparse_utils import FlexibleArgumentParser
        from vllm.v1.engine.async_llm import AsyncLLM

        parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
        self._llm = AsyncLLM.from_engine_args(
            AsyncEngineArgs.from_cli_args(parser.parse_args(list(arguments)))
        )

    async def limits(self) -> tuple[str, int]:
        model = self._llm.model_config
        return model.model, model.max_model_len

    async def tokenize(self, text: str) -> list[int]:
        return self._llm.get_tokenizer().encode(text, add_special_tokens=False)

    async def describe(self) -> dict[str, Any]:
        return (await self._llm.collective_rpc("scalerl_describe"))[0]

    async def cache_bytes(self) -> int:
        return min(await self._llm.collective_rpc("scalerl_cache_bytes"))

    async def complete(
        self,
        name: str,
        prompt_T: np.ndarray,
        salt: str,
        params: Mapping[str, Any],
        extra: Mapping[str, str],
    ) -> SampledTokens | None:
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        sampling = SamplingParams(
            **params,
            extra_args=dict(extra),
            # Request only tokens, and only once all are sampled.
            detokenize=False,
            flat_logprobs=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompt = tokens_input(prompt_T.tolist(), cache_salt=salt)
        (result,) = [result async for result in self._llm.generate(prompt, sampling, name)]
        (output,) = result.outputs
        if output.finish_reason == "abort":
            return None
        token_T = np.array(output.token_ids, dtype=np.int64)
        # With `logprobs=0` each position has only the sampled token's log-probability.
        logp_T = np.array(output.logprobs.logprobs, dtype=np.float32)
        return SampledTokens(token_T, logp_T, result.num_cached_tokens or 0)

    async def pause(self) -> None:
        await self._llm.pause_generation(mode="keep", clear_cache=False)

    async def resume(self) -> None:
        await self._llm.resume_generation()

    async def install(self, folder: str) -> dict[str, int]:
        return _by_name(await self._llm.collective_rpc("scalerl_install", args=(folder,)))

    async def progress(self) -> dict[str, int]:
        return _by_name(await self._llm.collective_rpc("scalerl_progress"))

    async def abort(self, names: Sequence[str]) -> None:
        await self._llm.abort(names)

    async def transfer(self, method: str, info: Mapping[str, Any]) -> None:
        # By the methods of `WorkerBase`: the engine's methods of these names take other arguments.
        await self._llm.collective_rpc(method, kwargs=dict(info))

    async def world_size(self) -> int:
        return self._llm.vllm_config.parallel_config.world_size

    async def check(self) -> None:
        await self._llm.check_health()

    def close(self) -> None:
        self._llm.shutdown()


def _by_name(found: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Return the tokens of completions by our names, without the eight random digits that vLLM appends."""
    return {key.rpartition("-")[0]: n for of_rank in found for key, n in of_rank.items()}
