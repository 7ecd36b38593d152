"""The few calls of the DevTools protocol that a test of a page needs, to Chromium itself: no driver beside it."""

import base64
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
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
    "--remote-debugging-port=0",
]


class Page:
    """One browser window, as wide as asked."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket, self._sent, self._said, self._loaded = socket, 0, [], False
        for domain in ("Page", "Runtime", "Log"):
            self.devtools(f"{domain}.enable")

    def become(
        self, *, width: int = 1280, height: int = 900, dark: bool = False, phone: bool = False, scripts: bool = True
    ) -> None:
        """Another screen for what is opened next; `phone`: a touch screen with two pixels per point."""
        scale = 2.0 if phone else 1.0
        screen = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": phone}
        self.devtools("Emulation.setDeviceMetricsOverride", **screen)
        self.devtools("Emulation.setTouchEmulationEnabled", enabled=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.devtools("Emulation.setEmulatedMedia", features=[scheme])
        self.devtools("Emulation.setScriptExecutionDisabled", value=not scripts)
        self.console()  # what the pages before have said

    def open(self, path: Path, seconds: float = 60.0) -> None:
        self._loaded = False
        self.devtools("Page.navigate", url=path.as_uri())
        end = time.monotonic() + seconds
        while not self._loaded:
            self._take(json.loads(self._socket.recv(timeout=max(end - time.monotonic(), 0.01))))

    def run(self, script: str, *args: Any) -> Any:
        """The value that `script` returns; `arguments` holds `args`."""
        code = f"(function() {{{script}}}).apply(null, {json.dumps(args)})"
        found = self.devtools("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"]["exception"]["description"])
        return found["result"].get("value")

    def shown(self, selector: str) -> list[float]:
        """The corners of the first such element's box, also where scripts are off; none where it has none."""
        root = self.devtools("DOM.getDocument")["root"]["nodeId"]
        node = self.devtools("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        try:
            return self.devtools("DOM.getBoxModel", nodeId=node)["model"]["border"]
        except RuntimeError:
            return []

    def press(self, key: str) -> None:
        """A key, by its name in `KeyboardEvent.key`, to the element that has the focus."""
        codes = {"Tab": 9, "ArrowRight": 39, "ArrowLeft": 37, "End": 35, "Home": 36, "Escape": 27}
        for kind in ("keyDown", "keyUp"):
            self.devtools("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=codes[key])

    def console(self) -> list[str]:
        """What the browser's console said since the last call, warnings and errors alike."""
        self.run("return 0")  # behind all that was said before
        said, self._said = self._said, []
        return said

    def devtools(self, command: str, **parameters: Any) -> Any:
        self._sent += 1
        self._socket.send(json.dumps({"id": self._sent, "method": command, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv(timeout=60))
            if message.get("id") == self._sent:
                if "error" in message:
                    raise RuntimeError(f"{command}: {message['error']['message']}")
                return message["result"]
            self._take(message)

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

    def _take(self, event: dict[str, Any]) -> None:
        """An event: the page has loaded, or something was said."""
        method, found = event.get("method"), event.get("params", {})
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Runtime.consoleAPICalled":
            self._said.append(" ".join(str(one.get("value", one.get("description"))) for one in found["args"]))
        elif method == "Runtime.exceptionThrown":
            thrown = found["exceptionDetails"]
            self._said.append(thrown.get("exception", {}).get("description", thrown["text"]))
        elif method == "Log.entryAdded":
            self._said.append(found["entry"]["text"])


@contextmanager
def browser(profile: Path) -> Iterator[Page]:
    """A browser with a fresh profile folder: starting one takes longer than a test of a page."""
    assert BROWSER is not None
    command = [BROWSER, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        address = next(line.split()[-1] for line in process.stderr if line.startswith("DevTools listening on"))
        with connect(address, max_size=None, compression=None) as whole:
            whole.send(json.dumps({"id": 1, "method": "Target.getTargets"}))
            targets = json.loads(whole.recv(timeout=60))["result"]["targetInfos"]
            window = next(one["targetId"] for one in targets if one["type"] == "page")
            place = address.partition("/devtools/")[0]
            with connect(f"{place}/devtools/page/{window}", max_size=None, compression=None) as socket:
                yield Page(socket)
            whole.send(json.dumps({"id": 2, "method": "Browser.close"}))
            process.wait(20)
    except ConnectionClosed as closed:
        raise RuntimeError("the browser has ended") from closed
    finally:
        process.terminate()
        process.wait(20)
