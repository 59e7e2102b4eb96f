"""The Grafana dashboard and the documents name the figures that are served."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from tests.peer.views.served_figures import names, served_by_agents, served_by_bootstrap_peers

ROOT = Path(__file__).parents[3]


def test_the_dashboard_asks_for_figures_that_are_served() -> None:
    text = (ROOT / "examples" / "bootstrap_host" / "grafana.json").read_text()
    panels = json.loads(text)["panels"]
    asked = names(" ".join(t["expr"] for panel in panels for t in panel["targets"]))
    assert len(asked) > 10
    assert asked <= served_by_agents() | served_by_bootstrap_peers()


def test_a_dashboard_can_be_imported() -> None:
    board = json.loads((ROOT / "examples" / "bootstrap_host" / "grafana.json").read_text())
    sources = {each["name"] for each in board["templating"]["list"] if each["type"] == "datasource"}
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        assert panel["title"] and panel["targets"], panel
        assert panel["datasource"]["uid"] in {f"${{{name}}}" for name in sources}
        place = panel["gridPos"]
        cells = {
            (place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])
        }
        assert max(x for x, _ in cells) < 24, f"{panel['title']} is wider than the board"
        assert not cells & taken, f"{panel['title']} lies on another panel"
        taken |= cells
        letters = [target["refId"] for target in panel["targets"]]
        assert len(set(letters)) == len(letters)


def test_the_alerts_ask_for_figures_that_are_served_and_say_what_is_wrong() -> None:
    folder = ROOT / "examples/bootstrap_host"
    (name,) = yaml.safe_load((folder / "prometheus.yml").read_text())["rule_files"]
    (group,) = yaml.safe_load((folder / name).read_text())["groups"]
    asked = names(" ".join(rule["expr"].replace("shoal.*", "") for rule in group["rules"]))
    assert len(asked) > 5
    assert asked <= served_by_agents() | served_by_bootstrap_peers()
    assert all(rule["annotations"]["summary"] for rule in group["rules"])


def test_every_figure_is_documented() -> None:
    pages = ("docs/lend/watching.md", "docs/host/monitoring.md", "docs/reference/api.md")
    documented = names(" ".join((ROOT / page).read_text() for page in pages))
    served = served_by_agents() | served_by_bootstrap_peers()
    created = {name for name in served if name.endswith("_created")}
    assert served - created <= documented
