"""A registry that ollama pulls from: manifests and blobs over HTTP, blobs by way of another host name."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Registry:
    """Serves blobs and manifests; a context manager.

    `halt_at` makes every answer end its bytes there and wait until `go_on` is set.
    """

    def __init__(self):
        self.blobs: dict[str, bytes] = {}
        self.manifests: dict[str, bytes] = {}
        self.ranges: list[str] = []
        self.halt_at: int | None = None
        self.go_on = threading.Event()
        registry = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                registry.answer(self)

            do_HEAD = do_GET

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.port = self.server.server_address[1]

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.go_on.set()
        self.server.shutdown()
        self.server.server_close()

    def name(self, model: str) -> str:
        return f"127.0.0.1:{self.port}/{model}"

    def answer(self, request):
        parts = request.path.strip("/").split("/")
        if parts[0] == "cdn":
            return self.send(request, self.blobs.get(parts[1]))
        kind, key = parts[-2:]
        if kind == "manifests":
            return self.send(request, self.manifests.get("/".join(parts[1:-2]) + ":" + key))
        data = self.blobs.get(key)
        if data is None or request.command == "HEAD":
            return self.send(request, data)
        # ollama asks for the parts where a redirect to another host leads.
        request.send_response(307)
        request.send_header("Location", f"http://localhost:{self.port}/cdn/{key}")
        request.send_header("Content-Length", "0")
        request.end_headers()

    def send(self, request, data: bytes | None):
        if data is None:
            return request.send_error(404)
        wanted = request.headers.get("Range")
        start, end = 0, len(data) - 1
        if wanted:
            self.ranges.append(wanted)
            start, end = (int(x) for x in wanted.removeprefix("bytes=").split("-"))
        request.send_response(206 if wanted else 200)
        request.send_header("Content-Length", str(end + 1 - start))
        request.end_headers()
        if request.command == "HEAD":
            return
        data = data[start : end + 1]
        try:
            if wanted and self.halt_at is not None and self.halt_at < len(data):
                request.wfile.write(data[: self.halt_at])
                request.wfile.flush()
                self.go_on.wait()
                data = data[self.halt_at :]
            request.wfile.write(data)
        except OSError:
            pass
