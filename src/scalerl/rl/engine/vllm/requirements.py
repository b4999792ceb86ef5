"""Requirements on a vLLM server, as arguments to start it with, and as a check of a running one."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from scalerl.errors import WorkerError, brief
from scalerl.rl.sync.vllm_client import VllmClient

WORKER = "scalerl.rl.engine.vllm.served.Worker"
LENGTH_CONTROL = "scalerl.rl.engine.vllm.served:LengthProcessor"


@dataclass(frozen=True)
class Requirements:
    """The properties that a server must have."""

    tokenizer: Any
    texts: tuple[str, ...]
    """Texts that its tokenizer must turn into the same tokens as ours."""
    shape: Mapping[str, Any]
    """The shape of the model, by `shape_of`."""
    positions: int
    precision: str
    fp32_logits: bool
    slots: int

    def flags(self) -> list[str]:
        """Return the arguments that every engine must be started with."""
        head = {"head_dtype": "float32"} if self.fp32_logits else {}
        return [
            *("--dtype", self.precision),
            *("--max-num-seqs", str(self.slots), "--max-model-len", str(self.positions)),
            # Log-probabilities after the temperature; and no top-p or top-k of generation_config.json.
            *("--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"),
            *("--worker-extension-cls", WORKER, "--logits-processors", LENGTH_CONTROL),
            *(("--hf-overrides", json.dumps(head)) if head else ()),
        ]

    def mismatches(self, found: Mapping[str, Any]) -> Iterator[str]:
        """Yield the arguments that a server lacks, according to the report of its worker extension."""
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


async def check_server(client: VllmClient, required: Requirements, seconds: float) -> int:
    """Check that an engine meets the requirements, and return its seed.

    Raises:
        WorkerError: it is not a vLLM server, serves another model, or was started with other arguments.
        WorkerLostError: it does not answer.
    """
    name, longest = await client.call("limits", seconds=seconds)
    if longest < required.positions:
        raise WorkerError(
            f"{client.name}: {name} takes {longest} tokens, the recipe needs {required.positions} "
            "(--max-model-len)"
        )
    # Prompts are sent as tokens: another tokenizer would silently mean another prompt.
    for text in required.texts:
        ours = required.tokenizer(text, add_special_tokens=False)["input_ids"]
        if await client.call("tokenize", text, seconds=seconds) != ours:
            raise WorkerError(
                f"{client.name}: {name} has another tokenizer ({brief(text)} is {brief(ours)} here): "
                "serve the model that the recipe names"
            )
    found = await client.call("describe", seconds=seconds)
    try:
        other = {name: n for name, n in found["shape"].items() if n != required.shape[name]}
        wrong, seed = list(required.mismatches(found)), int(found["seed"])
    except (KeyError, TypeError):
        raise WorkerError(f"{client.name}: {brief(found)} from its worker: not our extension") from None
    if other:
        ours = {name: required.shape[name] for name in other}
        raise WorkerError(f"{client.name}: it serves another model ({other}, and {ours} here)")
    if wrong:
        raise WorkerError(f"{client.name}: start it with {', '.join(wrong)}")
    return seed
