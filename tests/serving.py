"""A real HTTP server for tests, in a thread."""

import threading
from contextlib import contextmanager

import uvicorn


@contextmanager
def running(app, port=0):
    """Serves an application on loopback (port 0 = any free one) while the block runs; yields its address."""
    http = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error", access_log=False))
    thread = threading.Thread(target=http.run, daemon=True)
    thread.start()
    while not http.started:
        assert thread.is_alive()
        threading.Event().wait(0.01)
    try:
        yield f"http://127.0.0.1:{http.servers[0].sockets[0].getsockname()[1]}"
    finally:
        http.should_exit = True
        thread.join()
