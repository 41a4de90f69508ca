"""Every kind of chart in a real JupyterLab: it is alive at once, and fits its cell, at two widths and in both themes.

Screenshots are kept in build/screenshots; look at them.
"""

from __future__ import annotations

import os
import re
import time

import pytest

from tests.browser.test_browser import LAST_STEP, PANEL
from tests.support.browser import LATE, SCREENSHOTS, lab_and_its_end, write

pytestmark = pytest.mark.browser
SETTLED_S = 15
"""How long charts may take to fit a window that has changed, on a machine that is busy."""

LOOKS = [("Light", 1100), ("Dark", 700)]
"""The theme and the width of the window, in px."""

if os.environ.get("LABKIT_WIDE"):
    LOOKS += [("Light", 700), ("Light", 1600), ("Dark", 1100)]

PREPARE = """
import labkit, plotly.express as px, time
from course.explore import explore

def train(worker, names, steps, pause_s=0.02):
    for step in range(steps):
        worker.log(**{name: 1000 / (1 + step + worker.rank) for name in names})
        print("step", step)
        time.sleep(pause_s)

def learn(worker, steps):
    import torch
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(300, 400), torch.nn.ReLU(), torch.nn.Linear(400, 10))
    if worker.world_size > 1:
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        model(torch.ones(16, 300)).square().mean().backward()
        optimizer.step()
        worker.log(loss=1 / (1 + step))
    return getattr(model, "module", model).state_dict()

names = ["loss", "accuracy", "gradient_norm", "learning_rate", "loss_of_validation", "time_of_a_step_ms"]
ranks = labkit.Session(2)
one = six = None
ranks
"""
LIVE = {
    "a live view of one panel": """
if one:
    one.stop()
one = labkit.launch(train, names[:1], 10**6, 0.5, on=ranks, wait=False)
one
""",
    "a live view of six panels": """
if one:
    one.stop()
six = labkit.launch(train, names, 10**6, 0.5, on=ranks, wait=False)
six
""",
}
STILL = {
    "a run of one panel": """
if six:
    six.stop()
run = labkit.launch(train, names[:1], 20, on=ranks)
""",
    "a run of six panels": "many = labkit.launch(train, names, 20, on=ranks, name='a name that is rather long')",
    "run.figure()": "run.figure()",
    "labkit.show": "labkit.show(px.scatter(x=[1, 2, 3], y=[3, 1, 2], title='three points'))",
    "bars": "labkit.charts.bars(['steps of one rank', 'steps of all ranks'], [1234.5, 2], 'ms', 'a long title ' * 9)",
    "parts": "labkit.charts.stacked({way: dict(forward=1, waiting=2) for way in ('DDP', 'ZeRO')}, 'ms')",
    "labkit.compare": "labkit.compare({'one process': run, 'distributed data parallel': many})",
    "labkit.compare of functions": """
ways = {'one process': learn, 'distributed': learn}
compared = labkit.compare(ways, world_size={'one process': 1}, on=ranks, steps=14)
""",
    "explore": """
def draw(batch_size=128, latency_us=10):
    return px.line(x=[1, batch_size], y=[latency_us, 1], title=f"batch {batch_size}")

explore(draw, batch_size=[64, 128, 256], latency_us=[1, 10, 100])
""",
}
CHARTS = {"a session": PREPARE, **LIVE, **STILL}

TOO_WIDE = """cell => {
    const wrong = [];
    for (const output of cell.querySelectorAll('.jp-OutputArea-output')) {
        const room = output.getBoundingClientRect(), right = Math.min(room.right, innerWidth);
        for (const part of output.querySelectorAll('.jupyter-widgets, .widget-html-content'))
            if (part.getBoundingClientRect().right > right + 1)
                wrong.push(`${part.className} to ${part.getBoundingClientRect().right} in ${right}`);
        for (const part of output.querySelectorAll('.labkit-run > *, .labkit-run .uplot, .labkit-run .u-legend'))
            if (part.getBoundingClientRect().right > right + 1)
                wrong.push(`${part.className} to ${part.getBoundingClientRect().right} in ${right}`);
        const isTable = output.querySelector('th.col_heading');
        if (output.offsetParent && output.scrollWidth > output.clientWidth + 1 && !isTable)
            wrong.push(`${output.className} scrolls: ${output.scrollWidth} px in ${output.clientWidth}`);
        const plots = [...output.querySelectorAll('.js-plotly-plot')];
        if (output.matches('.js-plotly-plot')) plots.push(output);
        for (const plot of plots.filter(plot => plot.offsetParent)) {
            if (plot.querySelector('.main-svg').clientHeight < 150) wrong.push('is squashed');
            for (const part of plot.querySelectorAll('.main-svg, .legend, .gtitle, .xtitle, .ytitle, .xtick, .ytick')) {
                const box = part.getBoundingClientRect();
                if (box.width && (box.left < room.left - 1 || box.right > right + 1))
                    wrong.push(`${part.classList} from ${box.left} to ${box.right} in ${room.left} to ${right}`);
                if (box.width && box.top < plot.getBoundingClientRect().top - 1)
                    wrong.push(`${part.classList} begins above its chart`);
            }
        }
    }
    return wrong;
}"""
LIES_OVER = """cell => {
    const wrong = [];
    for (const plot of [...cell.querySelectorAll('.js-plotly-plot')].filter(plot => plot.offsetParent)) {
        const panels = [...plot.querySelectorAll('.nsewdrag')];
        for (const part of plot.querySelectorAll('.legend, .gtitle, .xtitle, .ytitle'))
            for (const panel of panels) {
                const a = part.getBoundingClientRect(), b = panel.getBoundingClientRect();
                const x = Math.min(a.right, b.right) - Math.max(a.left, b.left);
                const y = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
                if (a.width && x > 2 && y > 2) wrong.push(`${part.classList} lies ${x} x ${y} px over a panel`);
            }
    }
    return wrong;
}"""

