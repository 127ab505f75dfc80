"""Unpacks a program of another Debian release and its libraries into a folder, without changing the system.

    python -m tests.debian sid mysql-server-core .servers/mysql
    python -m tests.debian bookworm prometheus .servers/prometheus --without-libraries

Packages come from the mirror that this machine's apt uses, and their checksums from its index.
"""

from __future__ import annotations

import hashlib
import lzma
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

SECONDS_MAX = 120
# Packages that matter only for system services.
LEFT_OUT = {"adduser", "debconf", "init-system-helpers", "iproute2", "mysql-client", "passwd", "perl", "perl-base"}
LEFT_OUT |= {"psmisc", "systemd", "sysvinit-utils"}

Package = dict[str, str]


def mirror() -> str:
    sources = [*Path("/etc/apt/sources.list.d").glob("*.sources"), Path("/etc/apt/sources.list")]
    for path in sources:
        text = path.read_text() if path.exists() else ""
        for address in re.findall(r"^(?:URIs:|deb(?: \[[^]]*\])?) (\S+)", text, re.MULTILINE):
            if "security" not in address:
                return str(address).rstrip("/")
    sys.exit("this machine's apt has no mirror")


def fetched(address: str) -> bytes:
    with urllib.request.urlopen(address, timeout=SECONDS_MAX) as answer:
        content: bytes = answer.read()
    return content


def packages(release: str) -> dict[str, Package]:
    """All packages of the release, by name and by provided names."""
    index = lzma.decompress(fetched(f"{mirror()}/dists/{release}/main/binary-amd64/Packages.xz")).decode()
    found = [dict(re.findall(r"^(\S+): (.*)$", entry, re.MULTILINE)) for entry in index.split("\n\n")]
    named = {package["Package"]: package for package in found if "Package" in package}
    provided = {name: package for package in named.values() for name in _names(package.get("Provides", ""))}
    return provided | named


def _names(listed: str) -> Iterator[str]:
    """The names in a list of packages; for alternatives, the first one."""
    for each in listed.split(","):
        if name := re.split(r"[(|:\s]", each.strip(), maxsplit=1)[0]:
            yield name


def needed(all_of_them: dict[str, Package], name: str) -> dict[str, Package]:
    chosen: dict[str, Package] = {}
    left = [name]
    while left:
        package = all_of_them.get(one) if (one := left.pop()) not in LEFT_OUT else None
        if package is not None and package["Package"] not in chosen:
            chosen[package["Package"]] = package
            left += [*_names(package.get("Depends", "")), *_names(package.get("Pre-Depends", ""))]
    return chosen


def unpack(release: str, name: str, folder: Path, *, libraries: bool) -> None:
    """Unpack into a temporary folder first, so that an existing folder is always complete."""
    found = packages(release)
    chosen = needed(found, name) if libraries else {name: found[name]}
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as made:
        for number, package in enumerate(chosen.values(), 1):
            print(f"\r{name} from Debian {release}: {number} of {len(chosen)} packages", end="", flush=True)
            content = fetched(f"{mirror()}/{package['Filename']}")
            if hashlib.sha256(content).hexdigest() != package["SHA256"]:
                sys.exit(f"\n{package['Package']} does not have the checksum in the index")
            archive = Path(made, "package.deb")
            archive.write_bytes(content)
            subprocess.run(["dpkg-deb", "-x", archive, Path(made, "root")], check=True)
        print()
        shutil.rmtree(folder, ignore_errors=True)
        Path(made, "root").rename(folder)


if __name__ == "__main__":
    release, name, folder, *options = sys.argv[1:]
    unpack(release, name, Path(folder), libraries=options != ["--without-libraries"])
