"""An OpenAI-compatible endpoint on this machine, answered by a function of the question."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Asked:
    """What the endpoint has seen."""

    def __init__(self) -> None:
        self.questions: list[str] = []
        self.under_way = 0
        self.most_under_way = 0
        self.lock = threading.Lock()


@contextmanager
def endpoint(reply: Callable[[str, int], tuple[int, str]]) -> Iterator[tuple[str, Asked]]:
    """Serves `reply(question, how many were asked before)` as (status, text); yields the base URL."""
    asked = Asked()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with asked.lock:
                number = len(asked.questions)
                asked.questions.append(body["messages"][-1]["content"])
                asked.under_way += 1
                asked.most_under_way = max(asked.most_under_way, asked.under_way)
            status, text = reply(body["messages"][-1]["content"], number)
            content = json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]}).encode()
            with asked.lock:
                asked.under_way -= 1
            self.send_response(status if self.path == "/v1/chat/completions" else 404)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
