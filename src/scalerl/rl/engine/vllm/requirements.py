"""What a vLLM server must be and be started with, and the check of a running one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from scalerl.errors import WorkerError, brief
from scalerl.rl.engine.vllm.protocol import LENGTH_CONTROL, WORKER
from scalerl.rl.sync.vllm_client import Client, ServerLostError


@dataclass(frozen=True)
class Requirements:
    """What a server must be."""

    tokenizer: Any
    texts: tuple[str, ...]
    """Texts that its tokenizer must split into the same tokens."""
    shape: Mapping[str, Any]
    """The shape of the model, by `shape_of`."""
    positions: int
    precision: str
    fp32_logits: bool
    slots: int

    def flags(self) -> list[str]:
        """Return the arguments that any server must be started with, our own and others'."""
        head = {"head_dtype": "float32"} if self.fp32_logits else {}
        return [
            *("--dtype", self.precision),
            *("--max-num-seqs", str(self.slots), "--max-model-len", str(self.positions)),
            *("--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"),
            *("--worker-extension-cls", WORKER, "--logits-processors", LENGTH_CONTROL),
            "--enable-prompt-tokens-details",
            *(("--hf-overrides", json.dumps(head)) if head else ()),
        ]

    def mismatches(self, found: Mapping[str, Any]) -> Iterator[str]:
        """Yield the arguments that a server lacks, by what its worker extension reports of it."""
        if found["dtype"] != self.precision:
            yield f"--dtype {self.precision} (it has {found['dtype']})"
        if self.fp32_logits and found["head_dtype"] != "float32":
            yield '--hf-overrides \'{"head_dtype": "float32"}\''
        if found["logprobs_mode"] != "processed_logprobs":
            yield "--logprobs-mode processed_logprobs"
        if found["max_num_seqs"] < self.slots:
            yield f"--max-num-seqs {self.slots} (it has {found['max_num_seqs']})"
        if found["v2_model_runner"]:
            yield "VLLM_USE_V2_MODEL_RUNNER=0"
        if not found["length_control"]:
            yield f"--logits-processors {LENGTH_CONTROL}"
        if found["data_parallel"] > 1:
            yield "--data-parallel-size 1 (a server for each instead: an update pauses one engine)"
        if found["pipeline_parallel"] > 1:
            yield "--pipeline-parallel-size 1 (no stage but the last has the newest token)"
        if found["speculative"]:
            yield "no --speculative-config (its drafts follow neither new weights nor forced tokens)"


async def check_server(client: Client, required: Requirements, seconds: float) -> tuple[str, int]:
    """Check that it is a vLLM server as required, and return the name of its model and its seed.

    Raises:
        WorkerError: it is another server, serves another model, or was started with other arguments.
        ServerLostError: it does not answer.
    """
    models = await client.request("/v1/models", seconds=seconds)
    try:
        name, longest = models["data"][0]["id"], int(models["data"][0]["max_model_len"])
    except (KeyError, IndexError, TypeError, ValueError):
        raise WorkerError(f"{client.name}: {brief(models)} from /v1/models: not a vLLM server") from None
    if longest < required.positions:
        raise WorkerError(
            f"{client.name}: {name} takes {longest} tokens, the recipe needs {required.positions} "
            "(--max-model-len)"
        )
    for text in required.texts:
        ours = required.tokenizer(text, add_special_tokens=False)["input_ids"]
        body = {"model": name, "prompt": text, "add_special_tokens": False}
        theirs = await client.request("/tokenize", body, seconds=seconds)
        if not isinstance(theirs, dict) or theirs.get("tokens") != ours:
            raise WorkerError(
                f"{client.name}: {name} has another tokenizer ({brief(text)} is {brief(ours)} here): "
                "serve the model that the recipe names"
            )
    seed = await _check_flags(client, required, seconds)
    paused = await client.request("/is_paused", seconds=seconds)
    if isinstance(paused, dict) and paused.get("is_paused"):  # a trainer was killed during an update
        await client.request("/resume", {}, seconds=seconds)
    return name, seed


async def _check_flags(client: Client, required: Requirements, seconds: float) -> int:
    answer: Any = None
    try:
        answer = await client.request("/collective_rpc", {"method": "scalerl_describe"}, seconds=seconds)
        found = answer["results"][0]
        other = {name: n for name, n in found["shape"].items() if n != required.shape[name]}
        wrong, seed = list(required.mismatches(found)), int(found["seed"])
    except ServerLostError as error:
        if not await client.is_well():
            raise
        raise WorkerError(f"{error}: start it with --worker-extension-cls {WORKER}") from error
    except (KeyError, IndexError, TypeError):
        raise WorkerError(f"{client.name}: {brief(answer)} from /collective_rpc: not our extension") from None
    if other:
        ours = {name: required.shape[name] for name in other}
        raise WorkerError(f"{client.name}: it serves another model ({other}, and {ours} here)")
    if wrong:
        raise WorkerError(f"{client.name}: start it with {', '.join(wrong)}")
    return seed
