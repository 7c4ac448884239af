"""A warm process that has imported vLLM once and forks a worker for each connection.

Runs in vLLM's own environment:  python -m tests.support.vllm.zygote SOCKET

vLLM takes about 10 s to import and 2 s to build a tiny engine. The imports are paid here, so each
worker costs the 2 s. A worker leads its own process group, so that a test can kill it with all it
started; the zygote dies with whoever holds its standard input.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import traceback

from tests.support.vllm.forking import fork_what_vllm_spawns

# Before torch and vLLM read them. One thread each: many workers share two cores.
SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCH_COMPILE_DISABLE": "1",
}


def _import_vllm() -> None:
    import transformers  # noqa: F401
    import vllm.engine.arg_utils
    import vllm.model_executor.layers.quantization.online.base
    import vllm.v1.engine.llm_engine
    import vllm.v1.executor.multiproc_executor
    import vllm.v1.worker.cpu_model_runner
    import vllm.v1.worker.cpu_worker  # noqa: F401

    # All that our connector imports, and not its own module, which registers its name.
    import ownerserve.engines.vllm.build
    import ownerserve.engines.vllm.replay.padding
    import ownerserve.engines.vllm.worker_side.worker  # noqa: F401
    from tests.support.vllm import worker  # noqa: F401


def main(path: str) -> None:
    os.environ.update({name: os.environ.get(name, value) for name, value in SETTINGS.items()})
    _import_vllm()
    fork_what_vllm_spawns()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the workers here
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        while True:
            ready, _, _ = select.select([listener, sys.stdin], [], [])
            if sys.stdin in ready:
                return
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                _worker(connection)
            connection.close()


def _worker(connection: socket.socket) -> None:
    os.setpgid(0, 0)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # Stops reading the test's standard input and never outlives a broken engine's exit handlers.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    from tests.support.vllm.worker import serve

    code = 1
    try:
        serve(connection)
        code = 0
    except BaseException:  # noqa: BLE001  the root of this process
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1])
