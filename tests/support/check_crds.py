"""The manifests of deploy/kubernetes/gateway and the PodMonitor against the schemas of their own definitions.

    python tests/support/check_crds.py CRD.yaml ..

The files are CustomResourceDefinitions, as their projects publish them (Gateway API, its inference extension, KEDA, the
Prometheus operator). Every field must be known: what a cluster prunes in silence is a fault here. docs/replicas.md says
what came of it, and when. Rules in CEL are not evaluated.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jsonschema
import yaml

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "kubernetes"
MANIFESTS = [*sorted((FOLDER / "gateway").glob("*.yaml")), FOLDER / "podmonitor.yaml"]
OPEN = "x-kubernetes-preserve-unknown-fields"


def closed(schema: Any) -> Any:
    """The schema in which an object has the properties that it names and no others."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: closed(part) for name, part in schema.items()}
    if "properties" in schema and isinstance(schema["properties"], dict) and not schema.get(OPEN):
        made.setdefault("additionalProperties", False)
    if schema.get("x-kubernetes-int-or-string"):
        made.pop("type", None)
    return made


def schemas(files: list[Path]) -> dict[tuple[str, str], Any]:
    """By apiVersion and kind."""
    found = {}
    for file in files:
        for definition in yaml.safe_load_all(file.read_text()):
            if definition and definition["kind"] == "CustomResourceDefinition":
                spec = definition["spec"]
                for version in spec["versions"]:
                    schema = version["schema"]["openAPIV3Schema"]
                    schema["properties"]["metadata"] = {"type": "object", OPEN: True}
                    found[f"{spec['group']}/{version['name']}", spec["names"]["kind"]] = closed(schema)
    return found


def faults(document: dict, schema: Any) -> list[str]:
    errors = jsonschema.Draft202012Validator(schema).iter_errors(document)
    return [f"{'.'.join(map(str, error.absolute_path))}: {error.message[:300]}" for error in errors]


def main() -> int:
    known, wrong = schemas([Path(name) for name in sys.argv[1:]]), 0
    for file in MANIFESTS:
        (document,) = yaml.safe_load_all(file.read_text())
        kind = (document["apiVersion"], document["kind"])
        if kind not in known:
            print(f"{file.name}: {kind}: no schema given")
            continue
        found = faults(document, known[kind])
        # the schema that lets everything pass proves nothing
        spoilt = faults({**document, "spec": {**document["spec"], "replica": 2}}, known[kind])
        assert spoilt, f"{kind} takes any field"
        wrong += len(found)
        print(f"{file.name}: {kind}: {'; '.join(found) or 'every field is known'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
