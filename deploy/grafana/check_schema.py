"""Type-checks the dashboard against @grafana/schema, and refreshes the list of keys that the tests check it with.

    python deploy/grafana/check_schema.py [--write-keys]

Needs npm. tsc sees wrong types; it lets unknown keys pass, so those are found with schema_keys.json: every interface
that a dashboard of ours can reach, its keys, and the interfaces that lie behind them, read from the package.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
KEYS = HERE / "schema_keys.json"
PACKAGES = ("@grafana/schema@13.2.3", "typescript@7.0.2")
PANELS = ("timeseries", "stat", "heatmap", "bargauge")
ROOTS = ("Dashboard", *(f"{panel}.{part}" for panel in PANELS for part in ("Options", "FieldConfig")))
INTERFACE = re.compile(r"export interface (\w+)(?: extends ([^{]+))? \{(.*?)\n\}", re.S)
TYPESCRIPT = """import type {{ Dashboard }} from "@grafana/schema";
{imports}
type Plain<T> = T extends string ? `${{T}}` : T extends number ? number : T extends object
  ? {{ [K in keyof T]: Plain<T[K]> }} : T;
export const dashboard: Plain<Dashboard> = {dashboard};
{checks}
"""


def main(arguments: list[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder)
        subprocess.run(["npm", "install", "--silent", "--no-fund", "--no-audit", *PACKAGES], cwd=where, check=True)
        keys = reachable(read_interfaces(where / "node_modules/@grafana/schema/dist/types"))
        text = json.dumps(keys, indent=1, sort_keys=True) + "\n"
        if "--write-keys" in arguments:
            KEYS.write_text(text)
        elif KEYS.read_text() != text:
            print(f"{KEYS.name} is not what {PACKAGES[0]} gives: run with --write-keys")
            return 1
        return type_check(where)


def type_check(where: Path) -> int:
    """tsc's exit status. Options and custom fields are checked by the panel's own types."""
    dashboard = json.loads((HERE / "dashboards" / "pilotfish.json").read_text())
    imports = [f'import type * as {p} from "{_module(p)}";' for p in PANELS]
    checks = []
    for panel in dashboard["panels"]:
        if panel["type"] == "row":
            continue
        options = json.dumps(panel["options"])
        checks.append(f"export const options{panel['id']}: Plain<{panel['type']}.Options> = {options};")
        custom = json.dumps(panel["fieldConfig"]["defaults"].get("custom", {}))
        if custom != "{}":
            checks.append(f"export const custom{panel['id']}: Plain<{panel['type']}.FieldConfig> = {custom};")
    text = TYPESCRIPT.format(
        imports="\n".join(imports), dashboard=json.dumps(dashboard, indent=1), checks="\n".join(checks)
    )
    (where / "dashboard.ts").write_text(text)
    flags = ["--noEmit", "--strict", "--skipLibCheck", "--module", "nodenext", "--target", "es2022"]
    done = subprocess.run(["npx", "tsc", *flags, "dashboard.ts"], cwd=where, check=False)
    print("tsc: no error" if done.returncode == 0 else "tsc: errors")
    return done.returncode


def _module(panel: str) -> str:
    return f"./node_modules/@grafana/schema/dist/types/raw/composable/{panel}/panelcfg/x/types.gen.js"


def read_interfaces(folder: Path) -> dict[str, dict[str, str]]:
    """Keys of every interface with the type of each as written; `extends` resolved. Panel interfaces carry a prefix."""
    bodies: dict[str, tuple[list[str], dict[str, str]]] = {}
    files = {"": [folder / "common/common.gen.d.ts", folder / "raw/dashboard/x/types.gen.d.ts"]}
    files |= {f"{p}.": [folder / f"raw/composable/{p}/panelcfg/x/types.gen.d.ts"] for p in PANELS}
    for prefix, paths in files.items():
        for path in paths:
            text = re.sub(r"/\*.*?\*/", "", path.read_text(), flags=re.S)
            for name, parents, body in INTERFACE.findall(text):
                fields = dict(re.findall(r"^    (\w+)\??: (.*?);$", body, re.M | re.S))
                bodies[prefix + name] = ([p.split(".")[-1].strip() for p in (parents or "").split(",") if p], fields)

    def resolve(name: str) -> dict[str, str]:
        parents, fields = bodies[name]
        merged: dict[str, str] = {}
        for parent in parents:
            merged |= resolve(parent)
        return merged | fields

    return {name: resolve(name) for name in bodies}


def reachable(interfaces: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    """What lies behind the roots: key -> the interfaces its value may be, separated by |, or nothing."""
    found: dict[str, dict[str, str]] = {}
    todo = list(ROOTS)
    while todo:
        name = todo.pop()
        if name in found or name not in interfaces:
            continue
        prefix = name.split(".")[0] + "." if "." in name else ""
        found[name] = {}
        for key, written in interfaces[name].items():
            words = re.findall(r"\w+", re.sub(r"'[^']*'", "", written))
            behind = [known for word in words for known in (word, prefix + word) if known in interfaces]
            found[name][key] = "|".join(sorted(set(behind)))
            todo += behind
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