HARD_TO_READ = """cell => {
    const probe = document.body.appendChild(document.createElement('div'));
    probe.style.background = 'var(--jp-layout-color0)';
    const numbers = color => color.match(/[\\d.]+/g).map(Number);
    const ground = numbers(getComputedStyle(probe).backgroundColor);
    probe.remove();
    const luminance = color => {
        const linear = part => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
        const [r, g, b] = color.map(part => linear(part / 255));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const contrast = color => {
        const alpha = color[3] ?? 1, seen = [0, 1, 2].map(i => alpha * color[i] + (1 - alpha) * ground[i]);
        const [low, high] = [luminance(seen), luminance(ground)].sort((one, other) => one - other);
        return (high + 0.05) / (low + 0.05);
    };
    const wrong = [], words = '.xtick text, .ytick text, .legendtext, .gtitle, .xtitle, .ytitle';
    for (const part of cell.querySelectorAll('.labkit-run td, .labkit-run .u-label, .labkit-run .u-title')) {
        if (!part.offsetParent || part.textContent === '●') continue;
        const ratio = contrast(numbers(getComputedStyle(part).color));
        if (ratio < 4.5) wrong.push(`${part.className} ${part.textContent}: ${ratio.toFixed(1)} : 1 on ${ground}`);
    }
    for (const plot of [...cell.querySelectorAll('.js-plotly-plot')].filter(plot => plot.offsetParent)) {
        const paper = numbers(getComputedStyle(plot.querySelector('.main-svg')).backgroundColor);
        if (paper[3] !== 0) wrong.push(`lies on a ground of its own: ${paper}`);
        for (const text of plot.querySelectorAll(words)) {
            const ratio = contrast(numbers(getComputedStyle(text).fill));
            if (ratio < 4.5) wrong.push(`${text.classList} ${text.textContent}: ${ratio.toFixed(1)} : 1 on ${ground}`);
        }
        for (const line of plot.querySelectorAll('.scatterlayer path.js-line')) {
            const ratio = contrast(numbers(getComputedStyle(line).stroke));
            if (ratio < 2.2) wrong.push(`a curve: ${ratio.toFixed(1)} : 1 on ${ground}`);
        }
    }
    return wrong;
}"""
"""Words of less than 4.5 : 1, which WCAG 2 asks of small text, and charts that are not transparent. Of curves, the
palest of Okabe and Ito's colours, the orange, has 2.2 : 1 on white."""


