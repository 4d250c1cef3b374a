"""Saved pages of an experiment: what MLflow shows of our runs before anyone has chosen a column.

MLflow calls them views, and keeps each as a tag of the experiment, `mlflow.sharedViewState.<id>`: JSON with a name, two
times and the state of the page, itself JSON, compressed. `?viewStateShareKey=<id>` opens it.
"""

import base64
import json
import time
import zlib
from typing import Any

__all__ = ["FIGURES", "page_path", "saved_pages"]

# The images of a scenario's run. MLflow puts what is before the slash above the charts of a run's metrics.
FIGURES = ("figures/mAP by task", "figures/AP by task", "figures/reliability")

_TAG = "mlflow.sharedViewState."
_COLUMNS = (
    *(f"params.`{name}`" for name in ("scenario", "method", "seed")),
    *(f"metrics.`{name}`" for name in ("last_mAP", "avg_mAP", "last_CF1", "last_OF1", "forgetting")),
    "tags.`csc.settings`",
)
_CURVES = ("mAP", "CF1", "OF1", "forgetting", "ECE", "FPR")
_SECTIONS = {"csc-curves-by-task": "After each task", "csc-figures": "Figures"}


def saved_pages() -> dict[str, str]:
    """The tags of an experiment that hold its pages: a table of scenario runs, the best first, and curves by task."""
    curves = {
        "compareRunCharts": [*map(_curve, _CURVES), *map(_images, FIGURES)],
        "compareRunSections": [
            {"uuid": uuid, "name": name, "display": True, "isReordered": True, "isGenerated": False}
            for uuid, name in _SECTIONS.items()
        ],
        "isAccordionReordered": True,
    }
    return {
        f"{_TAG}csc-results": _saved("Results: scenario runs, best last mAP first", {}),
        f"{_TAG}csc-curves": _saved("Curves: scenario runs by task", curves),
    }


def page_path(experiment_id: str, page: str) -> str:
    """The address of a saved page on a tracking server.

    >>> page_path("1", "curves")
    '/#/experiments/1/runs?viewStateShareKey=csc-curves&compareRunsMode=CHART&workflowType=machine_learning'
    """
    mode = "CHART" if page == "curves" else "TABLE"
    state = f"viewStateShareKey=csc-{page}&compareRunsMode={mode}&workflowType=machine_learning"
    return f"/#/experiments/{experiment_id}/runs?{state}"


def _saved(name: str, charts: dict[str, Any]) -> str:
    state = {
        "searchFilter": "tags.`csc.role` = 'scenario'",
        "orderByKey": "metrics.`last_mAP`",
        "orderByAsc": False,
        "startTime": "ALL",
        "lifecycleFilter": "Active",
        "datasetsFilter": [],
        "modelVersionFilter": "All Runs",
        "selectedColumns": list(_COLUMNS),
        "columnOrder": [],
        "columnWidths": {},
        "runsExpanded": {},
        "runsPinned": [],
        "runsHidden": [],
        "runsVisibilityMap": {},
        "runsHiddenMode": "SHOW_ALL",
        "viewMaximized": False,
        "runListHidden": False,
        "groupBy": None,
        "groupsExpanded": {},
        "hideEmptyCharts": True,
        "useGroupedValuesInCharts": True,
        "autoRefreshEnabled": True,
        "globalLineChartConfig": {"xAxisKey": "step", "lineSmoothness": 0, "selectedXAxisMetricKey": ""},
        **charts,
    }
    compressed = base64.b64encode(zlib.compress(json.dumps(state).encode(), 9)).decode()
    now = int(time.time() * 1000)
    return json.dumps({"name": name, "createdAt": now, "updatedAt": now, "state": f"deflate;{compressed}"})


def _card(name: str, kind: str, section: str) -> dict[str, Any]:
    return {
        "uuid": f"csc-{name}",
        "type": kind,
        "runsCountToCompare": 30,
        "metricSectionId": section,
        "deleted": False,
        "isGenerated": False,
        "displayName": name,
    }


def _images(figure: str) -> dict[str, Any]:
    """A grid of one figure of all runs."""
    return {**_card(figure, "IMAGE", "csc-figures"), "imageKeys": [figure], "step": 0, "showRunParams": False}


def _curve(metric: str) -> dict[str, Any]:
    """A line chart of a metric; the step of scenario runs is the task."""
    return {
        **_card(metric, "LINE", "csc-curves-by-task"),
        "metricKey": metric,
        "selectedMetricKeys": [metric],
        "lineSmoothness": 0,
        "xAxisScaleType": "linear",
        "scaleType": "linear",
        "range": {},
        "xAxisKey": "step",
        "selectedXAxisMetricKey": "",
        "yAxisKey": "metric",
        "yAxisExpressions": [],
        "ignoreOutliers": False,
        "useGlobalXaxisKey": True,
        "useGlobalLineSmoothing": True,
    }
