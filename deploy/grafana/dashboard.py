"""panels.py in Grafana's dashboard JSON (schema of @grafana/schema 13), laid out over its 24 columns."""

from __future__ import annotations

import json
from typing import Any

from pilotfish.deploy.grafana.panels import ROWS, Panel, Query, Row
from pilotfish.deploy.grafana.queries import SPLITS
from pilotfish.metrics.definitions import PREFIX

HEIGHTS = {"stat": 4, "timeseries": 8, "heatmap": 8, "bargauge": 8}
COLUMNS = 24
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
NO_VALUE = "no data: idle, or k = 0"


def dashboard() -> dict[str, Any]:
    return {
        "uid": "pilotfish",
        "title": "pilotfish",
        "description": "Acceptance, speed, capacity and requests of pilotfish servers.",
        "tags": ["pilotfish", "inference"],
        "editable": True,
        "schemaVersion": 39,
        "version": 1,
        "timezone": "browser",
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "graphTooltip": 1,
        "templating": {"list": [_datasource_variable(), _instance_variable(), _split_variable()]},
        "panels": _lay_out(ROWS),
    }


def text() -> str:
    return json.dumps(dashboard(), indent=1) + "\n"


def _datasource_variable() -> dict[str, Any]:
    return {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def _instance_variable() -> dict[str, Any]:
    return {
        "name": "instance",
        "label": "Instance",
        "type": "query",
        "datasource": DATASOURCE,
        "query": f"label_values({PREFIX}engine_up, instance)",
        "refresh": 2,
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
    }


def _split_variable() -> dict[str, Any]:
    """Whether panels add the chosen instances up, or show each."""
    together, apart = SPLITS
    return {
        "name": "split",
        "label": "Servers",
        "type": "custom",
        "query": f"added up : {together}, each for itself : {apart}",
        "current": {"text": "added up", "value": together},
    }


def _lay_out(rows: tuple[Row, ...]) -> list[dict[str, Any]]:
    placed: list[dict[str, Any]] = []
    y = 0
    for row in rows:
        head = {"h": 1, "w": COLUMNS, "x": 0, "y": y}
        placed.append(
            {
                "id": len(placed) + 1,
                "type": "row",
                "title": row.title,
                "collapsed": False,
                "panels": [],
                "gridPos": head,
            }
        )
        y, x, height = y + 1, 0, 0
        for panel in row.panels:
            if x + panel.width > COLUMNS:
                y, x, height = y + height, 0, 0
            height = max(height, HEIGHTS[panel.kind])
            place = {"h": HEIGHTS[panel.kind], "w": panel.width, "x": x, "y": y}
            placed.append(_panel(panel, len(placed) + 1, place))
            x += panel.width
        y += height
    return placed


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.tells,
        "datasource": DATASOURCE,
        "gridPos": place,
        "targets": [_target(query, chr(ord("A") + i), panel.kind) for i, query in enumerate(panel.queries)],
        "fieldConfig": {"defaults": _defaults(panel), "overrides": _overrides(panel)},
        "options": _options(panel),
    }


def _target(query: Query, letter: str, kind: str) -> dict[str, Any]:
    return {
        "refId": letter,
        "datasource": DATASOURCE,
        "expr": query.expression,
        # a label that a series lacks is nothing in a legend
        "legendFormat": f"{query.legend} {{{{instance}}}}" if query.legend else "__auto",
        "format": "heatmap" if kind == "heatmap" else "time_series",
        "range": kind in ("timeseries", "heatmap", "stat"),
        "instant": kind == "bargauge",
    }


def _defaults(panel: Panel) -> dict[str, Any]:
    fields: dict[str, Any] = {"unit": panel.unit, "noValue": NO_VALUE}
    if panel.kind != "heatmap":
        fields |= {"min": 0, "color": {"mode": "palette-classic"}}
    if panel.decimals is not None:
        fields["decimals"] = panel.decimals
    if panel.maximum is not None:
        fields["max"] = panel.maximum
    if panel.kind == "timeseries":
        fields["custom"] = {
            "drawStyle": "line",
            "lineWidth": 2,
            "fillOpacity": 40 if panel.stacked else 0,
            "showPoints": "never",
            "spanNulls": False,
            "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
        }
    return fields


def _overrides(panel: Panel) -> list[dict[str, Any]]:
    """Limits are dashed."""
    dashes = {"id": "custom.lineStyle", "value": {"fill": "dash", "dash": [8, 8]}}
    letters = [chr(ord("A") + i) for i, query in enumerate(panel.queries) if query.dashed]
    return [{"matcher": {"id": "byFrameRefID", "options": letter}, "properties": [dashes]} for letter in letters]


def _options(panel: Panel) -> dict[str, Any]:
    last = {"calcs": ["lastNotNull"], "fields": "", "values": False}
    if panel.kind == "stat":
        return _stat_options(last, named=bool(panel.queries[0].legend))
    if panel.kind == "bargauge":
        return _bargauge_options(last)
    if panel.kind == "heatmap":
        return _heatmap_options()
    return {
        "legend": {"showLegend": True, "displayMode": "list", "placement": "bottom", "calcs": []},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }


def _stat_options(last: dict[str, Any], named: bool) -> dict[str, Any]:
    return {
        "reduceOptions": last,
        "orientation": "auto",
        "colorMode": "value",
        "graphMode": "area",
        "justifyMode": "auto",
        "textMode": "value_and_name" if named else "value",
        "wideLayout": True,
        "showPercentChange": False,
        "percentChangeColorMode": "standard",
    }


def _bargauge_options(last: dict[str, Any]) -> dict[str, Any]:
    return {
        "reduceOptions": last,
        "orientation": "horizontal",
        "displayMode": "basic",
        "namePlacement": "auto",
        "valueMode": "color",
        "showUnfilled": True,
        "sizing": "auto",
        "minVizHeight": 16,
        "minVizWidth": 8,
        "maxVizHeight": 300,
        "legend": {"showLegend": False, "displayMode": "list", "placement": "bottom", "calcs": []},
    }


def _heatmap_options() -> dict[str, Any]:
    scheme = {"mode": "scheme", "scheme": "Oranges", "fill": "dark-orange", "exponent": 0.5, "steps": 64}
    return {
        "calculate": False,
        "cellGap": 1,
        "color": scheme | {"scale": "exponential", "reverse": False},
        "exemplars": {"color": "rgba(255,0,255,0.7)"},
        "legend": {"show": True},
        "rowsFrame": {"layout": "le"},
        "showValue": "never",
        "tooltip": {"mode": "single", "yHistogram": True},
        "yAxis": {"axisPlacement": "left", "reverse": False, "unit": "none"},
    }
