"""Fetch axe-core, the accessibility checker of `make test-browser`, from the npm registry.

    tools/axe.py FILE

The release and its hash are fixed here. NPM_CONFIG_REGISTRY names another registry.
"""

from __future__ import annotations

import base64
import hashlib
import io
import os
import sys
import tarfile
import urllib.request
from pathlib import Path

VERSION = "4.14.0"
SHA512 = "9WTZxEjsZ7b13TH8JPmbV2z8CHbl80/2hm3XPEG4JgNdQLK81IBRXmSxHfMAOkSqQeRxT/0dwNDz2GOm3zzpcQ=="
"""As in `dist.integrity` of the registry."""
REGISTRY = "https://registry.npmjs.org"
WAIT_S = 60.0


def main(target: Path) -> None:
    registry = os.environ.get("NPM_CONFIG_REGISTRY", REGISTRY).rstrip("/")
    url = f"{registry}/axe-core/-/axe-core-{VERSION}.tgz"
    with urllib.request.urlopen(url, timeout=WAIT_S) as answer:
        package = answer.read()
    found = base64.b64encode(hashlib.sha512(package).digest()).decode()
    if found != SHA512:
        raise SystemExit(f"{url} has the hash {found}, expected {SHA512}: do not use it")
    with tarfile.open(fileobj=io.BytesIO(package)) as archive:
        member = archive.extractfile("package/axe.min.js")
        assert member is not None
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(member.read())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
