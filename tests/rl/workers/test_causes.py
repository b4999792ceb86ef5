"""What Ray says of a death, in a few words; the texts are those of Ray 2.60."""

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError

from scalerl.rl.workers.ray.actors import SupervisedActor, cause_of

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


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (died(EXIT + KILLED), "its process ended (pid 7, SYSTEM_ERROR: connection error code 2)"),
        (died(EXIT + "USER_ERROR"), "its process ended (pid 7, USER_ERROR)"),
        (
            died(EXIT + "NODE_OUT_OF_MEMORY Worker exit detail: Task was killed due to the node running low"),
            "its process ended (pid 7): Ray ended it, as its node was out of memory",
        ),
        (died(HEAD + GONE), "its node is gone (health check failed due to missing too many heartbeats)"),
        (
            died(HEAD + "The actor is dead because it was killed by `ray.kill`."),
            "it died (it was killed by `ray.kill`.)",
        ),
        (died(NO_MODULE), "it could not begin at 10.0.0.3 (ModuleNotFoundError: No module named 'scalerl')"),
        (ActorUnavailableError(AWAY, b"a" * 16), "it cannot be reached (Socket closed)"),
    ],
)
def test_the_cause_and_none_of_the_guesses(error, said):
    assert cause_of(error, 7) == said
    member = SupervisedActor("generator 3", None, 60.0, "node 10.0.0.3 (e5a55c88)", 7)
    lost = member.lost(error)
    assert str(lost) == f"generator 3 on node 10.0.0.3 (e5a55c88) is lost: {said}"
    assert (lost.who, lost.node) == (member.name, member.node)
