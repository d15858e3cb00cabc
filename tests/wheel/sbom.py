# SPDX-License-Identifier: Apache-2.0
"""Writes CycloneDX bills of materials of wheels: the package, what NOTICE lists, what it requires.

python tests/wheel/sbom.py FOLDER WHEEL...    the same wheel gives the same bytes
"""

from __future__ import annotations

import hashlib
import re
import sys
import uuid
import zipfile
from datetime import datetime, timezone
from email import message_from_bytes
from importlib.util import find_spec
from pathlib import Path

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import HashAlgorithm, HashType
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL

ROW = re.compile(
    r"^\| (?P<name>[^|(]+?)(?: \([^|]*)? \| (?:torch|g\+\+) \| (?P<license>[^|]+) \|", re.M
)
"""A row of NOTICE's table: headers that are compiled in, who brings them, their license."""


def pybind11_version() -> str:
    """Returns the version that torch's headers say."""
    text = (Path(find_spec("torch").origin).parent / "include/pybind11/detail/common.h").read_text()
    names = ("MAJOR", "MINOR", "MICRO")
    return ".".join(
        re.search(rf"#define PYBIND11_VERSION_{name} +(\d+)", text)[1] for name in names
    )


def describe(path: Path) -> Bom:
    """Returns the bill of materials."""
    with zipfile.ZipFile(path) as wheel:
        name = next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = message_from_bytes(wheel.read(name))
        notice = wheel.read(name.replace("METADATA", "licenses/NOTICE")).decode()
        torch = wheel.read("torchq/built_for.txt").decode().split(",")[0].removeprefix("torch ")
        built = datetime(*wheel.getinfo(name).date_time, tzinfo=timezone.utc)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    package, version = metadata["Name"], metadata["Version"]
    licenses = LicenseFactory()
    root = Component(
        name=package,
        version=version,
        type=ComponentType.LIBRARY,
        bom_ref=package,
        purl=PackageURL("pypi", name=package, version=version, qualifiers={"file_name": path.name}),
        licenses=[licenses.make_from_string(metadata["License-Expression"])],
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=digest)],
    )
    versions = {"PyTorch": torch, "pybind11": pybind11_version()}
    parts = [
        Component(
            name=row["name"],
            version=versions.get(row["name"]),
            bom_ref=f"headers of {row['name']}",
            description="headers, compiled into the libraries of the wheel",
            licenses=[licenses.make_from_string(row["license"])],
        )
        for row in ROW.finditer(notice)
    ]
    for requirement in metadata.get_all("Requires-Dist"):
        if "extra ==" not in requirement:
            needed = re.match(r"[\w-]+", requirement)[0]
            purl = PackageURL("pypi", name=needed)
            text = f"not in the wheel, which requires {requirement}"
            parts.append(Component(name=needed, bom_ref=needed, purl=purl, description=text))
    bom = Bom(components=parts, serial_number=uuid.uuid5(uuid.NAMESPACE_URL, digest))
    bom.metadata.component, bom.metadata.timestamp = root, built
    bom.register_dependency(root, parts)
    return bom


def write(path: Path, folder: Path) -> None:
    """Writes and validates the bill of a wheel."""
    text = JsonV1Dot6(describe(path)).output_as_string(indent=2)
    problem = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
    if problem is not None:
        sys.exit(f"torchq: the bill of materials is no CycloneDX 1.6: {problem}")
    (folder / f"{path.name}.cdx.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    for argument in sys.argv[2:]:
        write(Path(argument), Path(sys.argv[1]))