TOO_LATE = """() => {
    const timeout = AbortSignal.timeout.bind(AbortSignal);
    window.isBusy = true;
    AbortSignal.timeout = ms => timeout(window.isBusy ? 0 : ms);
}"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lab")
    write(folder, "charts.ipynb", *(source.strip() for source in CHARTS.values()))
    with lab_and_its_end(folder) as jupyterlab:
        jupyterlab.open("charts.ipynb")
        jupyterlab.run_cell(0)
        jupyterlab.wait_until_run(0)
        yield jupyterlab


def settle(page, index):
    """Scroll a cell into view, wait until its charts fit (or for `SETTLED_S`), and return the cell."""
    cell = page.cell(index)
    cell.locator(".jp-OutputArea").last.scroll_into_view_if_needed()
    deadline, before = time.monotonic() + SETTLED_S, None
    while time.monotonic() < deadline:
        now = cell.evaluate(f"cell => [({TOO_WIDE})(cell), ({LIES_OVER})(cell), cell.offsetHeight]")
        if now == before and not now[0] and not now[1]:
            break
        before = now
        page.page.wait_for_timeout(250)  # Plotly itself waits for 100 ms
    return cell


def look_at(page, kinds):
    """At every width, and in the dark: nothing of these charts is wider than its cell, lies over a panel, or is pale.

    First in a window of the same width that is only higher: no chart may lose its height for that.
    """
    wrong = []
    for theme, width in LOOKS:
        page.command("apputils:change-theme", theme=f"JupyterLab {theme}")
        for kind in kinds:  # nobody changes both at once; a chart may then stay as wide as it was
            settle(page, list(CHARTS).index(kind))
        page.page.set_viewport_size({"width": width, "height": 1300})
        for kind in kinds:
            cell = settle(page, list(CHARTS).index(kind))
            is_labkits = kind not in ("labkit.show", "explore")  # Plotly Express has a look of its own
            for test in (TOO_WIDE, LIES_OVER, *[HARD_TO_READ] * is_labkits):
                wrong += [f"{kind}, {theme}, {width} px: {what}" for what in cell.evaluate(test)]
            name = kind.replace(" ", "_").replace("()", "")
            # With the caret as it is: hiding it has the page's style computed anew, twice.
            cell.screenshot(path=SCREENSHOTS / f"chart_{name}_{width}_{theme}.png", caret="initial")
    assert wrong == []


DRAWN_AT = """plot => {
    const {left, top} = plot.getBoundingClientRect();
    return plot._fullData.map((trace, i) => {
        const axis = id => plot._fullLayout[id[0] + 'axis' + id.slice(1)];
        const x = axis(trace.xaxis || 'x'), y = axis(trace.yaxis || 'y'), points = plot.calcdata[i];
        const point = points[Math.floor(points.length / 2)];
        const [a, b] = trace.type != 'bar' ? [point.x, point.y]
            : trace.orientation == 'h' ? [(point.b + point.s) / 2, point.p] : [point.p, (point.b + point.s) / 2];
        return [left + x._offset + x.c2p(a), top + y._offset + y.c2p(b)];
    }).filter(place => place.every(Number.isFinite));
}"""
"""Where the middle point of each trace is drawn, in px."""


def hover(page, index):
    """Point at one trace of a chart after another until it says what is there."""
    cell = page.cell(index)
    plot = cell.locator(".js-plotly-plot:visible").first
    plot.scroll_into_view_if_needed()
    for _ in range(3):  # a live chart moves on
        for x, y in plot.evaluate(DRAWN_AT):
            page.page.mouse.move(x - 3, y)
            page.page.mouse.move(x, y)
            page.page.wait_for_timeout(200)
            if cell.locator(".hoverlayer .hovertext, .hoverlayer .legend").count():
                return True
    return False


@pytest.mark.wide
def test_a_view_that_was_loaded_too_late_is_live(page):
    """anywidget gives a model two seconds to load; here none, as on a machine that is busy. It is deaf then."""
    page.page.evaluate(TOO_LATE)
    page.run_cell(1)
    page.cell(1).locator(PANEL).first.wait_for()
    before = page.page.evaluate(LAST_STEP)
    page.wait_for(f"before => ({LAST_STEP})() > before", before)
    page.page.evaluate("() => { window.isBusy = false; }")
    assert any(LATE in error for error in page.errors), "it was too late"


def test_live_views_fit_their_cells(page):
    for kind, last in zip(LIVE, (0, 5), strict=True):
        index = list(CHARTS).index(kind)
        page.run_cell(index)
        cell = page.cell(index)
        cell.locator(PANEL).nth(last).wait_for()
        look_at(page, [kind])
        assert cell.locator(f"{PANEL} .u-label").all_text_contents()[:4] == ["step", "rank 0", "rank 1", "mean"]
        cell.locator(PANEL).first.scroll_into_view_if_needed()
        cell.locator(f"{PANEL} .u-over").first.hover()
        cell.locator(f"{PANEL} .u-value", has_text=re.compile(r"^[\d.]+$")).nth(3).wait_for()  # under the mouse
    assert page.real_errors() == []


def test_a_chart_that_stays_is_alive_at_once_and_fits_its_cell(page):
    indices = [list(CHARTS).index(kind) for kind in STILL]
    for index in indices:
        page.run_cell(index)
        page.wait_until_run(index)
        page.cell(index).locator(".jp-RenderedPlotly.js-plotly-plot .main-svg:visible").first.wait_for()
        assert page.cell(index).locator(".jp-RenderedPlotly img:visible").count() == 0, "no picture in its place"
    page.errors.clear()  # those of the short runs' live views: another test looks at live views
    look_at(page, ["a session", *STILL])
    assert [kind for kind, index in zip(STILL, indices, strict=True) if not hover(page, index)] == []
    # A short run is over, and its live view taken away, while a slow browser still makes its parts.
    of_taken_away = ("Could not add child view to box", "no comm channel defined", "null (reading 'widgets')")
    # And JupyterLab's Plotly says this of a chart that it is drawing anew when the window changes; it is whole after.
    harmless = (*of_taken_away, "This element is not a Plotly plot")
    assert [error for error in page.real_errors() if not any(words in error for words in harmless)] == []
