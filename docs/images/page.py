#!/usr/bin/env python3
"""Takes docs/images/page.png: hobbit-server's page after "See it work", with the demo model, in Chromium.

usage: docs/images/page.py [HOBBIT_SERVER]       (default: target/release/hobbit-server)
setup.sh --browser installs Chromium and its driver.
"""

import base64
import json
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SERVER = sys.argv[1] if len(sys.argv) > 1 else ROOT / "target/release/hobbit-server"
# A mouse: without one the page shows buttons that otherwise appear under the pointer.
MOUSE = "--blink-settings=primaryHoverType=2,availableHoverTypes=2,primaryPointerType=4,availablePointerTypes=4"
ARGUMENTS = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1280,860", MOUSE]
ANSWERED = "return document.querySelector('.message.assistant footer')?.textContent.includes(' tokens/s') ?? false"


def start(command, ready):
    """A process, and what its output says that it is ready with."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return process, next(found[1] for found in map(re.compile(ready).search, process.stdout) if found)


def post(url, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request))["value"]


server, page = start([SERVER, "--port", "0", "-n", "100", "-s", "1"], r"ready; (http://[^,]+)")
driver, port = start(["chromedriver", "--port=0"], r"successfully on port (\d+)")
session = f"http://127.0.0.1:{port}/session"
try:
    wanted = {"alwaysMatch": {"goog:chromeOptions": {"args": ARGUMENTS}, "timeouts": {"implicit": 10_000}}}
    session += "/" + post(session, {"capabilities": wanted})["sessionId"]
    post(f"{session}/url", {"url": page})
    (button,) = post(f"{session}/element", {"using": "css selector", "value": "#see"}).values()
    post(f"{session}/element/{button}/click", {})
    while not post(f"{session}/execute/sync", {"script": ANSWERED, "args": []}):
        time.sleep(0.1)
    with urllib.request.urlopen(f"{session}/screenshot") as answer:
        (ROOT / "docs/images/page.png").write_bytes(base64.b64decode(json.load(answer)["value"]))
    urllib.request.urlopen(urllib.request.Request(session, method="DELETE"))
finally:
    driver.terminate()
    server.terminate()
