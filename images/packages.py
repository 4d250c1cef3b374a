"""What the images are made of, from their locks: an SBOM of each, the licences, and known vulnerabilities.

    python -m images.packages sbom FOLDER      CycloneDX 1.6, one file for each image
    python -m images.packages licences         exit code 1 if a package has a licence that nobody has allowed
    python -m images.packages audit            exit code 1 if a vulnerability is known, 3 if the database is away

The packages of Python are listed; those of the base image are its maker's to list.
"""

import json
import os
import re
import sys
import urllib.error
import urllib.request
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageMetadata, PackageNotFoundError, metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
IMAGES = ("cpu", "train")
DATABASE = "https://api.osv.dev"  # Open Source Vulnerabilities; OSV_URL names a copy of it

# What may be in an image. Proprietary are only NVIDIA's libraries, whose licence allows to hand them on in an image.
ALLOWED = {
    *("0BSD", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0", "CC0-1.0", "ISC", "LLVM-exception", "MIT"),
    *("MIT-0", "MIT-CMU", "MPL-2.0", "PSF-2.0", "Zlib", "LicenseRef-NVIDIA-Proprietary"),
}
# How packages without an SPDX expression say it.
SPDX = {
    "3-Clause BSD License": "BSD-3-Clause",
    "Apache 2.0": "Apache-2.0",
    "Apache Software License": "Apache-2.0",
    "BSD": "BSD-3-Clause",
    "BSD License": "BSD-3-Clause",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "NVIDIA Proprietary Software": "LicenseRef-NVIDIA-Proprietary",
}
UNSAID = {"cuda-toolkit": "LicenseRef-NVIDIA-Proprietary"}  # a package without files, of NVIDIA's libraries


@dataclass(frozen=True)
class Package:
    """A package of a lock."""

    name: str
    version: str
    hashes: tuple[str, ...]
    licence: str  # as SPDX writes it; empty if the package does not say

    @property
    def purl(self) -> str:
        """The address of a package that all tools understand."""
        return f"pkg:pypi/{self.name}@{self.version}"


def packages(image: str) -> list[Package]:
    """The packages of an image, from its lock; their licences from those that are installed here."""
    lock = (ROOT / "requirements" / f"{image}-image.txt").read_text(encoding="utf-8")
    blocks = re.findall(r"^(\S+)==(\S+)((?: \\\n    --hash=sha256:[0-9a-f]{64})*)", lock, re.MULTILINE)
    return [
        Package(name, version, tuple(re.findall(r"sha256:(\w+)", hashes)), licence_of(name))
        for name, version, hashes in blocks
    ]


def licence_of(name: str) -> str:
    """The licence of an installed package."""
    try:
        facts: PackageMetadata = metadata(name)
    except PackageNotFoundError:
        return ""
    classifiers = [item.rpartition(" :: ")[2] for item in facts.get_all("Classifier") or [] if item.startswith("Lic")]
    for said in (facts.get("License-Expression"), facts.get("License"), *classifiers):
        text = SPDX.get(said or "", said or "")
        if text and len(text.splitlines()) == 1 and not refused(text):
            return text
    return UNSAID.get(name) or facts.get("License-Expression") or ", ".join(classifiers)


def refused(licence: str) -> list[str]:
    """The parts of an expression that nobody has allowed; of alternatives one is enough."""
    alternatives = [re.split(r" AND | WITH |[()]", part) for part in licence.split(" OR ")]
    left = [[word for word in map(str.strip, words) if word and word not in ALLOWED] for words in alternatives]
    return min(left, key=len)


def bom(image: str) -> dict[str, Any]:
    """The bill of materials of an image, as CycloneDX 1.6."""
    components = [
        {
            "type": "library",
            "bom-ref": package.purl,
            "name": package.name,
            "version": package.version,
            "purl": package.purl,
            "hashes": [{"alg": "SHA-256", "content": content} for content in package.hashes],
            **({"licenses": [{"expression": package.licence}]} if package.licence else {}),
        }
        for package in packages(image)
    ]
    ours = {"type": "container", "name": f"csc-{image}", "version": _version(), "bom-ref": f"csc-{image}"}
    now = datetime.now(UTC).isoformat(timespec="seconds")
    facts = {"timestamp": now, "component": ours}
    return {"bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1, "metadata": facts, "components": components}


def _version() -> str:
    found = re.search(r'__version__ = "(.*)"', (ROOT / "csc" / "__init__.py").read_text(encoding="utf-8"))
    return found[1] if found else "unknown"


def write_boms(folder: Path) -> int:
    """Write the bill of materials of every image."""
    folder.mkdir(parents=True, exist_ok=True)
    for image in IMAGES:
        content = bom(image)
        file = folder / f"csc-{image}.cdx.json"
        file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        print(f"{file}: {len(content['components'])} packages")
    return 0


def check_licences() -> int:
    """Print which licences there are, and the packages whose licence nobody has allowed."""
    found = {package.name: package.licence for image in IMAGES for package in packages(image)}
    for licence in sorted(set(found.values())):
        names = sorted(name for name, other in found.items() if other == licence)
        print(f"{licence or 'not said':<34} {len(names):>3}  {', '.join(names[:6])}{' …' if len(names) > 6 else ''}")
    bad = {name: licence for name, licence in found.items() if not licence or refused(licence)}
    for name, licence in bad.items():
        print(f"make licences: {name}: {licence or 'says no licence'}, which is not allowed", file=sys.stderr)
    return 1 if bad else 0


def audit() -> int:
    """Look every package up in a database of known vulnerabilities."""
    asked = sorted({(package.name, package.version) for image in IMAGES for package in packages(image)})
    queries = [{"package": {"name": name, "ecosystem": "PyPI"}, "version": version} for name, version in asked]
    database = os.environ.get("OSV_URL", DATABASE)
    request = urllib.request.Request(
        f"{database}/v1/querybatch", json.dumps({"queries": queries}).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            results = json.load(answer)["results"]
            known = [[one["id"] for one in result.get("vulns", ())] for result in results]
            if len(known) != len(asked):
                raise ValueError("it answers for another number of packages")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = getattr(error, "reason", error)
        print(f"make audit: NOTHING WAS CHECKED: {database} could not be asked ({reason})", file=sys.stderr)
        return 3
    for (name, version), found in zip(asked, known, strict=True):
        for identifier in found:
            print(f"{name} {version}: {identifier}")
    bad = sum(map(bool, known))
    print(f"{len(asked)} packages asked for at {database}, {bad} with known vulnerabilities")
    return 1 if bad else 0


if __name__ == "__main__":
    commands = {"licences": check_licences, "audit": audit, "sbom": lambda: write_boms(Path(sys.argv[2]))}
    sys.exit(commands[sys.argv[1]]())
