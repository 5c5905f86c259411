"""A service that judges, and a command that runs while it does:

    python examples/verifiers/service.py megatron-dapo train ... reward.remote.url=http://127.0.0.1:8123

The standard library is all it needs; a real one may be written in any language, on any machine.
"""

import argparse
import json
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PORT = 8123
_NUMBER = re.compile(r"\d{1,9}")


class Judge(BaseHTTPRequestHandler):
    """`POST` of {"requests": [{"prompt", "response", "ground_truth"}]}; docs/rewards.md has the contract."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["requests"]
        answer = json.dumps({"verdicts": [verdict(**request) for request in asked]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *arguments: object) -> None:
        """Not a line for each batch."""


def verdict(prompt: str, response: str, ground_truth: str) -> dict[str, object]:
    """Right if the last line is an answer line whose only number is the ground truth."""
    last = response.strip().rpartition("\n")[2]
    numbers = _NUMBER.findall(last) if last.startswith("Answer:") else []
    stated = numbers[0] if len(numbers) == 1 else None
    return {"accuracy": stated == ground_truth, "extracted": stated, "rule": "service"}


def main() -> int:
    """Serves while the command that the arguments name runs; its exit code."""
    parser = argparse.ArgumentParser(description="Serves while a command runs.")
    parser.add_argument("--port", type=int, default=PORT)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    server = ThreadingHTTPServer(("127.0.0.1", options.port), Judge)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        return subprocess.run(options.command, check=False).returncode
    finally:
        server.shutdown()


if __name__ == "__main__":
    sys.exit(main())
