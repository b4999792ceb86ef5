"""What Ray says of a death, in a few words, whatever the words of its version; these are of Ray 2.60."""

from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError

from scalerl.rl.workers.ray import backend
from scalerl.rl.workers.ray.backend import RayProcess, cause_of

HEAD = """The actor died unexpectedly before finishing this task.
\tclass_name: GeneratorActor
\tactor_id: 0e263db6c6dc5557dd7d795f01000000
\tpid: 25740
\tip: 10.0.0.3
"""
EXIT = HEAD + "The actor is dead because its worker process has died. Worker exit type: "
KILLED = (
    "SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits with a connection error code 2. End of file. "
    "Some common causes include: (1) the process was killed by the OOM killer due to high memory usage, (2) "
    "ray stop --force was called, or (3) the worker crashed unexpectedly due to SIGSEGV or another error. If "
    "the process was killed by the kernel OOM killer, consider enabling --enable-resource-isolation."
)
GONE = (
    "The actor died because its node has died. Node Id: 64a9bb3c\n\tthe actor's node was terminated "
    "unexpectedly: health check failed due to missing too many heartbeats"
)
_TRACE = (
    "\x1b[36mray::A.__init__()\x1b[39m (pid=9, ip=10.0.0.3, actor_id=3005ffd1, repr=<scalerl.TemporaryActor>)"
    "\n            ^^^^^^^^^^\n"
)
NO_MODULE = (
    f"The actor died because of an error raised in its creation task, {_TRACE}RuntimeError: The actor with "
    "name A failed to import on the worker. This may be because needed library dependencies are not in"
    f"stalled in the worker environment:\n\n{_TRACE}ModuleNotFoundError: No module named 'scalerl'"
)
AWAY = "The actor is temporarily unavailable: RpcError: RPC error: Socket closed rpc_code: 14."


def died(text):
    error = ActorDiedError()
    error.error_msg = text
    error.args = (text,)
    return error


def not_made(text):
    error = died(text)
    error._actor_init_failed = True
    return error


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            died(EXIT + KILLED),
            "its process ended (pid 7, The actor is dead because its worker process has died.",
        ),
        (died(EXIT + "USER_ERROR"), "Worker exit type: USER_ERROR)"),
        (died(EXIT + "NODE_OUT_OF_MEMORY Worker exit detail: Task was killed"), "type: NODE_OUT_OF_MEMORY"),
        (died(GONE), "its node has died"),
        (
            died(HEAD + "It was killed by `ray.kill`."),
            "its process ended (pid 7, It was killed by `ray.kill`.)",
        ),
        (not_made(NO_MODULE), "it could not begin (ModuleNotFoundError: No module named 'scalerl')"),
        (ActorUnavailableError(AWAY, b"a" * 16), "it cannot be reached (The actor "),
    ],
)
def test_the_cause_and_none_of_the_guesses(error, said, monkeypatch):
    monkeypatch.setattr(backend, "_has_died", lambda node: False)
    cause = cause_of(error, 7, "node 10.0.0.3 (e5a55c88)")
    assert said in cause
    assert len(cause) < 220
    assert "\n" not in cause
    assert "Some common causes" not in cause


def test_a_node_that_is_gone_is_the_cause(monkeypatch):
    monkeypatch.setattr(backend.ray, "nodes", lambda: [{"NodeID": "e5a55c88ff", "Alive": False}])
    assert cause_of(died(GONE), 7, "node 10.0.0.3 (e5a55c88)").startswith("its node is gone (")
    assert cause_of(died(GONE), 7, "node 10.0.0.4 (aaaaaaaa)").startswith("its process ended (pid 7, ")


def test_a_loss_names_the_worker_its_node_and_the_cause():
    process: Any = object.__new__(RayProcess)
    process.name, process.node = "generator 3", "node 10.0.0.3 (e5a55c88)"
    lost = process.lost("no heartbeat")
    assert str(lost) == "generator 3 on node 10.0.0.3 (e5a55c88) is lost: no heartbeat"
    assert (lost.who, lost.node) == (process.name, process.node)
