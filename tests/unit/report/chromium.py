"""The few WebDriver calls that a test of a page needs, spoken over HTTP to chromedriver."""

import base64
import json
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

DRIVER, BROWSER = Path("/usr/bin/chromedriver"), Path("/usr/bin/chromium")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
]


class Page:
    """One browser window, as wide as asked."""

    def __init__(self, port: int, session: str) -> None:
        self._at = f"http://127.0.0.1:{port}/session/{session}"

    def become(self, *, width: int = 1280, height: int = 900, dark: bool = False, phone: bool = False) -> None:
        """Another screen for what is opened next; `phone`: a touch screen with two pixels per point."""
        scale = 2.0 if phone else 1.0
        screen = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": phone}
        self.devtools("Emulation.setDeviceMetricsOverride", **screen)
        self.devtools("Emulation.setTouchEmulationEnabled", enabled=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.devtools("Emulation.setEmulatedMedia", features=[scheme])
        self.console()  # what the pages before have said

    def open(self, path: Path) -> None:
        _call("POST", f"{self._at}/url", {"url": path.as_uri()})

    def run(self, script: str, *args: Any) -> Any:
        """The value that `script` returns; `arguments` holds `args`."""
        return _call("POST", f"{self._at}/execute/sync", {"script": script, "args": list(args)})

    def console(self) -> list[str]:
        """What the browser's console said since the last call, warnings and errors alike."""
        return [entry["message"] for entry in _call("POST", f"{self._at}/se/log", {"type": "browser"})]

    def devtools(self, command: str, **parameters: Any) -> Any:
        return _call("POST", f"{self._at}/goog/cdp/execute", {"cmd": command, "params": parameters})

    def screenshot(self, path: Path, *, full: bool = False) -> None:
        shot = self.devtools("Page.captureScreenshot", captureBeyondViewport=full)
        path.write_bytes(base64.b64decode(shot["data"]))

    def wait_for(self, script: str, seconds: float = 30.0) -> Any:
        """The first truthy value of `return <script>`; TimeoutError if there is none in time."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if value := self.run(f"return {script}"):
                return value
            time.sleep(0.1)
        raise TimeoutError(script)


@contextmanager
def browser(profile: Path) -> Iterator[Page]:
    """A browser with a fresh profile folder: starting one takes longer than a test of a page."""
    driver = subprocess.Popen([str(DRIVER), "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert driver.stdout is not None
        port = next(
            int(line.rstrip(". \n").rpartition(" ")[2]) for line in driver.stdout if "successfully on port" in line
        )
        options: dict[str, Any] = {
            "binary": str(BROWSER),
            "args": [*FLAGS, f"--user-data-dir={profile}"],
        }
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        started = _call("POST", f"http://127.0.0.1:{port}/session", {"capabilities": {"alwaysMatch": wanted}})
        try:
            yield Page(port, started["sessionId"])
        finally:
            _call("DELETE", f"http://127.0.0.1:{port}/session/{started['sessionId']}")
    finally:
        driver.terminate()
        driver.wait(20)


def _call(method: str, url: str, body: dict[str, Any] | None = None) -> Any:
    data = json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(url, data=data, method=method, headers={"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]
    except urllib.error.HTTPError as error:
        raise RuntimeError(json.load(error)["value"]["message"]) from error
