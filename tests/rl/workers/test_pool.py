"""What a pool says of a worker that it lost."""

from contextlib import closing

import echoing

from scalerl.own_code import load
from scalerl.rl.workers.pool import PoolWorker, WorkerPool
from scalerl.rl.workers.processes import Processes


class EchoPool(WorkerPool[PoolWorker]):
    noun, role = "worker", "echo"

    def _send(self, worker, number, work):
        worker.process.send(work)

    def _received(self, worker, message):
        self.complete(worker, message.value)


def test_a_file_of_custom_code_that_was_edited_is_reported_where_a_lost_worker_loads_it_again(
    tmp_path, caplog
):
    """Its rewards, say, are then by the new code, and those of the other workers by the old one."""
    own, same, gone = tmp_path / "own.py", tmp_path / "same.py", tmp_path / "gone.py"
    for file in (own, same, gone):
        file.write_text("right = 1.0\n")
        load(f"{file}:right")
    own.write_text("right = 0.0\n")
    gone.unlink()
    with closing(EchoPool([PoolWorker("worker 0", 0)], Processes(), echoing.echo, ["hello"])) as pool:
        pool.start()
        pool.wait_until_started()
        assert not caplog.messages
        pool.add(0, "exit")
        assert pool.wait_for(lambda: bool(pool.lost), 60)
    text = f"{own} has changed since the run began: the next process goes by the new code"
    assert [message for message in caplog.messages if "own.py" in message] == [text]
    assert not any(name in caplog.text for name in ("same.py", "gone.py"))
