"""The dashboard is what its source says, names only exported metrics, and has no key that Grafana's schema lacks."""

import json
import re
from pathlib import Path

import pytest

from pilotfish.deploy.grafana import dashboard, generate, queries
from pilotfish.deploy.grafana.panels import ROWS
from pilotfish.deploy.prometheus import rules
from pilotfish.metrics.definitions import DEFINITIONS

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"
KEYS = json.loads((DEPLOY / "grafana" / "schema_keys.json").read_text())
TARGET = {"refId", "datasource", "expr", "legendFormat", "format", "range", "instant"}
"""Keys of a Prometheus query; @grafana/schema leaves targets open."""
INLINE = {"time": {"from", "to"}, "templating": {"list"}, "overrides": {"matcher", "properties"}}
"""Keys of types that the schema writes in place."""


def unknown_keys(value, names, path=""):
    """Paths of keys that none of the interfaces `names` ("A|B") has; objects that the schema leaves open hold any."""
    if isinstance(value, list):
        return [found for i, item in enumerate(value) for found in unknown_keys(item, names, f"{path}[{i}]")]
    known = {}
    for name in names.split("|"):
        known |= KEYS.get(name, {})
    if not known or not isinstance(value, dict):
        return []
    found = [f"{path}.{key}" for key in value.keys() - known.keys()]
    for key in value.keys() & known.keys():
        inner, below = value[key], known[key]
        if key in INLINE:
            objects = inner if isinstance(inner, list) else [inner]
            found += [f"{path}.{key}.{strange}" for one in objects for strange in one.keys() - INLINE[key]]
            inner = [item for one in objects for item in one.get("list", [])]
        found += unknown_keys(inner, below, f"{path}.{key}")
    return found


def all_unknown(board):
    found = unknown_keys(board, "Dashboard")
    for panel in board["panels"]:
        if panel["type"] == "row":
            continue
        found += unknown_keys(panel["options"], f"{panel['type']}.Options", panel["title"])
        custom = panel["fieldConfig"]["defaults"].get("custom", {})
        found += unknown_keys(custom, f"{panel['type']}.FieldConfig", panel["title"])
        found += [f"{panel['title']}: {key}" for target in panel["targets"] for key in target.keys() - TARGET]
    return found


def test_the_committed_files_are_what_the_source_gives():
    assert generate.stale() == [], "run: python -m pilotfish.deploy.grafana.generate"


def test_no_key_is_unknown_to_grafana():
    assert all_unknown(json.loads(dashboard.text())) == []


@pytest.mark.parametrize(
    "spoil",
    [
        lambda board: board.update(titel="x"),
        lambda board: board["panels"][1].update(gridpos={}),
        lambda board: board["panels"][1]["gridPos"].update(width=3),
        lambda board: board["panels"][1]["options"].update(colourMode="value"),
        lambda board: board["panels"][1]["options"]["reduceOptions"].update(calc="last"),
        lambda board: board["panels"][1]["fieldConfig"]["defaults"].update(units="s"),
        lambda board: board["panels"][8]["fieldConfig"]["defaults"]["custom"]["stacking"].update(kind="a"),
        lambda board: board["panels"][1]["targets"][0].update(expression="up"),
        lambda board: board["templating"]["list"][0].update(default="x"),
        lambda board: board["time"].update(until="now"),
    ],
)
def test_a_key_that_grafana_lacks_is_found(spoil):
    board = json.loads(dashboard.text())
    spoil(board)
    assert len(all_unknown(board)) == 1


def test_panels_do_not_overlap_and_ids_are_unique():
    panels = dashboard.dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = set()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {(x + place["x"], y + place["y"]) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells


def test_titles_are_unique_and_every_panel_says_what_it_tells():
    panels = [panel for row in ROWS for panel in row.panels]
    titles = [(row.title, panel.title) for row in ROWS for panel in row.panels]
    assert len(set(titles)) == len(titles)
    assert all(panel.tells.endswith(".") for panel in panels)


def test_a_metric_that_is_not_exported_cannot_be_named():
    with pytest.raises(KeyError):
        queries.name_of("made_up_total")
    with pytest.raises(ValueError, match="histogram"):
        queries.name_of("round_seconds")
    with pytest.raises(ValueError, match="counter"):
        queries.name_of("generation_tokens_total", "sum")


def test_rules_and_dashboard_use_exported_labels_only():
    labels = {entry.name: set(entry.labels) | {"instance", "le"} for entry in DEFINITIONS}
    expressions = [query.expression for row in ROWS for panel in row.panels for query in panel.queries]
    expressions += [rule.expression for rule in (*rules.RECORDINGS, *rules.ALERTS)]
    for expression in expressions:
        for name, matchers in re.findall(r"(pilotfish_\w+)\{([^}]*)\}", expression):
            base = re.sub(r"_(bucket|sum|count)$", "", name)
            used = set(re.findall(r"(\w+)[=!]~?", matchers)) | set(re.findall(r"(\w+)=~?\"", matchers))
            assert used <= labels[name if name in labels else base], expression


def test_every_metric_is_on_the_dashboard_or_left_out_on_purpose():
    left_out = {"build_info", "engine_load_seconds", "spec_decode_disabled", "prompt_tokens_total"}
    left_out |= {
        "kv_bytes_per_token",
        "kv_cache_usage",
        "bytes_per_sequence",
        "unused_fields_total",
        "schema_keywords_left_out_total",
        "grammar_rounds_missed_total",
        "engine_restarts_total",
    }
    left_out |= {"self_test_failed", "timed_round_seconds"}
    text = dashboard.text()
    absent = {
        e.name.removeprefix("pilotfish_") for e in DEFINITIONS if not re.search(rf"{e.name}(_\w+)?[{{ \[)]", text)
    }
    assert absent == left_out


def test_every_alert_is_in_the_manual():
    manual = (DEPLOY.parent / "docs" / "operations.md").read_text()
    for alert in rules.ALERTS:
        assert f"### {alert.name}\n" in manual, alert.name
