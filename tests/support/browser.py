"""A headless Chromium, driven through chromedriver's own protocol (W3C WebDriver) over HTTP."""

import base64
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

CHROMIUM, DRIVER = "/usr/bin/chromium", shutil.which("chromedriver")
MISSING = "needs Debian's chromium and chromium-driver" if not (Path(CHROMIUM).exists() and DRIVER) else ""
ENTER, ESCAPE, TAB, SHIFT = "\ue007", "\ue00c", "\ue004", "\ue008"
KEY, MODEL = "house", "smollm2-135m"  # of the server that the page is tested on
PHONE, DESKTOP = (390, 844), (1280, 800)  # CSS pixels
_ARGUMENTS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
]


class Browser:
    """One window; all methods act on the tab that is shown."""

    def __init__(self, http: httpx.Client, session: str) -> None:
        self._http, self._session = http, session

    def open(self, url: str) -> None:
        self._post("url", url=url)

    def tab(self) -> str:
        """Return a handle of the tab that is shown."""
        return str(self._http.get(f"/session/{self._session}/window").json()["value"])

    def open_tab(self) -> str:
        """Open and show another tab; return its handle."""
        tab = str(self._post("window/new", type="tab")["handle"])
        self.show(tab)
        return tab

    def show(self, tab: str) -> None:
        self._post("window", handle=tab)

    def close_tab(self, back: str) -> None:
        """Close the tab that is shown, and show the tab with the handle `back`."""
        self._http.delete(f"/session/{self._session}/window")
        self.show(back)

    def run(self, script: str, *arguments: object) -> Any:
        """Run the body of a function in the page, and return its result; a promise is awaited."""
        return self._post("execute/sync", script=script, args=list(arguments))

    def wait(self, condition: str, seconds: float = 60) -> Any:
        """Return the value of a JavaScript expression once it is true."""
        end = time.monotonic() + seconds
        while not (value := self.run(f"return {condition}")):
            assert time.monotonic() < end, f"{condition} never came; the page says: {self.text('body')}"
            time.sleep(0.03)  # between two questions
        return value

    def text(self, css: str) -> str:
        return str(self.run("return document.querySelector(arguments[0])?.innerText ?? ''", css))

    def type(self, *keys: str) -> None:
        """Type keys into the element with the focus; `SHIFT + key` holds shift."""
        for key in keys:
            held = key[0] if len(key) > 1 and key[0] == SHIFT else ""
            self._press(held, key[len(held) :])

    def size(self, width: int, height: int, scale: float = 1) -> None:
        """Set the size of the page, in CSS pixels."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 600}
        self.command("Emulation.setDeviceMetricsOverride", **metrics)

    def command(self, name: str, **parameters: object) -> Any:
        """Call a command of the DevTools protocol, and return its result."""
        return self._post("goog/cdp/execute", cmd=name, params=parameters)

    def screenshot(self) -> bytes:
        """Return a screenshot of the page as PNG."""
        return base64.b64decode(self._http.get(f"/session/{self._session}/screenshot").json()["value"])

    def complaints(self) -> list[str]:
        """Return the errors and warnings of the console since the last call."""
        return [str(line["message"]) for line in self._post("se/log", type="browser")]

    def _press(self, held: str, keys: str) -> None:
        pairs = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        if held:
            pairs = [{"type": "keyDown", "value": held}, *pairs, {"type": "keyUp", "value": held}]
        self._post("actions", actions=[{"type": "key", "id": "keyboard", "actions": pairs}])

    def _post(self, path: str, **body: object) -> Any:
        answer = self._http.post(f"/session/{self._session}/{path}", json=body).json()["value"]
        assert not (isinstance(answer, dict) and "error" in answer), answer
        return answer


def tab_to(page: Browser, css: str) -> None:
    """Move the focus to the element `css` with the tab key alone."""
    for _ in range(80):
        if page.run("return document.activeElement.matches(arguments[0])", css):
            return
        page.type(TAB)
    raise AssertionError(f"no tab key leads to {css}")


@contextmanager
def chromium(folder: Path) -> Iterator[Browser]:
    """Run a browser with a profile of its own in `folder` during the block."""
    assert DRIVER
    with subprocess.Popen([DRIVER, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as driver:
        try:
            with httpx.Client(base_url=_driver_url(driver), timeout=90) as http:
                session = http.post("/session", json={"capabilities": {"alwaysMatch": _wanted(folder)}}).json()["value"]
                assert "sessionId" in session, session
                yield Browser(http, session["sessionId"])
                http.delete(f"/session/{session['sessionId']}")
        finally:
            driver.terminate()


def _driver_url(driver: "subprocess.Popen[str]") -> str:
    assert driver.stdout
    for line in driver.stdout:
        if found := re.search(r"started successfully on port (\d+)", line):
            return f"http://127.0.0.1:{found[1]}"
    raise AssertionError("chromedriver did not start")


def _wanted(folder: Path) -> dict[str, object]:
    options = {"binary": CHROMIUM, "args": [*_ARGUMENTS, f"--user-data-dir={folder / 'profile'}"]}
    return {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "WARNING"}}
