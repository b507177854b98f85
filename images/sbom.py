"""Adds the distribution's packages to an image's bill of materials.

    python3 sbom.py PYTHON.json DPKG.txt OUTPUT.json

PYTHON.json is CycloneDX for the Python environment; DPKG.txt holds a line `name version architecture` per package.
"""

import json
import sys
from urllib.parse import quote


def main(python_path: str, dpkg_path: str, output_path: str) -> None:
    with open(python_path, encoding="utf-8") as file:
        document = json.load(file)
    with open(dpkg_path, encoding="utf-8") as file:
        for name, version, architecture in (line.split() for line in file):
            purl = f"pkg:deb/debian/{quote(name)}@{quote(version)}?arch={architecture}"
            document["components"].append(
                {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}
            )
    with open(output_path, "w", encoding="utf-8") as file:
        json.dump(document, file, indent=1, sort_keys=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
