"""Looks at built pages in Chromium, as wide as a phone, a tablet and a laptop: is anything cut?

    sphinx-build docs out/docs && python docs/look.py out/docs out/pictures

It fails if a page has to be scrolled sideways, or a block of code, or from 768 pixels on a table. A
picture of each page at each width goes to the second folder, if there is one.
"""

import functools
import http.server
import itertools
import json
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

WIDTHS = 390, 768, 1280
# It loads each page in a frame of each width, and posts what is wider than what is around it.
SCRIPT = """<!doctype html><body><script>
const found = [], pages = %s;
async function look() {
  for (const width of %s) {
    const frame = document.createElement("iframe");
    frame.style = `width: ${width}px; height: 900px; border: 0`;
    document.body.append(frame);
    for (const page of pages) {
      await new Promise(go => { frame.onload = go; frame.src = "/" + page; });
      const root = frame.contentDocument.documentElement;
      const wide = width < 768 ? "pre" : "pre, .table-wrapper";
      for (const part of [root, ...root.querySelectorAll(wide)])
        if (part.scrollWidth > (part === root ? width : part.clientWidth + 1))
          found.push([page, width, part.scrollWidth, part.textContent.trim().slice(0, 60)]);
    }
  }
}
look().catch(error => found.push(["", 0, 0, String(error)]))
  .then(() => fetch("/found", {method: "POST", body: JSON.stringify(found)}));
</script>"""


class Site(http.server.SimpleHTTPRequestHandler):
    """Pages of a folder, the script, and what it has found."""

    pages: list[str]
    found: list[tuple[str, int, int, str]] | None = None
    is_done = threading.Event()

    def do_GET(self) -> None:
        if self.path != "/look":
            return super().do_GET()
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write((SCRIPT % (json.dumps(self.pages), list(WIDTHS))).encode())

    def do_POST(self) -> None:
        Site.found = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()
        self.is_done.set()

    def log_message(self, *_: object) -> None:
        """Says nothing of each request."""


def main(folder: Path, pictures: Path | None) -> None:
    """Prints what is cut, and exits with 1 if anything is."""
    names = "chromium", "chromium-browser", "google-chrome"
    browser = next(filter(None, map(shutil.which, names)), None)
    if browser is None:
        raise SystemExit(f"none of {', '.join(names)} is installed")
    hidden = {"_modules", "_static", "search.html"}
    pages = [page.relative_to(folder) for page in sorted(folder.rglob("*.html"))]
    Site.pages = [page.as_posix() for page in pages if not hidden & {*page.parts}]
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Site, directory=str(folder))
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    rules = "MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"  # or it waits for badges of other sites
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--no-proxy-server"]
    command += [f"--host-resolver-rules={rules}"]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as own:
        command += [f"--user-data-dir={own}"]
        said = subprocess.DEVNULL
        running = subprocess.Popen([*command, f"{address}/look"], stdout=said, stderr=said)
        Site.is_done.wait(300)
        running.terminate()
        running.wait()
        for page, width in itertools.product(Site.pages, WIDTHS):
            if pictures is not None:
                file = pictures / str(width) / f"{page.replace('/', '_')}.png"
                file.parent.mkdir(parents=True, exist_ok=True)
                size = [f"--window-size={width},1800", f"--screenshot={file}"]
                picture = [*command, *size, f"{address}/{page}"]
                subprocess.run(picture, stdout=said, stderr=said, check=True)
    if Site.found is None:
        raise SystemExit("the browser has not ended within five minutes")
    for page, width, pixels, text in Site.found:
        print(f"{page} at {width} pixels: {pixels} are needed for {text!r}")
    print(f"{len(Site.pages)} pages at {len(WIDTHS)} widths, {len(Site.found)} parts are cut")
    raise SystemExit(bool(Site.found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None)
